"""Axis names, making a mesh, and the view of a user's mesh on which the engine works."""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .errors import MeshError

RING = "ring"
ULYSSES = "ulysses"
ORDERED = (RING, ULYSSES, "cfg", "tp")
"""Axes along which it matters which rank holds which part."""


def init_mesh(*, ring: int = 1, ulysses: int = 1, device_type: str | None = None, **others: int) -> DeviceMesh:
    """Make a mesh over the whole world with the axes ``**others`` (outer, in the order given), ``ring``, ``ulysses``.

    An axis named ``tp`` is put innermost, where tensor parallel's all-reduces find the fastest links. Both context
    axes are always present, also with degree 1::

        init_mesh(ring=2, ulysses=2)          -> ("ring", "ulysses")             = (2, 2)
        init_mesh(ulysses=2, dp=2, tp=2)      -> ("dp", "ring", "ulysses", "tp") = (2, 1, 2, 2)

    Args:
        ring: degree of the ring axis.
        ulysses: degree of the ulysses axis.
        device_type: ``"cuda"``, ``"cpu"`` ...; by default the accelerator if there is one, else ``"cpu"``.
        **others: degrees of further axes by name.

    Raises:
        MeshError: a degree below 1, or degrees whose product is not the world size.
    """
    outer = {name: degree for name, degree in others.items() if name != "tp"}
    degrees = {**outer, RING: ring, ULYSSES: ulysses}
    if "tp" in others:
        degrees["tp"] = others["tp"]
    given: dict[str, object] = {**degrees}
    for name, degree in given.items():
        if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
            raise MeshError(f"mesh axis {name!r} has degree {degree!r}; a degree is an integer of at least 1")
    if device_type is None:
        device_type = (
            accelerator.type if (accelerator := torch.accelerator.current_accelerator(check_available=True)) else "cpu"
        )
    if dist.is_initialized():
        world = dist.get_world_size()
        if math.prod(degrees.values()) != world:
            asked = " x ".join(f"{name}={degree}" for name, degree in degrees.items())
            raise MeshError(
                f"mesh {asked} has {math.prod(degrees.values())} ranks but the world has {world}; "
                f"make the product {world}, or build a DeviceMesh over part of the world yourself and pass that"
            )
    return init_device_mesh(device_type, tuple(degrees.values()), mesh_dim_names=tuple(degrees))


def local_device(kind: str) -> torch.device:
    """This process's device of a mesh whose ``device_type`` is ``kind``."""
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


@dataclass(frozen=True)
class ContextMesh:
    """The (ring, ulysses) view of a mesh: degrees, this rank's place and the two process groups.

    The order of the axes in the user's mesh makes no difference here: ring is the outer cut of a sequence, ulysses
    the inner one. A missing axis has degree 1 and no group.

    Attributes:
        ring, ulysses: degrees.
        ring_rank, ulysses_rank: this rank's coordinates.
        ring_group, ulysses_group: names of the process groups, as functional collectives take them; ``""`` where the
            degree is 1.
        mesh: the user's mesh.
    """

    ring: int
    ulysses: int
    ring_rank: int
    ulysses_rank: int
    ring_group: str
    ulysses_group: str
    mesh: DeviceMesh = field(repr=False, compare=False)

    @property
    def size(self) -> int:
        """Number of context-parallel ranks."""
        return self.ring * self.ulysses

    @property
    def axes(self) -> tuple[tuple[int, str], ...]:
        """(degree, group) of ring and ulysses, outer first."""
        return (self.ring, self.ring_group), (self.ulysses, self.ulysses_group)

    def constant(self) -> ContextMesh:
        """The same; within a graph, plain integers, where those of an object may be symbolic (``dynamic=True``)."""
        if not torch.compiler.is_compiling():
            return self
        degrees = operator.index(self.ring), operator.index(self.ulysses)
        ranks = operator.index(self.ring_rank), operator.index(self.ulysses_rank)
        return ContextMesh(*degrees, *ranks, self.ring_group, self.ulysses_group, self.mesh)


def context_mesh(mesh: DeviceMesh) -> ContextMesh:
    """View ``mesh`` as (ring, ulysses).

    Raises:
        MeshError: the mesh has no axis named ``ring`` or ``ulysses``, this rank is not in it, or ranks do not ascend
            along an axis.
    """
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(f"a DeviceMesh is needed, found {type(mesh).__name__}; make one with meshcp.init_mesh(ring=2)")
    names = mesh.mesh_dim_names
    if not names:
        raise MeshError(
            f"the mesh of shape {tuple(mesh.shape)} has no axis names; "
            'give it mesh_dim_names with an axis "ring" or "ulysses" (or both), or use meshcp.init_mesh'
        )
    if RING not in names and ULYSSES not in names:
        raise MeshError(
            f'the mesh has axes {names}; context parallelism needs an axis named "ring" or "ulysses" (or both): '
            "rename the axis that should shard the sequence, or use meshcp.init_mesh"
        )
    if not torch.compiler.is_compiling():
        check_order(mesh)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise MeshError(
            f"rank {dist.get_rank()} is not in the mesh of ranks {mesh.mesh.flatten().tolist()}; "
            "call this on the ranks of the mesh only"
        )

    def axis(name: str) -> tuple[int, int, str]:
        if name not in names:
            return 1, 0, ""
        position = names.index(name)
        degree = mesh.size(position)
        return degree, coordinate[position], mesh.get_group(name).group_name if degree > 1 else ""

    ring, ring_rank, ring_group = axis(RING)
    ulysses, ulysses_rank, ulysses_group = axis(ULYSSES)
    return ContextMesh(ring, ulysses, ring_rank, ulysses_rank, ring_group, ulysses_group, mesh)


@functools.lru_cache(maxsize=64)
def check_order(mesh: DeviceMesh, axes: tuple[str, ...] = ORDERED) -> None:
    """Raise where a process group, which sorts its ranks, has them in another order than a mesh axis.

    Raises:
        MeshError: ranks that do not ascend along one of ``axes``.
    """
    for position, name in enumerate(mesh.mesh_dim_names or ()):
        if name not in axes or mesh.size(position) == 1:
            continue
        for ranks in mesh.mesh.movedim(position, -1).reshape(-1, mesh.size(position)).tolist():
            if ranks != sorted(ranks):
                raise MeshError(
                    f"along mesh axis {name!r} are the ranks {ranks}, which do not ascend; process groups sort them to "
                    f"{sorted(ranks)}, so that the parts of a tensor would be taken for each other: make the mesh with "
                    "ascending ranks"
                )
