"""Which plan belongs to which class. A new model is one file in this folder; ``Plan.classes`` says what it is for."""

from __future__ import annotations

import difflib
import importlib
import pkgutil

from torch import nn

from ..errors import PlanError
from ..plan import Plan
from .refused import REFUSED


def _collect() -> dict[str, Plan]:
    plans: dict[str, Plan] = {}
    package = importlib.import_module(__package__)
    for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda info: info.name):
        if info.name in ("registry", "refused"):
            continue
        module = importlib.import_module(f"{__package__}.{info.name}")
        for value in vars(module).values():
            if isinstance(value, Plan):
                for name in value.classes:
                    assert plans.get(name, value) is value, f"two plans for {name}"
                    plans[name] = value
    return plans


PLANS = _collect()
"""Class name -> plan."""


def plan_for(model: nn.Module) -> Plan:
    """The plan for the class of ``model``, or for the nearest of its base classes.

    Raises:
        PlanError: there is none; the message names the closest and where the guide is.
    """
    for cls in type(model).__mro__:
        if cls.__name__ in REFUSED:
            raise PlanError(f"meshcp has no plan for {cls.__name__}: {REFUSED[cls.__name__]}")
        if cls.__name__ in PLANS:
            return PLANS[cls.__name__]
    name = type(model).__name__
    close = difflib.get_close_matches(name, PLANS, 1, cutoff=0.3)
    hint = f"The closest is the plan of {close[0]}. " if close else ""
    raise PlanError(
        f"meshcp has no plan for {name}. {hint}Pass one: parallelize(model, mesh, Plan({{...}})); models/README.md "
        "shows how to write it in ten minutes"
    )


def table() -> list[list[str]]:
    """The supported models as rows of text, a header first: class, streams, what its plan does not cover."""
    rows = [["class", "streams", "limits"]]
    for name, plan in sorted(PLANS.items()):
        rows.append([name, ", ".join(plan.streams), plan.notes or "none known"])
    for name, reason in sorted(REFUSED.items()):
        rows.append([name, "no plan", reason])
    return rows
