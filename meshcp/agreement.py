"""Do the context-parallel ranks hold the same inputs, and whole outputs? Checked once, in the first forward pass.

The common mistake is a generator that is not seeded alike on every rank; its result looks like noise in the picture
and like nothing at all in a log.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from . import _compat
from .errors import InputError, LayoutError
from .layout import map_tensors
from .mesh import ContextMesh, local_device

_PRIME = 1_000_003


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


def check_agreement(context: ContextMesh, inputs: dict[str, Any]) -> None:
    """Raise on every context-parallel rank if any tensor of ``inputs`` differs between them.

    One small collective on each context axis; one more, of Python objects, to name the tensor when they differ.

    Raises:
        InputError: naming the tensors that differ, and the ranks.
    """
    digests: dict[str, int] = {}

    def note(x: torch.Tensor, path: str) -> torch.Tensor:
        if not hasattr(x, "placements"):
            digests[path] = digest(x)
        return x

    for name, value in inputs.items():
        map_tensors(value, note, name)
    mixed = 0
    for index, (name, value) in enumerate(sorted(digests.items())):
        mixed = (mixed * _PRIME + value * (index + 1) + sum(name.encode())) & (2**62 - 1)
    mine = torch.tensor([mixed, -mixed], dtype=torch.int64, device=local_device(context.mesh.device_type))
    for degree, group in context.axes:
        if degree > 1:
            dist.all_reduce(mine, dist.ReduceOp.MAX, group=_compat.resolve_group(group))
    highest, lowest = int(mine[0].item()), -int(mine[1].item())
    if highest == lowest:
        return
    _name_difference(context, digests)


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


def _name_difference(context: ContextMesh, digests: dict[str, int]) -> None:
    gathered: list[tuple[int, dict[str, int]]] = [(dist.get_rank(), digests)]
    for degree, group in context.axes:
        if degree > 1:
            parts: list[list[tuple[int, dict[str, int]]]] = [[] for _ in range(degree)]
            dist.all_gather_object(parts, gathered, group=_compat.resolve_group(group))
            gathered = [item for part in parts for item in part]
    first_rank, first = min(gathered, key=lambda item: item[0])
    differing: dict[str, list[int]] = {}
    for rank, other in gathered:
        for name in sorted(first.keys() | other.keys()):
            if first.get(name) != other.get(name):
                differing.setdefault(name, []).append(rank)
    parts_text = "; ".join(f"{name} on ranks {ranks}" for name, ranks in sorted(differing.items()))
    raise InputError(
        f"the inputs differ between context-parallel ranks: {parts_text} (compared with rank {first_rank}). Every rank "
        "of a context-parallel group must be given the same tensors: seed the generator alike "
        "(torch.Generator().manual_seed(0) on each rank, or meshcp.seed_everything), or broadcast them"
    )
