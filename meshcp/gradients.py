"""The training contract: the MEAN over the context-parallel ranks of a parameter's gradient is the single process's.

That is what FSDP2, HSDP and DDP compute, so over (data x context) ranks they are right as they come. For what has no
such reducer there is :func:`average_gradients`; for a loss on unequal local shards :func:`local_mean`; for the noise
:func:`seed_everything`; for a norm over parameters on different meshes :func:`clip_grad_norm_`.

Axes of a mesh fall into two kinds. Ranks along ``ring``, ``ulysses``, ``tp`` and ``cfg`` work on the same sample; along
every other axis (``dp``, ``fsdp``, ``replicate`` ...) on different ones.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from . import _compat
from .errors import LayoutError, MeshError
from .mesh import RING, ULYSSES
from .plan import clean_path
from .tensor_parallel import sums_by_itself

SAME_SAMPLE = (RING, ULYSSES, "tp", "cfg")
"""Axes along which ranks work on the same sample."""

_BUCKET = 64 << 20


@dataclass(frozen=True)
class Axis:
    """Ranks to reduce over."""

    name: str
    group: dist.ProcessGroup = field(compare=False)
    ranks: frozenset[int]


def average_gradients(model: nn.Module, mesh: DeviceMesh, *, axes: Sequence[str] | None = None) -> None:
    """Replace every gradient by its mean over ranks: for a plain loop, after ``backward`` and before the optimizer.

    With accumulation over micro-batches it is called once, after the last of them. Gradients travel in flat buckets of
    one dtype, in one all-reduce a bucket and axis. A parameter that has no gradient here counts as zero; one that has
    none on any rank is left without. Which collectives run depends on the parameters alone, so ranks with and without
    gradients never wait for each other.

    A ``DTensor`` (a tensor-parallel shard, FSDP over other axes) is averaged shard by shard. Where FSDP has reduced
    along an axis already, nothing is left to do along it.

    Args:
        model: what was trained; the same on every rank.
        mesh: the mesh given to ``parallelize``.
        axes: the axes to average over. By default ``ring`` and ``ulysses``; name the data axes as well where the plain
            loop has them: ``axes=("dp", "ring", "ulysses")``. An axis that the mesh lacks is an error, unless it is one
            of the two.

    Raises:
        MeshError: an axis that the mesh does not have.
        LayoutError: a gradient that cannot be averaged: sparse, a partial sum, or a ``DTensor`` whose mesh contains the
            ranks to average over without FSDP having done so.
    """
    wanted = _axes(mesh, (RING, ULYSSES) if axes is None else axes)
    managed = any(isinstance(module, FSDPModule) for module in model.modules())
    groups: dict[tuple[Axis, ...], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        left = tuple(axis for axis in wanted if not _is_reduced(name, parameter, axis, managed))
        if left:
            groups.setdefault(left, []).append((name, parameter))
    for left, parameters in groups.items():
        average(parameters, left)


def average(parameters: Sequence[tuple[str, nn.Parameter]], axes: tuple[Axis, ...]) -> None:
    """Replace the gradients of named parameters by their means over ``axes``."""
    _reduce_gradients(parameters, axes, 1 / math.prod(len(axis.ranks) for axis in axes))


@torch.no_grad()
def _reduce_gradients(parameters: Sequence[tuple[str, nn.Parameter]], axes: tuple[Axis, ...], factor: float) -> None:
    """Their sums over ``axes`` times ``factor``. A missing one counts as zero, unless it is missing everywhere."""
    by_device: dict[torch.device, list[tuple[str, nn.Parameter]]] = {}
    for item in parameters:
        by_device.setdefault(item[1].device, []).append(item)
    for device, items in by_device.items():
        present = torch.tensor([p.grad is not None for _, p in items], dtype=torch.int32, device=device)
        _reduce(present, axes)
        for bucket in _buckets([item for item, ranks in zip(items, present.tolist(), strict=True) if ranks]):
            _reduce_bucket(bucket, axes, factor)


def sum_over_tp(model: nn.Module, mesh: DeviceMesh, *parameters: str, axis: str = "tp") -> None:
    """Sum the gradients of replicated parameters that each tensor-parallel rank used for its own heads only.

    The tensor parallel plans that meshcp ships do this by themselves, in the backward pass. This is for a plan of your
    own, with ``ColwiseParallel`` projections and QK-norms that stay replicated::

        meshcp.sum_over_tp(model, mesh, "*.norm_q.weight", "*.norm_k.weight")

    Call it once, before the optimizer's step, also with accumulation and beside FSDP2 (whose shards it sums).

    Args:
        parameters: names, with ``*`` for any part of one (``fnmatch``).
        axis: name of the tensor-parallel axis.

    Raises:
        MeshError: a mesh without the axis.
        LayoutError: a name that matches nothing, a parameter that is sharded over the axis, or one whose gradient is
            summed already.
    """
    wanted = _axes(mesh, (axis,))
    found: list[tuple[str, nn.Parameter]] = []
    unmatched = set(parameters)
    done = {clean_path(path) for path, module in model.named_modules() if sums_by_itself(module)}
    for name, parameter in model.named_parameters():
        path = clean_path(name)
        hits = [pattern for pattern in parameters if fnmatchcase(path, pattern)]
        unmatched -= set(hits)
        if not hits or not parameter.requires_grad:
            continue
        if path.rpartition(".")[0] in done:
            raise LayoutError(
                f"the gradient of {path} is summed over {axis!r} in the backward pass, by the tensor parallel style of "
                "meshcp; leave it out here"
            )
        if isinstance(parameter, DTensor) and any(_is_reduced(name, parameter, over, managed=True) for over in wanted):
            raise LayoutError(
                f"{path} is sharded over {axis!r} ({parameter.placements}); only a replicated parameter, of which "
                "every rank computes a part of the gradient, is summed. Leave it out"
            )
        found.append((name, parameter))
    if unmatched:
        raise LayoutError(
            f"{sorted(unmatched)} match no parameter of {type(model).__name__}; needed: names as named_parameters() "
            'gives them, such as "*.norm_q.weight"'
        )
    if wanted:
        _reduce_gradients(found, wanted, 1.0)


def local_mean(
    loss: torch.Tensor,
    mesh: DeviceMesh,
    *,
    weights: torch.Tensor | None = None,
    axes: Sequence[str] | None = None,
) -> torch.Tensor:
    """The mean over the tokens of all ranks, from the losses of this rank's tokens.

    For ``parallelize(..., gather=False)``, where each rank holds a part, and parts differ in size: the mean of the
    ranks' means is not the mean. The value is that of the single process on every rank; its gradient is weighed such
    that the mean over ranks of parameter gradients (FSDP2, DDP, :func:`average_gradients`) is the single process's::

        prediction = model(...).sample                       # this rank's rows
        target = handle.shard(target, seq(1, "image"))
        loss = meshcp.local_mean((prediction - target).square(), mesh)

    Args:
        loss: loss of each element that this rank holds, of any shape, possibly empty; not reduced.
        weights: weight of each, broadcastable to ``loss`` (a mask of 0 and 1 for the mean over valid tokens). Constant:
            no gradient flows into it.
        axes: the axes to average over, by default ``ring`` and ``ulysses``. With data axes as well, a token counts
            alike in whichever sample it is.

    Returns:
        A scalar of the dtype of ``loss``; one small all-reduce an axis.

    Raises:
        LayoutError: weights that do not broadcast to the losses.
        MeshError: an axis that the mesh does not have.
    """
    wanted = _axes(mesh, (RING, ULYSSES) if axes is None else axes)
    if weights is not None:
        try:
            weights = weights.detach().to(loss.dtype).expand(loss.shape)
        except RuntimeError:
            raise LayoutError(
                f"local_mean: weights of shape {tuple(weights.shape)} for losses of shape {tuple(loss.shape)}; needed: "
                "weights that broadcast to the losses, sharded like them (handle.shard)"
            ) from None
    mean: torch.Tensor = _WeighedMean.apply(loss, weights, wanted)
    return mean


class _WeighedMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, weights: torch.Tensor | None, axes: tuple[Axis, ...]) -> torch.Tensor:
        exact = torch.float32 if loss.device.type == "mps" else torch.float64
        wide = loss.to(exact)
        if weights is None:
            sums = torch.stack([wide.sum(), wide.new_tensor(float(loss.numel()))])
        else:
            sums = torch.stack([(wide * weights).sum(), weights.to(exact).sum()])
        _reduce(sums, axes)
        ctx.degree, ctx.shape, ctx.dtype = math.prod(len(axis.ranks) for axis in axes), loss.shape, loss.dtype
        ctx.save_for_backward(sums[1], *([] if weights is None else [weights]))
        return (sums[0] / sums[1]).to(loss.dtype)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        total, *weights = ctx.saved_tensors
        share = (grad.to(total.dtype) * ctx.degree / total).to(ctx.dtype)
        return (share * weights[0] if weights else share.expand(ctx.shape)), None, None


def seed_everything(
    seed: int, mesh: DeviceMesh, *, step: int = 0, same: Sequence[str] = SAME_SAMPLE
) -> torch.Generator:
    """Seed every generator: alike where ranks work on the same sample, differently where they do not.

    ``random``, NumPy, and torch on the CPU and on every device are seeded; the returned generator (on the CPU) is for
    noise and timesteps. Ranks whose coordinates on the data axes are all 0 get exactly ``seed`` at step 0, so they draw
    what a single process with that seed draws.

    Between context-parallel ranks the default generators agree when this returns, and after everything that all of them
    draw alike. Dropout over an uneven sequence draws more on some ranks than on others, and then they no longer agree:
    draw noise from the returned generator, or seed anew each step (``step=``), which also makes a resumed run draw what
    the first would have.

    Args:
        mesh: the mesh given to ``parallelize``.
        step: mixed into the seed.
        same: names of the axes along which ranks must agree; all other axes of the mesh get different seeds.

    Returns:
        A generator on the CPU, seeded likewise.

    Raises:
        MeshError: a mesh without axis names, or without this rank.
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None or not mesh.mesh_dim_names:
        raise MeshError(f"{mesh} has no axis names or does not contain this rank; pass the mesh given to parallelize")
    place = 0
    for position, name in enumerate(mesh.mesh_dim_names):
        if name not in same:
            place = place * mesh.size(position) + coordinate[position]
    mine = _mix(seed, place, step)
    random.seed(mine)
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(mine % 2**32)
    torch.manual_seed(mine)
    return torch.Generator().manual_seed(mine)


def _mix(seed: int, *parts: int) -> int:
    """``seed`` itself while all parts are 0; else unrelated numbers for unequal arguments (splitmix64)."""
    value = seed % 2**63
    for position, part in enumerate(parts):
        if part:
            value = (value + (2 * part + position) * 0x9E3779B97F4A7C15) % 2**64
            value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
            value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % 2**64
            value = (value ^ (value >> 31)) % 2**63
    return value


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """``torch.nn.utils.clip_grad_norm_`` for parameters that do not all lie on one mesh.

    With FSDP2 alone torch's own does; beside tensor parallel some parameters are on ``(fsdp, tp)``, some on ``fsdp``
    and, without FSDP, some are plain, which torch refuses to combine. Every element counts once, whatever it is
    replicated over. Call it when gradients are final (after :func:`average_gradients`, if that is used).

    Returns:
        The norm before clipping, the same on every rank.

    Raises:
        LayoutError: a gradient that is sparse or a partial sum.
    """
    given = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
    tensors = [given] if isinstance(given, torch.Tensor) else list(given)
    powers: dict[tuple[str, ...], torch.Tensor] = {}
    groups: dict[tuple[str, ...], list[dist.ProcessGroup]] = {}
    grads: list[torch.Tensor] = []
    for index, tensor in enumerate(tensors):
        if not tensor.requires_grad:
            continue
        over = _sharded_over(tensor, f"parameter {index}")
        key = tuple(str(group.group_name) for group in over)
        device = tensor.device
        exact = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        groups[key] = over
        if key not in powers:
            powers[key] = torch.zeros((), dtype=exact, device=device)
        if tensor.grad is None:
            continue
        local = _local(tensor.grad, f"the gradient of parameter {index}")
        grads.append(local)
        norm = torch.linalg.vector_norm(local, norm_type, dtype=exact) if local.numel() else powers[key].new_zeros(())
        mine = norm if math.isinf(norm_type) else norm**norm_type
        powers[key] = torch.maximum(powers[key], mine) if math.isinf(norm_type) else powers[key] + mine
    operation = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
    for key, power in powers.items():
        for group in groups[key]:
            dist.all_reduce(power, operation, group=group)
    if not powers:
        return torch.zeros(())
    first = next(iter(powers.values()))
    stacked = torch.stack([power.to(first.device) for power in powers.values()])
    total = stacked.max() if math.isinf(norm_type) else stacked.sum() ** (1 / norm_type)
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for grad in grads:
        grad.mul_(scale.to(grad.device, grad.dtype))
    return total


def fsdp_mesh(mesh: DeviceMesh, *, shard: Sequence[str] | None = None, replicate: Sequence[str] = ()) -> DeviceMesh:
    """The mesh to give to ``fully_shard``: any axes of the mesh, in any order, as one to shard over.

    ::

        mesh = init_device_mesh("cuda", (2, 2, 2, 2), mesh_dim_names=("dp", "ring", "ulysses", "tp"))
        fsdp_mesh(mesh)                                                   shards over dp x ring x ulysses
        fsdp_mesh(mesh, shard=("ring", "ulysses"), replicate=("dp",))     HSDP: shards over 4, replicates over 2
        fsdp_mesh(mesh, shard=("dp",))                                    apart from context parallel: see below

    Every data axis and every context axis has to be among ``shard`` and ``replicate``, or its mean is yours to take
    (:func:`average_gradients` over the axes that are missing).

    Args:
        shard: names of the axes; by default all but ``tp``, ``cfg`` and those of ``replicate``.
        replicate: names of the axes to replicate over; axes that the mesh lacks may be named in neither.

    Returns:
        A mesh of one axis, or of two (replicate, shard). Every rank of ``mesh`` calls this: it makes process groups.

    Raises:
        MeshError: no axis to shard over, one that the mesh lacks, or one named for both.
    """
    names = mesh.mesh_dim_names or ()
    if shard is None:
        shard = [name for name in names if name not in ("tp", "cfg", *replicate)]
    unknown = [name for name in (*shard, *replicate) if name not in names]
    if unknown or not shard or set(shard) & set(replicate):
        raise MeshError(
            f"fsdp_mesh: shard={tuple(shard)}, replicate={tuple(replicate)} on a mesh of {names}; needed: at least one "
            "axis to shard over, each axis of the mesh at most once, and no others"
        )
    inner = _compat.flatten_axes(mesh, [name for name in names if name in shard])
    if not replicate:
        return inner
    return _compat.join_meshes(_compat.flatten_axes(mesh, [name for name in names if name in replicate]), inner)


def _axes(mesh: DeviceMesh, names: Sequence[str]) -> tuple[Axis, ...]:
    """The axes of degree above 1 among ``names``, in the order of the mesh."""
    known = mesh.mesh_dim_names or ()
    unknown = [name for name in names if name not in known and name not in (RING, ULYSSES)]
    if isinstance(names, str) or unknown:
        raise MeshError(f"axes={names!r}: the mesh has axes {known}; needed: a sequence of names of its axes")
    found = []
    for position, name in enumerate(known):
        if name in names and mesh.size(position) > 1:
            group = mesh.get_group(name)
            found.append(Axis(name, group, frozenset(dist.get_process_group_ranks(group))))
    return tuple(found)


def _is_reduced(name: str, parameter: torch.Tensor, axis: Axis, managed: bool) -> bool:
    """Whether the gradient is the same, or another shard, along the axis because the parameter's mesh contains it."""
    if not isinstance(parameter, DTensor):
        return False
    shared = axis.ranks & set(parameter.device_mesh.mesh.flatten().tolist())
    if len(shared) == 1:
        return False
    if shared == axis.ranks and managed:
        return True
    raise LayoutError(
        f"{name} is a DTensor on mesh axes {parameter.device_mesh.mesh_dim_names} with placements "
        f"{parameter.placements}, which {'contain' if shared == axis.ranks else 'cross'} the axis {axis.name!r} to "
        "average over, and no FSDP2 module reduces it; give parameters to fully_shard over these axes, or keep them "
        "apart from the context-parallel axes"
    )


def _local(grad: torch.Tensor, what: str) -> torch.Tensor:
    if isinstance(grad, DTensor):
        if any(placement.is_partial() for placement in grad.placements):
            raise LayoutError(f"{what} is a partial sum ({grad.placements}); redistribute it before")
        return grad.to_local()
    if grad.layout != torch.strided:
        raise LayoutError(f"{what} is sparse ({grad.layout}); needed: a dense gradient (Embedding(sparse=False))")
    return grad


def _sharded_over(tensor: torch.Tensor, what: str) -> list[dist.ProcessGroup]:
    if not isinstance(tensor, DTensor):
        return []
    mesh = tensor.device_mesh
    return [
        mesh.get_group(position)
        for position, placement in enumerate(tensor.placements)
        if not isinstance(placement, Replicate) and mesh.size(position) > 1
    ]


def _reduce(x: torch.Tensor, axes: Iterable[Axis]) -> None:
    for axis in axes:
        dist.all_reduce(x, group=axis.group)


def _buckets(parameters: list[tuple[str, nn.Parameter]]) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Parameters of one dtype each, up to a size, in their order."""
    by_dtype: dict[torch.dtype, list[tuple[str, nn.Parameter]]] = {}
    for item in parameters:
        by_dtype.setdefault(item[1].dtype, []).append(item)
    for items in by_dtype.values():
        bucket: list[tuple[str, nn.Parameter]] = []
        size = 0
        for item in items:
            nbytes = item[1].numel() * item[1].element_size()
            if bucket and size + nbytes > _BUCKET:
                yield bucket
                bucket, size = [], 0
            bucket.append(item)
            size += nbytes
        yield bucket


def _reduce_bucket(bucket: list[tuple[str, nn.Parameter]], axes: tuple[Axis, ...], factor: float) -> None:
    parts = []
    for name, parameter in bucket:
        if parameter.grad is None:
            parts.append(torch.zeros_like(_local(parameter.detach(), name)))
        else:
            parts.append(_local(parameter.grad, f"the gradient of {name}").to(parameter.dtype))
    flat = torch.cat([part.reshape(-1) for part in parts])
    if factor != 1:
        # Before the sum, so that half precision does not overflow in it.
        flat.mul_(factor)
    _reduce(flat, axes)
    for (name, parameter), part, mean in zip(bucket, parts, flat.split([part.numel() for part in parts]), strict=True):
        if parameter.grad is not None:
            _local(parameter.grad, name).copy_(mean.view(part.shape))
        elif isinstance(parameter, DTensor):
            parameter.grad = DTensor.from_local(
                mean.view(part.shape).clone(), parameter.device_mesh, parameter.placements,
                shape=parameter.shape, stride=parameter.stride(),
            )  # fmt: skip
        else:
            parameter.grad = mean.view(part.shape).clone()
