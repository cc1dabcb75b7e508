"""Attention masks: one canonical form, and the pieces of it that a rank or a KV block needs.

Shapes: B batch, H query heads, Q query rows, K key rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from ..errors import AttentionError
from ..placements import Interval, select, total


def canonical_mask(
    mask: torch.Tensor, batch: int, heads: int, queries: int, keys: int, *, rows_are_batch: bool = True
) -> torch.Tensor:
    """Bring a mask in global form to 4 dimensions, each either full or 1: ``[B|1, H|1, Q|1, K]``.

    Args:
        mask: boolean (True: attend) or additive, of shape ``[B, K]`` (key-only), ``[Q, K]``, ``[B, Q, K]`` or any
            4-D shape that broadcasts to ``[B, H, Q, K]``.
        rows_are_batch: how a 2-D mask of ``B`` rows is read when it could be both: as ``[B, K]``, the way Diffusers
            does, or as ``[Q, K]``, the way of ``F.scaled_dot_product_attention``.

    Raises:
        AttentionError: another shape, or an integer mask.
    """
    shape = tuple(mask.shape)
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise AttentionError(
            f"attention mask of dtype {mask.dtype}; needed: bool (True: attend) or floating point (added to the "
            "scores). Convert it with mask.bool()"
        )
    if mask.ndim == 2:
        is_keys = shape == (batch, keys) and (rows_are_batch or shape[0] != queries)
        mask = mask[:, None, None, :] if is_keys else mask[None, None]
    elif mask.ndim == 3:
        mask = mask[:, None]
    full = (batch, heads, queries, keys)
    if mask.ndim != 4 or any(size not in (1, want) for size, want in zip(mask.shape, full, strict=True)):
        raise AttentionError(
            f"attention mask of shape {shape}; needed in global form: [B, K], [Q, K], [B, 1, 1, K], [B, 1, Q, K] or "
            f"[B, H, Q, K] with B={batch}, H={heads}, Q={queries}, K={keys} (lengths of the whole sequence, not of "
            "this rank's shard). Pass the mask of the whole sequence, or a DTensor that says how it is sharded"
        )
    return mask if mask.shape[-1] == keys else mask.expand(*mask.shape[:-1], keys)


def additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The mask as numbers to add to the scores: ``-inf`` where a boolean mask says no."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


def select_broadcast(x: torch.Tensor, dim: int, intervals: Sequence[Interval]) -> torch.Tensor:
    """:func:`select`, but a dimension of size 1 (broadcast) is returned as it is, unless nothing is asked for."""
    if total(intervals) == 0:
        return x.narrow(dim, 0, 0)
    return x if x.shape[dim] == 1 else select(x, dim, intervals)


def positions(intervals: Sequence[Interval], device: torch.device) -> torch.Tensor:
    """Canonical positions as a 1-D int64 tensor."""
    parts = [torch.arange(start, stop, device=device) for start, stop in intervals]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=device)


def causal_relation(q_rows: Sequence[Interval], kv_rows: Sequence[Interval]) -> Literal["all", "none", "same", "mixed"]:
    """What "a query sees the keys up to its own position" means between two sets of rows.

    ``"all"``: every key is visible. ``"none"``: none is. ``"same"``: the rows are the same, so a kernel's own causal
    mode is right. ``"mixed"``: it takes a mask.
    """
    if max(stop for _, stop in kv_rows) - 1 <= q_rows[0][0]:
        return "all"
    if kv_rows[0][0] > max(stop for _, stop in q_rows) - 1:
        return "none"
    return "same" if tuple(q_rows) == tuple(kv_rows) else "mixed"


def causal_mask(q_rows: Sequence[Interval], kv_rows: Sequence[Interval], device: torch.device) -> torch.Tensor:
    """Boolean ``[1, 1, Q, K]``: the keys at or before each query's position."""
    return (positions(q_rows, device)[:, None] >= positions(kv_rows, device)[None, :])[None, None]
