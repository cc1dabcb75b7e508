"""What a plan can ask of a module: shard its inputs or outputs, gather its outputs, attend across the mesh.

Each style is frozen data. ``check`` says whether it fits a module, without touching it; ``attach`` makes it work and
returns how to undo that. What happens in a forward pass is in :class:`Runtime`, one for each parallel model.
"""

from __future__ import annotations

import copy
import difflib
import functools
import inspect
import math
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeVar, dataclass_transform

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle
from torch.overrides import TorchFunctionMode

from . import _compat
from .attention.distributed import CallPlan, LocalKernel, check_rows, sdpa
from .attention.kernels import AUTOMATIC, choose_kernel
from .collectives import sum_over
from .errors import AttentionError, InputError, LayoutError, PlanError
from .layout import StreamLengths, map_tensors
from .mesh import ContextMesh
from .placements import SequenceLayout, StreamCount, StreamDim, StreamGrid, StreamParts, select, total

Undo = Callable[[], None]
S = TypeVar("S", bound="MeshcpStyle")


class Runtime:
    """What the styles of one parallel model share while it runs: the mesh, the stream lengths, the attention sites."""

    def __init__(self, context: ContextMesh) -> None:
        self.context = context
        self.lengths = StreamLengths(context)
        self.backend = _compat.register_attention_backend()
        self.running = False
        self.inside = 0
        self.plans: dict[tuple[Any, ...], CallPlan] = {}

    @property
    def idle(self) -> bool:
        """Whether a module that runs now does so for another model, or for itself.

        Z-Image's ControlNet shares modules with its transformer; either may be parallel without the other. A part that
        the backward pass computes anew (activation checkpointing) belongs to the model that it is a part of.
        """
        return not self.running and not _compat.in_backward()


def _before(module: nn.Module, path: str, runtime: Runtime, hook: Callable[..., Any]) -> Undo:
    """Call ``hook(module, args, kwargs)`` before the module's forward, while the model runs that it is a part of."""
    if not path:
        # torch.compile runs the hooks of the module that it is given outside of its graph, as graphs of their own.
        def run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not runtime.running:
                raise InputError(
                    f"{type(module).__name__}.forward was called by itself, without the hooks that make it parallel; "
                    "call the model: model(...), not model.forward(...)"
                )
            changed = hook(module, args, kwargs)
            if changed is not None:
                args, kwargs = changed
            return original(*args, **kwargs)

        return _wrap_forward(module, run)

    def guarded(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return None if runtime.idle else hook(module, args, kwargs)

    return module.register_forward_pre_hook(guarded, with_kwargs=True).remove


def _after(module: nn.Module, path: str, runtime: Runtime, hook: Callable[..., Any]) -> Undo:
    """Call ``hook(module, args, output)`` after the module's forward, while the model runs that it is a part of."""
    if not path:

        def run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            changed = hook(module, args, output)
            return output if changed is None else changed

        return _wrap_forward(module, run)

    def guarded(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return None if runtime.idle else hook(module, args, output)

    return module.register_forward_hook(guarded).remove


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
def _style(*, init: bool = True) -> Callable[[type[S]], type[S]]:
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


def _parameters(module: nn.Module) -> list[str]:
    """Names of the arguments of ``forward``, as the class declares it."""
    # PEFT's layers stand for the layer that they wrap.
    while isinstance(module.__dict__.get("_modules", {}).get("base_layer"), nn.Module):
        module = module.base_layer  # type: ignore[assignment]
    signature = inspect.signature(type(module).forward)
    return [name for name in signature.parameters if name != "self"]


def _takes_any(module: nn.Module) -> bool:
    """Whether ``forward`` swallows arguments that it does not name."""
    parameters = inspect.signature(type(module).forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def _named(path: str) -> str:
    """A module for messages. A compiled one stays nameless: its graph would be guarded by the name, and blocks that are
    alike could not share it."""
    if torch.compiler.is_compiling():
        return "a compiled module"
    return repr(path) if path else "the model"


def _check_taken(style: MeshcpStyle, inputs: Sequence[tuple[str, object]], module: nn.Module, path: str) -> None:
    """Raise unless the module's forward takes every input that the style names."""
    names = _parameters(module)
    for name, _ in inputs:
        if name not in names:
            raise PlanError(
                f"{type(style).__name__} names input {name!r} of {_named(path)} ({type(module).__name__}), whose "
                f"forward takes {', '.join(names)}; correct the name in the plan"
            )


@_style(init=False)
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
        names = _parameters(module)
        for name, where in self.inputs:
            may_lack = isinstance(where, StreamDim) and where.if_taken
            if name not in names and not may_lack and not (where.optional and _takes_any(module)):
                close = difflib.get_close_matches(name, names, 1)
                hint = f"did you mean {close[0]!r}? " if close else ""
                raise PlanError(
                    f"{type(self).__name__} names input {name!r} of {_named(path)} ({type(module).__name__}), whose "
                    f"forward takes {', '.join(names)}; {hint}Correct the name in the plan"
                )

    def attach(self, module: nn.Module, path: str, runtime: Runtime) -> Undo:
        names = _parameters(module)
        # Inputs of one stream, and counts of one, tell lengths that those of several streams are cut by.
        order = sorted(self.inputs, key=lambda item: (len(item[1].streams) > 1, isinstance(item[1], StreamCount)))
        # An optional input may be one that only some block classes declare, while the others swallow it in **kwargs.
        places = [(name, names.index(name), where) for name, where in order if name in names]
        lengths = runtime.lengths

        def shard(
            _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            new_args, new_kwargs = list(args), dict(kwargs)
            for name, position, where in places:
                if name in new_kwargs:
                    value = new_kwargs[name]
                elif position < len(new_args):
                    value = new_args[position]
                else:
                    value = None
                if value is None and isinstance(where, StreamCount):
                    value = where.default
                if value is None:
                    if isinstance(where, StreamDim) and where.empty:
                        lengths.tell(where.streams[0], 0, f"input {name!r} of {_named(path)}, which is left out,")
                        continue
                    if where.optional:
                        continue
                    raise InputError(
                        f"input {name!r} of {_named(path)} is missing or None, and the plan shards it as {where!r}; "
                        "pass it, or mark it optional=True in the plan if the model runs without it"
                    )
                who = f"input {name!r} of {_named(path)}"
                if isinstance(where, StreamCount):
                    value = lengths.count(value, where, who)
                elif isinstance(where, StreamParts):
                    value = _shard_parts(value, where, lengths, who)
                elif isinstance(where, StreamGrid):
                    lengths.tell(where.stream, _grid_size(value, where, who), who)
                else:
                    value = _map(value, where, who, lengths.shard)
                if position < len(new_args):
                    new_args[position] = value
                else:
                    new_kwargs[name] = value
            return tuple(new_args), new_kwargs

        return _before(module, path, runtime, shard)


def _grid_size(value: Any, where: StreamGrid, who: str) -> int:
    """The number of tokens of a grid."""
    item = value
    try:
        for index in where.at:
            item = item[index]
        return math.prod(operator.index(size) for size in item)
    except (IndexError, KeyError, TypeError):
        raise InputError(f"{who} is {value!r}; the plan needs sizes of a grid in it ({where!r})") from None


def _map(value: Any, where: StreamDim, who: str, function: Callable[[torch.Tensor, StreamDim, str], Any]) -> Any:
    """``function(tensor, where, who)`` in the place of every tensor in ``value``."""
    return map_tensors(value, lambda x, at: function(x, where, at), who)


def _shard_parts(value: Any, where: StreamParts, lengths: StreamLengths, who: str) -> Any:
    if not isinstance(value, tuple | list) or len(value) != len(where.parts):
        found = f"{len(value)} parts" if isinstance(value, tuple | list) else type(value).__name__
        raise InputError(
            f"{who} has {found}; the plan says {where!r}. Pass a tuple of {len(where.parts)}, or correct the plan"
        )
    new = list(value)
    for index, part in enumerate(where.parts):
        if part is not None and (value[index] is not None or not part.optional):
            new[index] = _map(value[index], part, f"{who} [{index}]", lengths.shard)
    return type(value)(*new) if hasattr(value, "_fields") else type(value)(new)


def _on_outputs(
    output: Any, entries: Sequence[StreamDim | None], path: str, function: Callable[[torch.Tensor, StreamDim, str], Any]
) -> Any:
    """Apply ``function`` to the outputs that ``entries`` name: a tensor, a tuple, or a dict-like model output."""
    if isinstance(output, torch.Tensor):
        return output if entries[0] is None else function(output, entries[0], f"output of {_named(path)}")
    if isinstance(output, dict):
        keys, values = list(output), list(output.values())
    elif isinstance(output, tuple | list):
        keys, values = list(range(len(output))), list(output)
    else:
        raise InputError(
            f"output of {_named(path)} is {type(output).__name__}; the plan handles tensors, tuples and model outputs"
        )
    if len(values) < len([entry for entry in entries if entry is not None and not entry.optional]):
        raise InputError(f"output of {_named(path)} has {len(values)} parts; the plan names {list(entries)}")
    for index, (key, value, where) in enumerate(zip(keys, values, entries, strict=False)):
        if where is None or value is None:
            continue
        new = _map(value, where, f"output [{key!r}] of {_named(path)}", function)
        values[index] = new
        if isinstance(output, dict):
            output[key] = new
    if isinstance(output, dict):
        return output
    if hasattr(output, "_fields"):
        return type(output)(*values)
    return type(output)(values)


def _check_outputs(style: str, outputs: tuple[Any, ...]) -> None:
    for where in outputs:
        if where is not None and not isinstance(where, StreamDim):
            raise PlanError(f'{style}({where!r}): needed: seq(dim, "stream"), or None for an output to leave alone')
    if all(where is None for where in outputs):
        raise PlanError(f'{style}() names no output; needed: seq(dim, "stream") for at least one')


@_style(init=False)
class ShardOutputs(MeshcpStyle):
    """Cut outputs of a module along the sequence, by position: ``ShardOutputs(seq(0, "image"), None)``.

    For what a module computes on every rank alike and the rest of the model wants in parts, such as rotary
    embeddings. No communication.
    """

    outputs: tuple[StreamDim | None, ...]

    def __init__(self, *outputs: StreamDim | None) -> None:
        _check_outputs("ShardOutputs", outputs)
        object.__setattr__(self, "outputs", outputs)

    def __repr__(self) -> str:
        return f"ShardOutputs({', '.join(map(repr, self.outputs))})"

    @property
    def named_streams(self) -> tuple[str, ...]:
        return tuple(stream for where in self.outputs if where is not None for stream in where.streams)

    def attach(self, module: nn.Module, path: str, runtime: Runtime) -> Undo:
        def shard(_: nn.Module, args: Any, output: Any) -> Any:
            return _on_outputs(output, self.outputs, path, runtime.lengths.shard)

        return _after(module, path, runtime, shard)


@_style(init=False)
class GatherOutputs(MeshcpStyle):
    """Make outputs of a module whole again on every rank, by position: ``GatherOutputs(seq(1, "image"))``.

    One all-gather a stream over each context axis of degree above 1. The gradient is the sum over ranks (see
    :mod:`meshcp.gradients` for the contract). ``inner=True``: the model itself goes on with the whole sequence (it cuts
    it, or combines it with a tensor that is whole), so ``parallelize(gather=False)`` leaves this one as it is.
    """

    outputs: tuple[StreamDim | None, ...]
    inner: bool = False

    def __init__(self, *outputs: StreamDim | None, inner: bool = False) -> None:
        _check_outputs("GatherOutputs", outputs)
        object.__setattr__(self, "outputs", outputs)
        object.__setattr__(self, "inner", inner)

    def __repr__(self) -> str:
        return f"GatherOutputs({', '.join([*map(repr, self.outputs)] + ['inner=True'] * self.inner)})"

    def attach(self, module: nn.Module, path: str, runtime: Runtime) -> Undo:
        def gather(_: nn.Module, args: Any, output: Any) -> Any:
            return _on_outputs(output, self.outputs, path, runtime.lengths.gather)

        return _after(module, path, runtime, gather)


@_style(init=False)
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
        names = _parameters(module)

        def gather(
            _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            new_args, new_kwargs = list(args), dict(kwargs)
            for name, where in self.inputs:
                assert isinstance(where, StreamDim)
                if name not in names:
                    continue
                position, who = names.index(name), f"input {name!r} of {_named(path)}"
                value = new_kwargs[name] if name in new_kwargs else dict(enumerate(args)).get(position)
                if value is None and not where.optional:
                    raise InputError(f"{who} is missing or None, and the plan gathers it as {where!r}; pass it")
                value = _map(value, where, who, runtime.lengths.gather)
                if name in new_kwargs:
                    new_kwargs[name] = value
                elif value is not None:
                    new_args[position] = value
            return tuple(new_args), new_kwargs

        return _before(module, path, runtime, gather)


@_style(init=False)
class TrimOutputs(GatherOutputs):
    """What ``parallelize(gather=False)`` puts in the place of :class:`GatherOutputs`: outputs stay sharded, without the
    stand-in rows of streams of which a rank has none."""

    def attach(self, module: nn.Module, path: str, runtime: Runtime) -> Undo:
        def trim(_: nn.Module, args: Any, output: Any) -> Any:
            return _on_outputs(output, self.outputs, path, runtime.lengths.trim)

        return _after(module, path, runtime, trim)


@_style()
class LocalAttention(MeshcpStyle):
    """Attention that needs no communication: its keys and values are whole on every rank.

    Cross-attention over a replicated text, or self-attention inside a part of the model that runs before the sequence
    is sharded (a text refiner). It covers the module; the attention itself is left alone.
    """

    def attach(self, module: nn.Module, path: str, runtime: Runtime) -> Undo:
        text, names = "encoder_hidden_states", _parameters(module)
        # Without a text, Diffusers' cross-attention attends to its own tokens.
        place = names.index(text) if text in names and getattr(module, "is_cross_attention", False) else None

        def run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if runtime.idle:
                return original(*args, **kwargs)
            if place is not None and (args[place] if place < len(args) else kwargs.get(text)) is None:
                raise AttentionError(
                    f"{_named(path)} is a cross-attention that got no {text}, so that its keys are its own tokens, of "
                    "which this rank has a part; the plan says LocalAttention(). Pass the text to the model"
                )
            runtime.inside += 1
            try:
                return original(*args, **kwargs)
            finally:
                runtime.inside -= 1

        return _wrap_forward(module, run)


@_style()
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
        names = _parameters(module)
        if self.name not in names:
            raise PlanError(f"{self!r} on {_named(path)}, whose forward takes {', '.join(names)}; correct the name")

    def attach(self, module: nn.Module, path: str, runtime: Runtime) -> Undo:
        position, lengths = _parameters(module).index(self.name), runtime.lengths
        carried: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        who = f"input {self.name!r} of {_named(path)}"

        def take(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            value = args[position] if position < len(args) else kwargs.get(self.name)
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

        before, after = _before(module, path, runtime, take), _after(module, path, runtime, keep)

        def undo() -> None:
            before()
            after()

        return undo


@_style(init=False)
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
        _check_taken(self, self.reasons, module, path)

    def attach(self, module: nn.Module, path: str, runtime: Runtime) -> Undo:
        names = _parameters(module)
        places = [(name, names.index(name), reason) for name, reason in self.reasons]

        def refuse(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for name, position, reason in places:
                if (args[position] if position < len(args) else kwargs.get(name)) is not None:
                    raise InputError(f"input {name!r} of {_named(path)} is not covered by the plan: {reason}")

        return _before(module, path, runtime, refuse)


@_style(init=False)
class GatherStores(MeshcpStyle):
    """What a module keeps for later in a cache that it is given, made whole.

    ``GatherStores(kv_cache=seq(1, "image"))``: the argument is an object with a method ``store``, which takes keys and
    values; another forward pass reads them, over streams of other lengths: see ``whole`` of
    :class:`ContextParallelAttention`. One all-gather a tensor.
    """

    caches: tuple[tuple[str, StreamDim], ...]

    def __init__(self, **caches: StreamDim) -> None:
        _check_outputs("GatherStores", tuple(caches.values()))
        object.__setattr__(self, "caches", tuple(caches.items()))

    def __repr__(self) -> str:
        return f"GatherStores({', '.join(f'{name}={where!r}' for name, where in self.caches)})"

    def check(self, module: nn.Module, path: str, runtime: Runtime) -> None:
        _check_taken(self, self.caches, module, path)

    def attach(self, module: nn.Module, path: str, runtime: Runtime) -> Undo:
        names = _parameters(module)
        places = [(name, names.index(name), where) for name, where in self.caches]

        def wrap(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            new_args, new_kwargs = list(args), dict(kwargs)
            for name, position, where in places:
                values: Any = new_kwargs if name in new_kwargs else new_args
                key = name if name in new_kwargs else position
                if (name in new_kwargs or position < len(new_args)) and values[key] is not None:
                    who = f"what {_named(path)} stores in {name!r}"
                    values[key] = _GatheringCache(values[key], where, runtime.lengths, who)
            return tuple(new_args), new_kwargs

        return _before(module, path, runtime, wrap)


class _GatheringCache:
    """A cache whose ``store`` gathers first; all else is the cache's own."""

    def __init__(self, cache: Any, where: StreamDim, lengths: StreamLengths, who: str) -> None:
        self._cache, self._where, self._lengths, self._who = cache, where, lengths, who

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def store(self, *tensors: torch.Tensor) -> Any:
        return self._cache.store(*(self._lengths.gather(x, self._where, self._who) for x in tensors))


@_style(init=False)
class ContextParallelAttention(MeshcpStyle):
    """Attention over sequences that are sharded over the mesh.

    Attributes:
        streams: the streams that the queries are the concatenation of, in the order of the model.
        kv: the same for keys and values: None when they are the same sequence, other streams for cross-attention
            between sharded sequences, ``"replicated"`` when every rank holds them whole.
        then: what covers further attention calls of the same module, such as those of an IP-Adapter;
            :class:`LocalAttention` or another ``ContextParallelAttention``. None: a second call is an error.
        key_masks: for processors that build the mask themselves out of the mask of one stream and ones for the local
            length of another: the keyword argument of the module that is the boolean mask ``[B, stream]`` of a whole
            stream, and the stream. The processor gets None in its place, the attention the mask of all keys.
        per_sample: the processor makes one attention call for each sample of the batch, over the valid rows of that
            sample only. It gets a mask by which every row of this rank is valid in the place of the key mask, and its
            call i the key mask of sample i: rows that are not valid are computed, but nobody attends to them.
        mask_needed: the processor cannot do without a key mask. It gets one by which every row of this rank is valid,
            and the mask that it makes of it, for the rank's own rows and keys, is put aside.
        mask: for processors that pad the mask to the local length or repeat it for every head: the keyword argument of
            the module that is the mask of the whole sequence. The processor gets None in its place.
        mask_streams: the streams that the keys of ``mask`` are the concatenation of, where they are not those of the
            attention: it gets the columns of its own keys.
        may_skip: the processor may make no call at all (guidance that passes the values on in the place of attention):
            then nothing passes between tokens.
        whole: name of a stream that is whole on every rank (a prompt, condition images, what a cache keeps of earlier
            steps) and whose keys stand in front of the others. A call that sees no other keys is local.
        native_only: with some attention backends the model does otherwise (a window of the kernel in the place of a
            mask), which the plan does not cover: any but Diffusers' own choice is refused.
    """

    streams: tuple[str, ...]
    kv: tuple[str, ...] | Literal["replicated"] | None = None
    then: LocalAttention | ContextParallelAttention | None = None
    key_masks: tuple[tuple[str, str], ...] = ()
    per_sample: bool = False
    mask_needed: bool = False
    mask: str | None = None
    may_skip: bool = False
    whole: str | None = None
    native_only: bool = False
    mask_streams: tuple[str, ...] = ()

    def __init__(
        self,
        streams: Sequence[str],
        kv: Sequence[str] | Literal["replicated"] | None = None,
        then: LocalAttention | ContextParallelAttention | None = None,
        key_masks: Mapping[str, str] | None = None,
        per_sample: bool = False,
        mask_needed: bool = False,
        mask: str | None = None,
        may_skip: bool = False,
        whole: str | None = None,
        native_only: bool = False,
        mask_streams: Sequence[str] = (),
    ) -> None:
        if isinstance(streams, str) or not streams:
            raise PlanError(
                f'ContextParallelAttention(streams={streams!r}): needed: a tuple of names, such as ("text", "image")'
            )
        set_ = object.__setattr__
        set_(self, "streams", tuple(streams))
        set_(self, "kv", kv if kv is None or kv == "replicated" else tuple(kv))
        set_(self, "then", then)
        set_(self, "key_masks", tuple((key_masks or {}).items()))
        set_(self, "per_sample", per_sample)
        set_(self, "mask_needed", mask_needed)
        set_(self, "mask", mask)
        set_(self, "may_skip", may_skip)
        set_(self, "whole", whole)
        set_(self, "native_only", native_only)
        set_(self, "mask_streams", tuple(mask_streams))

    def __repr__(self) -> str:
        parts = [f"streams={self.streams}"]
        parts += [f"{name}={value!r}" for name, value in (("kv", self.kv), ("then", self.then)) if value is not None]
        parts += [f"key_masks={dict(self.key_masks)}"] * bool(self.key_masks)
        parts += ["per_sample=True"] * self.per_sample + ["mask_needed=True"] * self.mask_needed
        parts += [f"mask={self.mask!r}"] * bool(self.mask) + ["may_skip=True"] * self.may_skip
        parts += [f"whole={self.whole!r}"] * bool(self.whole) + ["native_only=True"] * self.native_only
        parts += [f"mask_streams={self.mask_streams}"] * bool(self.mask_streams)
        return f"ContextParallelAttention({', '.join(parts)})"

    def check(self, module: nn.Module, path: str, runtime: Runtime) -> None:
        takes = {*_parameters(module), *inspect.signature(type(_owner(module)).__call__).parameters}
        for name, stream in self.key_masks:
            if name not in takes or stream not in (self.kv or self.streams):
                raise PlanError(
                    f"{self!r} on {_named(path)}: needed: an argument that {type(_owner(module)).__name__} takes "
                    f"({', '.join(sorted(takes - {'self'}))}) and one of the streams {self.kv or self.streams}"
                )
        if self.mask is not None and (self.mask not in takes or self.key_masks):
            raise PlanError(
                f"{self!r} on {_named(path)}: needed: as mask an argument that {type(_owner(module)).__name__} takes "
                f"({', '.join(sorted(takes - {'self'}))}), and no key_masks beside it"
            )
        if self.mask_streams and not (self.mask and {*(self.kv or self.streams)} <= {*self.mask_streams}):
            raise PlanError(
                f"{self!r} on {_named(path)}: mask_streams needs mask, and the streams {self.kv or self.streams} among "
                "its own"
            )
        if self.whole is not None and self.kv == "replicated":
            raise PlanError(
                f'{self!r} on {_named(path)}: kv="replicated" says that all keys are whole; leave whole out'
            )
        _check_native_only(self, _compat.chosen_backend(_owner(module)), path)
        if runtime.context.ring > 1 and self.kv != "replicated":
            backend = _compat.chosen_backend(_owner(module))
            if backend not in AUTOMATIC:
                parameter = next(module.parameters(), torch.empty(0))
                try:
                    choose_kernel(backend, parameter.device.type, parameter.dtype, mask=False)
                except AttentionError as error:
                    raise AttentionError(f"{_named(path)}: {error}") from None

    def attach(self, module: nn.Module, path: str, runtime: Runtime) -> Undo:
        return _wrap_forward(module, AttentionSite(module, path, self, runtime).run)


def _check_native_only(style: ContextParallelAttention, backend: str, path: str) -> None:
    if style.native_only and backend not in AUTOMATIC:
        raise AttentionError(
            f"{_named(path)} has the attention backend {backend!r}, with which this model masks otherwise than the "
            "plan covers; needed: Diffusers' own choice (model.reset_attention_backend())"
        )


def _owner(module: nn.Module) -> object:
    """What carries the attention backend: the processor, or the module itself where it has none."""
    processor = getattr(module, "processor", None)
    return module if processor is None else processor


class AttentionSite:
    """An attention module of a parallel model: takes over the attention calls that happen while it runs."""

    def __init__(self, module: nn.Module, path: str, style: ContextParallelAttention, runtime: Runtime) -> None:
        self.module, self.path, self.style, self.runtime = module, path, style, runtime
        self.calls = 0
        self.key_masks: dict[str, torch.Tensor] = {}
        self.mask: torch.Tensor | None = None

    def run(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The forward of the module, with its attention calls coming here."""
        runtime, owner = self.runtime, _owner(self.module)
        if runtime.idle:
            return original(*args, **kwargs)
        self.calls = 0
        for name, stream in self.style.key_masks:
            if kwargs.get(name) is not None:
                self.key_masks[stream] = kwargs[name]
                needed = self.style.per_sample or self.style.mask_needed
                kwargs[name] = self._all_valid(kwargs[name], stream) if needed else None
        if self.style.mask is not None and kwargs.get(self.style.mask) is not None:
            self.mask, kwargs[self.style.mask] = kwargs[self.style.mask], None
        runtime.inside += 1
        try:
            if _compat.has_attention_seam(owner):
                self.backend = _compat.chosen_backend(owner)
                _check_native_only(self.style, self.backend, self.path)
                with _compat.taken_over(owner, runtime.backend, self, everywhere=self.style.whole is not None):
                    output = original(*args, **kwargs)
            else:
                self.backend = ""
                with _SdpaCalls(self):
                    output = original(*args, **kwargs)
        finally:
            runtime.inside -= 1
            self.key_masks.clear()
            self.mask = None
        if self.calls == 0 and not self.style.may_skip:
            raise AttentionError(
                f"{_named(self.path)} ran without an attention call that meshcp can see: its processor "
                f"{type(owner).__name__} calls neither dispatch_attention_fn with its own backend nor "
                "F.scaled_dot_product_attention. Set a processor that does, or cover the module with LocalAttention() "
                "if it needs no communication"
            )
        return output

    def dispatched(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        dropout_p: float,
        causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        """A call of ``dispatch_attention_fn``: ``[B, S, H, D]``."""
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return self.attend(q, k, v, mask, dropout_p, causal, scale, rows_are_batch=True).transpose(1, 2)

    def attend(
        self,
        q_BHSD: torch.Tensor,
        k_BGKD: torch.Tensor,
        v_BGKD: torch.Tensor,
        mask: torch.Tensor | None,
        dropout_p: float,
        causal: bool,
        scale: float | None,
        *,
        rows_are_batch: bool,
    ) -> torch.Tensor:
        """The module's next attention call: ``[B, H, S, D]``, S the rows that this rank carries.

        Raises:
            AttentionError: a call that the plan does not cover, or one that cannot be computed rightly.
            LayoutError: rows that are not those of the layout.
        """
        style: LocalAttention | ContextParallelAttention | None = self.style
        known = self.runtime.lengths.known
        if self.style.whole is not None and k_BGKD.shape[2] <= known.get(self.style.whole, 0):
            return self._local(q_BHSD, k_BGKD, v_BGKD, mask, causal, scale)
        sample = self.calls if self.style.per_sample else None
        for _ in range(0 if self.style.per_sample else self.calls):
            if isinstance(style, ContextParallelAttention) and style.then is not None:
                style = style.then
            elif isinstance(style, ContextParallelAttention):
                raise AttentionError(
                    f"{_named(self.path)} makes attention call {self.calls + 1}, but the plan covers only "
                    f"{self.calls}; say what it is with {replace_then(self.style)}"
                )
        self.calls += 1
        if isinstance(style, LocalAttention):
            return self._local(q_BHSD, k_BGKD, v_BGKD, mask, causal, scale)
        assert style is not None
        if dropout_p:
            raise AttentionError(
                f"{_named(self.path)}: dropout_p={dropout_p}: dropout inside distributed attention would draw another "
                "mask than one process does; set the attention dropout to 0 (model.eval(), or the model's config)"
            )
        extra = 0
        if style.whole is not None:
            extra = self._whole_keys(style, k_BGKD.shape[2])
            k_BGKD, v_BGKD = (self._own_part(x, extra) for x in (k_BGKD, v_BGKD))
        plan = self._plan(style, q_BHSD, k_BGKD, extra)
        if self.key_masks and style.key_masks:
            mask = self._joined_key_mask(style, None if style.mask_needed else mask)
            mask = mask if sample is None else mask[sample : sample + 1]
        if self.mask is not None and style.mask is not None:
            mask = self._own_columns(style, self.mask) if style.mask_streams else self.mask
        return plan.run(
            q_BHSD, k_BGKD, v_BGKD, mask, causal=causal, scale=scale, local=self._local_kernel(), kernel=self.backend,
            rows_are_batch=rows_are_batch, held=True,
        )  # fmt: skip

    def _whole_keys(self, style: ContextParallelAttention, rows: int) -> int:
        """How many of the keys of a call are whole on every rank, in front of those of the sharded streams."""
        runtime, who = self.runtime, f"the keys of attention in {_named(self.path)}"
        assert not isinstance(style.kv, str)
        layout, here = runtime.lengths.layout(style.kv or style.streams, who), runtime.context
        extra = rows - total(layout.held(here.ring_rank, here.ulysses_rank))
        known = runtime.lengths.known.get(style.whole or "", 0)
        if extra < 0 or (known and extra != known):
            raise LayoutError(
                f"{who} has {rows} rows; needed: the {known or 'cached ones'} of {style.whole!r}, whole, and this "
                f"rank's of {layout}. Correct the plan's streams, or shard the missing input"
            )
        return extra

    def _own_part(self, x_BHSD: torch.Tensor, whole: int) -> torch.Tensor:
        """The first ``whole`` rows cut to what this rank would hold of them, and the others."""
        if not whole:
            return x_BHSD
        start, stop = SequenceLayout((whole,), self.runtime.context.ring, self.runtime.context.ulysses).held(
            self.runtime.context.ring_rank, self.runtime.context.ulysses_rank
        )[0]
        return torch.cat([x_BHSD[:, :, start:stop], x_BHSD[:, :, whole:]], 2)

    def _plan(self, style: ContextParallelAttention, q: torch.Tensor, k: torch.Tensor, whole: int = 0) -> CallPlan:
        runtime, who = self.runtime, f"attention in {_named(self.path)}"
        known = runtime.lengths.known
        heads, kv_heads, rows, kv_rows = q.shape[1], k.shape[1], q.shape[2], k.shape[2]
        streams = tuple(known.get(name, -1) for name in style.streams)
        kv = tuple(known.get(name, -1) for name in style.kv) if isinstance(style.kv, tuple) else style.kv
        key = (streams, kv, heads, kv_heads, rows, kv_rows, whole)
        compiling = torch.compiler.is_compiling()
        if not compiling and key in runtime.plans:
            return runtime.plans[key]
        layout = runtime.lengths.layout(style.streams, who).without_empty()
        check_rows(rows, layout, runtime.context, f"the queries of {who}")
        if style.kv == "replicated":
            kv_layout = None
        else:
            kv_layout = layout if style.kv is None else runtime.lengths.layout(style.kv, who).without_empty()
            if whole:
                kv_layout = SequenceLayout((whole, *kv_layout.lengths), kv_layout.ring, kv_layout.ulysses)
            check_rows(kv_rows, kv_layout, runtime.context, f"the keys of {who}")
        plan = CallPlan(runtime.context, layout, kv_layout, heads, kv_heads)
        if not compiling:
            runtime.plans[key] = plan
        return plan

    def _joined_key_mask(self, style: ContextParallelAttention, mask: torch.Tensor | None) -> torch.Tensor:
        """``[B, 1, 1, K]`` out of the masks of single streams; a stream without one is wholly visible."""
        who, streams = _named(self.path), style.kv or style.streams
        assert not isinstance(streams, str), "check refuses key_masks with replicated keys"
        if mask is not None:
            raise AttentionError(
                f"{who} has a mask of its own of shape {tuple(mask.shape)}, and the plan takes {dict(style.key_masks)} "
                "for its mask; there can be only one: correct key_masks in the plan"
            )
        some = next(iter(self.key_masks.values()))
        parts = []
        for stream in streams:
            length = self.runtime.lengths.known[stream]
            part = self.key_masks.get(stream)
            if part is None:
                part = some.new_ones(some.shape[0], length)
            if part.dtype != torch.bool or part.ndim != 2 or part.shape[1] != length:
                raise AttentionError(
                    f"{who}: the mask of stream {stream!r} is {part.dtype} of shape {tuple(part.shape)}; needed: bool, "
                    f"[B, {length}] (True: attend), of the whole stream"
                )
            parts.append(part)
        return torch.cat(parts, 1)[:, None, None, :]

    def _own_columns(self, style: ContextParallelAttention, mask: torch.Tensor) -> torch.Tensor:
        """The columns of this attention's keys, of a mask over the keys of ``mask_streams``."""
        layout = self.runtime.lengths.layout(style.mask_streams, f"the mask of {_named(self.path)}")
        if mask.shape[-1] != layout.length:
            raise AttentionError(
                f"the mask of {_named(self.path)} has shape {tuple(mask.shape)}; needed: {layout.length} keys, those "
                f"of the streams {style.mask_streams}"
            )
        columns = dict(zip(style.mask_streams, mask.split(list(layout.lengths), -1), strict=True))
        return torch.cat([columns[stream] for stream in style.kv or style.streams], -1)

    def _all_valid(self, mask: torch.Tensor, stream: str) -> torch.Tensor:
        """``[B, rows]`` of ones: what a processor that cannot do without gets in the place of a key mask."""
        lengths, context, who = self.runtime.lengths, self.runtime.context, f"the mask of {_named(self.path)}"
        # Those that attend sample by sample put the valid rows first in their output, which leaves rows where they are
        # only if the valid ones stand first. They count these on the host too: the check costs no synchronisation more.
        per_sample = self.style.per_sample and not torch.compiler.is_compiling()
        if per_sample and bool((mask[:, 1:] & ~mask[:, :-1]).any()):
            raise AttentionError(
                f"{who} has padding in front of or between valid tokens; the plan needs masks with the valid tokens "
                "first (padding_side='right' in the tokenizer)"
            )
        rows = total(lengths.layout((stream,), who).held(context.ring_rank, context.ulysses_rank))
        return mask.new_ones(mask.shape[0], rows)

    def _local_kernel(self) -> LocalKernel:
        return sdpa if self.backend in AUTOMATIC else self._local

    def _local(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        """The attention that the user chose, on what this rank holds."""
        if self.backend in AUTOMATIC:
            if mask is not None and mask.ndim == 2 and tuple(mask.shape) == (q.shape[0], k.shape[2]):
                mask = mask[:, None, None, :]
            return sdpa(q, k, v, mask, causal, scale)
        grouped = k.shape[1] != q.shape[1]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return _compat.dispatch(self.backend, q, k, v, mask, causal, scale, grouped).transpose(1, 2)


def replace_then(style: ContextParallelAttention) -> ContextParallelAttention:
    """``style`` with ``then=LocalAttention()`` at the end of its chain, for messages."""
    then = replace_then(style.then) if isinstance(style.then, ContextParallelAttention) else LocalAttention()
    extended = copy.copy(style)
    object.__setattr__(extended, "then", then)
    return extended


@_style(init=False)
class LinearAttention(MeshcpStyle):
    """Linear attention over sharded streams: a state that is a sum over the sequence, applied to each query.

    The processor makes the state with one ``torch.matmul`` of values ``[B, H, D, S]`` and keys ``[B, H, S, D]``, its
    first; the state is summed over the mesh. One all-reduce of ``[B, H, D, D]``, whatever the length of the sequence.
    """

    streams: tuple[str, ...]

    def __init__(self, streams: Sequence[str]) -> None:
        if isinstance(streams, str) or not streams:
            raise PlanError(f'LinearAttention(streams={streams!r}): needed: a tuple of names, such as ("image",)')
        object.__setattr__(self, "streams", tuple(streams))

    def __repr__(self) -> str:
        return f"LinearAttention(streams={self.streams})"

    def attach(self, module: nn.Module, path: str, runtime: Runtime) -> Undo:
        def run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if runtime.idle:
                return original(*args, **kwargs)
            mode = _FirstMatmul(self.streams, f"linear attention in {_named(path)}", runtime)
            with mode:
                output = original(*args, **kwargs)
            if not mode.seen:
                raise AttentionError(
                    f"{_named(path)} ran without a torch.matmul of values and keys; LinearAttention covers processors "
                    "that make their state with one. Set such a processor, or cover the module with another style"
                )
            return output

        return _wrap_forward(module, run)


class _FirstMatmul(TorchFunctionMode):
    """Makes the first ``torch.matmul`` contract the whole sequence."""

    def __init__(self, streams: tuple[str, ...], who: str, runtime: Runtime) -> None:
        super().__init__()
        self.streams, self.who, self.runtime = streams, who, runtime
        self.seen = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.matmul or self.seen:
            return func(*args, **(kwargs or {}))
        self.seen = True
        return self._state(*args, **(kwargs or {}))

    def _state(self, input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        context, lengths = self.runtime.context, self.runtime.lengths
        layout = lengths.layout(self.streams, self.who)
        check_rows(input.shape[-1], layout, context, f"the values of {self.who}")
        check_rows(other.shape[-2], layout, context, f"the keys of {self.who}")
        real = layout.real(context.ring_rank, context.ulysses_rank)
        if real is not None:
            input, other = select(input, input.ndim - 1, real), select(other, other.ndim - 2, real)
        state = torch.matmul(input, other)
        for degree, group in context.axes:
            if degree > 1:
                state = sum_over(state, group)
        return state


@_style()
class FoldTokens(MeshcpStyle):
    """A block that folds its tokens into rows and columns for a convolution inside it.

    ``FoldTokens("image", height="height", width="width", convolution="ff")``: names of the arguments that say how many
    rows and columns there are, and of the module that gets ``[B, C, rows, columns]``. The block is told that this
    rank's tokens are one column; the convolution runs on the rows that they lie in and ``reach`` more on either side,
    and this rank's tokens are cut out of the result. One all-gather of its input.
    """

    stream: str
    height: str
    width: str
    convolution: str
    reach: int = 1

    @property
    def named_streams(self) -> tuple[str, ...]:
        return (self.stream,)

    def check(self, module: nn.Module, path: str, runtime: Runtime) -> None:
        names = _parameters(module)
        if self.height not in names or self.width not in names or self.convolution not in dict(module.named_modules()):
            raise PlanError(
                f"{self!r} on {_named(path)}: its forward takes {', '.join(names)}, and its modules are "
                f"{', '.join(name for name, _ in module.named_children())}; correct the names in the plan"
            )

    def attach(self, module: nn.Module, path: str, runtime: Runtime) -> Undo:
        names, lengths = _parameters(module), runtime.lengths
        places = [(name, names.index(name)) for name in (self.height, self.width)]
        grid = StreamGrid(self.stream, ())
        sizes: list[Any] = []

        def fold(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            new_args, new_kwargs = list(args), dict(kwargs)
            sizes[:] = [args[at] if at < len(args) else kwargs.get(name) for name, at in places]
            who = f"({self.height}, {self.width}) of {_named(path)}"
            lengths.tell(self.stream, _grid_size(sizes, grid, who), who)
            start, stop = lengths.held(self.stream)
            for (name, at), size in zip(places, (stop - start, 1), strict=True):
                if at < len(new_args):
                    new_args[at] = size
                else:
                    new_kwargs[name] = size
            return tuple(new_args), new_kwargs

        def convolve(original: Callable[..., Any], x_BCS1: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor
            if runtime.idle:
                out = original(x_BCS1)
                return out
            height, width = sizes
            start, stop = lengths.held(self.stream)
            first, last = max(0, start // width - self.reach), min(height, -(-stop // width) + self.reach)
            where = StreamDim(2, (self.stream,), ndim=4)
            whole = lengths.gather(x_BCS1, where, f"the input of {self.convolution!r} in {_named(path)}")
            rows = whole.narrow(2, first * width, (last - first) * width).reshape(*whole.shape[:2], last - first, width)
            out = original(rows).flatten(2, 3).unsqueeze(-1)
            return out.narrow(2, start - first * width, stop - start)

        before = _before(module, path, runtime, fold)
        inside = _wrap_forward(module.get_submodule(self.convolution), convolve)

        def undo() -> None:
            inside()
            before()

        return undo


class _SdpaCalls(TorchFunctionMode):
    """Takes over ``F.scaled_dot_product_attention`` within a processor that calls it itself."""

    def __init__(self, site: AttentionSite) -> None:
        super().__init__()
        self.site = site

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        return self._call(*args, **kwargs)

    def _call(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        return self.site.attend(query, key, value, attn_mask, dropout_p, is_causal, scale, rows_are_batch=False)


class UncoveredCalls(TorchFunctionMode):
    """Refuses any ``F.scaled_dot_product_attention`` that happens outside of the attention modules of a plan."""

    def __init__(self, runtime: Runtime, model: str) -> None:
        super().__init__()
        self.runtime, self.model = runtime, model

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention and not self.runtime.inside:
            raise AttentionError(
                f"{self.model} computes attention outside of the modules that the plan covers; over a sharded sequence "
                "that would be silently wrong. Add an entry for the module that makes the call: "
                "ContextParallelAttention(streams), or LocalAttention() where keys and values are whole on every rank"
            )
        return func(*args, **(kwargs or {}))


class _WrappedForward:
    """``run(forward, ...)`` in the place of a module's forward; call it to undo that.

    It goes beneath the wrappers that offloading and caching put around a forward, so that what happens does not depend
    on who came first: a cache that skips the module skips this with it, and taking any of them off leaves the others.
    Two parallel models that share a module each have one there, the later around the earlier.
    """

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        original, put = _compat.innermost_forward(module)
        self.module, self.original, self.own = module, original, module.__dict__.get("forward")
        self.active = True

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return run(self.original, *args, **kwargs) if self.active else self.original(*args, **kwargs)

        forward.__dict__["meshcp_wrapper"] = self
        self.forward = forward
        put(forward)

    @property
    def attached(self) -> bool:
        """Whether a call of the module still comes here."""
        return any(self in _wrappers(value) for value, _ in _compat.forward_slots(self.module))

    def __call__(self) -> None:
        # Whoever holds on to it in another way (a wrapper that we do not know) finds it turned off.
        self.active = False
        for value, put in _compat.forward_slots(self.module):
            if value is self.forward:
                put(self.original)
            for outer in _wrappers(value):
                if outer.original is self.forward:
                    outer.original = self.original
        own = self.module.__dict__
        if own.get("forward") is self.original and self.own is not self.original:
            del own["forward"]


def _wrappers(forward: Any) -> Iterator[_WrappedForward]:
    """Those of which ``forward`` is the outermost."""
    while True:
        wrapper = getattr(forward, "__dict__", {}).get("meshcp_wrapper")
        # functools.wraps copies the attribute to whatever someone else puts around.
        if wrapper is None or wrapper.forward is not forward:
            return
        yield wrapper
        forward = wrapper.original


def _wrap_forward(module: nn.Module, run: Callable[..., Any]) -> Undo:
    return _WrappedForward(module, run)
