"""``torch.ops.meshcp.attention``: the operator, its gradient, its shapes and its DTensor strategy.

Shapes: B batch, H query heads, G KV heads, S query rows, K this rank's KV rows, D head width, E value width.

The operator works on what a rank holds after the all-to-all over ulysses: whole rows of its own heads. Over the ring
axis its KV rows are a shard of the sequence, and the operator passes them round (:mod:`meshcp.attention.ring`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import Placement, Replicate, Shard

from .. import _compat
from ..collectives import RingExchange
from ..errors import AttentionError
from ..mesh import RING, ULYSSES
from ..placements import Interval, merge_intervals
from .kernels import KernelCall, choose_kernel, rows_outermost, unrounded_dtype
from .masks import causal_relation
from .ring import RingCall, accumulation_dtype, ring_backward, ring_forward

if TYPE_CHECKING:
    from .._compat import OpSchema

_OPTIONS = (
    "bool causal=False, float? scale=None, str ring='', int[] q_rows=[], int[] kv_rows=[], int[] kv_counts=[], "
    "str backend=''"
)
_library = torch.library.Library("meshcp", "DEF")
_library.define(
    f"attention(Tensor q, Tensor k, Tensor v, Tensor? mask=None, *, {_OPTIONS}) -> (Tensor out, Tensor lse)"
)
_library.define(
    "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor out, Tensor lse, *, "
    f"{_OPTIONS}) -> (Tensor dq, Tensor dk, Tensor dv)"
)


def flatten_intervals(intervals: Sequence[Interval]) -> list[int]:
    return [bound for interval in intervals for bound in interval]


def _intervals(flat: Sequence[int]) -> tuple[Interval, ...]:
    return tuple(zip(flat[::2], flat[1::2], strict=True))


class _Alone:
    """A ring of one rank: nothing travels."""

    degree, rank = 1, 0

    @staticmethod
    def wait(works: list[Any]) -> None:
        assert not works


def _call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float | None,
    ring: str, q_rows: Sequence[int], kv_rows: Sequence[int], kv_counts: Sequence[int], backend: str,
) -> tuple[RingCall, Any]:  # fmt: skip
    exchange = RingExchange(ring) if ring else _Alone()
    blocks: list[tuple[Interval, ...]] = []
    if ring:
        queries, intervals = _intervals(q_rows), iter(_intervals(kv_rows))
        blocks = [tuple(itertools.islice(intervals, count)) for count in kv_counts]
    else:
        queries = merge_intervals([(0, q.shape[2])])
        blocks = [merge_intervals([(0, k.shape[2])])]
    mixed = causal and any(queries and rows and causal_relation(queries, rows) == "mixed" for rows in blocks)
    chosen = choose_kernel(backend, KernelCall.of(q, v, mask is not None or mixed))
    if scale is None:
        scale = q.shape[-1] ** -0.5
    return RingCall(queries, tuple(blocks), causal, scale, chosen), exchange


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, *, causal: bool = False,
    scale: float | None = None, ring: str = "", q_rows: Sequence[int] = (), kv_rows: Sequence[int] = (),
    kv_counts: Sequence[int] = (), backend: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    call, exchange = _call(q, k, v, mask, causal, scale, ring, q_rows, kv_rows, kv_counts, backend)
    return ring_forward(q, k, v, mask, call, exchange)


def _backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
    out: torch.Tensor, lse: torch.Tensor, *, causal: bool = False, scale: float | None = None, ring: str = "",
    q_rows: Sequence[int] = (), kv_rows: Sequence[int] = (), kv_counts: Sequence[int] = (), backend: str = "",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    call, exchange = _call(q, k, v, mask, causal, scale, ring, q_rows, kv_rows, kv_counts, backend)
    gradients = ring_backward(grad, q, k, v, mask, out, lse, call, exchange)
    # The one stride order that the fake kernels promise.
    return tuple(rows_outermost(x) for x in gradients)  # type: ignore[return-value]


def _empty_rows(like_BHSD: torch.Tensor, width: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    batch, heads, rows, _ = like_BHSD.shape
    return like_BHSD.new_empty(batch, rows, heads, width, dtype=dtype).transpose(1, 2)


def _forward_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty_rows(q, v.shape[-1], unrounded_dtype(q)), q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))


def _backward_fake(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tuple(_empty_rows(x, x.shape[-1]) for x in (q, k, v))  # type: ignore[return-value]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    q, k, v, mask = inputs
    if mask is not None and mask.requires_grad:
        raise AttentionError(
            "the attention mask requires a gradient, which meshcp does not compute; detach it (mask.detach())"
        )
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, mask, *output)
    ctx.options = keyword_only_inputs


def _autograd(ctx: Any, grad: torch.Tensor, _: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    q, k, v, mask, out, lse = ctx.saved_tensors
    return *torch.ops.meshcp.attention_backward(grad, q, k, v, mask, out, lse, **ctx.options), None


def _twice(ctx: Any, *grads: torch.Tensor | None) -> Any:
    raise AttentionError(
        "the gradient of ring attention is differentiated once more, which meshcp does not compute. Compute second "
        "derivatives on a mesh with the ulysses axis alone, in sdpa_kernel(SDPBackend.MATH), whose gradient has one"
    )


for _name, _kernel, _fake in (
    ("attention", _forward, _forward_fake),
    ("attention_backward", _backward, _backward_fake),
):
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"meshcp::{_name}", _fake, lib=_library)
torch.library.register_autograd("meshcp::attention", _autograd, setup_context=_setup_context, lib=_library)
torch.library.register_autograd("meshcp::attention_backward", _twice, lib=_library)


# -- DTensor ---------------------------------------------------------------------------------------------------------

_BATCH, _HEADS, _SEQUENCE = Shard(0), Shard(1), Shard(2)


def _mask_placement(shard: Placement, spec: Any) -> Placement:
    """How the mask lies when q is sharded so: alike where it has the dimension, replicated where it broadcasts."""
    if isinstance(shard, Shard) and shard.dim <= 2 and spec.shape[shard.dim] > 1:
        return shard
    return Replicate()


def _strategy(schema: OpSchema) -> list[list[Sequence[Placement] | None]]:
    """One candidate a call: what each axis may carry follows from its name.

    ``ring`` -> Shard(sequence) when the call names its ring group, else Replicate; ``ulysses`` and ``tp`` ->
    Shard(heads); any other axis -> Shard(batch) if q is sharded so, else Replicate. A head count that the KV heads
    do not share is replicated over KV, never cut wrongly.
    """
    backward = schema.op is torch.ops.meshcp.attention_backward.default
    specs = _compat.input_specs(schema)
    q, k, mask = (
        (specs[1], specs[2], specs[4]) if backward else (specs[0], specs[1], specs[3] if len(specs) > 3 else None)
    )
    assert q is not None
    assert k is not None
    names = q.mesh.mesh_dim_names or ()
    rows: list[Placement] = []
    for axis, placement in enumerate(q.placements):
        name, degree = (names[axis] if names else ""), q.mesh.size(axis)
        if degree == 1:
            rows.append(Replicate())
        elif name == RING:
            rows.append(_SEQUENCE if schema.kwargs_schema.get("ring") else Replicate())
        elif name in (ULYSSES, "tp"):
            rows.append(_HEADS if q.shape[1] % degree == 0 and k.shape[1] % degree == 0 else Replicate())
        else:
            rows.append(_BATCH if placement == _BATCH else Replicate())
    masks = None if mask is None else [_mask_placement(placement, mask) for placement in rows]
    if backward:
        return [[rows, rows, rows, rows, rows, rows, rows, masks, rows, rows]]
    return [[rows, rows, rows, rows, rows, masks]]


_compat.register_strategy([torch.ops.meshcp.attention.default, torch.ops.meshcp.attention_backward.default], _strategy)
