"""Do the ranks hold the same inputs and weights, one plan, and whole outputs? Checked once, in the first forward pass.

The common mistake is a generator that is not seeded alike on every rank; its result looks like noise in the picture
and like nothing at all in a log. A plan that differs ends in a collective that never returns.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from . import _compat
from .errors import InputError, LayoutError, PlanError
from .layout import map_tensors
from .mesh import ContextMesh, local_device

_PRIME = 1_000_003
_ODD = 0x9E3779B97F4A7C15 - 2**64

# Of a large weight so many words of 8 bytes from the front and as many from the end are read: what ranks load or draw
# differently differs there too, and a model of 24 GB is not read for it.
_PIECE = 1 << 18


def digest(x: torch.Tensor) -> int:
    """A 63-bit fingerprint of the bytes, the shape and the dtype of ``x``."""
    # A copy, as a tensor of one element counts as contiguous whatever its stride (timestep.expand(1)).
    raw = x.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
    seed = hash((tuple(x.shape), len(str(x.dtype)), x.element_size())) & (2**31 - 1)
    if not raw.numel():
        return seed
    words = torch.nn.functional.pad(raw, (0, -raw.numel() % 4)).view(torch.int32).to(torch.int64)
    weights = torch.arange(words.numel(), device=words.device, dtype=torch.int64).mul_(_PRIME).add_(seed + 1)
    mixed = (words + 0x9E3779B9) * (weights | 1)
    return int((mixed ^ (mixed >> 17)).sum().item()) & (2**63 - 1)


@dataclass(frozen=True)
class _Axis:
    """An axis along which ranks must agree."""

    name: str
    group: dist.ProcessGroup
    ranks: tuple[int, ...]


@dataclass
class _Held:
    """What a rank tells the others by name, once they know that something differs.

    Attributes:
        facts: the plan and how it is used, in words.
        inputs, weights, shards: fingerprints by name; shards of parameters differ along ``tp``.
        tp: this rank's place on ``tp``.
    """

    rank: int
    tp: int
    facts: dict[str, str]
    inputs: dict[str, int]
    weights: dict[str, int]
    shards: dict[str, int]


def check_agreement(context: ContextMesh, model: nn.Module, inputs: dict[str, Any], facts: Mapping[str, str]) -> None:
    """Raise on every rank along ``ring``, ``ulysses`` and ``tp`` if they were not given the same.

    Compared are the tensors of ``inputs``, the ``facts``, and the parameters of ``model``: those that are whole, and
    along ``ring`` and ``ulysses`` shards over other axes too. Fingerprints travel: one small collective an axis, and
    one more, of Python objects, to name what differs.

    Raises:
        PlanError: facts that differ.
        InputError: inputs or weights that differ. All name what differs, and the ranks.
    """
    axes = _axes(context)
    if not axes:
        return
    digests: dict[str, int] = {}

    def note(x: torch.Tensor, path: str) -> torch.Tensor:
        if not hasattr(x, "placements"):
            digests[path] = digest(x)
        return x

    for name, value in inputs.items():
        map_tensors(value, note, name)
    along_tp = [axis for axis in axes if axis.name == "tp"]
    whole, cut = weights_of(model, [axis.ranks for axis in axes if axis.name != "tp"])
    shards = _fingerprints(cut)
    weights = _fingerprints(whole)
    if not any(isinstance(x, DTensor) and _shares(x, [axis.ranks for axis in along_tp]) for x in model.parameters()):
        # Not what parallelize_module makes: plain tensors may be anything along tp.
        shards, weights = {**shards, **weights}, {}
    # Addresses in the repr of a user's own style are no difference.
    told = {name: re.sub(r" at 0x[0-9a-f]+", "", text) for name, text in facts.items()}
    told["mesh axes"] = str(dict(zip(context.mesh.mesh_dim_names or (), context.mesh.shape, strict=False)))
    places = list(context.mesh.get_coordinate() or ())
    names = context.mesh.mesh_dim_names or ()
    held = _Held(dist.get_rank(), places[names.index("tp")] if along_tp else 0, told, digests, weights, shards)
    words = {name: zlib.crc32(text.encode()) for name, text in told.items()}
    mixed = [_mix(items) for items in (words, digests, weights, shards)]
    mine = torch.tensor(
        [sign * value for value in mixed for sign in (1, -1)],
        dtype=torch.int64,
        device=local_device(context.mesh.device_type),
    )
    own = mine[6:].clone()
    for axis in axes:
        dist.all_reduce(mine, dist.ReduceOp.MAX, group=axis.group)
        if axis.name == "tp":
            mine[6:] = own
        own = mine[6:].clone()
    highest = mine.tolist()
    same = [highest[2 * i] == -highest[2 * i + 1] for i in range(4)]
    if all(same[:3]) and along_tp:
        # Who is told of a shard that differs, at another place on tp, must hear of it here.
        flag = torch.tensor([not same[3]], dtype=torch.int32, device=mine.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=along_tp[0].group)
        same[3] = not flag.item()
    if not all(same):
        _name_difference(axes, held)


def weights_of(
    model: nn.Module, groups: Iterable[tuple[int, ...]]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The parameters that the ranks of each of ``groups`` hold alike: the whole ones, and parts of those that are cut
    over other ranks."""
    groups = list(groups)
    whole: dict[str, torch.Tensor] = {}
    cut: dict[str, torch.Tensor] = {}
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        # The first FSDP: plain tensors are what it left of the parameters on this rank.
        return whole, cut
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            if not _shares(parameter, groups):
                cut[name] = parameter.to_local()
        # Quantised weights are tensors of other classes; offloaded ones have no storage now.
        elif type(parameter.data) is torch.Tensor and parameter.layout == torch.strided and not parameter.is_meta:
            whole[name] = parameter
    return whole, cut


def _shares(x: DTensor, groups: Iterable[tuple[int, ...]]) -> bool:
    """Whether any of the groups has two ranks between which ``x`` is cut or replicated."""
    ranks = set(x.device_mesh.mesh.flatten().tolist())
    return any(len(ranks.intersection(group)) > 1 for group in groups)


def fingerprints(model: nn.Module, group: tuple[int, ...]) -> dict[str, int]:
    """The fingerprint of every parameter that the ranks of ``group`` hold alike, by name."""
    whole, cut = weights_of(model, [group])
    return _fingerprints({**whole, **cut})


@torch.no_grad()
def _fingerprints(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Of the bytes (see ``_PIECE``), the shape and the dtype of each. Waits for the device once."""
    factors: dict[torch.device, torch.Tensor] = {}
    sums: dict[torch.device, list[torch.Tensor]] = {}
    names: dict[torch.device, list[str]] = {}
    for name, x in tensors.items():
        if x.device not in factors:
            # Odd, so that any one word that differs makes a difference.
            factors[x.device] = torch.arange(_PIECE, device=x.device, dtype=torch.int64).mul_(_ODD).mul_(2).add_(1)
        raw = x.detach().contiguous().view(-1)
        raw = raw.view(torch.uint8) if raw.numel() else raw.new_empty(0, dtype=torch.uint8)
        total = factors[x.device].new_zeros(())
        size, end = 8 * _PIECE, raw.numel() // 8 * 8
        for start in range(0, raw.numel(), size) if end <= 2 * size else (0, end - size):
            piece = raw[start : start + size]
            words = torch.nn.functional.pad(piece, (0, -piece.numel() % 8)).view(torch.int64)
            total = total * _PRIME + (words * factors[x.device][: words.numel()]).sum()
        sums.setdefault(x.device, []).append(total)
        names.setdefault(x.device, []).append(name)
    values: dict[str, int] = {}
    for device, of_device in sums.items():
        values.update(zip(names[device], torch.stack(of_device).tolist(), strict=True))
    described = {name: f"{tuple(x.shape)} {x.dtype}".encode() for name, x in tensors.items()}
    return {name: values[name] ^ zlib.crc32(described[name]) for name in tensors}


def _mix(items: Mapping[str, int]) -> int:
    """One number of 62 bits for all."""
    mixed = 0
    for index, (name, value) in enumerate(sorted(items.items())):
        mixed = (mixed * _PRIME + value * (index + 1) + sum(name.encode())) & (2**62 - 1)
    return mixed


def _axes(context: ContextMesh) -> list[_Axis]:
    """Those of degree above 1, in an order that does not depend on their names: these may differ between ranks."""
    mesh, found = context.mesh, []
    groups = [(name, group) for name, (degree, group) in zip(("ring", "ulysses"), context.axes, strict=True)]
    names = mesh.mesh_dim_names or ()
    if "tp" in names and mesh.size(names.index("tp")) > 1:
        groups.append(("tp", mesh.get_group("tp").group_name))
    for name, group_name in groups:
        if group_name:
            group = _compat.resolve_group(group_name)
            found.append(_Axis(name, group, tuple(dist.get_process_group_ranks(group))))
    return sorted(found, key=lambda axis: axis.ranks[1] - axis.ranks[0], reverse=True)


def check_outputs(context: ContextMesh, output: Any, model: str) -> None:
    """Raise on every context-parallel rank if an output is not the same on all of them: then it is still sharded.

    Compared are shapes and, to a thousandth, sums: what ranks compute alike may differ in the last bits.

    Raises:
        LayoutError: naming the outputs that differ.
    """
    found: dict[str, torch.Tensor] = {}

    def note(x: torch.Tensor, path: str) -> torch.Tensor:
        if x.is_floating_point() and not hasattr(x, "placements"):
            found[path] = x.detach()
        return x

    map_tensors(dict(output) if isinstance(output, dict) else output, note, "output")
    # A fixed number of values, whatever a rank holds: ranks that disagree must not disagree on the message's size.
    values = torch.zeros(4, dtype=torch.float64, device=local_device(context.mesh.device_type))
    for index, x in enumerate(found.values()):
        flat = x.double().flatten()
        weights = torch.linspace(0.5, 1.5, flat.numel(), dtype=torch.float64, device=x.device)
        shape = sum((i + 2) * size for i, size in enumerate(x.shape))
        parts = torch.stack([flat.abs().sum(), (flat * weights).sum(), flat.square().sum().sqrt()])
        values[:3] += (index + 1) * parts.to(values.device)
        values[3] += (index + 1) * shape
    extremes = torch.cat([values, -values])
    for degree, group in context.axes:
        if degree > 1:
            dist.all_reduce(extremes, dist.ReduceOp.MAX, group=_compat.resolve_group(group))
    spread, size = extremes[:4] + extremes[4:], torch.maximum(extremes[:4].abs(), extremes[4:].abs())
    if bool((spread <= 1e-3 * size[0].clamp(min=size[3] * 1e-6)).logical_or(spread == 0).all()) and not spread[3]:
        return
    shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in found.items())
    raise LayoutError(
        f"the outputs of {model} differ between context-parallel ranks (here: {shapes}), so at least one is still "
        'sharded. Add GatherOutputs(seq(dim, "stream")) for the module that makes it, or call '
        "parallelize(..., gather=False) if you want each rank's part"
    )


def _name_difference(axes: list[_Axis], held: _Held) -> None:
    gathered = [held]
    for axis in axes:
        parts: list[list[_Held]] = [[] for _ in axis.ranks]
        dist.all_gather_object(parts, gathered, group=axis.group)
        gathered = [item for part in parts for item in part]
    gathered.sort(key=lambda item: item.rank)
    first = gathered[0]
    across = "context-parallel ranks" if all(axis.name != "tp" for axis in axes) else "ranks of ring, ulysses and tp"
    if text := _differing((item.rank, item.facts, first.facts) for item in gathered):
        names = sorted({name for item in gathered for name in item.facts})
        pairs = [(name, item) for name in names for item in gathered if item.facts.get(name) != first.facts.get(name)]
        name, other = pairs[0]
        values = "; ".join(f"rank {item.rank} has {item.facts.get(name, 'none')}" for item in (first, other))
        raise PlanError(
            f"{across} do not run the same: {text} (compared with rank {first.rank}; {values}). Their collectives "
            "would never meet. Make the mesh, the plan and the call alike on every rank"
        )
    if text := _differing((item.rank, item.inputs, first.inputs) for item in gathered):
        raise InputError(
            f"the inputs differ between {across}: {text} (compared with rank {first.rank}). Every rank "
            "of a context-parallel group must be given the same tensors: seed the generator alike "
            "(torch.Generator().manual_seed(0) on each rank, or meshcp.seed_everything), or broadcast them"
        )
    firsts: dict[int, _Held] = {}
    for item in gathered:
        firsts.setdefault(item.tp, item)
    text = _differing(
        (item.rank, {**item.weights, **item.shards}, {**first.weights, **firsts[item.tp].shards}) for item in gathered
    )
    raise InputError(
        f"the weights differ between {across}: {text} (compared with rank {first.rank}, shards with the first rank at "
        "the same place on tp). Load the same checkpoint and the same adapters on every rank, or seed alike before the "
        "model is made"
    )


def _differing(items: Iterable[tuple[int, Mapping[str, object], Mapping[str, object]]], most: int = 4) -> str:
    """What each rank has that the reference beside it has otherwise, and on which ranks."""
    differing: dict[str, list[int]] = {}
    for rank, held, reference in items:
        for name in sorted(held.keys() | reference.keys()):
            if held.get(name) != reference.get(name):
                differing.setdefault(name, []).append(rank)
    named = [f"{name} on ranks {ranks}" for name, ranks in sorted(differing.items())]
    return "; ".join(named[:most]) + (f" and {len(named) - most} more" if len(named) > most else "")
