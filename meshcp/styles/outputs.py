"""Styles about what a module returns: cut it, make it whole, take stand-in rows off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import InputError
from ..placements import StreamDim
from .base import MeshcpStyle, Runtime, Undo, check_declared, frozen_style, map_declared, named
from .hooks import after_forward


def _on_outputs(
    output: Any, entries: Sequence[StreamDim | None], path: str, function: Callable[[torch.Tensor, StreamDim, str], Any]
) -> Any:
    """Apply ``function`` to the outputs that ``entries`` name: a tensor, a tuple, or a dict-like model output."""
    if isinstance(output, torch.Tensor):
        return output if entries[0] is None else function(output, entries[0], f"output of {named(path)}")
    if isinstance(output, dict):
        keys, values = list(output), list(output.values())
    elif isinstance(output, tuple | list):
        keys, values = list(range(len(output))), list(output)
    else:
        raise InputError(
            f"output of {named(path)} is {type(output).__name__}; the plan handles tensors, tuples and model outputs"
        )
    if len(values) < len([entry for entry in entries if entry is not None and not entry.optional]):
        raise InputError(f"output of {named(path)} has {len(values)} parts; the plan names {list(entries)}")
    for index, (key, value, where) in enumerate(zip(keys, values, entries, strict=False)):
        if where is None or value is None:
            continue
        new = map_declared(value, where, f"output [{key!r}] of {named(path)}", function)
        values[index] = new
        if isinstance(output, dict):
            output[key] = new
    if isinstance(output, dict):
        return output
    if hasattr(output, "_fields"):
        return type(output)(*values)
    return type(output)(values)


@frozen_style(init=False)
class ShardOutputs(MeshcpStyle):
    """Cut outputs of a module along the sequence, by position: ``ShardOutputs(seq(0, "image"), None)``.

    For what a module computes on every rank alike and the rest of the model wants in parts, such as rotary
    embeddings. No communication.
    """

    outputs: tuple[StreamDim | None, ...]

    def __init__(self, *outputs: StreamDim | None) -> None:
        check_declared("ShardOutputs", outputs)
        object.__setattr__(self, "outputs", outputs)

    def __repr__(self) -> str:
        return f"ShardOutputs({', '.join(map(repr, self.outputs))})"

    @property
    def named_streams(self) -> tuple[str, ...]:
        return tuple(stream for where in self.outputs if where is not None for stream in where.streams)

    def attach(self, module: nn.Module, path: str, runtime: Runtime) -> Undo:
        def shard(_: nn.Module, args: Any, output: Any) -> Any:
            return _on_outputs(output, self.outputs, path, runtime.lengths.shard)

        return after_forward(module, path, runtime, shard)


@frozen_style(init=False)
class GatherOutputs(MeshcpStyle):
    """Make outputs of a module whole again on every rank, by position: ``GatherOutputs(seq(1, "image"))``.

    One all-gather a stream over each context axis of degree above 1. The gradient is the sum over ranks (see
    :mod:`meshcp.gradients` for the contract). ``inner=True``: the model itself goes on with the whole sequence (it cuts
    it, or combines it with a tensor that is whole), so ``parallelize(gather=False)`` leaves this one as it is.
    """

    outputs: tuple[StreamDim | None, ...]
    inner: bool = False

    def __init__(self, *outputs: StreamDim | None, inner: bool = False) -> None:
        check_declared("GatherOutputs", outputs)
        object.__setattr__(self, "outputs", outputs)
        object.__setattr__(self, "inner", inner)

    def __repr__(self) -> str:
        return f"GatherOutputs({', '.join([*map(repr, self.outputs)] + ['inner=True'] * self.inner)})"

    def attach(self, module: nn.Module, path: str, runtime: Runtime) -> Undo:
        def gather(_: nn.Module, args: Any, output: Any) -> Any:
            return _on_outputs(output, self.outputs, path, runtime.lengths.gather)

        return after_forward(module, path, runtime, gather)


@frozen_style(init=False)
class TrimOutputs(GatherOutputs):
    """What ``parallelize(gather=False)`` puts in the place of :class:`GatherOutputs`: outputs stay sharded, without the
    stand-in rows of streams of which a rank has none."""

    def attach(self, module: nn.Module, path: str, runtime: Runtime) -> Undo:
        def trim(_: nn.Module, args: Any, output: Any) -> Any:
            return _on_outputs(output, self.outputs, path, runtime.lengths.trim)

        return after_forward(module, path, runtime, trim)
