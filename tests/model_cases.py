"""One model case: a tiny random configuration of a real Diffusers class, run parallel and not, and compared.

A row is data: the class, its configuration and a function that makes the inputs. New models add rows in tests/rows/.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import pkgutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import meshcp
from tests.harness import make_mesh, world_mean

Mesh = tuple[tuple[str, int], ...]

# What every row runs in, by world size; gradients are compared on the meshes of GRADIENTS.
MESHES: dict[int, tuple[Mesh, ...]] = {
    2: ((("ulysses", 2),), (("ring", 2),)),
    3: ((("ring", 3),),),
    4: ((("ulysses", 4),), (("ring", 2), ("ulysses", 2))),
}
GRADIENTS: tuple[Mesh, ...] = ((("ring", 3),), (("ring", 2), ("ulysses", 2)))


@dataclass(frozen=True)
class Row:
    """A case.

    Attributes:
        name: what the case is about, unique within its class.
        model: name of the class in ``diffusers``.
        config: arguments of the class; tiny.
        inputs: a module-level function that makes the keyword arguments of ``forward``, given a seeded generator; fp64
            for what is floating point unless the model wants otherwise.
        prepare: called with the model before anything else (add an adapter, fuse projections ...).
        tolerance: largest difference relative to the largest output; 1e-10 unless the model itself computes in fp32
            somewhere (say where).
        gradient_tolerance: the same for gradients of parameters.
        gradients: False for inputs that the model cannot be trained with.
    """

    name: str
    model: str
    config: Mapping[str, Any]
    inputs: Callable[[torch.Generator], dict[str, Any]]
    prepare: Callable[[nn.Module], None] | None = None
    tolerance: float = 1e-10
    gradient_tolerance: float = 1e-10
    gradients: bool = True
    plan: meshcp.Plan | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"{self.model}-{self.name}"


def rows() -> list[Row]:
    """Every row in tests/rows/."""
    package = importlib.import_module("tests.rows")
    found = []
    for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda info: info.name):
        found += importlib.import_module(f"tests.rows.{info.name}").ROWS
    return found


def build(row: Row) -> nn.Module:
    """The model in fp64 with every parameter random, also those that Diffusers initialises to zero."""
    import diffusers

    with warnings.catch_warnings():
        # Diffusers builds some of its models out of parts that it calls deprecated.
        warnings.simplefilter("ignore", FutureWarning)
        model = getattr(diffusers, row.model)(**row.config)
    generator = torch.Generator().manual_seed(7)
    model = model.to(torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.2 if parameter.ndim < 2 else parameter[0].numel() ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * scale)
    if row.prepare is not None:
        row.prepare(model)
    return model.eval()


def make_inputs(row: Row, seed: int = 11) -> dict[str, Any]:
    return row.inputs(torch.Generator().manual_seed(seed))


def tensors_of(output: Any) -> list[Tensor]:
    """Every tensor of a model output, in order."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, list | tuple):
        return [x for part in output for x in tensors_of(part)]
    return []


def _loss(outputs: list[Tensor]) -> Tensor:
    generator = torch.Generator().manual_seed(13)
    terms = [
        (x * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum()
        for x in outputs
        if x.is_floating_point() and x.requires_grad
    ]
    return torch.stack(terms).sum()


def _gradients(model: nn.Module) -> dict[str, Tensor | None]:
    found = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def _difference(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if not expected.numel():
        return 0.0
    assert bool(actual.isfinite().all()), "not finite"
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-12))


def compare(
    row: Row,
    meshes: tuple[Mesh, ...],
    gradients_on: tuple[Mesh, ...] = GRADIENTS,
    gathered: tuple[Mesh, ...] = (),
    gathered_gradients: bool = False,
) -> list[str]:
    """Run the row on each mesh, on those of ``gathered`` with KV gathered, and without a mesh; one line for each
    difference that is too large."""
    model, wrong = build(row), []
    gradients = row.gradients and any(mesh in gradients_on for mesh in meshes)
    with torch.set_grad_enabled(gradients):
        expected = tensors_of(model(**make_inputs(row)))
    assert expected, "the model returns no tensor"
    expected_gradients: dict[str, Tensor | None] = {}
    if gradients:
        _loss(expected).backward()
        expected_gradients = _gradients(model)
    before = sorted(model.state_dict())
    for mesh, gather_kv in [(mesh, False) for mesh in meshes] + [(mesh, True) for mesh in gathered]:
        device_mesh = make_mesh(mesh)
        with_gradients = gradients and mesh in gradients_on and (not gather_kv or gathered_gradients)
        handle = meshcp.parallelize(model, device_mesh, row.plan, gather_kv=gather_kv)
        where = f"{mesh}{', KV gathered' * gather_kv}"
        with torch.set_grad_enabled(with_gradients):
            actual = tensors_of(model(**make_inputs(row)))
        assert len(actual) == len(expected), f"{len(actual)} outputs, expected {len(expected)}"
        for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
            difference = _difference(a.detach(), e.detach())
            if not difference <= row.tolerance:
                wrong.append(f"{where}: output {index} differs by {difference:.1e} ({handle.describe()})")
        if with_gradients:
            _loss(actual).backward()
            wrong += _compare_gradients(row, where, expected_gradients, _gradients(model), model)
        handle.remove()
        assert sorted(model.state_dict()) == before
    with torch.no_grad():
        restored = tensors_of(model(**make_inputs(row)))
    if any(_difference(a, e.detach()) for a, e in zip(restored, expected, strict=True)):
        wrong.append("after remove() the model is not what it was")
    return wrong


def _compare_gradients(
    row: Row, where: str, expected: dict[str, Tensor | None], actual: dict[str, Tensor | None], model: nn.Module
) -> list[str]:
    wrong = []
    shapes = dict(model.named_parameters())
    # Some ranks may have no gradient of a parameter that others have: a rank without tokens of a stream.
    *means, present = world_mean(
        [torch.zeros_like(shapes[name]) if actual[name] is None else actual[name] for name in expected]
        + [torch.tensor([float(actual[name] is not None) for name in expected], dtype=torch.float64)]
    )
    largest = max(float(g.abs().max()) for g in expected.values() if g is not None and g.numel())
    for (name, want), mean, some in zip(expected.items(), means, present.tolist(), strict=True):
        if want is None and not some:
            continue
        want = torch.zeros_like(mean) if want is None else want
        # Relative to the parameter's own largest gradient, but no finer than rounding in the largest of all: one that
        # is zero in theory (the keys' of an attention over one token) is a sum of such roundings.
        floor = max(1e-6, 1e-14 / row.gradient_tolerance) * largest
        scale = max(float(want.abs().max()) if want.numel() else 0.0, floor)
        difference = float((mean - want).abs().max()) / scale if want.numel() else 0.0
        if not difference <= row.gradient_tolerance:
            wrong.append(f"{where}: gradient of {name} differs by {difference:.1e}")
    return wrong


def without_entry(row: Row, path: str) -> str:
    """Run the row on two ranks with a plan that lacks one entry: ``refused: ...``, ``harmless`` or ``wrong: ...``."""
    from meshcp.models import plan_for

    model = build(row)
    with torch.no_grad():
        expected = tensors_of(model(**make_inputs(row)))
    plan = (row.plan or plan_for(model)).without(path)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ulysses",))
    try:
        handle = meshcp.parallelize(model, mesh, plan)
        with torch.no_grad():
            actual = tensors_of(model(**make_inputs(row)))
    except meshcp.MeshcpError as error:
        return f"refused: {type(error).__name__}: {error}"
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        return f"refused by the model: {type(error).__name__}: {error}"
    handle.remove()
    same = len(actual) == len(expected) and all(
        a.shape == e.shape and _difference(a, e) <= row.tolerance for a, e in zip(actual, expected, strict=True)
    )
    return "harmless" if same else "wrong: the output differs and nobody said so"


def with_config(row: Row, name: str, **changes: Any) -> Row:
    """A row like another, with some of its fields changed."""
    return dataclasses.replace(row, name=name, **changes)


def left_sharded(row: Row) -> str:
    """Run the row on two ranks with ``gather=False``: ``refused: ...``, ``right``, or ``wrong: ...``.

    Right is each output being whole, or this rank's part of what one process computes.
    """
    from meshcp.models import plan_for

    model = build(row)
    with torch.no_grad():
        expected = tensors_of(model(**make_inputs(row)))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ring",))
    plan = row.plan or plan_for(model)
    try:
        handle = meshcp.parallelize(model, mesh, plan, gather=False)
    except meshcp.PlanError as error:
        return f"refused: {error}"
    with torch.no_grad():
        actual = tensors_of(model(**make_inputs(row)))
    declared = [
        where
        for _, styles in plan.entries
        for style in styles
        if isinstance(style, meshcp.GatherOutputs)
        for where in style.outputs
        if where is not None
    ]
    for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
        parts = [e]
        for where in declared:
            with contextlib.suppress(meshcp.MeshcpError):
                parts.append(handle.shard(e, where))
        if not any(a.shape == part.shape and _difference(a, part) <= row.tolerance for part in parts):
            return f"wrong: output {index} of shape {tuple(a.shape)} is no part of {tuple(e.shape)}"
    handle.remove()
    return "right"
