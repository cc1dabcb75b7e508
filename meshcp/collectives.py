"""The collectives that the rest of meshcp calls: all-to-all, all-gather, ring exchange.

Sizes are arguments, never messages: each function takes the lengths of every rank, which the layout knows. All are
differentiable where training needs it, and all but the ring exchange (which lives inside an operator) are made of
functional collectives, so that ``torch.compile`` and ``CommDebugMode`` see them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from . import _compat


def all_to_all(x: torch.Tensor, receive: Sequence[int], send: Sequence[int], group: str) -> torch.Tensor:
    """Send ``send[i]`` elements of the 1-D ``x`` to rank ``i`` of ``group``, receive ``receive[i]`` from it.

    Not differentiable by itself: what travels is packed by :mod:`meshcp.attention.ulysses`, whose two directions are
    each other's gradients.

    Returns:
        1-D tensor of ``sum(receive)`` elements, in rank order.
    """
    return _compat.wait(_compat.start_all_to_all(x, receive, send, group))


class _GatherSum(torch.autograd.Function):
    """All-gather whose gradient is a reduce-scatter sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, sizes: tuple[int, ...], rank: int, group: str) -> torch.Tensor:
        ctx.dim, ctx.sizes, ctx.rank, ctx.group = dim, sizes, rank, group
        return _gather(x, dim, sizes, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _scatter_sum(grad, ctx.dim, ctx.sizes, ctx.rank, ctx.group), None, None, None, None


def all_gather(x: torch.Tensor, dim: int, sizes: Sequence[int], rank: int, group: str) -> torch.Tensor:
    """Concatenate the shards of every rank of ``group`` along ``dim``.

    One collective. Shorter shards are padded on the wire to the longest (by at most ``max(sizes) - min(sizes)``
    rows), since an all-gather is the one collective whose fast algorithms need equal sizes. The gradient is the sum
    over ranks, scattered (see :mod:`meshcp.gradients`): with the usual mean over ranks of parameter gradients it makes
    them those of a single process.

    Args:
        x: this rank's shard, ``sizes[rank]`` long along ``dim``.
        sizes: length of each rank's shard.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        gathered: torch.Tensor = _GatherSum.apply(x, dim, tuple(sizes), rank, group)
        return gathered
    return _gather(x, dim, sizes, group)


def _gather(x: torch.Tensor, dim: int, sizes: Sequence[int], group: str) -> torch.Tensor:
    longest = max(sizes)
    moved = x.movedim(dim, 0)
    if moved.shape[0] < longest:
        padded = x.new_zeros((longest, *moved.shape[1:]))
        padded[: moved.shape[0]] = moved
        moved = padded
    gathered = _compat.wait(_compat.start_all_gather(moved.contiguous(), len(sizes), group))
    if all(size == longest for size in sizes):
        return gathered.movedim(0, dim)
    parts = [gathered[rank * longest : rank * longest + size] for rank, size in enumerate(sizes) if size]
    return torch.cat([part.movedim(0, dim) for part in parts], dim)


def _scatter_sum(x: torch.Tensor, dim: int, sizes: Sequence[int], rank: int, group: str) -> torch.Tensor:
    longest = max(sizes)
    moved = x.movedim(dim, 0)
    if any(size != longest for size in sizes):
        padded = x.new_zeros((longest * len(sizes), *moved.shape[1:]))
        start = 0
        for index, size in enumerate(sizes):
            padded[index * longest : index * longest + size] = moved[start : start + size]
            start += size
        moved = padded
    mine = _compat.wait(_compat.start_reduce_scatter(moved.contiguous(), len(sizes), group))
    return mine[: sizes[rank]].movedim(0, dim)


def all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    """The sum over ``group``, out of place."""
    return _compat.wait(_compat.start_all_reduce(x, group))


class _SumBoth(torch.autograd.Function):
    """All-reduce whose gradient is an all-reduce."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return all_reduce(x.contiguous(), group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return all_reduce(grad.contiguous(), ctx.group), None


def sum_over(x: torch.Tensor, group: str) -> torch.Tensor:
    """The sum over ``group`` of what each rank goes on with alone; so is its gradient the sum of theirs."""
    if torch.is_grad_enabled() and x.requires_grad:
        summed: torch.Tensor = _SumBoth.apply(x, group)
        return summed
    return all_reduce(x.contiguous(), group)


class RingExchange:
    """Point-to-point exchange with the two neighbours on the ring: send to the next rank, receive from the one before.

    ::

        with blocks a b c on ranks 0 1 2, after one exchange:   c a b

    ``start`` posts a transfer and returns at once; ``wait`` ends it. Empty blocks are not sent:
    both ends know the lengths.

    On a GPU, ``wait`` lets the stream wait, not the process, and a transfer begins when the stream has come to where it
    was posted. Hence both tensors must be held until ``wait``, and may be dropped right after: whatever takes their
    memory next comes later in the stream.
    """

    _connected: ClassVar[weakref.WeakSet[dist.ProcessGroup]] = weakref.WeakSet()

    def __init__(self, group: str) -> None:
        self.group = _compat.resolve_group(group)
        self.degree = self.group.size()
        self.rank = self.group.rank()
        self._next = dist.get_global_rank(self.group, (self.rank + 1) % self.degree)
        self._previous = dist.get_global_rank(self.group, (self.rank - 1) % self.degree)

    def start(self, send: torch.Tensor, receive: torch.Tensor) -> list[dist.Work]:
        """Post the transfer of ``send`` to the next rank and of ``receive`` from the one before.

        Every rank of the group calls this, also one that neither sends nor receives.
        """
        if send.device.type != "cpu" and self.group not in self._connected:
            # NCCL connects a group in its first operation, in which every rank must take part: here some may have
            # nothing to send or to receive.
            dist.all_reduce(torch.zeros(1, device=send.device), group=self.group)
            self._connected.add(self.group)
        transfers = []
        if send.numel():
            transfers.append(dist.P2POp(dist.isend, send, self._next, self.group))
        if receive.numel():
            transfers.append(dist.P2POp(dist.irecv, receive, self._previous, self.group))
        return dist.batch_isend_irecv(transfers) if transfers else []

    @staticmethod
    def wait(works: list[dist.Work]) -> None:
        """End what :meth:`start` has posted."""
        for work in works:
            work.wait()
