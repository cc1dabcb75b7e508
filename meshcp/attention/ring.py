"""Ring attention: queries stay, KV blocks go round, one transfer always in flight behind the computation.

Shapes: B batch, H query heads, G KV heads, S this rank's query rows, K rows of a KV block, D head width,
E value width. Blocks of KV may differ in length, also be empty.

::

    step 0   compute with own block        | own block travels to the next rank, the previous one's arrives
    step 1   compute with the one arrived  | it travels on ...
    step n-1 compute, nothing travels

A rank holds its own KV and at most two blocks in transit: the one it computes with, the one that arrives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..collectives import RingExchange
from ..placements import Interval, total
from .kernels import Kernel, block_backward, block_forward, finite_lse, unrounded_dtype
from .masks import causal_mask, causal_relation, select_broadcast
from .merge import Merger


@dataclass(frozen=True)
class RingCall:
    """What a ring rank knows about a call, in plain values.

    Attributes:
        q_rows: canonical positions of this rank's query rows.
        kv_rows: canonical positions of the KV block of each ring rank, in ring order.
        causal, scale, kernel: as in the operator.
    """

    q_rows: tuple[Interval, ...]
    kv_rows: tuple[tuple[Interval, ...], ...]
    causal: bool
    scale: float
    kernel: Kernel

    def visible(self, mask: torch.Tensor | None, owner: int, device: torch.device) -> _Visible | None:
        """What this rank's rows see of the block of ``owner``; None when that is nothing.

        ``mask`` has this rank's rows and the columns of the whole sequence.
        """
        rows = self.kv_rows[owner]
        if not rows or not self.q_rows:
            return None
        if not self.causal:
            return _Visible(None if mask is None else select_broadcast(mask, -1, rows), False)
        relation = causal_relation(self.q_rows, rows)
        if relation == "none":
            return None
        return _Visible(causal_mask(self.q_rows, rows, device) if relation == "mixed" else None, relation == "same")


class _Visible(NamedTuple):
    mask: torch.Tensor | None
    causal: bool


def _pack(k_BGKD: torch.Tensor, v_BGKE: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """K and V in one contiguous 1-D tensor, tokens outermost within each."""
    packed = k_BGKD.new_empty(k_BGKD.numel() + v_BGKE.numel(), dtype=dtype)
    for part, x in zip(_views(packed, k_BGKD.shape, v_BGKE.shape), (k_BGKD, v_BGKE), strict=True):
        part.copy_(x)
    return packed


def _views(packed: torch.Tensor, k_shape: Sequence[int], v_shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    parts, start = [], 0
    for batch, heads, rows, width in (k_shape, v_shape):
        size = batch * heads * rows * width
        parts.append(packed[start : start + size].view(batch, rows, heads, width).transpose(1, 2))
        start += size
    return parts[0], parts[1]


class _Blocks:
    """KV blocks as they come round, each with its owner; the transfer of the next one is in flight meanwhile."""

    def __init__(self, exchange: RingExchange, k: torch.Tensor, v: torch.Tensor, call: RingCall) -> None:
        self.exchange, self.call, self.k, self.v = exchange, call, k, v

    def shapes(self, owner: int) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]]:
        rows = total(self.call.kv_rows[owner])
        (batch, heads, _, width), value_width = self.k.shape, self.v.shape[-1]
        return (batch, heads, rows, width), (batch, heads, rows, value_width)

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        degree, rank = self.exchange.degree, self.exchange.rank
        packed = _pack(self.k, self.v, self.k.dtype) if degree > 1 else None
        k, v = self.k, self.v
        for step in range(degree):
            owner = (rank - step) % degree
            works, arriving = [], None
            if packed is not None and step < degree - 1:
                k_shape, v_shape = self.shapes((owner - 1) % degree)
                size = torch.Size(k_shape).numel() + torch.Size(v_shape).numel()
                arriving = packed.new_empty(size)
                works = self.exchange.start(packed, arriving)
            yield owner, k, v
            self.exchange.wait(works)
            if arriving is not None:
                packed = arriving
                k, v = _views(packed, k_shape, v_shape)


def ring_forward(
    q_BHSD: torch.Tensor,
    k_BGKD: torch.Tensor,
    v_BGKE: torch.Tensor,
    mask: torch.Tensor | None,
    call: RingCall,
    exchange: RingExchange,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(out [B,H,S,E], lse [B,H,S] in fp32 or fp64)``, over the KV of every ring rank.

    ``out`` is in the dtype of q, on the CPU in fp32 for half precision: the backward pass takes each block's gradients
    from it, and what one rounding of it does to them, kernels that make one pass over all keys partly undo.
    """
    merger = Merger()
    for owner, k, v in _Blocks(exchange, k_BGKD, v_BGKE, call):
        visible = call.visible(mask, owner, q_BHSD.device) if q_BHSD.numel() and k.numel() else None
        if visible is not None:
            merger.add(*block_forward(call.kernel, q_BHSD, k, v, *visible, call.scale))
    batch, heads, rows, _ = q_BHSD.shape
    out = q_BHSD.new_zeros(batch, rows, heads, v_BGKE.shape[-1], dtype=unrounded_dtype(q_BHSD)).transpose(1, 2)
    lse = q_BHSD.new_full((batch, heads, rows), float("-inf"), dtype=accumulation_dtype(q_BHSD.dtype))
    if (merged := merger.result()) is not None:
        out.copy_(merged[0])
        lse.copy_(merged[1])
    return out, lse


def ring_backward(
    grad_BHSE: torch.Tensor,
    q_BHSD: torch.Tensor,
    k_BGKD: torch.Tensor,
    v_BGKE: torch.Tensor,
    mask: torch.Tensor | None,
    out_BHSE: torch.Tensor,
    lse_BHS: torch.Tensor,
    call: RingCall,
    exchange: RingExchange,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v. KV goes round as in forward; the gradient of each block follows it one step behind,

    gathering the contribution of every rank, in fp32 (fp64), and arrives at its owner after the last step.
    """
    dtype = accumulation_dtype(q_BHSD.dtype)
    lse = finite_lse(lse_BHS)
    dq = torch.zeros_like(q_BHSD, dtype=dtype)
    blocks = _Blocks(exchange, k_BGKD, v_BGKE, call)
    degree = exchange.degree
    works: list[torch.distributed.Work] = []
    travelling: torch.Tensor | None = None
    sent: torch.Tensor | None = None
    for owner, k, v in blocks:
        visible = call.visible(mask, owner, q_BHSD.device) if q_BHSD.numel() and k.numel() else None
        mine = None
        if visible is not None:
            mine = block_backward(call.kernel, grad_BHSE, q_BHSD, k, v, out_BHSE, lse, *visible, call.scale)
            dq += mine.query
        exchange.wait(works)
        k_shape, v_shape = blocks.shapes(owner)
        if travelling is None:
            travelling = torch.zeros(
                torch.Size(k_shape).numel() + torch.Size(v_shape).numel(), dtype=dtype, device=q_BHSD.device
            )
        if mine is not None:
            dk, dv = _views(travelling, k_shape, v_shape)
            dk += mine.key
            dv += mine.value
        if degree > 1:
            arriving_owner = (owner - 1) % degree
            size = sum(torch.Size(shape).numel() for shape in blocks.shapes(arriving_owner))
            sent, travelling = travelling, travelling.new_empty(size)
            works = exchange.start(sent, travelling)
    exchange.wait(works)
    assert travelling is not None
    dk, dv = _views(travelling, k_BGKD.shape, v_BGKE.shape)
    return dq.to(q_BHSD.dtype), dk.to(k_BGKD.dtype), dv.to(v_BGKE.dtype)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
