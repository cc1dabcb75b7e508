"""One dimension cut over one mesh axis or over two: DTensor's own ``Shard``, in integers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ..errors import LayoutError
from .intervals import Interval


def shard_interval(length: int, degree: int, rank: int) -> Interval:
    """The part of ``range(length)`` that ``rank`` of ``degree`` holds, as ``torch.chunk`` cuts it.

    ::

        length 10, degree 4        rank 0      rank 1      rank 2    rank 3
        chunk = ceil(10/4) = 3   [0 1 2]     [3 4 5]     [6 7 8]    [9]
        length 3, degree 4       [0]         [1]         [2]        []

    The last shards may be shorter or empty, exactly as in ``torch.distributed.tensor.Shard``; none is larger than
    ``ceil(length / degree)``.
    """
    chunk = -(-length // degree)
    return min(length, rank * chunk), min(length, (rank + 1) * chunk)


def shard_sizes(length: int, degree: int) -> tuple[int, ...]:
    """The length of each rank's shard, in rank order. See :func:`shard_interval`."""
    return tuple(stop - start for start, stop in (shard_interval(length, degree, rank) for rank in range(degree)))


def sequence_placements(mesh: DeviceMesh, dim: int) -> tuple[Placement, ...]:
    """DTensor placements that shard tensor dimension ``dim`` over the ring and ulysses axes of ``mesh``.

    Every other axis of the mesh (``dp``, ``tp`` ...) is ``Replicate()``.
    """
    names = mesh.mesh_dim_names or ()
    return tuple(Shard(dim) if name in ("ring", "ulysses") else Replicate() for name in names)


def local_interval(x: DTensor, dim: int) -> Interval:
    """Where this rank's shard of ``x`` lies along ``dim`` of the global tensor.

    Several mesh axes may cut the same dim, also FSDP after tensor parallel (``_StridedShard``, which is the outer axis
    of the mesh but the inner cut)::

        length 5, placements (Shard(0), Shard(0)), mesh 2 x 2        [0 1] [2]   [3] [4]
        length 5, FSDP over 2 of a tensor-parallel cut over 2        [0 1] [3]   [2] [4]
    """
    coordinate = x.device_mesh.get_coordinate()
    if coordinate is None:
        raise LayoutError(f"this rank is not in the mesh {x.device_mesh} of the tensor; ask on ranks of the mesh only")
    outer: list[int] = []
    inner: list[int] = []
    for axis, placement in enumerate(x.placements):
        if placement.is_partial():
            raise LayoutError(f"the tensor is {placement} on a mesh axis, a sum still to be made: redistribute it")
        if getattr(placement, "dim", None) == dim:
            (inner if hasattr(placement, "split_factor") else outer).append(axis)
    start, stop = 0, x.shape[dim]
    for axis in outer + inner[::-1]:
        low, high = shard_interval(stop - start, x.device_mesh.size(axis), coordinate[axis])
        start, stop = start + low, start + high
    return start, stop


class _Local(torch.autograd.Function):
    """``DTensor.to_local`` whose gradient has the global shape and strides of the tensor.

    torch's own derives them from the local gradient, so with uneven shards each rank has others. They are part of the
    key by which DTensor caches what it dispatches, and a cache that hits on some ranks only makes them part ways as
    soon as it holds an equal mesh with other process groups.
    """

    @staticmethod
    def forward(ctx: Any, x: DTensor, grad_placements: Sequence[Placement]) -> torch.Tensor:
        ctx.mesh, ctx.placements, ctx.shape, ctx.stride = x.device_mesh, grad_placements, x.shape, x.stride()
        local = x.to_local()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[DTensor, None]:
        order = sorted(range(grad.ndim), key=lambda dim: ctx.stride[dim], reverse=True)
        back = sorted(range(grad.ndim), key=order.__getitem__)
        grad = grad.permute(order).contiguous().permute(back)
        stride, size = [0] * grad.ndim, 1
        for dim in reversed(order):
            stride[dim], size = size, size * ctx.shape[dim]
        return DTensor.from_local(
            grad, ctx.mesh, ctx.placements, run_check=False, shape=ctx.shape, stride=tuple(stride)
        ), None


def to_local(x: DTensor, grad_placements: Sequence[Placement]) -> torch.Tensor:
    """This rank's part of ``x``, differentiable; the gradient has ``grad_placements``, and the shape and strides of
    ``x`` on every rank, however unevenly it is cut."""
    local: torch.Tensor = _Local.apply(x, grad_placements)
    return local
