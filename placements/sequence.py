"""How a sequence that is the concatenation of several streams lies on the (ring, ulysses) mesh."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

from .intervals import Interval, merge_intervals, total
from .shard import shard_interval, shard_sizes


class Segment(NamedTuple):
    """A run of rows that lies together both on one ulysses rank and in the ring block.

    Attributes:
        rank: the ulysses rank that holds the rows while the sequence is sharded.
        local: where the run begins among that rank's rows.
        block: where it begins in the ring block, in the order of :meth:`SequenceLayout.segments`.
        length: how many rows.
    """

    rank: int
    local: int
    block: int
    length: int


@dataclass(frozen=True)
class SequenceLayout:
    """Streams of known global lengths, each sharded over ring first (outer) and then over ulysses (inner).

    A rank holds its shard of every stream, concatenated in stream order. *Canonical order* is the order of the whole
    sequence on one process: all of the first stream, then all of the second. Text of 5 and image of 8 tokens on
    ring 2 x ulysses 2::

        canonical   t0 t1 t2 t3 t4 | i0 i1 i2 i3 i4 i5 i6 i7

                    ulysses 0            ulysses 1
        ring 0      t0 t1 | i0 i1        t2 | i2 i3         block 0 = t0 t1 t2 | i0 i1 i2 i3
        ring 1      t3    | i4 i5        t4 | i6 i7         block 1 = t3 t4    | i4 i5 i6 i7

    ``block(r)`` is what ring rank ``r`` attends with after the all-to-all over ulysses: whole rows of fewer heads,
    in canonical order.

    Attributes:
        lengths: global length of each stream, in stream order.
        ring: degree of the ring axis.
        ulysses: degree of the ulysses axis.
        ulysses_outer: a DTensor on a mesh whose ulysses axis stands left of its ring axis is sharded over ulysses
            first; ``parallelize`` never makes one, ``meshcp.attention`` accepts it.
    """

    lengths: tuple[int, ...]
    ring: int = 1
    ulysses: int = 1
    ulysses_outer: bool = False

    def __repr__(self) -> str:
        streams = " + ".join(map(str, self.lengths))
        order = "ulysses x ring" if self.ulysses_outer else "ring x ulysses"
        degrees = f"{self.ulysses} x {self.ring}" if self.ulysses_outer else f"{self.ring} x {self.ulysses}"
        return f"SequenceLayout({streams} tokens on {order} = {degrees})"

    @property
    def length(self) -> int:
        """Global length of the whole sequence."""
        return sum(self.lengths)

    def without_empty(self) -> SequenceLayout:
        """The same layout less the streams of length 0, so that layouts of the same rows are equal."""
        return dataclasses.replace(self, lengths=tuple(length for length in self.lengths if length))

    def stream(self, index: int, ring_rank: int, ulysses_rank: int) -> Interval:
        """The part of stream ``index`` that a rank holds, counted from the start of that stream."""
        first, second = (self.ring, ring_rank), (self.ulysses, ulysses_rank)
        if self.ulysses_outer:
            first, second = second, first
        start, stop = shard_interval(self.lengths[index], *first)
        low, high = shard_interval(stop - start, *second)
        return start + low, start + high

    def local_lengths(self, ring_rank: int, ulysses_rank: int) -> tuple[int, ...]:
        """How many rows of each stream a rank holds."""
        return tuple(total((self.stream(index, ring_rank, ulysses_rank),)) for index in range(len(self.lengths)))

    def rows(self, ring_rank: int, ulysses_rank: int) -> tuple[Interval, ...]:
        """Canonical positions of a rank's rows, in the order in which it holds them."""
        offset, rows = 0, []
        for index, length in enumerate(self.lengths):
            start, stop = self.stream(index, ring_rank, ulysses_rank)
            rows.append((offset + start, offset + stop))
            offset += length
        return tuple(rows)

    def held(self, ring_rank: int, ulysses_rank: int) -> tuple[Interval, ...]:
        """Canonical positions of what a rank holds between attentions: :meth:`rows`, and a stand-in where it has none.

        Model code is not written for empty tensors (``reshape(..., -1, 2)`` is ambiguous without elements), so a rank
        without rows of a stream carries a copy of the stream's first row. Attention and gathering leave it out: see
        :meth:`real`.
        """
        offset, held = 0, []
        for (start, stop), length in zip(self.rows(ring_rank, ulysses_rank), self.lengths, strict=True):
            held.append((offset, offset + 1) if start == stop and length else (start, stop))
            offset += length
        return tuple(held)

    def real(self, ring_rank: int, ulysses_rank: int) -> tuple[Interval, ...] | None:
        """Which of the held rows are the rank's own, counted among those; None when all are."""
        rows, held = self.rows(ring_rank, ulysses_rank), self.held(ring_rank, ulysses_rank)
        if total(rows) == total(held):
            return None
        position, real = 0, []
        for row, mine in zip(rows, held, strict=True):
            if row[0] < row[1]:
                real.append((position, position + total((row,))))
            position += total((mine,))
        return merge_intervals(real)

    def block(self, ring_rank: int, canonical: bool = True) -> tuple[Interval, ...]:
        """Canonical positions of the rows of a whole ring block, in the order of :meth:`segments`."""
        parts = [part for rank in range(self.ulysses) for part in self.rows(ring_rank, rank) if part[0] < part[1]]
        return merge_intervals(sorted(parts) if canonical else parts)

    def over_ring(self) -> SequenceLayout:
        """The ring blocks as a layout over one axis, each rank holding a block in canonical order::

        5 + 8 tokens on ring 2 x ulysses 2   ->   5 + 8 tokens on 2 ranks:   t0 t1 t2 | i0 i1 i2 i3,   t3 t4 | ...
        """
        lengths = self.lengths
        if self.ulysses_outer:
            # Ring then cuts each ulysses shard of a stream, as it would cut streams of their own.
            lengths = tuple(size for length in lengths for size in shard_sizes(length, self.ulysses))
        return SequenceLayout(lengths, ulysses=self.ring)

    def segments(self, ring_rank: int, canonical: bool = True) -> tuple[Segment, ...]:
        """The rows of ring block ``ring_rank``, and where each run lies on its ulysses rank.

        In canonical order, or as they arrive: those of each ulysses rank after those of the one before.
        """
        runs: list[tuple[int, int, int, int]] = []
        for rank in range(self.ulysses):
            local = 0
            for start, stop in self.rows(ring_rank, rank):
                if start < stop:
                    runs.append((start, rank, local, stop - start))
                local += stop - start
        segments, block = [], 0
        for _, rank, local, length in sorted(runs) if canonical else runs:
            segments.append(Segment(rank, local, block, length))
            block += length
        return tuple(segments)
