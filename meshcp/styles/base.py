"""What all styles are made of: the runtime that they share, the class that they have in common, names in messages."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar, dataclass_transform

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from .. import _compat
from ..attention.distributed import CallPlan
from ..errors import PlanError
from ..layout import StreamLengths, map_tensors
from ..mesh import ContextMesh
from ..placements import StreamDim

Undo = Callable[[], None]
S = TypeVar("S", bound="MeshcpStyle")


class Runtime:
    """What the styles of one parallel model share while it runs: the mesh, the stream lengths, the attention sites."""

    def __init__(self, context: ContextMesh, gather_kv: bool = False) -> None:
        self._context, self.gather_kv = context, gather_kv and context.ring > 1
        self.lengths = StreamLengths(context)
        self.backend = _compat.register_attention_backend()
        self.running = False
        self.inside = 0
        self.plans: dict[tuple[Any, ...], CallPlan] = {}

    @property
    def context(self) -> ContextMesh:
        return self._context.constant()

    @property
    def idle(self) -> bool:
        """Whether a module that runs now does so for another model, or for itself.

        Z-Image's ControlNet shares modules with its transformer; either may be parallel without the other. A part that
        the backward pass computes anew (activation checkpointing) belongs to the model that it is a part of.
        """
        return not self.running and not _compat.in_backward()


class MeshcpStyle(ParallelStyle):
    """A style that :func:`meshcp.parallelize` attaches. The styles of one model share its stream lengths, so
    ``torch.distributed.tensor.parallel.parallelize_module`` cannot apply one alone."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> NoReturn:
        raise PlanError(
            f"{self!r} works together with the other styles of its plan; pass the plan to "
            "meshcp.parallelize(model, mesh, plan) instead of parallelize_module. Tensor parallel styles go to "
            "parallelize_module, on the mesh's tp axis"
        )

    @property
    def named_streams(self) -> tuple[str, ...]:
        """The streams that the style names."""
        return ()

    def check(self, module: nn.Module, path: str, runtime: Runtime) -> None:
        """Raise unless the style fits the module. Touches nothing."""

    def attach(self, module: nn.Module, path: str, runtime: Runtime) -> Undo:
        """Make the style work on the module."""
        raise NotImplementedError


@dataclass_transform(frozen_default=True)
def frozen_style(*, init: bool = True) -> Callable[[type[S]], type[S]]:
    """A frozen dataclass, save that ``src_data_rank`` may be set, to no effect.

    torch's ``parallelize_module`` sets it on every style before it calls ``_apply``, which has more to say.
    """

    def make(cls: type[S]) -> type[S]:
        frozen = dataclass(frozen=True, init=init)(cls)
        refuse = frozen.__setattr__

        def set_attribute(self: S, name: str, value: object) -> None:
            if name != "src_data_rank":
                refuse(self, name, value)

        type.__setattr__(frozen, "__setattr__", set_attribute)
        return frozen

    return make


def forward_parameters(module: nn.Module) -> list[str]:
    """Names of the arguments of ``forward``, as the class declares it."""
    # PEFT's layers stand for the layer that they wrap.
    while (wrapped := dict(module.named_children()).get("base_layer")) is not None:
        module = wrapped
    signature = inspect.signature(type(module).forward)
    # Whatever its author calls the instance.
    return list(signature.parameters)[1:]


def takes_any(module: nn.Module) -> bool:
    """Whether ``forward`` swallows arguments that it does not name."""
    parameters = inspect.signature(type(module).forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def named(path: str) -> str:
    """A module for messages. A compiled one stays nameless: its graph would be guarded by the name, and blocks that are
    alike could not share it."""
    if torch.compiler.is_compiling():
        return "a compiled module"
    return repr(path) if path else "the model"


def check_taken(style: MeshcpStyle, inputs: Sequence[tuple[str, object]], module: nn.Module, path: str) -> None:
    """Raise unless the module's forward takes every input that the style names."""
    names = forward_parameters(module)
    for name, _ in inputs:
        if name not in names:
            raise PlanError(
                f"{type(style).__name__} names input {name!r} of {named(path)} ({type(module).__name__}), whose "
                f"forward takes {', '.join(names)}; correct the name in the plan"
            )


def map_declared(
    value: Any, where: StreamDim, who: str, function: Callable[[torch.Tensor, StreamDim, str], Any]
) -> Any:
    """``function(tensor, where, who)`` in the place of every tensor in ``value``."""
    return map_tensors(value, lambda x, at: function(x, where, at), who)


def check_declared(style: str, entries: tuple[Any, ...]) -> None:
    for where in entries:
        if where is not None and not isinstance(where, StreamDim):
            raise PlanError(f'{style}({where!r}): needed: seq(dim, "stream"), or None for an output to leave alone')
    if all(where is None for where in entries):
        raise PlanError(f'{style}() names no output; needed: seq(dim, "stream") for at least one')
