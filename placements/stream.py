"""How a plan says which dimension of a tensor is which stream."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StreamDim:
    """Dimension ``dim`` of a tensor is the concatenation of ``streams``. Made by :func:`seq`.

    Attributes:
        dim: the dimension; negative counts from the end.
        streams: names of the streams, in the order in which the model concatenates them.
        optional: the tensor may be None or not passed at all.
        ndim: the rank that the tensor must have, if the plan wants to check it.
        when_ndim: the tensor is sharded only when it has this rank; with another it is the same for all tokens and
            stays whole (a timestep that may be one a sample or one a token).
    """

    dim: int
    streams: tuple[str, ...]
    optional: bool = False
    ndim: int | None = None
    when_ndim: int | None = None

    def __repr__(self) -> str:
        parts = [str(self.dim), *(repr(stream) for stream in self.streams)]
        parts += [f"{name}={value}" for name, value in (("ndim", self.ndim), ("when_ndim", self.when_ndim)) if value]
        return f"seq({', '.join(parts + ['optional=True'] * self.optional)})"


def seq(
    dim: int, *streams: str, optional: bool = False, ndim: int | None = None, when_ndim: int | None = None
) -> StreamDim:
    """Dimension ``dim`` is the stream ``streams[0]``, or the concatenation of several.

    ::

        seq(1, "image")              hidden_states   [B, image, C]
        seq(-2, "text")              txt_ids         [text, 3] or [B, text, 3]
        seq(0, "text", "image")      rope            [text + image, D]

    See :class:`StreamDim` for the options.
    """
    if not streams:
        raise ValueError('seq needs at least one stream name, as in seq(1, "image")')
    return StreamDim(dim, streams, optional, ndim, when_ndim)


@dataclass(frozen=True)
class StreamCount:
    """An integer argument that counts the tokens of streams. Made by :func:`count`."""

    streams: tuple[str, ...]
    optional: bool = False

    def __repr__(self) -> str:
        return f"count({', '.join([*map(repr, self.streams)] + ['optional=True'] * self.optional)})"


def count(*streams: str, optional: bool = False) -> StreamCount:
    """An integer argument by which a module splits what it holds: it gets the rank's own number of rows.

    ``ShardInputs(text_seq_len=count("text"))``: a block that is told the text length of the whole sequence would cut
    its local tensor in the wrong place.
    """
    if not streams:
        raise ValueError('count needs at least one stream name, as in count("text")')
    return StreamCount(streams, optional)
