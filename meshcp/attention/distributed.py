"""The way of one attention call: shard of the sequence -> heads -> ring, or KV gathered and kernel -> shard again.

Shapes: B batch, H query heads, G KV heads, S this rank's query rows, K this rank's KV rows, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..errors import AttentionError, LayoutError
from ..mesh import ContextMesh
from ..placements import HeadLayout, Interval, SequenceLayout, merge_intervals, select, total
from .kernels import unrounded_dtype
from .masks import canonical_mask, positions, select_broadcast
from .op import flatten_intervals
from .ulysses import Bundle, Exchange, overlap, to_heads, to_sequence

LocalKernel = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, bool, float | None], torch.Tensor
]
"""``(q, k, v, mask, causal, scale) -> out`` on ``[B, H, S, D]`` with as many KV heads as query heads or H/G of them."""


def sdpa(
    q_BHSD: torch.Tensor,
    k_BGKD: torch.Tensor,
    v_BGKD: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """``F.scaled_dot_product_attention``, the ordinary local attention."""
    return F.scaled_dot_product_attention(
        q_BHSD, k_BGKD, v_BGKD, mask, is_causal=causal, scale=scale, enable_gqa=k_BGKD.shape[1] != q_BHSD.shape[1]
    )


class _Order(NamedTuple):
    """The rows of a head shard in canonical order or as they come.

    Attributes:
        blocks: canonical positions of the KV rows of each ring rank, in this order.
        to_heads, to_sequence, gather: the collectives: queries, keys and values to heads, the output back, and over the
            ring axis KV.
    """

    blocks: tuple[tuple[Interval, ...], ...]
    to_heads: Exchange | None
    to_sequence: Exchange | None
    gather: Exchange | None


class CallPlan:
    """Everything about an attention call that follows from layouts and head counts: made once, used every layer."""

    def __init__(
        self,
        context: ContextMesh,
        q: SequenceLayout,
        kv: SequenceLayout | None,
        heads: int,
        kv_heads: int,
        gather_kv: bool = False,
    ) -> None:
        """
        Args:
            context: the mesh.
            q, kv: layouts of queries and of keys and values; ``kv`` None where KV is replicated.
            heads, kv_heads: query and KV head counts before the all-to-all.
            gather_kv: over the ring axis, gather keys and values in the place of passing them round.

        Raises:
            AttentionError: KV heads that do not divide the query heads.
        """
        if kv_heads == 0 or heads % kv_heads:
            raise AttentionError(
                f"{heads} query heads over {kv_heads} KV heads; the first must be a multiple of the second"
            )
        self.context, self.q, self.kv, self.heads = context, q, kv, heads
        layout = HeadLayout(heads, kv_heads, context.ulysses)
        query = tuple(layout.query(rank) for rank in range(context.ulysses))
        shared = tuple(layout.kv(rank) for rank in range(context.ulysses))
        self._query_heads = query[context.ulysses_rank]
        self._kv_index = layout.kv_index(context.ulysses_rank)
        self._q_rows = q.block(context.ring_rank)
        here = context.ring_rank, context.ulysses_rank
        self._q_real = q.real(*here)
        self._kv_real = None if kv is None else kv.real(*here)
        # Where a KV head is computed with on several ranks, its gradient is the sum of theirs.
        self._shared = overlap(shared)
        ulysses: list[list[Bundle]] = []
        if kv is not None and context.ulysses > 1:
            query_bundle = Bundle(q, (query,), (heads,))
            if kv == q:
                bundles = [Bundle(q, (query, shared, shared), (heads, kv_heads, kv_heads))]
            else:
                bundles = [query_bundle, Bundle(kv, (shared, shared), (kv_heads, kv_heads))]
            ulysses = [bundles, [query_bundle]]
        gathered: Bundle | None = None
        if kv is not None and context.ring > 1 and gather_kv:
            # As a redistribution: from shards of the sequence to shards of the heads, where everybody's are all heads.
            count = total((shared[context.ulysses_rank],))
            everybody = ((0, count),) * context.ring
            gathered = Bundle(kv.over_ring(), (everybody, everybody), (count, count))

        def order(canonical: bool) -> _Order:
            where = context.ulysses_group, context.ring_rank, context.ulysses_rank
            to, back = (Exchange(each, *where, canonical) for each in ulysses) if ulysses else (None, None)
            ring = context.ring_group, 0, context.ring_rank
            gather = None if gathered is None else Exchange([gathered], *ring, canonical)
            blocks = () if kv is None else tuple(kv.block(rank, canonical) for rank in range(context.ring))
            return _Order(blocks, to, back, gather)

        self._canonical, self._as_they_come = order(True), order(False)

    def describe_heads(self) -> str:
        """The query heads that this rank computes with, as text."""
        start, stop = self._query_heads
        return f"{start}..{stop - 1} of {self.heads}" if start < stop else f"none of {self.heads}"

    def run(
        self,
        q_BHSD: torch.Tensor,
        k_BGKD: torch.Tensor,
        v_BGKD: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        causal: bool = False,
        scale: float | None = None,
        local: LocalKernel = sdpa,
        kernel: str = "",
        rows_are_batch: bool = True,
        held: bool = False,
    ) -> torch.Tensor:
        """Attention of this rank's rows over the whole sequence.

        Args:
            q_BHSD, k_BGKD, v_BGKD: this rank's shard (KV whole where it is replicated), any strides.
            mask: in global form, or None.
            local: what computes once the heads are sharded and the keys whole, where nothing travels round a ring.
            kernel: name of the kernel for the ring.
            rows_are_batch: see :func:`canonical_mask`.
            held: the tensors carry stand-ins for streams of which the rank has no rows (``SequenceLayout.held``);
                their outputs are zeros.
        """
        if held and (self._q_real is not None or self._kv_real is not None):
            return self._run_real(q_BHSD, k_BGKD, v_BGKD, mask, causal, scale, local, kernel, rows_are_batch)
        context = self.context
        q_BHSD, k_BGKD, v_BGKD = (_autocast(x) for x in (q_BHSD, k_BGKD, v_BGKD))
        if not q_BHSD.dtype == k_BGKD.dtype == v_BGKD.dtype:
            raise AttentionError(
                f"q is {q_BHSD.dtype}, k {k_BGKD.dtype}, v {v_BGKD.dtype}; needed: one dtype, as everywhere in "
                "scaled_dot_product_attention: cast them to one"
            )
        if mask is not None:
            if causal:
                raise AttentionError("both a mask and causal=True; give one of the two (put causality into the mask)")
            if mask.requires_grad:
                raise AttentionError(
                    "the attention mask requires a gradient, which meshcp does not compute; detach it (mask.detach())"
                )
            keys = self.kv.length if self.kv is not None else k_BGKD.shape[2]
            mask = canonical_mask(mask, q_BHSD.shape[0], self.heads, self.q.length, keys, rows_are_batch=rows_are_batch)
        if self.kv is None:
            rows = self.q.rows(context.ring_rank, context.ulysses_rank)
            return _over_whole_keys(q_BHSD, k_BGKD, v_BGKD, mask, rows, causal, scale, local)
        unrounded = unrounded_dtype(q_BHSD)
        # Only causality and the rows of a mask ask where a query is; the columns of a mask are cheaper to arrange.
        any_order = not causal and (mask is None or mask.shape[2] == 1)
        order = self._as_they_come if any_order else self._canonical
        if order.to_heads is not None:
            dtype = unrounded if self._shared else None
            if self.kv == self.q:
                ((q, k, v),) = to_heads(order.to_heads, [[q_BHSD, k_BGKD, v_BGKD]], dtype)
            else:
                (q,), (k, v) = to_heads(order.to_heads, [[q_BHSD], [k_BGKD, v_BGKD]], dtype)
            if mask is not None:
                mask = select_broadcast(mask, 1, (self._query_heads,))
        else:
            q, k, v = q_BHSD, k_BGKD, v_BGKD
        if order.gather is not None:
            ((k, v),) = to_heads(order.gather, [[k, v]], unrounded)
        if k.dtype != k_BGKD.dtype:
            # Autocast would round them again, and with them each rank's part of the gradients.
            local = torch.autocast(q.device.type, enabled=False)(local)
            q = q.to(k.dtype)
            mask = mask.to(q.dtype) if mask is not None and mask.is_floating_point() else mask
        k, v = self._align_kv(k), self._align_kv(v)
        if mask is not None and any_order and (context.ring == 1 or order.gather is not None):
            mask = select_broadcast(mask, 3, merge_intervals(row for block in order.blocks for row in block))
        out: torch.Tensor
        if order.gather is not None:
            out = _over_whole_keys(q, k, v, mask, self._q_rows, causal, scale, local)
        elif context.ring > 1:
            if mask is not None:
                mask = select_broadcast(mask, 2, self._q_rows)
            out, _ = torch.ops.meshcp.attention(
                q, k, v, mask, causal=causal, scale=scale, ring=context.ring_group,
                q_rows=flatten_intervals(self._q_rows),
                kv_rows=[bound for block in order.blocks for bound in flatten_intervals(block)],
                kv_counts=[len(block) for block in order.blocks], backend=kernel,
            )  # fmt: skip
        elif q.numel() and k.numel():
            out = local(q, k, v, mask, causal, scale)
        else:
            out = nothing(q, k, v)
        out = out.to(q_BHSD.dtype)
        if order.to_sequence is not None:
            ((out,),) = to_sequence(order.to_sequence, [[out]])
        return out

    def _run_real(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
        scale: float | None,
        local: LocalKernel,
        kernel: str,
        rows_are_batch: bool,
    ) -> torch.Tensor:
        rows = q.shape[2]
        if self._q_real is not None:
            q = select(q, 2, self._q_real)
        if self._kv_real is not None:
            k, v = select(k, 2, self._kv_real), select(v, 2, self._kv_real)
        out = self.run(
            q, k, v, mask, causal=causal, scale=scale, local=local, kernel=kernel, rows_are_batch=rows_are_batch
        )
        if self._q_real is None:
            return out
        parts, position, start = [], 0, 0
        for low, high in self._q_real:
            parts += [_zero_rows(out, low - position), out[:, :, start : start + high - low]]
            position, start = high, start + high - low
        return torch.cat([*parts, out[:, :, :0], _zero_rows(out, rows - position)], 2)

    def _align_kv(self, x: torch.Tensor) -> torch.Tensor:
        """One KV head a query head where the rank's query heads do not share its KV heads evenly."""
        index, kv_heads = self._kv_index, x.shape[1]
        heads = len(index)
        if kv_heads == 0 or (heads % kv_heads == 0 and index == tuple(i * kv_heads // heads for i in range(heads))):
            return x
        return torch.cat([x[:, i : i + 1] for i in index], 1)


def _over_whole_keys(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    rows: Sequence[Interval],
    causal: bool,
    scale: float | None,
    local: LocalKernel,
) -> torch.Tensor:
    """Attention of the queries at the canonical positions ``rows`` over all keys, with the rows of the mask there."""
    if causal:
        keys = torch.arange(k.shape[2], device=q.device)
        mask, causal = (positions(rows, q.device)[:, None] >= keys)[None, None], False
    elif mask is not None:
        mask = select_broadcast(mask, 2, [row for row in rows if row[0] < row[1]])
    if not (q.numel() and k.numel()):
        return nothing(q, k, v)
    return local(q, k, v, mask, causal, scale)


def _autocast(x: torch.Tensor) -> torch.Tensor:
    """``x`` as autocast would give it to ``F.scaled_dot_product_attention``; cast here, half as much travels."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(kind))
    return x


def _zero_rows(like_BHSD: torch.Tensor, rows: int) -> torch.Tensor:
    batch, heads, _, width = like_BHSD.shape
    return like_BHSD.new_zeros(batch, rows, heads, width).transpose(1, 2)


def nothing(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The output of an attention without rows, heads or keys: zeros, still part of the graph.

    A rank without heads must take part in the all-to-all of the backward pass, so its output hangs on its inputs.
    """
    batch, heads, rows, _ = q.shape
    out = q.new_zeros(batch, rows, heads, v.shape[-1]).transpose(1, 2)
    return out + 0.0 * (q.sum() + k.sum() + v.sum())


def check_rows(found: int, layout: SequenceLayout, context: ContextMesh, what: str) -> None:
    """Raise unless a tensor has as many rows as the layout gives this rank."""
    lengths = [total((row,)) for row in layout.held(context.ring_rank, context.ulysses_rank)]
    if found != sum(lengths):
        raise LayoutError(
            f"{what} has {found} rows on ring rank {context.ring_rank}, ulysses rank {context.ulysses_rank}, but the "
            f"layout gives it {' + '.join(map(str, lengths))} = {sum(lengths)} of {layout}. The streams that the plan "
            "names for this attention are not the ones that the model concatenates here: correct the plan's streams, "
            "or shard the missing input"
        )


__all__ = ["CallPlan", "LocalKernel", "check_rows", "nothing", "sdpa"]
