"""The vocabulary of layouts: how a dimension lies on the mesh, in plain integers.

Everything here is pure: no collective, no process group, no model. A layout is frozen data that every rank can
compute alike, so no rank ever has to ask another for a size.
"""

from __future__ import annotations

if __name__ != "meshcp.placements":
    raise ImportError("this folder ships inside the package: import meshcp.placements")

from .heads import HeadLayout
from .intervals import Interval, merge_intervals, select, total
from .sequence import Segment, SequenceLayout
from .shard import local_interval, sequence_placements, shard_interval, shard_sizes, to_local
from .stream import StreamCount, StreamDim, StreamGrid, StreamParts, count, grid, parts, seq

__all__ = [
    "HeadLayout",
    "Interval",
    "Segment",
    "SequenceLayout",
    "StreamCount",
    "StreamDim",
    "StreamGrid",
    "StreamParts",
    "count",
    "grid",
    "local_interval",
    "merge_intervals",
    "parts",
    "select",
    "seq",
    "sequence_placements",
    "shard_interval",
    "shard_sizes",
    "to_local",
    "total",
]
