"""Ulysses: the all-to-all over the ulysses axis that turns a sequence shard into a head shard, and back.

Jacobs et al. 2023, "DeepSpeed Ulysses". Shapes: B batch, H heads, S rows, D width; a *bundle* is several tensors
whose rows travel together (q, k, v of self-attention), a *row* of a bundle is one token of all of them.

::

    sequence shard, this rank's tokens          head shard, all tokens of the ring block in canonical order
        t0 [h0 h1 h2 h3]      one all-to-all        t0 [h0 h1]
        i0 [h0 h1 h2 h3]      ---------------->     t1 [h0 h1]
                                                    i0 [h0 h1]
                                                    i1 [h0 h1]

On the wire: for each destination, bundle after bundle, row after row, ``[B, heads of the destination, D]``. Sizes are
exact; every rank knows them from the layouts. Attention without mask and causality does not ask for the order of rows,
which then stay as they come (t0 i0 t1 i1). The two directions are each other's transposes as linear maps, so each is
the other's gradient, also where several ranks hold the same KV head: going back, their rows are summed.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..collectives import all_to_all
from ..placements import Interval, SequenceLayout, merge_intervals, total


@dataclass(frozen=True)
class Bundle:
    """Tensors that share a sequence layout, and the heads of each that each ulysses rank computes with.

    Attributes:
        layout: where their rows lie.
        heads: for each tensor, for each ulysses rank: its heads.
        counts: for each tensor, how many heads it has in all.
    """

    layout: SequenceLayout
    heads: tuple[tuple[Interval, ...], ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class _Columns:
    """Where the tensors of a bundle lie in a row: ``[B, columns]`` for one destination."""

    starts: tuple[int, ...]
    shapes: tuple[tuple[int, int], ...]
    width: int


class Exchange:
    """The plan of one all-to-all, the same for both directions: every split and offset, as plain integers."""

    def __init__(
        self, bundles: Sequence[Bundle], group: str, ring_rank: int, ulysses_rank: int, canonical: bool = True
    ) -> None:
        """
        Args:
            bundles: what travels.
            group: of the ranks that exchange.
            ring_rank, ulysses_rank: this rank's.
            canonical: whether the rows of a head shard are in canonical order. Otherwise they are as they come, rank
                after rank, which saves a copy in each direction where ranks hold rows of several streams.
        """
        self.bundles, self.group, self.rank = tuple(bundles), group, ulysses_rank
        self.degree = bundles[0].layout.ulysses
        self._rows = [
            [sum(bundle.layout.local_lengths(ring_rank, rank)) for rank in range(self.degree)] for bundle in bundles
        ]
        self._segments = [bundle.layout.segments(ring_rank, canonical) for bundle in bundles]
        self._sent = self._runs()
        self._block = [total(bundle.layout.block(ring_rank)) for bundle in bundles]
        self._geometries: dict[tuple[int, tuple[tuple[int, ...], ...]], _Geometry] = {}

    def _runs(self) -> list[tuple[int, int, int]]:
        """What a head shard sends, in the order of the wire: runs ``(bundle, start, stop)`` of rows."""
        sent = sorted((segment.rank, b, segment) for b, segments in enumerate(self._segments) for segment in segments)
        return [
            (b, start, stop)
            for b, run in itertools.groupby(sent, key=operator.itemgetter(1))
            for start, stop in merge_intervals((each.block, each.block + each.length) for _, _, each in run)
        ]

    # -- the two sides of the wire -------------------------------------------------------------------------------------
    # While the sequence is sharded, a region of the wire belongs to one peer: this rank's rows of the peer's heads.
    # While the heads are, it holds the peer's rows of this rank's heads.

    def _columns(self, bundle: int, rank: int, widths: Sequence[int]) -> _Columns:
        starts, shapes, width = [], [], 0
        for heads, size in zip(self.bundles[bundle].heads, widths, strict=True):
            count = total((heads[rank],))
            starts.append(width)
            shapes.append((count, size))
            width += count * size
        return _Columns(tuple(starts), tuple(shapes), width)

    def _geometry(self, batch: int, widths: Sequence[Sequence[int]]) -> _Geometry:
        """Everything about a call that does not depend on values; every layer asks for the same."""
        key = batch, tuple(map(tuple, widths))
        if not torch.compiler.is_compiling() and key in self._geometries:
            return self._geometries[key]
        columns = [[self._columns(b, rank, widths[b]) for rank in range(self.degree)] for b in range(len(self.bundles))]
        by_heads = [
            [rows[self.rank] * batch * columns[b][rank].width for b, rows in enumerate(self._rows)]
            for rank in range(self.degree)
        ]
        by_rows = [
            [rows[rank] * batch * columns[b][self.rank].width for b, rows in enumerate(self._rows)]
            for rank in range(self.degree)
        ]
        geometry = _Geometry(
            batch,
            columns,
            [sum(parts) for parts in by_heads],
            [sum(parts) for parts in by_rows],
            list(self._regions(by_heads)),
            [self._pieces(by_rows, b, batch * columns[b][self.rank].width) for b in range(len(self.bundles))],
        )
        if not torch.compiler.is_compiling():
            self._geometries[key] = geometry
        return geometry

    def _regions(self, by_heads: list[list[int]]) -> Iterator[_Region]:
        """The regions of the heads side, without the empty ones.

        Ranks whose regions are alike, and whose heads follow each other or are the same, are taken together, so that an
        even exchange is one copy a tensor.
        """
        sizes = [sum(parts) for parts in by_heads]
        for b, bundle in enumerate(self.bundles):
            rank = 0
            while rank < self.degree:
                last = rank + 1
                while last < self.degree and sizes[last] == sizes[rank] and _alike(bundle.heads, rank, last):
                    last += 1
                if by_heads[rank][b]:
                    inner = sum(by_heads[rank][:b])
                    yield _Region(b, rank, last - rank, sum(sizes[:rank]), sizes[rank], inner, by_heads[rank][b])
                rank = last

    def _pieces(self, by_rows: list[list[int]], b: int, row: int) -> tuple[Interval, ...]:
        """Where the rows of a bundle lie on the rows side, in canonical order."""
        begins, position = [], 0
        for parts in by_rows:
            begins.append(position + sum(parts[:b]))
            position += sum(parts)
        return merge_intervals(
            (begins[segment.rank] + segment.local * row, begins[segment.rank] + (segment.local + segment.length) * row)
            for segment in self._segments[b]
        )

    def _pairs(
        self, flat: torch.Tensor, geometry: _Geometry, tensors: Sequence[Sequence[torch.Tensor]]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, bool]]:
        """Each tensor's part of each region of ``flat`` and what it corresponds to in the tensor, both

        ``[ranks, S, B, heads, D]``, the latter with 1 in the place of ranks that hold the same heads, and whether
        several ranks hold some of the tensor's heads.
        """
        for b, rank, many, base, stride, inner, size in geometry.regions:
            column = geometry.columns[b][rank]
            region = flat.narrow(0, base, many * stride).view(many, stride).narrow(1, inner, size)
            wire = region.view(many, self._rows[b][self.rank], geometry.batch, column.width)
            for tensor, heads, start, (count, width) in zip(
                tensors[b], self.bundles[b].heads, column.starts, column.shapes, strict=True
            ):
                if count:
                    runs = 1 if many > 1 and heads[rank] == heads[rank + 1] else many
                    part = tensor.narrow(1, heads[rank][0], runs * count).unflatten(1, (runs, count))
                    there = wire.narrow(3, start, count * width).unflatten(3, (count, width))
                    yield there, part.permute(1, 3, 0, 2, 4), overlap(heads)

    def to_heads(self, tensors: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """``[B, H, S local, D]`` -> ``[B, H of this rank, S of the ring block, D]``, bundle by bundle."""
        batch, widths, like = _describe(tensors)
        geometry = self._geometry(batch, widths)
        send = like.new_empty(sum(geometry.by_heads))
        for there, here, _ in self._pairs(send, geometry, tensors):
            there.copy_(here)
        received = all_to_all(send, geometry.by_rows, geometry.by_heads, self.group)
        return [self._arranged(received, geometry, b) for b in range(len(tensors))]

    def _arranged(self, received: torch.Tensor, geometry: _Geometry, b: int) -> list[torch.Tensor]:
        """The rows of one bundle in the order of the head shard; runs that lie together already are not copied."""
        column, pieces = geometry.columns[b][self.rank], geometry.pieces[b]
        if len(pieces) == 1:
            flat = received[pieces[0][0] : pieces[0][1]]
        else:
            flat = torch.cat([received[start:stop] for start, stop in pieces]) if pieces else received[:0]
        rows = flat.view(self._block[b], geometry.batch, column.width)
        return [
            rows[..., start : start + count * width].unflatten(-1, (count, width)).permute(1, 2, 0, 3)
            for start, (count, width) in zip(column.starts, column.shapes, strict=True)
        ]

    def to_sequence(self, tensors: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """The way back: ``[B, H of this rank, S of the ring block, D]`` -> ``[B, H, S local, D]``."""
        batch, widths, like = _describe(tensors)
        geometry = self._geometry(batch, widths)
        rows = [
            _rows_of(bundle, batch, self._block[b], geometry.columns[b][self.rank]) for b, bundle in enumerate(tensors)
        ]
        flat = [rows[b][start:stop].reshape(-1) for b, start, stop in self._sent]
        send = flat[0] if len(flat) == 1 else torch.cat(flat) if flat else like.new_empty(0)
        received = all_to_all(send.contiguous(), geometry.by_heads, geometry.by_rows, self.group)
        results = [
            [
                _output(like, batch, count, lengths[self.rank], width, heads)
                for count, width, heads in zip(bundle.counts, widths[b], bundle.heads, strict=True)
            ]
            for b, (bundle, lengths) in enumerate(zip(self.bundles, self._rows, strict=True))
        ]
        for there, here, shared in self._pairs(received, geometry, results):
            if shared:
                here.add_(there if len(here) == len(there) else there.sum(0, keepdim=True))
            else:
                here.copy_(there)
        return results


class _Region(NamedTuple):
    """Part of the wire on the heads side: one bundle for ``many`` peers from ``rank`` on, in elements.

    Peer ``rank + i`` has ``size`` elements from ``base + i * stride + inner`` on.
    """

    bundle: int
    rank: int
    many: int
    base: int
    stride: int
    inner: int
    size: int


@dataclass(frozen=True)
class _Geometry:
    """The wire of one call: sizes for each peer in elements, regions of the heads side, pieces of the rows side."""

    batch: int
    columns: list[list[_Columns]]
    by_heads: list[int]
    by_rows: list[int]
    regions: list[_Region]
    pieces: list[tuple[Interval, ...]]


def _alike(heads: Sequence[Sequence[Interval]], first: int, rank: int) -> bool:
    """Whether ``rank`` has as many heads of every tensor as ``first``, each following its predecessor's or being the
    same, whichever it is between ``first`` and the next."""
    for tensor in heads:
        count, step = total((tensor[first],)), tensor[first + 1][0] - tensor[first][0]
        if total((tensor[rank],)) != count or step not in (0, count) or tensor[rank][0] - tensor[rank - 1][0] != step:
            return False
    return True


def overlap(heads: Sequence[Interval]) -> bool:
    """Whether some head is held by several ranks."""
    return any(after[0] < before[1] for before, after in itertools.pairwise(heads))


def _output(
    like: torch.Tensor, batch: int, heads: int, rows: int, width: int, ranks: Sequence[Interval]
) -> torch.Tensor:
    make = like.new_zeros if overlap(ranks) or total(ranks) < heads else like.new_empty
    return make(batch, rows, heads, width).transpose(1, 2)


def _describe(tensors: Sequence[Sequence[torch.Tensor]]) -> tuple[int, list[list[int]], torch.Tensor]:
    like = tensors[0][0]
    # Under torch.compile a batch may be symbolic; the wire is cut by plain integers.
    widths = [[operator.index(tensor.shape[-1]) for tensor in bundle] for bundle in tensors]
    return operator.index(like.shape[0]), widths, like


def _rows_of(bundle: Sequence[torch.Tensor], batch: int, rows: int, column: _Columns) -> torch.Tensor:
    """The tensors of a bundle as rows ``[S, B, columns]``; a view for a single tensor in ``[S, B, H, D]`` memory."""
    flat = [
        tensor.permute(2, 0, 1, 3).reshape(rows, batch, count * width)
        for tensor, (count, width) in zip(bundle, column.shapes, strict=True)
    ]
    return flat[0] if len(flat) == 1 else torch.cat(flat, -1)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, exchange: Exchange, sizes: tuple[int, ...], dtype: torch.dtype, *flat: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.exchange, ctx.sizes, ctx.dtype = exchange, sizes, flat[0].dtype
        # Not x.to(dtype) alone: where there is nothing to do, a graph of torch 2.11 would lose the gradient.
        heads = (x for bundle in exchange.to_heads(_bundled(flat, sizes)) for x in bundle)
        return tuple(x if x.dtype == dtype else x.to(dtype) for x in heads)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        back = ctx.exchange.to_sequence(_bundled(grads, ctx.sizes))
        return None, None, None, *(x.to(ctx.dtype) for bundle in back for x in bundle)


class _ToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, sizes: tuple[int, ...], *flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.exchange, ctx.sizes = exchange, sizes
        return tuple(x for bundle in exchange.to_sequence(_bundled(flat, sizes)) for x in bundle)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        back = ctx.exchange.to_heads(_bundled(grads, ctx.sizes))
        return None, None, *(x for bundle in back for x in bundle)


def _bundled(flat: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[list[torch.Tensor]]:
    bundles, start = [], 0
    for size in sizes:
        bundles.append(list(flat[start : start + size]))
        start += size
    return bundles


def _flat(tensors: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    return [x for bundle in tensors for x in bundle]


def _trains(tensors: Sequence[Sequence[torch.Tensor]]) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in _flat(tensors))


def to_heads(
    exchange: Exchange, tensors: Sequence[Sequence[torch.Tensor]], dtype: torch.dtype | None = None
) -> list[list[torch.Tensor]]:
    """Sequence shard to head shard, one collective, differentiable: see :meth:`Exchange.to_heads`.

    Args:
        dtype: of what is returned. Gradients come back in it, are summed in it where several ranks hold a head, and
            only then rounded to the dtype of ``tensors``, in which these travel.
    """
    dtype = tensors[0][0].dtype if dtype is None else dtype
    if not _trains(tensors):
        return [[x.to(dtype) for x in bundle] for bundle in exchange.to_heads(tensors)]
    sizes = tuple(len(bundle) for bundle in tensors)
    return _bundled(_ToHeads.apply(exchange, sizes, dtype, *_flat(tensors)), sizes)


def to_sequence(exchange: Exchange, tensors: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Head shard to sequence shard, one collective, differentiable: see :meth:`Exchange.to_sequence`."""
    if not _trains(tensors):
        return exchange.to_sequence(tensors)
    sizes = tuple(len(bundle) for bundle in tensors)
    return _bundled(_ToSequence.apply(exchange, sizes, *_flat(tensors)), sizes)
