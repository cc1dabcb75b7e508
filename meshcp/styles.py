"""What a plan can ask of a module: shard its inputs or outputs, gather its outputs, attend across the mesh.

Each style is frozen data. ``check`` says whether it fits a module, without touching it; ``attach`` makes it work and
returns how to undo that. What happens in a forward pass is in :class:`Runtime`, one for each parallel model.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle
from torch.overrides import TorchFunctionMode

from . import _compat
from .attention.distributed import CallPlan, LocalKernel, check_rows, sdpa
from .attention.kernels import AUTOMATIC, choose_kernel
from .errors import AttentionError, InputError, PlanError
from .layout import StreamLengths, map_tensors
from .mesh import ContextMesh
from .placements import StreamCount, StreamDim

Undo = Callable[[], None]


class Runtime:
    """What the styles of one parallel model share while it runs: the mesh, the stream lengths, the attention sites."""

    def __init__(self, context: ContextMesh) -> None:
        self.context = context
        self.lengths = StreamLengths(context)
        self.backend = _compat.register_attention_backend()
        self.inside = 0
        self.plans: dict[tuple[Any, ...], CallPlan] = {}


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


def _parameters(module: nn.Module) -> list[str]:
    """Names of the arguments of ``forward``, as the class declares it."""
    signature = inspect.signature(type(module).forward)
    return [name for name in signature.parameters if name != "self"]


def _named(path: str) -> str:
    return repr(path) if path else "the model"


@dataclass(frozen=True, init=False)
class ShardInputs(MeshcpStyle):
    """Cut inputs of a module along the sequence: each rank goes on with its own part.

    ``ShardInputs(hidden_states=seq(1, "image"), controlnet_block_samples=seq(1, "image", optional=True))``: the names
    are those of the arguments of ``forward``, passed by position or by name. An argument that is a tuple, list or dict
    of tensors has each of them cut alike; one that counts tokens is declared as ``count("text")``. No communication: every rank holds the whole input.
    """

    inputs: tuple[tuple[str, StreamDim | StreamCount], ...]

    def __init__(self, **inputs: StreamDim | StreamCount) -> None:
        for name, where in inputs.items():
            if not isinstance(where, StreamDim | StreamCount):
                raise PlanError(f'ShardInputs({name}={where!r}): needed: seq(dim, "stream"), such as seq(1, "image")')
        object.__setattr__(self, "inputs", tuple(inputs.items()))

    def __repr__(self) -> str:
        return f"ShardInputs({', '.join(f'{name}={where!r}' for name, where in self.inputs)})"

    @property
    def named_streams(self) -> tuple[str, ...]:
        return tuple(stream for _, where in self.inputs for stream in where.streams)

    def check(self, module: nn.Module, path: str, runtime: Runtime) -> None:
        names = _parameters(module)
        for name, _ in self.inputs:
            if name not in names:
                close = difflib.get_close_matches(name, names, 1)
                hint = f"did you mean {close[0]!r}? " if close else ""
                raise PlanError(
                    f"ShardInputs names input {name!r} of {_named(path)} ({type(module).__name__}), whose forward takes "
                    f"{', '.join(names)}; {hint}Correct the name in the plan"
                )

    def attach(self, module: nn.Module, path: str, runtime: Runtime) -> Undo:
        names = _parameters(module)
        # One-stream inputs tell lengths that inputs of several streams are cut by.
        order = sorted(self.inputs, key=lambda item: (isinstance(item[1], StreamCount), len(item[1].streams) > 1))
        places = [(name, names.index(name), where) for name, where in order]
        lengths = runtime.lengths

        def shard(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            new_args, new_kwargs = list(args), dict(kwargs)
            for name, position, where in places:
                if name in new_kwargs:
                    value = new_kwargs[name]
                elif position < len(new_args):
                    value = new_args[position]
                else:
                    value = None
                if value is None:
                    if where.optional:
                        continue
                    raise InputError(
                        f"input {name!r} of {_named(path)} is missing or None, and the plan shards it as {where!r}; "
                        "pass it, or mark it optional=True in the plan if the model runs without it"
                    )
                who = f"input {name!r} of {_named(path)}"
                if isinstance(where, StreamCount):
                    value = lengths.count(value, where, who)
                else:
                    value = map_tensors(value, lambda x, at, where=where: lengths.shard(x, where, at), who)
                if name in new_kwargs:
                    new_kwargs[name] = value
                else:
                    new_args[position] = value
            return tuple(new_args), new_kwargs

        return module.register_forward_pre_hook(shard, with_kwargs=True).remove


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
        new = map_tensors(
            value, lambda x, at, where=where: function(x, where, at), f"output [{key!r}] of {_named(path)}"
        )
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


@dataclass(frozen=True, init=False)
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

        return module.register_forward_hook(shard).remove


@dataclass(frozen=True, init=False)
class GatherOutputs(MeshcpStyle):
    """Make outputs of a module whole again on every rank, by position: ``GatherOutputs(seq(1, "image"))``.

    One all-gather a stream over each context axis of degree above 1. The gradient is the sum over ranks (see
    :mod:`meshcp.gradients` for the contract).
    """

    outputs: tuple[StreamDim | None, ...]

    def __init__(self, *outputs: StreamDim | None) -> None:
        _check_outputs("GatherOutputs", outputs)
        object.__setattr__(self, "outputs", outputs)

    def __repr__(self) -> str:
        return f"GatherOutputs({', '.join(map(repr, self.outputs))})"

    def attach(self, module: nn.Module, path: str, runtime: Runtime) -> Undo:
        def gather(_: nn.Module, args: Any, output: Any) -> Any:
            return _on_outputs(output, self.outputs, path, runtime.lengths.gather)

        return module.register_forward_hook(gather).remove


@dataclass(frozen=True, init=False)
class TrimOutputs(GatherOutputs):
    """What ``parallelize(gather=False)`` puts in the place of :class:`GatherOutputs`: outputs stay sharded, without the
    stand-in rows of streams of which a rank has none."""

    def attach(self, module: nn.Module, path: str, runtime: Runtime) -> Undo:
        def trim(_: nn.Module, args: Any, output: Any) -> Any:
            return _on_outputs(output, self.outputs, path, runtime.lengths.trim)

        return module.register_forward_hook(trim).remove


@dataclass(frozen=True)
class LocalAttention(MeshcpStyle):
    """Attention that needs no communication: its keys and values are whole on every rank.

    Cross-attention over a replicated text, or self-attention inside a part of the model that runs before the sequence
    is sharded (a text refiner). It covers the module; the attention itself is left alone.
    """

    def attach(self, module: nn.Module, path: str, runtime: Runtime) -> Undo:
        def run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            runtime.inside += 1
            try:
                return original(*args, **kwargs)
            finally:
                runtime.inside -= 1

        return _wrap_forward(module, run)


@dataclass(frozen=True, init=False)
class ContextParallelAttention(MeshcpStyle):
    """Attention over sequences that are sharded over the mesh.

    Attributes:
        streams: the streams that the queries are the concatenation of, in the order of the model.
        kv: the same for keys and values: None when they are the same sequence, other streams for cross-attention
            between sharded sequences, ``"replicated"`` when every rank holds them whole.
        then: what covers further attention calls of the same module, such as those of an IP-Adapter;
            :class:`LocalAttention` or another ``ContextParallelAttention``. None: a second call is an error.
    """

    streams: tuple[str, ...]
    kv: tuple[str, ...] | Literal["replicated"] | None = None
    then: LocalAttention | ContextParallelAttention | None = None

    def __init__(
        self,
        streams: Sequence[str],
        kv: Sequence[str] | Literal["replicated"] | None = None,
        then: LocalAttention | ContextParallelAttention | None = None,
    ) -> None:
        if isinstance(streams, str) or not streams:
            raise PlanError(f'ContextParallelAttention(streams={streams!r}): needed: a tuple of names, such as ("text", "image")')
        set_ = object.__setattr__
        set_(self, "streams", tuple(streams))
        set_(self, "kv", kv if kv is None or kv == "replicated" else tuple(kv))
        set_(self, "then", then)

    def __repr__(self) -> str:
        parts = [f"streams={self.streams}"]
        parts += [f"{name}={value!r}" for name, value in (("kv", self.kv), ("then", self.then)) if value is not None]
        return f"ContextParallelAttention({', '.join(parts)})"

    def check(self, module: nn.Module, path: str, runtime: Runtime) -> None:
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


def _owner(module: nn.Module) -> object:
    """What carries the attention backend: the processor, or the module itself where it has none."""
    processor = getattr(module, "processor", None)
    return module if processor is None else processor


class AttentionSite:
    """An attention module of a parallel model: takes over the attention calls that happen while it runs."""

    def __init__(self, module: nn.Module, path: str, style: ContextParallelAttention, runtime: Runtime) -> None:
        self.module, self.path, self.style, self.runtime = module, path, style, runtime
        self.calls = 0

    def run(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The forward of the module, with its attention calls coming here."""
        runtime, owner = self.runtime, _owner(self.module)
        self.calls = 0
        runtime.inside += 1
        try:
            if _compat.has_attention_seam(owner):
                self.backend = _compat.chosen_backend(owner)
                with _compat.taken_over(owner, runtime.backend, self):
                    output = original(*args, **kwargs)
            else:
                self.backend = ""
                with _SdpaCalls(self):
                    output = original(*args, **kwargs)
        finally:
            runtime.inside -= 1
        if self.calls == 0:
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
        style: LocalAttention | ContextParallelAttention | None = self.style
        for _ in range(self.calls):
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
        plan = self._plan(style, q_BHSD, k_BGKD)
        return plan.run(
            q_BHSD, k_BGKD, v_BGKD, mask, causal=causal, scale=scale, local=self._local_kernel(), kernel=self.backend,
            rows_are_batch=rows_are_batch, held=True,
        )  # fmt: skip

    def _plan(self, style: ContextParallelAttention, q: torch.Tensor, k: torch.Tensor) -> CallPlan:
        runtime, who = self.runtime, f"attention in {_named(self.path)}"
        known = runtime.lengths.known
        heads, kv_heads, rows, kv_rows = q.shape[1], k.shape[1], q.shape[2], k.shape[2]
        streams = tuple(known.get(name, -1) for name in style.streams)
        kv = tuple(known.get(name, -1) for name in style.kv) if isinstance(style.kv, tuple) else style.kv
        key = (streams, kv, heads, kv_heads, rows, kv_rows)
        compiling = torch.compiler.is_compiling()
        if not compiling and key in runtime.plans:
            return runtime.plans[key]
        layout = runtime.lengths.layout(style.streams, who)
        check_rows(rows, layout, runtime.context, f"the queries of {who}")
        if style.kv == "replicated":
            kv_layout = None
        else:
            kv_layout = layout if style.kv is None else runtime.lengths.layout(style.kv, who)
            check_rows(kv_rows, kv_layout, runtime.context, f"the keys of {who}")
        plan = CallPlan(runtime.context, layout, kv_layout, heads, kv_heads)
        if not compiling:
            runtime.plans[key] = plan
        return plan

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
        rows = (x.transpose(1, 2) for x in (q, k, v))
        return _compat.dispatch(self.backend, *rows, mask, causal, scale, k.shape[1] != q.shape[1]).transpose(1, 2)


def replace_then(style: ContextParallelAttention) -> ContextParallelAttention:
    """``style`` with ``then=LocalAttention()`` at the end of its chain, for messages."""
    if isinstance(style.then, ContextParallelAttention):
        return ContextParallelAttention(style.streams, style.kv, replace_then(style.then))
    return ContextParallelAttention(style.streams, style.kv, LocalAttention())


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


def _wrap_forward(module: nn.Module, run: Callable[..., Any]) -> Undo:
    """Put ``run(forward, ...)`` in the place of the module's forward."""
    own, original = module.__dict__.get("forward"), module.forward
    active = True

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return run(original, *args, **kwargs) if active else original(*args, **kwargs)

    def undo() -> None:
        # Someone may have wrapped the module once more since (offloading, caching): then this layer turns itself off.
        nonlocal active
        active = False
        if module.__dict__.get("forward") is forward:
            if own is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = own

    module.__dict__["forward"] = forward
    return undo
