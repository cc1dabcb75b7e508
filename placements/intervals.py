"""Half-open integer intervals, the unit in which layouts speak."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

Interval = tuple[int, int]


def total(intervals: Iterable[Interval]) -> int:
    """The number of positions in ``intervals``."""
    return sum(stop - start for start, stop in intervals)


def merge_intervals(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """Drop empty intervals and join each one that begins where the one before it ends. Order is kept."""
    merged: list[Interval] = []
    for start, stop in intervals:
        if start == stop:
            continue
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


def select(x: torch.Tensor, dim: int, intervals: Sequence[Interval]) -> torch.Tensor:
    """The parts of ``x`` at ``intervals`` along ``dim``, joined; a view where there is only one."""
    if len(intervals) == 1:
        start, stop = intervals[0]
        return x if stop - start == x.shape[dim] else x.narrow(dim, start, stop - start)
    if not intervals:
        return x.narrow(dim, 0, 0)
    return torch.cat([x.narrow(dim, start, stop - start) for start, stop in intervals], dim)
