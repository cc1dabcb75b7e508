"""How a plan says which dimension of a tensor is which stream."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import PlanError


@dataclass(frozen=True)
class StreamDim:
    """Dimension ``dim`` of a tensor is the concatenation of ``streams``. Made by :func:`seq`.

    Attributes:
        dim: the dimension; negative counts from the end.
        streams: names of the streams, in the order in which the model concatenates them.
        optional: the tensor may be None or not passed at all.
        ndim: the rank that the tensor must have, if the plan wants to check it.
        when_ndim: the tensor is sharded only when it has this rank, or one of these; with another, or with length 1,
            it is the same for all tokens and stays whole (a timestep that may be one a sample or one a token).
        folded: the dimension is several sequences end to end (``[B * image]``, the batch folded into it), each of
            which is cut. Another input must tell the length of the streams. For inputs only.
        local: those of the streams of which the tensor holds only this rank's rows already. For inputs only.
        whole: those of the streams that every rank keeps whole: they are neither cut nor gathered.
        empty: like optional, and where the tensor is left out its stream has no tokens (a model with or without text).
        anew: the tensor begins another sequence of the same name, of a length of its own, for a part of the model that
            runs several times in a forward pass. For inputs only.
        if_taken: some of the modules that the entry matches have no such input. For inputs only.
    """

    dim: int
    streams: tuple[str, ...]
    optional: bool = False
    ndim: int | None = None
    when_ndim: int | tuple[int, ...] | None = None
    folded: bool = False
    local: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    empty: bool = False
    anew: bool = False
    if_taken: bool = False

    def __repr__(self) -> str:
        parts = [str(self.dim), *(repr(stream) for stream in self.streams)]
        parts += [f"{name}={value}" for name, value in (("ndim", self.ndim), ("when_ndim", self.when_ndim)) if value]
        parts += ["folded=True"] * self.folded
        parts += [f"{name}={value}" for name, value in (("local", self.local), ("whole", self.whole)) if value]
        parts += [f"{name}=True" for name in ("empty", "anew", "if_taken") if getattr(self, name)]
        return f"seq({', '.join(parts + ['optional=True'] * self.optional)})"


def seq(
    dim: int,
    *streams: str,
    optional: bool = False,
    ndim: int | None = None,
    when_ndim: int | tuple[int, ...] | None = None,
    folded: bool = False,
    local: tuple[str, ...] = (),
    whole: tuple[str, ...] = (),
    empty: bool = False,
    anew: bool = False,
    if_taken: bool = False,
) -> StreamDim:
    """Dimension ``dim`` is the stream ``streams[0]``, or the concatenation of several.

    ::

        seq(1, "image")              hidden_states   [B, image, C]
        seq(-2, "text")              txt_ids         [text, 3] or [B, text, 3]
        seq(0, "text", "image")      rope            [text + image, D]
        seq(1, "image", "text", local=("text",))     [B, image + this rank's text, C]

    See :class:`StreamDim` for the options.

    Raises:
        PlanError: no stream, or options that do not go together.
    """
    if not streams:
        raise PlanError('seq needs at least one stream name, as in seq(1, "image")')
    unknown = ({*local} | {*whole}) - {*streams}
    if unknown or {*local} & {*whole}:
        raise PlanError(f"local={local} and whole={whole}: needed: different ones of the streams {streams}")
    if (empty or anew) and len(streams) > 1:
        raise PlanError(f"empty=True and anew=True are for inputs of one stream, found {streams}")
    return StreamDim(dim, streams, optional, ndim, when_ndim, folded, local, whole, empty, anew, if_taken)


@dataclass(frozen=True)
class StreamCount:
    """An integer argument that counts the tokens of streams. Made by :func:`count`.

    Attributes:
        streams: names of the streams.
        optional: the argument may be None or not passed at all.
        leading: it counts the first tokens of the stream, such as those of a frame that is given, not all of them: a
            rank gets how many of those it holds.
        default: what is counted where the argument is not passed; for streams that only some calls have.
    """

    streams: tuple[str, ...]
    optional: bool = False
    leading: bool = False
    default: int | None = None

    def __repr__(self) -> str:
        parts = [*map(repr, self.streams)] + ["optional=True"] * self.optional + ["leading=True"] * self.leading
        return f"count({', '.join(parts + [f'default={self.default}'] * (self.default is not None))})"


def count(*streams: str, optional: bool = False, leading: bool = False, default: int | None = None) -> StreamCount:
    """An integer argument by which a module splits what it holds: it gets the rank's own number of rows.

    ``ShardInputs(text_seq_len=count("text"))``: a block that is told the text length of the whole sequence would cut
    its local tensor in the wrong place. See :class:`StreamCount` for the options.

    Raises:
        PlanError: no stream, or several with ``leading``.
    """
    if not streams:
        raise PlanError('count needs at least one stream name, as in count("text")')
    if leading and len(streams) > 1:
        raise PlanError(f"leading=True counts tokens of one stream, found {streams}")
    return StreamCount(streams, optional, leading, default)


@dataclass(frozen=True)
class StreamGrid:
    """An argument that says how many frames, rows and columns of tokens a stream has. Made by :func:`grid`."""

    stream: str
    at: tuple[int, ...]
    optional: bool = False

    @property
    def streams(self) -> tuple[str, ...]:
        """The stream, as a tuple of one."""
        return (self.stream,)

    def __repr__(self) -> str:
        return f"grid({', '.join([repr(self.stream), *map(str, self.at)] + ['optional=True'] * self.optional)})"


def grid(stream: str, *at: int, optional: bool = False) -> StreamGrid:
    """An argument with sizes whose product is the length of a stream. It tells the length and stays as it is.

    ``img_shapes=grid("target", 0, -1)``: the sizes are ``img_shapes[0][-1]``, such as ``(1, 64, 64)``.
    """
    return StreamGrid(stream, at, optional)


@dataclass(frozen=True)
class StreamParts:
    """A tuple or list argument whose parts are cut differently. Made by :func:`parts`."""

    parts: tuple[StreamDim | None, ...]
    optional: bool = False

    @property
    def streams(self) -> tuple[str, ...]:
        """The streams of all parts, in the order in which the parts name them."""
        return tuple(dict.fromkeys(name for part in self.parts if part is not None for name in part.streams))

    def __repr__(self) -> str:
        return f"parts({', '.join([*map(repr, self.parts)] + ['optional=True'] * self.optional)})"


def parts(*parts: StreamDim | None, optional: bool = False) -> StreamParts:
    """An argument that is a tuple or list, said part by part; None leaves a part whole.

    ``rotary_emb=parts(seq(0, "text"), seq(0, "video"))`` for ``(rope of text, rope of video)``. A part that is itself
    a tuple of tensors has each of them cut alike.

    Raises:
        PlanError: no part is cut.
    """
    if all(part is None for part in parts):
        raise PlanError('parts needs at least one seq, as in parts(None, seq(1, "video"))')
    return StreamParts(parts, optional)
