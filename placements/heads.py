"""How attention heads lie on the ulysses axis, also when they do not divide and when KV heads are fewer."""

from __future__ import annotations

from dataclasses import dataclass

from .intervals import Interval
from .shard import shard_interval


@dataclass(frozen=True)
class HeadLayout:
    """``heads`` query heads and ``kv_heads`` KV heads over ``degree`` ulysses ranks.

    Query heads are cut like any other dimension (``Shard(1)``). A rank holds just the KV heads that its query heads
    use, so with fewer KV heads than ranks several ranks hold the same one::

        heads 8, kv_heads 2, degree 4        rank 0   rank 1   rank 2   rank 3
                       query heads           0 1      2 3      4 5      6 7
                       KV heads              0        0        1        1
    """

    heads: int
    kv_heads: int
    degree: int

    @property
    def group(self) -> int:
        """Query heads for each KV head."""
        return self.heads // self.kv_heads

    def query(self, rank: int) -> Interval:
        """The query heads of ulysses rank ``rank``."""
        return shard_interval(self.heads, self.degree, rank)

    def kv(self, rank: int) -> Interval:
        """The KV heads that the query heads of ``rank`` use."""
        start, stop = self.query(rank)
        if start == stop:
            edge = -(-start // self.group)
            return edge, edge
        return start // self.group, (stop - 1) // self.group + 1

    def kv_index(self, rank: int) -> tuple[int, ...]:
        """For each query head of ``rank``: which of the rank's own KV heads it uses, counted from its first."""
        start, stop = self.query(rank)
        first = self.kv(rank)[0]
        return tuple(head // self.group - first for head in range(start, stop))
