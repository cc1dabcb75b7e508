"""Styles about what a module is given: cut it, gather it, carry it from one forward to the next, refuse it."""

from __future__ import annotations

import difflib
import math
import operator
import weakref
from typing import Any

import torch
from torch import nn

from .. import _compat
from ..errors import InputError, PlanError
from ..layout import StreamLengths
from ..placements import StreamCount, StreamDim, StreamGrid, StreamParts
from .base import (
    MeshcpStyle,
    Runtime,
    Undo,
    check_declared,
    check_taken,
    forward_parameters,
    frozen_style,
    map_declared,
    named,
    takes_any,
)
from .hooks import Arguments, Call, after_forward, before_forward


@frozen_style(init=False)
class ShardInputs(MeshcpStyle):
    """Cut inputs of a module along the sequence: each rank goes on with its own part.

    ``ShardInputs(hidden_states=seq(1, "image"), controlnet_block_samples=seq(1, "image", optional=True))``: the names
    are those of the arguments of ``forward``, passed by position or by name. An argument that is a tuple, list or dict
    of tensors has each of them cut alike, or is said part by part with ``parts(seq(...), seq(...))``; one that counts
    tokens is declared as ``count("text")``, one that holds the size of a grid of tokens as ``grid("video", ...)``. No
    communication: every rank holds the whole input.
    """

    inputs: tuple[tuple[str, StreamDim | StreamCount | StreamParts | StreamGrid], ...]

    def __init__(self, **inputs: StreamDim | StreamCount | StreamParts | StreamGrid) -> None:
        for name, where in inputs.items():
            if not isinstance(where, StreamDim | StreamCount | StreamParts | StreamGrid):
                raise PlanError(f'ShardInputs({name}={where!r}): needed: seq(dim, "stream"), such as seq(1, "image")')
        object.__setattr__(self, "inputs", tuple(inputs.items()))

    def __repr__(self) -> str:
        return f"ShardInputs({', '.join(f'{name}={where!r}' for name, where in self.inputs)})"

    @property
    def named_streams(self) -> tuple[str, ...]:
        return tuple(stream for _, where in self.inputs for stream in where.streams)

    def check(self, module: nn.Module, path: str, runtime: Runtime) -> None:
        names = forward_parameters(module)
        for name, where in self.inputs:
            may_lack = isinstance(where, StreamDim) and where.if_taken
            if name not in names and not may_lack and not (where.optional and takes_any(module)):
                close = difflib.get_close_matches(name, names, 1)
                hint = f"did you mean {close[0]!r}? " if close else ""
                raise PlanError(
                    f"{type(self).__name__} names input {name!r} of {named(path)} ({type(module).__name__}), whose "
                    f"forward takes {', '.join(names)}; {hint}Correct the name in the plan"
                )

    def attach(self, module: nn.Module, path: str, runtime: Runtime) -> Undo:
        names = forward_parameters(module)
        # Inputs of one stream, and counts of one, tell lengths that those of several streams are cut by.
        order = sorted(self.inputs, key=lambda item: (len(item[1].streams) > 1, isinstance(item[1], StreamCount)))
        # An optional input may be one that only some block classes declare, while the others swallow it in **kwargs.
        declared = [(name, where) for name, where in order if name in names]
        lengths = runtime.lengths

        def cut(x: torch.Tensor, where: StreamDim, who: str) -> torch.Tensor:
            x = lengths.shard(x, where, who)
            return _packed(x) if not torch.compiler.is_compiling() and _compat.is_compiled(module) else x

        def shard(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
            given = Arguments(names, args, kwargs)
            for name, where in declared:
                value, who = given.get(name), f"input {name!r} of {named(path)}"
                if value is None and isinstance(where, StreamCount):
                    value = where.default
                if value is None:
                    if isinstance(where, StreamDim) and where.empty:
                        lengths.tell(where.streams[0], 0, f"{who}, which is left out,")
                        continue
                    if where.optional:
                        continue
                    raise InputError(
                        f"{who} is missing or None, and the plan shards it as {where!r}; pass it, or mark it "
                        "optional=True in the plan if the model runs without it"
                    )
                if isinstance(where, StreamCount):
                    given.set(name, lengths.count(value, where, who))
                elif isinstance(where, StreamParts):
                    given.set(name, _shard_parts(value, where, lengths, who))
                elif isinstance(where, StreamGrid):
                    lengths.tell(where.stream, grid_size(value, where, who), who)
                else:
                    given.set(name, map_declared(value, where, who, cut))
            return given.call

        return before_forward(module, path, runtime, shard)


def _packed(x: torch.Tensor) -> torch.Tensor:
    """The same values without gaps in memory. A block that compiles its own calls is guarded by the strides of its
    inputs, and the others, which are given what a block returns, could not share its graph."""
    is_packed = x.stride() == torch.empty(x.shape, device="meta").stride()
    return x if is_packed else x.clone(memory_format=torch.contiguous_format)


def grid_size(value: Any, where: StreamGrid, who: str) -> int:
    """The number of tokens of a grid."""
    item = value
    try:
        for index in where.at:
            item = item[index]
        return math.prod(operator.index(size) for size in item)
    except (IndexError, KeyError, TypeError):
        raise InputError(f"{who} is {value!r}; the plan needs sizes of a grid in it ({where!r})") from None


def _shard_parts(value: Any, where: StreamParts, lengths: StreamLengths, who: str) -> Any:
    if not isinstance(value, tuple | list) or len(value) != len(where.parts):
        found = f"{len(value)} parts" if isinstance(value, tuple | list) else type(value).__name__
        raise InputError(
            f"{who} has {found}; the plan says {where!r}. Pass a tuple of {len(where.parts)}, or correct the plan"
        )
    new = list(value)
    for index, part in enumerate(where.parts):
        if part is not None and (value[index] is not None or not part.optional):
            new[index] = map_declared(value[index], part, f"{who} [{index}]", lengths.shard)
    return type(value)(*new) if hasattr(value, "_fields") else type(value)(new)


@frozen_style(init=False)
class GatherInputs(ShardInputs):
    """Make inputs of a module whole on every rank: ``GatherInputs(hidden_states=seq(1, "video"))``.

    For a small module that needs the whole sequence in the middle of sharded ones; ``ShardOutputs`` at the same module
    cuts what comes out. One all-gather a stream; the module's own work is done on every rank. The gradient is the sum
    over ranks.
    """

    def __init__(self, **inputs: StreamDim) -> None:
        if not inputs or not all(isinstance(where, StreamDim) for where in inputs.values()):
            raise PlanError(f'GatherInputs({inputs}): needed: seq(dim, "stream") for each, such as seq(1, "image")')
        object.__setattr__(self, "inputs", tuple(inputs.items()))

    def __repr__(self) -> str:
        return f"GatherInputs({', '.join(f'{name}={where!r}' for name, where in self.inputs)})"

    def attach(self, module: nn.Module, path: str, runtime: Runtime) -> Undo:
        names = forward_parameters(module)

        def gather(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
            given = Arguments(names, args, kwargs)
            for name, where in self.inputs:
                assert isinstance(where, StreamDim)
                if name not in names:
                    continue
                value, who = given.get(name), f"input {name!r} of {named(path)}"
                if value is not None:
                    given.set(name, map_declared(value, where, who, runtime.lengths.gather))
                elif not where.optional:
                    raise InputError(f"{who} is missing or None, and the plan gathers it as {where!r}; pass it")
            return given.call

        return before_forward(module, path, runtime, gather)


@frozen_style()
class CarryStream(MeshcpStyle):
    """An object that one forward pass returns and later ones take, in which each rank keeps its own rows of a stream.

    ``CarryStream("kv_cache", made_from="ref", holds="cached")``, a cache of keys and values: the object that the model
    returns holds the rows of stream ``made_from``; where it is passed as argument ``name``, stream ``holds`` is as
    long, and empty where it is not.
    """

    name: str
    made_from: str
    holds: str

    @property
    def named_streams(self) -> tuple[str, ...]:
        return (self.holds,)

    def check(self, module: nn.Module, path: str, runtime: Runtime) -> None:
        names = forward_parameters(module)
        if self.name not in names:
            raise PlanError(f"{self!r} on {named(path)}, whose forward takes {', '.join(names)}; correct the name")

    def attach(self, module: nn.Module, path: str, runtime: Runtime) -> Undo:
        names, lengths = forward_parameters(module), runtime.lengths
        carried: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        who = f"input {self.name!r} of {named(path)}"

        def take(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            value = Arguments(names, args, kwargs).get(self.name)
            if value is not None and value not in carried:
                raise InputError(
                    f"{who} is a {type(value).__name__} that another model made; needed: one that this parallel model "
                    "returned, in which each rank has its own rows. Make it anew with this model"
                )
            lengths.tell(self.holds, 0 if value is None else carried[value], who)

        def keep(_: nn.Module, args: Any, output: Any) -> None:
            parts = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else ()
            for part in parts:
                if part is not None and not isinstance(part, torch.Tensor | tuple | list | dict):
                    carried[part] = lengths.known[self.made_from]

        before, after = before_forward(module, path, runtime, take), after_forward(module, path, runtime, keep)

        def undo() -> None:
            before()
            after()

        return undo


@frozen_style(init=False)
class RefuseInputs(MeshcpStyle):
    """Inputs that must be left out, and why: ``RefuseInputs(sparse_params="the block mask is chosen from ...")``.

    For what a model can do that its plan does not cover and that would be wrong on a sharded sequence.
    """

    reasons: tuple[tuple[str, str], ...]

    def __init__(self, **reasons: str) -> None:
        object.__setattr__(self, "reasons", tuple(reasons.items()))

    def __repr__(self) -> str:
        return f"RefuseInputs({', '.join(f'{name}={reason!r}' for name, reason in self.reasons)})"

    def check(self, module: nn.Module, path: str, runtime: Runtime) -> None:
        check_taken(self, self.reasons, module, path)

    def attach(self, module: nn.Module, path: str, runtime: Runtime) -> Undo:
        names = forward_parameters(module)

        def refuse(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = Arguments(names, args, kwargs)
            for name, reason in self.reasons:
                if given.get(name) is not None:
                    raise InputError(f"input {name!r} of {named(path)} is not covered by the plan: {reason}")

        return before_forward(module, path, runtime, refuse)


@frozen_style(init=False)
class GatherStores(MeshcpStyle):
    """What a module keeps for later in a cache that it is given, made whole.

    ``GatherStores(kv_cache=seq(1, "image"))``: the argument is an object with a method ``store``, which takes keys and
    values; another forward pass reads them, over streams of other lengths: see ``whole`` of
    :class:`ContextParallelAttention`. One all-gather a tensor.
    """

    caches: tuple[tuple[str, StreamDim], ...]

    def __init__(self, **caches: StreamDim) -> None:
        check_declared("GatherStores", tuple(caches.values()))
        object.__setattr__(self, "caches", tuple(caches.items()))

    def __repr__(self) -> str:
        return f"GatherStores({', '.join(f'{name}={where!r}' for name, where in self.caches)})"

    def check(self, module: nn.Module, path: str, runtime: Runtime) -> None:
        check_taken(self, self.caches, module, path)

    def attach(self, module: nn.Module, path: str, runtime: Runtime) -> Undo:
        names = forward_parameters(module)

        def wrap(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
            given = Arguments(names, args, kwargs)
            for name, where in self.caches:
                cache = given.get(name)
                if cache is not None:
                    who = f"what {named(path)} stores in {name!r}"
                    given.set(name, _GatheringCache(cache, where, runtime.lengths, who))
            return given.call

        return before_forward(module, path, runtime, wrap)


class _GatheringCache:
    """A cache whose ``store`` gathers first; all else is the cache's own."""

    def __init__(self, cache: Any, where: StreamDim, lengths: StreamLengths, who: str) -> None:
        self._cache, self._where, self._lengths, self._who = cache, where, lengths, who

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def store(self, *tensors: torch.Tensor) -> Any:
        return self._cache.store(*(self._lengths.gather(x, self._where, self._who) for x in tensors))
