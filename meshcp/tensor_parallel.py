"""Tensor parallel styles that cut attention by whole heads, also where heads do not divide.

A parameter is an ordinary ``DTensor`` with ``Shard`` (``torch.chunk`` cuts), so FSDP2, checkpoints and
``full_tensor()`` understand it. Where the cut falls inside a head, or a row-wise weight takes a concatenation, the few
rows that another rank computes with travel to it in the forward pass, and their gradients back: weights, not
activations, and nothing at all where the cuts agree.

The styles are for ``torch.distributed.tensor.parallel.parallelize_module``; plans made of them are in
:mod:`meshcp.models.tensor_parallel`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from . import _compat
from .collectives import all_reduce, all_to_all
from .errors import PlanError
from .layout import map_tensors
from .mesh import check_order
from .placements import Interval, shard_interval, total

ORDER = (
    "1. parallelize_module(model, mesh['tp'], meshcp.tp_plan(model, mesh))  2. meshcp.parallelize(model, mesh)  "
    "3. activation checkpointing  4. fully_shard(block, mesh=meshcp.fsdp_mesh(mesh)) or DistributedDataParallel  "
    "5. torch.compile"
)
"""The order in which parallelisms are put on a model."""

Cut = tuple[tuple[Interval, ...], ...]
"""For each rank the intervals of a dimension that it holds, ascending."""

_MARK = "_meshcp_tp"


@dataclass(frozen=True)
class TensorMesh:
    """The tensor-parallel ranks: what a style works with once it is attached."""

    degree: int
    rank: int
    group: str


# -- autograd over the tp axis -----------------------------------------------------------------------------------------


class _Enter(torch.autograd.Function):
    """Identity whose gradient is the sum over tp: every rank goes on with its own heads from the same tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_reduce(grad.contiguous(), ctx.group), None


class _Leave(torch.autograd.Function):
    """Sum over tp whose gradient is the identity: from here on all ranks hold the same."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:
        return all_reduce(x.contiguous(), group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _Recut(torch.autograd.Function):
    """Dimension ``dim`` from one cut to another; the gradient goes the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, before: Cut, after: Cut, tp: TensorMesh) -> torch.Tensor:
        ctx.dim, ctx.before, ctx.after, ctx.tp = dim, before, after, tp
        return _move(x, dim, before, after, tp)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _move(grad, ctx.dim, ctx.after, ctx.before, ctx.tp), None, None, None, None


def _enter(x: torch.Tensor, tp: TensorMesh) -> torch.Tensor:
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    entered: torch.Tensor = _Enter.apply(x, tp.group)
    return entered


def _leave(x: torch.Tensor, tp: TensorMesh) -> torch.Tensor:
    left: torch.Tensor = _Leave.apply(x, tp.group)
    return left


def _recut(x: torch.Tensor, dim: int, before: Cut, after: Cut, tp: TensorMesh) -> torch.Tensor:
    if before == after:
        return x
    moved: torch.Tensor = _Recut.apply(x, dim, before, after, tp)
    return moved


def _common(held: Sequence[Interval], wanted: Sequence[Interval]) -> list[Interval]:
    """What both contain, ascending."""
    pairs = ((max(a, c), min(b, d)) for a, b in held for c, d in wanted)
    return sorted(pair for pair in pairs if pair[0] < pair[1])


def _offset(intervals: Sequence[Interval], position: int) -> int:
    """Where a global position lies among what a rank holds."""
    before = 0
    for start, stop in intervals:
        if start <= position < stop:
            return before + position - start
        before += stop - start
    raise AssertionError((intervals, position))


def _move(x: torch.Tensor, dim: int, before: Cut, after: Cut, tp: TensorMesh) -> torch.Tensor:
    rows = x.movedim(dim, 0).contiguous()
    width = rows[0].numel() if rows.shape[0] else _width(x, dim)
    pieces, send = [], []
    for rank in range(tp.degree):
        common = _common(before[tp.rank], after[rank])
        send.append(total(common) * width)
        pieces += [rows.narrow(0, _offset(before[tp.rank], a), b - a).reshape(-1) for a, b in common]
    incoming = [_common(before[rank], after[tp.rank]) for rank in range(tp.degree)]
    receive = [total(common) * width for common in incoming]
    packed = torch.cat(pieces) if pieces else rows.new_empty(0)
    flat = all_to_all(packed, receive, send, tp.group).view(-1, *rows.shape[1:])
    found, start = [], 0
    for common in incoming:
        for a, b in common:
            found.append((a, flat[start : start + b - a]))
            start += b - a
    ordered = [part for _, part in sorted(found, key=lambda item: item[0])]
    return (torch.cat(ordered) if ordered else flat).movedim(0, dim)


def _width(x: torch.Tensor, dim: int) -> int:
    width = 1
    for position, size in enumerate(x.shape):
        width *= 1 if position == dim else size
    return width


# -- cuts --------------------------------------------------------------------------------------------------------------


def _chunks(length: int, degree: int) -> Cut:
    """``Shard``'s own cut: how parameters are stored."""
    return tuple((shard_interval(length, degree, rank),) for rank in range(degree))


def head_interval(heads: int, degree: int, rank: int) -> Interval:
    """The heads that a tensor-parallel rank computes: as equal as can be, and at least one each.

    ::

        heads 5, degree 3        rank 0   rank 1   rank 2
                                 0 1      2 3      4
    """
    size, extra = divmod(heads, degree)
    start = rank * size + min(rank, extra)
    return start, start + size + (rank < extra)


def _head_cut(features: int, heads: int, degree: int) -> Cut:
    width = features // heads
    cut = (head_interval(heads, degree, rank) for rank in range(degree))
    return tuple(((start * width, stop * width),) for start, stop in cut)


def _joined(parts: Sequence[tuple[int, Cut]]) -> Cut:
    """The cut of a concatenation of parts (length and cut of each)."""
    degree = len(parts[0][1])
    ranks: list[tuple[Interval, ...]] = []
    for rank in range(degree):
        offset, intervals = 0, []
        for length, cut in parts:
            intervals += [(offset + start, offset + stop) for start, stop in cut[rank]]
            offset += length
        ranks.append(tuple(intervals))
    return tuple(ranks)


# -- attaching ---------------------------------------------------------------------------------------------------------


def sums_by_itself(module: nn.Module) -> bool:
    """Whether a style of this file sums the gradients of the module's parameters over tp."""
    return module.__dict__.get(_MARK) == "summed"


def _check_module(module: nn.Module, style: object) -> None:
    if isinstance(module, FSDPModule) or any(isinstance(inner, FSDPModule) for inner in module.modules()):
        raise PlanError(f"{style!r}: {type(module).__name__} is sharded by FSDP already; the order is {ORDER}")
    if any(hasattr(inner.__dict__.get("forward"), "meshcp_wrapper") for inner in module.modules()):
        raise PlanError(f"{style!r}: {type(module).__name__} is context-parallel already; the order is {ORDER}")
    if _MARK in module.__dict__:
        raise PlanError(f"{style!r}: {type(module).__name__} is tensor-parallel already; apply the plan once")


def _linear(owner: nn.Module, path: str, style: object) -> nn.Linear:
    try:
        module = owner.get_submodule(path) if path else owner
    except AttributeError:
        raise PlanError(f"{style!r}: {type(owner).__name__} has no {path!r}; correct the plan") from None
    if type(module) is not nn.Linear:
        raise PlanError(
            f"{style!r}: {path or type(owner).__name__} is {type(module).__name__}; needed: torch.nn.Linear. Apply "
            "tensor parallelism before adapters and quantization are added, and unfuse projections"
        )
    if isinstance(module.weight, DTensor):
        raise PlanError(
            f"{style!r}: the weight of {path or type(owner).__name__} is a DTensor on "
            f"{module.weight.device_mesh.mesh_dim_names} already; the order is {ORDER}"
        )
    return module


def _distribute(module: nn.Module, name: str, mesh: DeviceMesh, dim: int) -> None:
    """Make a parameter a ``DTensor`` of which this rank keeps its shard. No communication: all ranks hold the same."""
    parameter = getattr(module, name)
    if parameter is None:
        return
    shard = distribute_tensor(parameter.detach(), mesh, [Shard(dim)], src_data_rank=None)
    # A copy, so that the rest of the whole parameter can be freed.
    local = shard.to_local().clone()
    shard = DTensor.from_local(local, mesh, [Shard(dim)], shape=parameter.shape, stride=parameter.stride())
    module.register_parameter(name, nn.Parameter(shard, requires_grad=parameter.requires_grad))


def _here(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _bias(linear: nn.Linear) -> torch.Tensor | None:
    bias = cast("torch.Tensor | None", linear.bias)
    return None if bias is None else _here(bias)


def _replace_forward(module: nn.Module, forward: Callable[..., Any], mark: str = "sharded") -> None:
    module.__dict__["forward"] = functools.wraps(module.forward)(forward)
    module.__dict__[_MARK] = mark


def _cut_columns(linear: nn.Linear, mesh: DeviceMesh, tp: TensorMesh, cut: Cut, enter: bool) -> None:
    """``y[..., cut] = x W^T + b``: each rank computes the output features of its cut."""
    stored = _chunks(linear.out_features, tp.degree)
    _distribute(linear, "weight", mesh, 0)
    _distribute(linear, "bias", mesh, 0)

    def forward(x: torch.Tensor) -> torch.Tensor:
        weight = _recut(_here(linear.weight), 0, stored, cut, tp)
        bias = _bias(linear)
        if bias is not None:
            bias = _recut(bias, 0, stored, cut, tp)
        return F.linear(_enter(x, tp) if enter else x, weight, bias)

    _replace_forward(linear, forward)


def _cut_rows(linear: nn.Linear, mesh: DeviceMesh, tp: TensorMesh, cut: Cut) -> None:
    """``y = sum over ranks of x[..., cut] W[:, cut]^T, + b``: each rank holds the input features of its cut."""
    stored = _chunks(linear.in_features, tp.degree)
    _distribute(linear, "weight", mesh, 1)

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = _leave(F.linear(x, _recut(_here(linear.weight), 1, stored, cut, tp)), tp)
        bias = _bias(linear)
        return y if bias is None else y + bias

    _replace_forward(linear, forward)


def _sum_over_heads(norm: nn.Module, tp: TensorMesh) -> None:
    """A norm over the width of a head: its parameters stay whole, their gradients are summed over tp."""
    original = norm.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        own = _compat.own_parameters(norm)
        before = dict(own)
        for name, parameter in before.items():
            if parameter is not None:
                own[name] = _enter(_here(parameter), tp)  # type: ignore[assignment]
        try:
            return original(*args, **kwargs)
        finally:
            own.update(before)

    _replace_forward(norm, forward, "summed")


def _norm_across_heads(norm: nn.RMSNorm, mesh: DeviceMesh, tp: TensorMesh, cut: Cut) -> None:
    """An RMSNorm over all heads together (Wan): the mean square is taken over tp."""
    features = norm.normalized_shape[0]
    stored = _chunks(features, tp.degree)
    _distribute(norm, "weight", mesh, 0)

    def forward(x: torch.Tensor) -> torch.Tensor:
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        square = _enter(_leave(wide.square().sum(-1, keepdim=True), tp), tp) / features
        eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
        normed = wide * torch.rsqrt(square + eps)
        if norm.weight is not None:
            normed = normed * _recut(_here(norm.weight), 0, stored, cut, tp)
        return normed.to(x.dtype)

    _replace_forward(norm, forward)


class _Style(ParallelStyle):
    # Not frozen, as parallelize_module writes an attribute of its own.

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if device_mesh.ndim != 1:
            raise PlanError(
                f"{self!r} got a mesh of axes {device_mesh.mesh_dim_names}; needed: its tp axis, mesh['tp']"
            )
        check_order(device_mesh, device_mesh.mesh_dim_names or ())
        _check_module(module, self)
        if device_mesh.size() > 1:
            tp = TensorMesh(device_mesh.size(), device_mesh.get_local_rank(), device_mesh.get_group().group_name)
            self.cut(module, device_mesh, tp)
        return module

    def cut(self, module: nn.Module, mesh: DeviceMesh, tp: TensorMesh) -> None:
        """Make the module tensor-parallel."""
        raise NotImplementedError


@dataclass(unsafe_hash=True)
class ShardHeads(_Style):
    """An attention module whose heads are shared out over tp.

    Attributes:
        columns: its projections to heads (query, key, value ...); those that the module lacks are left out.
        rows: its projections from heads.
        norms: QK-norms over the width of one head. They stay whole; the gradients of their parameters are summed over
            tp in the backward pass, so that every rank has the whole gradient as it comes, also under FSDP2 and with
            accumulation.
        wide_norms: QK-norms over all heads together.
    """

    columns: tuple[str, ...]
    rows: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()
    wide_norms: tuple[str, ...] = ()

    def cut(self, module: nn.Module, mesh: DeviceMesh, tp: TensorMesh) -> None:
        heads = self._check(module, tp)
        for path in self._present(module, self.columns):
            linear = _linear(module, path, self)
            _cut_columns(linear, mesh, tp, _head_cut(linear.out_features, heads, tp.degree), enter=False)
        for path in self._present(module, self.rows):
            linear = _linear(module, path, self)
            _cut_rows(linear, mesh, tp, _head_cut(linear.in_features, heads, tp.degree))
        for path in self._present(module, self.norms):
            _sum_over_heads(module.get_submodule(path), tp)
        for path in self._present(module, self.wide_norms):
            norm = module.get_submodule(path)
            assert isinstance(norm, nn.RMSNorm)
            _norm_across_heads(norm, mesh, tp, _head_cut(norm.normalized_shape[0], heads, tp.degree))
        start, stop = head_interval(heads, tp.degree, tp.rank)
        for name in ("inner_dim", "inner_kv_dim", "kv_inner_dim"):
            if isinstance(getattr(module, name, None), int):
                setattr(module, name, getattr(module, name) // heads * (stop - start))
        module.heads = stop - start  # type: ignore[assignment]
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            # One sum a tensor in the backward pass, not one a projection.
            args = tuple(_enter(x, tp) if isinstance(x, torch.Tensor) else x for x in args)
            kwargs = {name: _enter(x, tp) if isinstance(x, torch.Tensor) else x for name, x in kwargs.items()}
            return original(*args, **kwargs)

        _replace_forward(module, forward)

    def _check(self, module: nn.Module, tp: TensorMesh) -> int:
        name, heads = type(module).__name__, getattr(module, "heads", None)
        if not isinstance(heads, int):
            raise PlanError(f"{self!r}: {name} has no head count (.heads); it is for attention modules")
        if tp.degree > heads:
            raise PlanError(
                f"{self!r}: {name} has {heads} heads, fewer than the tp degree {tp.degree}; needed: at least one head "
                "a rank. Use a smaller tp axis, and a larger ring, ulysses or fsdp axis"
            )
        if getattr(module, "fused_projections", False):
            raise PlanError(
                f"{self!r}: {name} has fused projections; call model.unfuse_qkv_projections() before tensor parallelism"
            )
        processor = getattr(module, "processor", None)
        if isinstance(processor, nn.Module) and next(processor.parameters(), None) is not None:
            raise PlanError(
                f"{self!r}: the processor {type(processor).__name__} of {name} has weights of its own (IP-Adapter?), "
                "which the plan does not shard; tensor parallelism needs a processor without weights"
            )
        for path in self._present(module, self.columns):
            linear = _linear(module, path, self)
            if linear.out_features % heads:
                raise PlanError(f"{self!r}: {path} of {name} has {linear.out_features} features for {heads} heads")
        for path in self._present(module, self.wide_norms):
            if not isinstance(module.get_submodule(path), nn.RMSNorm):
                raise PlanError(
                    f"{self!r}: {path} of {name} is {type(module.get_submodule(path)).__name__}; a norm across heads "
                    "must be torch.nn.RMSNorm"
                )
        covered = {*self.columns, *self.rows, *self.norms, *self.wide_norms}
        for path, parameter in module.named_parameters():
            if path.rpartition(".")[0] not in covered:
                raise PlanError(
                    f"{self!r} leaves {path} {tuple(parameter.shape)} of {name} out; name it among the columns, rows "
                    "or norms, or take it away"
                )
        return heads

    @staticmethod
    def _present(module: nn.Module, paths: Sequence[str]) -> list[str]:
        found = []
        for path in paths:
            value: Any = module
            for atom in path.split("."):
                value = value[int(atom)] if atom.isdigit() and value is not None else getattr(value, atom, None)
            if isinstance(value, nn.Module) and not isinstance(value, nn.Identity):
                found.append(path)
        return found


@dataclass(unsafe_hash=True)
class ShardHidden(_Style):
    """A feed-forward module whose hidden features are shared out over tp.

    Attributes:
        column: path of the projection in.
        row: path of the projection out.
    """

    column: str = "net.0.proj"
    row: str = "net.2"

    def cut(self, module: nn.Module, mesh: DeviceMesh, tp: TensorMesh) -> None:
        column, row = _linear(module, self.column, self), _linear(module, self.row, self)
        if column.out_features != row.in_features:
            raise PlanError(
                f"{self!r}: {self.column} makes {column.out_features} features, {self.row} takes {row.in_features}; a "
                "gated activation (GEGLU, SwiGLU) pairs features that a cut would part. Needed: an activation that "
                "works on each feature alone"
            )
        cut = _chunks(column.out_features, tp.degree)
        _cut_columns(column, mesh, tp, cut, enter=True)
        _cut_rows(row, mesh, tp, cut)


@dataclass(unsafe_hash=True)
class ShardParallelBlock(_Style):
    """A block whose attention and feed-forward run side by side and share the projection out (FLUX's single blocks).

    Attributes:
        attention: path of the attention module, and how its heads are cut.
        column: path of the feed-forward's projection in.
        row: path of the projection that takes the concatenation of heads and hidden features.
    """

    attention: str
    heads: ShardHeads
    column: str
    row: str

    def cut(self, module: nn.Module, mesh: DeviceMesh, tp: TensorMesh) -> None:
        attention = module.get_submodule(self.attention)
        heads = getattr(attention, "heads", 1)
        column, row = _linear(module, self.column, self), _linear(module, self.row, self)
        inner = row.in_features - column.out_features
        if inner <= 0 or inner % heads:
            raise PlanError(
                f"{self!r}: {self.row} takes {row.in_features} features, of which {column.out_features} come from "
                f"{self.column}; the other {inner} must be those of {heads} heads"
            )
        hidden = _chunks(column.out_features, tp.degree)
        self.heads._apply(attention, mesh)
        _cut_columns(column, mesh, tp, hidden, enter=True)
        _cut_rows(row, mesh, tp, _joined([(inner, _head_cut(inner, heads, tp.degree)), (column.out_features, hidden)]))
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            if not (torch.compiler.is_compiling() and _compat.is_compiled(module)):
                return output
            # Text and image are returned as views of one tensor, and AOTAutograd refuses a graph with DTensor inputs
            # whose outputs share memory.
            return map_tensors(output, lambda x, _: x.clone(), "output")

        _replace_forward(module, forward)


__all__ = ["ORDER", "ShardHeads", "ShardHidden", "ShardParallelBlock", "head_interval", "sums_by_itself"]
