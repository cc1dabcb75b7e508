"""Styles for what mixes tokens without softmax attention: linear attention, and convolutions over folded tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..attention.distributed import check_rows
from ..collectives import sum_over
from ..errors import AttentionError, PlanError
from ..placements import StreamDim, StreamGrid, select
from .base import MeshcpStyle, Runtime, Undo, forward_parameters, frozen_style, named
from .hooks import Arguments, Call, before_forward, wrap_forward
from .inputs import grid_size


@frozen_style(init=False)
class LinearAttention(MeshcpStyle):
    """Linear attention over sharded streams: a state that is a sum over the sequence, applied to each query.

    The processor makes the state with one ``torch.matmul`` of values ``[B, H, D, S]`` and keys ``[B, H, S, D]``, its
    first; the state is summed over the mesh. One all-reduce of ``[B, H, D, D]``, whatever the length of the sequence.
    """

    streams: tuple[str, ...]

    def __init__(self, streams: Sequence[str]) -> None:
        if isinstance(streams, str) or not streams:
            raise PlanError(f'LinearAttention(streams={streams!r}): needed: a tuple of names, such as ("image",)')
        object.__setattr__(self, "streams", tuple(streams))

    def __repr__(self) -> str:
        return f"LinearAttention(streams={self.streams})"

    def attach(self, module: nn.Module, path: str, runtime: Runtime) -> Undo:
        def run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if runtime.idle:
                return original(*args, **kwargs)
            mode = _FirstMatmul(self.streams, f"linear attention in {named(path)}", runtime)
            with mode:
                output = original(*args, **kwargs)
            if not mode.seen:
                raise AttentionError(
                    f"{named(path)} ran without a torch.matmul of values and keys; LinearAttention covers processors "
                    "that make their state with one. Set such a processor, or cover the module with another style"
                )
            return output

        return wrap_forward(module, run)


class _FirstMatmul(TorchFunctionMode):
    """Makes the first ``torch.matmul`` contract the whole sequence."""

    def __init__(self, streams: tuple[str, ...], who: str, runtime: Runtime) -> None:
        super().__init__()
        self.streams, self.who, self.runtime = streams, who, runtime
        self.seen = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.matmul or self.seen:
            return func(*args, **(kwargs or {}))
        self.seen = True
        return self._state(*args, **(kwargs or {}))

    def _state(self, input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        context, lengths = self.runtime.context, self.runtime.lengths
        layout = lengths.layout(self.streams, self.who)
        check_rows(input.shape[-1], layout, context, f"the values of {self.who}")
        check_rows(other.shape[-2], layout, context, f"the keys of {self.who}")
        real = layout.real(context.ring_rank, context.ulysses_rank)
        if real is not None:
            input, other = select(input, input.ndim - 1, real), select(other, other.ndim - 2, real)
        state = torch.matmul(input, other)
        for degree, group in context.axes:
            if degree > 1:
                state = sum_over(state, group)
        return state


@frozen_style()
class FoldTokens(MeshcpStyle):
    """A block that folds its tokens into rows and columns for a convolution inside it.

    ``FoldTokens("image", height="height", width="width", convolution="ff")``: names of the arguments that say how many
    rows and columns there are, and of the module that gets ``[B, C, rows, columns]``. The block is told that this
    rank's tokens are one column; the convolution runs on the rows that they lie in and ``reach`` more on either side,
    and this rank's tokens are cut out of the result. One all-gather of its input.
    """

    stream: str
    height: str
    width: str
    convolution: str
    reach: int = 1

    @property
    def named_streams(self) -> tuple[str, ...]:
        return (self.stream,)

    def check(self, module: nn.Module, path: str, runtime: Runtime) -> None:
        names = forward_parameters(module)
        if self.height not in names or self.width not in names or self.convolution not in dict(module.named_modules()):
            raise PlanError(
                f"{self!r} on {named(path)}: its forward takes {', '.join(names)}, and its modules are "
                f"{', '.join(name for name, _ in module.named_children())}; correct the names in the plan"
            )

    def attach(self, module: nn.Module, path: str, runtime: Runtime) -> Undo:
        names, lengths = forward_parameters(module), runtime.lengths
        grid = StreamGrid(self.stream, ())
        sizes: list[Any] = []

        def fold(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
            given = Arguments(names, args, kwargs)
            sizes[:] = [given.get(self.height), given.get(self.width)]
            who = f"({self.height}, {self.width}) of {named(path)}"
            lengths.tell(self.stream, grid_size(sizes, grid, who), who)
            start, stop = lengths.held(self.stream)
            given.set(self.height, stop - start)
            given.set(self.width, 1)
            return given.call

        def convolve(original: Callable[..., Any], x_BCS1: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor
            if runtime.idle:
                out = original(x_BCS1)
                return out
            height, width = sizes
            start, stop = lengths.held(self.stream)
            first, last = max(0, start // width - self.reach), min(height, -(-stop // width) + self.reach)
            where = StreamDim(2, (self.stream,), ndim=4)
            whole = lengths.gather(x_BCS1, where, f"the input of {self.convolution!r} in {named(path)}")
            rows = whole.narrow(2, first * width, (last - first) * width).reshape(*whole.shape[:2], last - first, width)
            out = original(rows).flatten(2, 3).unsqueeze(-1)
            return out.narrow(2, start - first * width, stop - start)

        before = before_forward(module, path, runtime, fold)
        inside = wrap_forward(module.get_submodule(self.convolution), convolve)

        def undo() -> None:
            inside()
            before()

        return undo
