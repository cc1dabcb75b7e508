"""Distributed attention: :func:`attention`, on plain tensors and on DTensors."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ..errors import AttentionError, check_switches
from ..mesh import RING, ULYSSES, ContextMesh, context_mesh
from ..placements import SequenceLayout, local_interval, to_local
from .distributed import CallPlan, nothing
from .masks import canonical_mask, select_broadcast

__all__ = ["attention"]

_BATCH, _HEADS, _SEQUENCE = Shard(0), Shard(1), Shard(2)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    dropout_p: float = 0.0,
    gather_kv: bool = False,
) -> torch.Tensor:
    """Scaled dot product attention over a sequence that is sharded over the ``ring`` and ``ulysses`` axes of a mesh.

    Shapes: B batch, H query heads, G KV heads, S query length, K key length, D head width, E value width.

    Args:
        q: ``[B, H, S, D]`` DTensor, of any strides. On ``ring``: ``Shard(2)`` or ``Replicate``; on ``ulysses``:
            ``Shard(2)``, ``Shard(1)`` or ``Replicate``; on any other axis: ``Shard(0)``, ``Shard(1)`` or
            ``Replicate``. Any length and head count, also shorter than the axis. Plain tensors get ordinary SDPA.
        k, v: ``[B, G, K, D]``, ``[B, G, K, E]`` DTensors on the same mesh. Sharded along the sequence like q, or
            replicated, which needs no communication.
        mask: bool (True: attend) or additive, in global form: ``[B, K]``, ``[S, K]``, ``[B, S, K]`` or 4-D that
            broadcasts to ``[B, H, S, K]``. As a plain tensor it is the whole mask, as a DTensor it may be sharded. A
            2-D mask that could be either is read as ``[B, K]``.
        causal: query i sees the keys 0 ... i.
        scale: factor of the scores; ``D ** -0.5`` by default.
        enable_gqa: allows G to be a divisor of H.
        dropout_p: for plain tensors only. Dropout is refused for DTensors: its mask would depend on the mesh.
        gather_kv: over ``ring``, gather keys and values in one collective in the place of passing them round: see
            :func:`meshcp.parallelize`. Plain tensors have nothing to gather.

    Returns:
        ``[B, H, S, E]`` with the placements of q.

    Raises:
        AttentionError: a mask, dtype, head count or option that cannot be computed rightly.
        MeshError: a mesh without ``ring`` or ``ulysses``, or whose ranks do not ascend along an axis.

    Self-attention costs two collectives over ``ulysses`` (one all-to-all for q, k, v, one for the output) and
    ``ring - 1`` point-to-point exchanges of KV, or one all-to-all with ``gather_kv``. Ulysses: Jacobs et al. 2023;
    ring: Liu et al. 2023.
    """
    check_switches(AttentionError, causal=causal, enable_gqa=enable_gqa, gather_kv=gather_kv)
    tensors = (q, k, v)
    sharded = [isinstance(x, DTensor) for x in tensors]
    if not any(sharded) and not isinstance(mask, DTensor):
        if mask is not None and causal:
            raise AttentionError("both a mask and causal=True; give one of the two (put causality into the mask)")
        if mask is not None:
            mask = canonical_mask(mask, q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        return F.scaled_dot_product_attention(
            q, k, v, mask, dropout_p=dropout_p, is_causal=causal, scale=scale, enable_gqa=enable_gqa
        )
    if not all(sharded):
        kinds = ", ".join(f"{name}: {type(x).__name__}" for name, x in zip("qkv", tensors, strict=True))
        raise AttentionError(f"q, k and v must all be DTensors or all plain tensors; found {kinds}")
    if dropout_p:
        raise AttentionError(
            f"dropout_p={dropout_p}: dropout inside distributed attention would draw another mask than one process "
            "does; use dropout_p=0.0 (model.eval(), or dropout on the output)"
        )
    return _sharded_attention(q, k, v, mask, causal, scale, enable_gqa, gather_kv)  # type: ignore[arg-type]


def _sharded_attention(
    q: DTensor,
    k: DTensor,
    v: DTensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None,
    enable_gqa: bool,
    gather_kv: bool,
) -> DTensor:
    mesh = q.device_mesh
    if k.device_mesh != mesh or v.device_mesh != mesh:
        raise AttentionError(f"q, k and v lie on different meshes: {mesh}, {k.device_mesh}, {v.device_mesh}")
    _check_shapes(q, k, v, enable_gqa)
    names = mesh.mesh_dim_names or ()
    _check_placements("q", q.placements, names)
    placements = _working_placements(q, k, names)
    q_work = q.redistribute(mesh, placements) if tuple(placements) != q.placements else q
    whole = all(
        k.placements[axis] == v.placements[axis] == Replicate()
        for axis, name in enumerate(names)
        if name in (RING, ULYSSES)
    )
    kv_placements = [
        Replicate() if whole and name in (RING, ULYSSES) and placement != _HEADS else placement
        for name, placement in zip(names, placements, strict=True)
    ]
    # Each rank computes only its own queries' share of the gradient of replicated keys.
    kv_grads = [
        Partial() if kv == Replicate() and placement != Replicate() else placement
        for kv, placement in zip(kv_placements, placements, strict=True)
    ]
    k_local, v_local = (
        to_local(x if x.placements == tuple(kv_placements) else x.redistribute(mesh, kv_placements), kv_grads)
        for x in (k, v)
    )
    q_local = to_local(q_work, placements)
    context = _active_context(context_mesh(mesh), names, placements)
    outer = RING in names and ULYSSES in names and names.index(ULYSSES) < names.index(RING)
    layouts = [SequenceLayout((x.shape[2],), context.ring, context.ulysses, outer and context.size > 1) for x in (q, k)]
    if mask is not None:
        mask = mask.full_tensor() if isinstance(mask, DTensor) else mask
        mask = canonical_mask(mask, q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        for dim in (0, 1):
            mask = select_broadcast(mask, dim, (local_interval(q_work, dim),))
    heads, kv_heads = q_local.shape[1], k_local.shape[1]
    if heads == 0:
        # No heads here (tensor parallel over more ranks than heads): the ranks of this ring are all idle.
        out = nothing(q_local, k_local, v_local)
    else:
        plan = _call_plan(context, layouts[0], None if whole else layouts[1], heads, kv_heads, gather_kv)
        out = plan.run(q_local, k_local, v_local, mask, causal=causal, scale=scale)
    shape = torch.Size((*q.shape[:3], v.shape[-1]))
    _, all_heads, rows, width = shape
    stride = (rows * all_heads * width, width, all_heads * width, 1)
    result = DTensor.from_local(out, mesh, placements, run_check=False, shape=shape, stride=stride)
    return result if tuple(placements) == q.placements else result.redistribute(mesh, q.placements)


@functools.lru_cache(maxsize=256)
def _call_plan(
    context: ContextMesh, q: SequenceLayout, kv: SequenceLayout | None, heads: int, kv_heads: int, gather_kv: bool
) -> CallPlan:
    return CallPlan(context, q, kv, heads, kv_heads, gather_kv)


def _check_shapes(q: DTensor, k: DTensor, v: DTensor, enable_gqa: bool) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise AttentionError(f"attention takes [B, H, S, D] tensors; found {shapes}")
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise AttentionError(
            f"shapes that do not fit: {shapes}; k and v share [B, G, K], q and k share B and the head width"
        )
    if q.shape[1] != k.shape[1] and (not enable_gqa or k.shape[1] == 0 or q.shape[1] % k.shape[1]):
        raise AttentionError(
            f"{q.shape[1]} query heads and {k.shape[1]} KV heads: pass enable_gqa=True, and a number of KV heads that "
            "divides the query heads"
        )


def _check_placements(what: str, placements: Sequence[Placement], names: Sequence[str]) -> None:
    for name, placement in zip(names, placements, strict=True):
        allowed: tuple[Placement, ...] = (_BATCH, _HEADS, Replicate())
        if name == RING:
            allowed = (_SEQUENCE, Replicate())
        elif name == ULYSSES:
            allowed = (_SEQUENCE, _HEADS, Replicate())
        if placement not in allowed:
            raise AttentionError(
                f"{what} is {placement!r} on mesh axis {name!r}; attention takes "
                f"{' or '.join(map(repr, allowed))} there: redistribute it first"
            )


def _working_placements(q: DTensor, k: DTensor, names: Sequence[str]) -> list[Placement]:
    """The placements of q on which the engine works: q's own, but heads on ulysses only where KV heads cut alike."""
    placements = list(q.placements)
    for axis, name in enumerate(names):
        if name == ULYSSES and placements[axis] == _HEADS and q.shape[1] != k.shape[1]:
            degree = q.device_mesh.size(axis)
            if q.shape[1] % degree or k.shape[1] % degree:
                placements[axis] = _SEQUENCE
        elif (
            placements[axis] == _HEADS
            and q.shape[1] != k.shape[1]
            and (q.shape[1] % q.device_mesh.size(axis) or k.shape[1] % q.device_mesh.size(axis))
        ):
            raise AttentionError(
                f"{q.shape[1]} query heads and {k.shape[1]} KV heads on mesh axis {name!r} of degree "
                f"{q.device_mesh.size(axis)}: grouped heads must divide the axis, or be replicated over it"
            )
    return placements


def _active_context(context: ContextMesh, names: Sequence[str], placements: Sequence[Placement]) -> ContextMesh:
    """``context`` with degree 1 on each axis along which the sequence is not sharded."""
    on = dict(zip(names, placements, strict=True))
    ring, ulysses = on.get(RING) == _SEQUENCE, on.get(ULYSSES) == _SEQUENCE
    return ContextMesh(
        context.ring if ring else 1,
        context.ulysses if ulysses else 1,
        context.ring_rank if ring else 0,
        context.ulysses_rank if ulysses else 0,
        context.ring_group if ring else "",
        context.ulysses_group if ulysses else "",
        context.mesh,
    )
