"""Styles that take over a module's attention: across the mesh, or left alone because nothing need travel."""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from .. import _compat
from ..attention.distributed import CallPlan, LocalKernel, check_rows, sdpa
from ..attention.kernels import AUTOMATIC, KernelCall, choose_kernel
from ..errors import AttentionError, LayoutError, PlanError
from ..placements import SequenceLayout, total
from .base import MeshcpStyle, Runtime, Undo, forward_parameters, frozen_style, named
from .hooks import wrap_forward

# Training on data of every shape would otherwise keep one for each for ever.
_PLANS_KEPT = 256


@frozen_style()
class LocalAttention(MeshcpStyle):
    """Attention that needs no communication: its keys and values are whole on every rank.

    Cross-attention over a replicated text, or self-attention inside a part of the model that runs before the sequence
    is sharded (a text refiner). It covers the module; the attention itself is left alone.
    """

    def attach(self, module: nn.Module, path: str, runtime: Runtime) -> Undo:
        text, names = "encoder_hidden_states", forward_parameters(module)
        # Without a text, Diffusers' cross-attention attends to its own tokens.
        place = names.index(text) if text in names and getattr(module, "is_cross_attention", False) else None

        def run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if runtime.idle:
                return original(*args, **kwargs)
            if place is not None and (args[place] if place < len(args) else kwargs.get(text)) is None:
                raise AttentionError(
                    f"{named(path)} is a cross-attention that got no {text}, so that its keys are its own tokens, of "
                    "which this rank has a part; the plan says LocalAttention(). Pass the text to the model"
                )
            runtime.inside += 1
            try:
                return original(*args, **kwargs)
            finally:
                runtime.inside -= 1

        return wrap_forward(module, run)


@frozen_style(init=False)
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
        takes = {*forward_parameters(module), *inspect.signature(type(_owner(module)).__call__).parameters}
        for name, stream in self.key_masks:
            if name not in takes or stream not in (self.kv or self.streams):
                raise PlanError(
                    f"{self!r} on {named(path)}: needed: an argument that {type(_owner(module)).__name__} takes "
                    f"({', '.join(sorted(takes - {'self'}))}) and one of the streams {self.kv or self.streams}"
                )
        if self.mask is not None and (self.mask not in takes or self.key_masks):
            raise PlanError(
                f"{self!r} on {named(path)}: needed: as mask an argument that {type(_owner(module)).__name__} takes "
                f"({', '.join(sorted(takes - {'self'}))}), and no key_masks beside it"
            )
        if self.mask_streams and not (self.mask and {*(self.kv or self.streams)} <= {*self.mask_streams}):
            raise PlanError(
                f"{self!r} on {named(path)}: mask_streams needs mask, and the streams {self.kv or self.streams} among "
                "its own"
            )
        if self.whole is not None and self.kv == "replicated":
            raise PlanError(f'{self!r} on {named(path)}: kv="replicated" says that all keys are whole; leave whole out')
        _check_native_only(self, _compat.chosen_backend(_owner(module)), path)
        if runtime.context.ring > 1 and not runtime.gather_kv and self.kv != "replicated":
            backend = _compat.chosen_backend(_owner(module))
            if backend not in AUTOMATIC:
                try:
                    # Where and in what it will compute may not be what the parameters say now: offloading, autocast,
                    # FSDP2's mixed precision.
                    choose_kernel(backend, KernelCall(runtime.context.mesh.device_type))
                except AttentionError as error:
                    raise AttentionError(f"{named(path)}: {error}") from None

    def attach(self, module: nn.Module, path: str, runtime: Runtime) -> Undo:
        undo = wrap_forward(module, AttentionSite(module, path, self, runtime).run)
        give_back = _compat.own_attention_seam(_owner(module))

        def detach() -> None:
            undo()
            give_back()

        return detach


def _check_native_only(style: ContextParallelAttention, backend: str, path: str) -> None:
    if style.native_only and backend not in AUTOMATIC:
        raise AttentionError(
            f"{named(path)} has the attention backend {backend!r}, with which this model masks otherwise than the "
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

    @property
    def name(self) -> str:
        """The module for messages."""
        # Dynamo of torch 2.11 guards a graph by whatever has been read, whether it came to anything or not.
        return named("" if torch.compiler.is_compiling() else self.path)

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
                f"{self.name} ran without an attention call that meshcp can see: its processor "
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
                    f"{self.name} makes attention call {self.calls + 1}, but the plan covers only "
                    f"{self.calls}; say what it is with {replace_then(self.style)}"
                )
        self.calls += 1
        if isinstance(style, LocalAttention):
            return self._local(q_BHSD, k_BGKD, v_BGKD, mask, causal, scale)
        assert style is not None
        if dropout_p:
            raise AttentionError(
                f"{self.name}: dropout_p={dropout_p}: dropout inside distributed attention would draw another "
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
        runtime, who = self.runtime, f"the keys of attention in {self.name}"
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
        runtime, who = self.runtime, f"attention in {self.name}"
        known = runtime.lengths.known
        # Plain integers also under torch.compile, where sizes may be symbolic.
        heads, kv_heads, rows, kv_rows = map(operator.index, (q.shape[1], k.shape[1], q.shape[2], k.shape[2]))
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
        plan = CallPlan(runtime.context, layout, kv_layout, heads, kv_heads, runtime.gather_kv)
        if not compiling:
            if len(runtime.plans) >= _PLANS_KEPT:
                runtime.plans.clear()
            runtime.plans[key] = plan
        return plan

    def _joined_key_mask(self, style: ContextParallelAttention, mask: torch.Tensor | None) -> torch.Tensor:
        """``[B, 1, 1, K]`` out of the masks of single streams; a stream without one is wholly visible."""
        who, streams = self.name, style.kv or style.streams
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
        layout = self.runtime.lengths.layout(style.mask_streams, f"the mask of {self.name}")
        if mask.shape[-1] != layout.length:
            raise AttentionError(
                f"the mask of {self.name} has shape {tuple(mask.shape)}; needed: {layout.length} keys, those "
                f"of the streams {style.mask_streams}"
            )
        columns = dict(zip(style.mask_streams, mask.split(list(layout.lengths), -1), strict=True))
        return torch.cat([columns[stream] for stream in style.kv or style.streams], -1)

    def _all_valid(self, mask: torch.Tensor, stream: str) -> torch.Tensor:
        """``[B, rows]`` of ones: what a processor that cannot do without gets in the place of a key mask."""
        lengths, context, who = self.runtime.lengths, self.runtime.context, f"the mask of {self.name}"
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
