"""What a parallel model knows during a forward pass: the lengths of its streams, and all that follows from them.

This is the one place that knows lengths. Inputs tell them when they are sharded; attention and outputs ask for them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .collectives import all_gather
from .errors import InputError, LayoutError
from .mesh import ContextMesh
from .placements import (
    SequenceLayout,
    StreamCount,
    StreamDim,
    select,
    sequence_placements,
    shard_sizes,
    to_local,
    total,
)


class StreamLengths:
    """The global length of every stream of the forward pass that runs now, and sharding and gathering by it."""

    def __init__(self, context: ContextMesh) -> None:
        self._context = context
        self.known: dict[str, int] = {}
        self._told_by: dict[str, str] = {}
        self._shards: dict[tuple[int, StreamDim], tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def context(self) -> ContextMesh:
        return self._context.constant()

    def begin(self) -> None:
        """Forget the lengths of the forward pass before."""
        self.known, self._told_by = {}, {}
        self._shards.clear()

    def resume_later(self) -> Callable[[], None]:
        """What makes the lengths of this forward pass known again: its backward pass may compute parts of it anew."""
        known, told_by = self.known, self._told_by

        def resume() -> None:
            self.known, self._told_by = known, told_by

        return resume

    def end(self) -> None:
        """Let go of the tensors of this forward pass; the lengths stay for whoever asks after it."""
        self._shards.clear()

    def tell(self, stream: str, length: int, who: str) -> None:
        """Learn the length of a stream.

        Raises:
            LayoutError: another tensor of the same stream had another length.
        """
        # Under torch.compile a length may be symbolic; a layout is made of plain integers, so each length compiles
        # once.
        length = operator.index(length)
        known = self.known.get(stream)
        if known is None:
            self.known[stream] = length
            self._told_by[stream] = who
        elif known != length:
            raise LayoutError(
                f"stream {stream!r}: {who} has length {length}, but {self._told_by[stream]} has {known}; tensors of "
                "one stream must be equally long. Pass inputs that belong together, or give the plan another stream "
                "name"
            )

    def layout(self, streams: Sequence[str], who: str) -> SequenceLayout:
        """The layout of a concatenation of streams.

        Raises:
            LayoutError: a stream that no input has told the length of.
        """
        missing = [stream for stream in streams if stream not in self.known]
        if missing:
            raise LayoutError(
                f"{who} needs the length of stream {', '.join(map(repr, missing))}, which no input told; known: "
                f"{self.known or 'none'}. Shard an input of that stream first: "
                f"ShardInputs(name=seq(dim, {missing[0]!r}))"
            )
        return SequenceLayout(tuple(self.known[stream] for stream in streams), self.context.ring, self.context.ulysses)

    def shard(self, x: torch.Tensor, where: StreamDim, who: str) -> torch.Tensor:
        """This rank's part of a tensor that every rank holds whole: a view for a single stream."""
        if isinstance(x, DTensor):
            return self._from_dtensor(x, where, who)
        dim = self._check(x, where, who)
        if dim is None or (where.when_ndim is not None and x.shape[dim] == 1):
            return x
        # A compiled forward would be guarded by the id, and compiled anew for every input.
        key = None if torch.compiler.is_compiling() else (id(x), where)
        if key is not None and key in self._shards:
            return self._shards[key][1]
        if where.local or where.whole:
            shard = self._shard_some(x, dim, where, who)
            if key is not None:
                self._shards[key] = (x, shard)
            return shard
        if not where.folded:
            self._learn(x.shape[dim], where, who)
        layout = self.layout(where.streams, who)
        if where.folded:
            x, dim, whole = self._unfold(x, dim, layout, who), dim + 1, x
        else:
            whole = x
        rows = [row for row in layout.held(self.context.ring_rank, self.context.ulysses_rank) if row[0] < row[1]]
        parts = [x.narrow(dim, start, stop - start) for start, stop in rows] or [x.narrow(dim, 0, 0)]
        shard = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
        if where.folded:
            shard = shard.flatten(dim - 1, dim)
        if key is not None:
            # Keeping the tensor itself keeps its id from being used again.
            self._shards[key] = (whole, shard)
        return shard

    def held(self, stream: str) -> tuple[int, int]:
        """The rows of a stream that this rank carries."""
        layout = self.layout((stream,), f"stream {stream!r}")
        return layout.held(self.context.ring_rank, self.context.ulysses_rank)[0]

    def _shard_some(self, x: torch.Tensor, dim: int, where: StreamDim, who: str) -> torch.Tensor:
        """Cut the streams that are neither whole for good nor this rank's rows already."""
        here = {name: self.held(name) for name in where.local}
        known = {name: self.known.get(name) for name in where.streams}
        sizes = [here[n][1] - here[n][0] if n in here else known[n] for n in where.streams]
        unknown = [name for name, size in zip(where.streams, sizes, strict=True) if size is None]
        rest = x.shape[dim] - sum(size for size in sizes if size is not None)
        if len(unknown) == 1 and rest >= 0:
            self.tell(unknown[0], rest, who)
            sizes = [rest if size is None else size for size in sizes]
        elif unknown or rest:
            found = " + ".join(f"{name} {size}" for name, size in zip(where.streams, sizes, strict=True))
            raise LayoutError(f"{who} has length {x.shape[dim]}, but its streams are {found} ({where!r})")
        parts, position = [], 0
        for name, size in zip(where.streams, sizes, strict=True):
            assert size is not None
            kept = name in where.local or name in where.whole
            start, stop = (0, size) if kept else self.held(name)
            parts.append(x.narrow(dim, position + start, stop - start))
            position += size
        return torch.cat(parts, dim)

    @staticmethod
    def _unfold(x: torch.Tensor, dim: int, layout: SequenceLayout, who: str) -> torch.Tensor:
        """``[..., n * S, ...]`` as ``[..., n, S, ...]``."""
        if not layout.length or x.shape[dim] % layout.length:
            raise LayoutError(
                f"{who} has length {x.shape[dim]} along dim {dim}; needed: a multiple of {layout.length}, the length "
                "of its streams, as the plan takes it for several sequences end to end"
            )
        unfolded: torch.Tensor = x.unflatten(dim, (-1, layout.length))
        return unfolded

    def count(self, value: Any, where: StreamCount, who: str) -> int:
        """How many rows of the streams this rank holds, for an argument that says how many there are in all.

        Where nothing has told the length of a single stream yet, the argument tells it. For a count of leading rows:
        how many of those this rank holds.

        Raises:
            LayoutError: the argument is not the length of the streams.
        """
        if where.leading:
            return self._count_leading(value, where, who)
        if len(where.streams) == 1 and isinstance(value, int) and not isinstance(value, bool):
            self.tell(where.streams[0], value, who)
        layout = self.layout(where.streams, who)
        if isinstance(value, bool) or not isinstance(value, int) or value != layout.length:
            raise LayoutError(
                f"{who} is {value!r}; the plan takes it for the length of {where.streams}, {layout.length}"
            )
        return total(layout.held(self.context.ring_rank, self.context.ulysses_rank))

    def _count_leading(self, value: Any, where: StreamCount, who: str) -> int:
        layout = self.layout(where.streams, who)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= layout.length:
            raise LayoutError(
                f"{who} is {value!r}; the plan takes it for a number of leading rows of {where.streams}, which has "
                f"{layout.length}"
            )
        held = layout.held(self.context.ring_rank, self.context.ulysses_rank)
        return sum(max(0, min(stop, value) - start) for start, stop in held)

    def gather(self, x: torch.Tensor, where: StreamDim, who: str) -> torch.Tensor:
        """The whole tensor, on every rank, from every rank's part. Gradients are summed over ranks."""
        dim = self._check(x, where, who)
        if dim is None:
            return x
        if where.whole:
            return self._each_stream(x, dim, where, who, self.gather)
        x = self.trim(x, where, who)
        layout = self.layout(where.streams, who)
        lengths = layout.local_lengths(self.context.ring_rank, self.context.ulysses_rank)
        parts = x.split(list(lengths), dim) if len(lengths) > 1 else (x,)
        whole = [
            self._gather_stream(part, dim, self.known[name]) for part, name in zip(parts, where.streams, strict=True)
        ]
        return whole[0] if len(whole) == 1 else torch.cat(whole, dim)

    def trim(self, x: torch.Tensor, where: StreamDim, who: str) -> torch.Tensor:
        """This rank's own rows, without the stand-ins for streams of which it has none."""
        dim = self._check(x, where, who)
        if dim is None:
            return x
        if where.whole:
            return self._each_stream(x, dim, where, who, self.trim)
        layout, context = self.layout(where.streams, who), self.context
        held = layout.held(context.ring_rank, context.ulysses_rank)
        real = layout.real(context.ring_rank, context.ulysses_rank)
        if real is not None and x.shape[dim] == total(real):
            return x
        if x.shape[dim] != total(held):
            lengths = " + ".join(str(total((row,))) for row in held)
            raise LayoutError(
                f"{who} has {x.shape[dim]} rows along dim {dim} on ring rank {context.ring_rank}, ulysses rank "
                f"{context.ulysses_rank}, but the layout gives it {lengths} of {layout}. Name the streams that this "
                "tensor holds there, in order"
            )
        return x if real is None else select(x, dim, real)

    def _each_stream(
        self,
        x: torch.Tensor,
        dim: int,
        where: StreamDim,
        who: str,
        function: Callable[[torch.Tensor, StreamDim, str], torch.Tensor],
    ) -> torch.Tensor:
        """``function`` of each stream on its own, but for those that are whole."""
        self.layout(where.streams, who)
        sizes = []
        for name in where.streams:
            start, stop = (0, self.known[name]) if name in where.whole else self.held(name)
            sizes.append(stop - start)
        if sum(sizes) != x.shape[dim]:
            parts = " + ".join(f"{name} {size}" for name, size in zip(where.streams, sizes, strict=True))
            raise LayoutError(
                f"{who} has {x.shape[dim]} rows along dim {dim}, but the plan gives it {parts} ({where!r})"
            )
        pieces = zip(where.streams, x.split(sizes, dim), strict=True)
        done = [
            piece if name in where.whole else function(piece, StreamDim(dim, (name,)), who) for name, piece in pieces
        ]
        return torch.cat(done, dim)

    def _gather_stream(self, x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
        context = self.context
        blocks = shard_sizes(length, context.ring)
        if context.ulysses > 1:
            sizes = shard_sizes(blocks[context.ring_rank], context.ulysses)
            x = all_gather(x, dim, sizes, context.ulysses_rank, context.ulysses_group)
        if context.ring > 1:
            x = all_gather(x, dim, blocks, context.ring_rank, context.ring_group)
        return x

    def _from_dtensor(self, x: DTensor, where: StreamDim, who: str) -> torch.Tensor:
        if len(where.streams) != 1:
            raise InputError(f"{who} is a DTensor over several streams {where.streams}; pass a plain tensor")
        dim = self._check(x, where, who)
        if dim is None:
            return x.full_tensor()
        self._learn(x.shape[dim], where, who)
        placements = list(x.placements)
        for axis, placement in enumerate(sequence_placements(x.device_mesh, dim)):
            if placement.is_shard():
                placements[axis] = placement
        names = x.device_mesh.mesh_dim_names or ()
        active = [name for name, (degree, _) in zip(("ring", "ulysses"), self.context.axes, strict=True) if degree > 1]
        if [name for name in names if name in active] != active:
            raise InputError(
                f"{who} is a DTensor on mesh axes {names}; needed: a mesh with {active} in this order "
                "(meshcp.init_mesh makes one), or a plain tensor"
            )
        local = to_local(x.redistribute(x.device_mesh, placements), placements)
        if local.shape[dim] or not x.shape[dim]:
            return local
        stand_in = local.new_zeros((*local.shape[:dim], 1, *local.shape[dim + 1 :]))
        # The redistribution's backward is a collective, in which a rank without rows takes part too.
        return stand_in + local.sum() if local.requires_grad else stand_in

    def _check(self, x: torch.Tensor, where: StreamDim, who: str) -> int | None:
        """The dimension to cut, or None where the plan says that a tensor of this rank stays whole."""
        if where.when_ndim is not None:
            ranks = where.when_ndim if isinstance(where.when_ndim, tuple) else (where.when_ndim,)
            if x.ndim not in ranks:
                return None
        if not -x.ndim <= where.dim < x.ndim or (where.ndim is not None and x.ndim != where.ndim):
            need = f"{where.ndim} dimensions" if where.ndim is not None else f"a dimension {where.dim}"
            raise InputError(
                f"{who} has shape {tuple(x.shape)}; the plan needs {need} ({where!r}). Pass a tensor of that rank, or "
                "correct the plan"
            )
        return where.dim % x.ndim

    def _learn(self, length: int, where: StreamDim, who: str) -> None:
        length = operator.index(length)
        if len(where.streams) == 1:
            if where.anew:
                self.known.pop(where.streams[0], None)
            self.tell(where.streams[0], length, who)
            return
        unknown = [stream for stream in where.streams if stream not in self.known]
        rest = sum(self.known[stream] for stream in where.streams if stream in self.known)
        if len(unknown) == 1 and length >= rest:
            self.tell(unknown[0], length - rest, who)
        elif not unknown and rest != length:
            parts = " + ".join(f"{stream} {self.known[stream]}" for stream in where.streams)
            raise LayoutError(f"{who} has length {length}, but its streams are {parts} = {rest}")


def map_tensors(value: Any, function: Callable[[torch.Tensor, str], Any], path: str) -> Any:
    """Apply ``function(tensor, path)`` to every tensor in nested tuples, lists and dicts; all else stays."""
    if isinstance(value, torch.Tensor):
        return function(value, path)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(
            *(map_tensors(x, function, f"{path}.{n}") for n, x in zip(value._fields, value, strict=True))
        )
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(x, function, f"{path}[{i}]") for i, x in enumerate(value))
    if type(value) is dict:
        return {key: map_tensors(x, function, f"{path}[{key!r}]") for key, x in value.items()}
    return value
