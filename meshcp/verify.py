"""``verify(model, mesh, example_inputs)``: one forward pass parallel and one not, and how far apart they are.

For people who write plans, and for people who do not trust ours.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import math
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from . import _compat
from .errors import MeshcpError, PlanError
from .layout import map_tensors
from .mesh import ContextMesh, context_mesh
from .parallelize import attach
from .plan import Plan

T = TypeVar("T")

# By folder, not by name: a checkout called meshcp holds an environment with all of Diffusers in it.
_LIBRARIES = tuple(os.path.dirname(os.path.abspath(file)) + os.sep for file in (torch.__file__, __file__))

# Relative to the largest value of the output. Half precisions round each layer's result, in another order on a mesh.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Difference:
    """How far a tensor of the parallel model is from the single process, on the rank where it is farthest.

    Attributes:
        name: ``"output"``, ``"output.sample"``, ``"output[0]"`` ..., or the name of a parameter.
        kind: an output, or the gradient of a parameter.
        absolute: the largest difference; infinite where shapes differ or a value is not finite.
        relative: the same divided by the largest value of the single process.
        rank: the rank where it is largest.
        tolerance: the relative difference up to which it counts as the same.
        note: shapes that differ, values that are not finite.
    """

    name: str
    kind: Literal["output", "gradient"]
    absolute: float
    relative: float
    rank: int
    tolerance: float
    note: str = ""

    @property
    def ok(self) -> bool:
        """Whether it is within the tolerance."""
        return self.relative <= self.tolerance

    def __str__(self) -> str:
        what = self.name if self.kind == "output" else f"gradient of {self.name}"
        said = f"{what}: {self.absolute:.1e} absolute, {self.relative:.1e} relative, worst on rank {self.rank}"
        verdict = "" if self.ok else f"  <- above {self.tolerance:.0e}"
        return said + (f" ({self.note})" if self.note else "") + verdict


@dataclass(frozen=True)
class Report:
    """What :func:`verify` found; the same on every rank.

    Attributes:
        model: name of the class.
        mesh: ring and ulysses degrees.
        differences: outputs first, then gradients.
        errors: what was raised, by rank, in the order of time: the first is the cause, the others may have been
            waiting for that rank in a collective.
        lengths: global length of each stream.
    """

    model: str
    mesh: str
    differences: tuple[Difference, ...]
    errors: Mapping[int, str] = dataclasses.field(default_factory=dict)
    lengths: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether the parallel model computes what the single process computes."""
        return not self.errors and bool(self.differences) and all(difference.ok for difference in self.differences)

    @property
    def worst(self) -> Difference | None:
        """The difference that is farthest beyond its tolerance, or nearest to it."""
        return max(self.differences, key=lambda d: d.relative / d.tolerance, default=None)

    def __repr__(self) -> str:
        streams = ", ".join(f"{name} {length}" for name, length in self.lengths.items())
        lines = [f"{'right' if self.ok else 'WRONG'}: {self.model} on {self.mesh}{f', {streams}' if streams else ''}"]
        lines += [f"  rank {rank} raised {error}" for rank, error in self.errors.items()]
        outputs = [d for d in self.differences if d.kind == "output"]
        gradients = sorted(
            (d for d in self.differences if d.kind == "gradient"), key=lambda d: -d.relative / d.tolerance
        )
        wrong = sum(not d.ok for d in gradients)
        shown = gradients[: max(3, min(wrong, 10))]
        lines += [f"  {difference}" for difference in [*outputs, *shown]]
        if len(gradients) > len(shown):
            lines.append(
                f"  and {len(gradients) - len(shown)} more gradients, {max(0, wrong - len(shown))} of them wrong"
            )
        return "\n".join(lines)


def verify(
    model: nn.Module,
    mesh: DeviceMesh,
    example_inputs: Mapping[str, Any] | Sequence[Any],
    plan: Plan | None = None,
    *,
    gradients: bool = False,
    tolerance: float | None = None,
    timeout: float = 120.0,
    gather_kv: bool = False,
) -> Report:
    """Run the model once as it is and once parallel, on each rank of the mesh, and compare.

    Every rank calls this with the same model and inputs. The run that is not parallel uses no collective of meshcp,
    and takes the memory and time of a single process on each rank. The model comes back as it was, also when
    something is raised. The parallel run has process groups of its own, so that a rank which raises does not leave
    the others waiting: they notice at once, or after ``timeout`` seconds.

    Args:
        model: a model that is not parallel yet.
        mesh, plan: as for :func:`meshcp.parallelize`.
        example_inputs: the arguments of ``forward``, by name or in order. Each run gets a copy.
        gradients: also compare the gradient of every parameter, of a fixed random weighting of the outputs: the mean
            over the context-parallel ranks with the single process.
        tolerance: largest difference, relative to the largest value, that counts as right. By default that of the
            dtype: 1e-9 in fp64, 1e-4 in fp32, 1e-2 in fp16, 5e-2 in bf16.
        timeout: seconds that a rank waits for another in a collective of the parallel run.
        gather_kv: as for :func:`meshcp.parallelize`.

    Returns:
        A report, the same on every rank: ``assert report.ok, report``. What either run raised is in it, by rank.

    Raises:
        MeshcpError: what :func:`meshcp.parallelize` refuses: a plan or a mesh that does not fit. On every rank, also
            where only one was refused.
    """
    context = context_mesh(mesh)
    if _compat.cache_hooks(model.modules()):
        raise PlanError(
            f"{type(model).__name__} has a Diffusers cache enabled, by which a second forward differs from the first; "
            "call model.disable_cache() before verify, and enable it afterwards"
        )
    if gradients and any(isinstance(p, DTensor) for p in model.parameters()):
        raise PlanError("verify(gradients=True) needs plain parameters, found DTensors; call it before fully_shard")
    groups = _Groups(context, timeout)
    try:
        return _verify(model, mesh, example_inputs, plan, groups, gradients, tolerance, gather_kv)
    finally:
        groups.close()


def _verify(
    model: nn.Module,
    mesh: DeviceMesh,
    example_inputs: Mapping[str, Any] | Sequence[Any],
    plan: Plan | None,
    groups: _Groups,
    gradients: bool,
    tolerance: float | None,
    gather_kv: bool,
) -> Report:
    context, name = groups.context, type(model).__name__
    on = f"ring {context.ring}{' (KV gathered)' * (gather_kv is True and context.ring > 1)} x ulysses {context.ulysses}"

    single, raised = _attempt(lambda: _run(model, example_inputs, gradients))
    errors = groups.errors(raised, "without parallelism: ")
    if errors:
        return Report(name, on, (), errors)
    handle, raised = _attempt(lambda: attach(model, mesh, groups.context, plan, gather_kv=gather_kv))
    errors = groups.errors(raised)
    if errors:
        if handle is not None:
            handle.remove()
        if raised is not None:
            raise raised.error
        raise PlanError("; ".join(f"rank {rank} raised {said}" for rank, said in errors.items()))
    assert handle is not None
    assert single is not None
    try:
        parallel, raised = _attempt(lambda: _run(model, example_inputs, gradients))
    finally:
        handle.remove()
    if raised is not None:
        groups.wake_others(raised.error)
    errors = groups.errors(raised)
    if errors:
        return Report(name, on, (), errors, handle.lengths)
    assert parallel is not None
    averaged = {key: groups.mean(x) for key, x in parallel.gradients.items()}
    mine = _compare(single, dataclasses.replace(parallel, gradients=averaged), tolerance)
    return Report(name, on, groups.worst(mine), {}, handle.lengths)


@dataclass(frozen=True)
class _Result:
    outputs: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]


def _run(model: nn.Module, example_inputs: Mapping[str, Any] | Sequence[Any], gradients: bool) -> _Result:
    """A forward pass (and backward) on a copy of the inputs; parameters keep the gradients that they have."""
    inputs = _copied(example_inputs)
    arguments: dict[str, Any] = {} if not isinstance(inputs, Mapping) else dict(inputs)
    positional = () if isinstance(inputs, Mapping) else tuple(inputs)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    devices = [] if accelerator is None else [torch.accelerator.current_device_index()]
    before = {key: p.grad for key, p in model.named_parameters()} if gradients else {}
    try:
        with torch.random.fork_rng(devices, device_type="cuda" if accelerator is None else accelerator.type):
            torch.manual_seed(0)
            if gradients:
                for parameter in model.parameters():
                    parameter.grad = None
            with torch.set_grad_enabled(gradients):
                outputs = _tensors(model(*positional, **arguments))
            if gradients:
                _weighted(outputs).backward()
        found = {
            key: torch.zeros_like(p) if p.grad is None else p.grad.detach()
            for key, p in (model.named_parameters() if gradients else ())
            if p.requires_grad
        }
    finally:
        if gradients:
            for key, parameter in model.named_parameters():
                parameter.grad = before.get(key)
    return _Result({key: x.detach() for key, x in outputs.items()}, found)


def _copied(value: Any) -> Any:
    """A copy that a model can change at will: containers and tensors anew, all else shared."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_copied, value))
    if isinstance(value, list | tuple):
        return type(value)(map(_copied, value))
    if isinstance(value, Mapping):
        return {key: _copied(x) for key, x in value.items()}
    return copy.copy(value)


def _tensors(output: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}

    def note(x: torch.Tensor, path: str) -> torch.Tensor:
        found[path] = x
        return x

    if isinstance(output, Mapping):
        for key, value in output.items():
            map_tensors(value, note, f"output.{key}")
    else:
        map_tensors(output, note, "output")
    return found


def _weighted(outputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A number that depends on every element of the outputs, each with a weight of its own."""
    terms = []
    for index, x in enumerate(outputs.values()):
        if x.is_floating_point() and x.requires_grad:
            generator = torch.Generator().manual_seed(index)
            weights = torch.randn(x.shape, generator=generator).to(x.device, x.dtype)
            terms.append((x * weights).sum().double())
    if not terms:
        raise PlanError("no output depends on a parameter that requires a gradient; call verify(gradients=False)")
    return torch.stack(terms).sum()


def _compare(single: _Result, parallel: _Result, tolerance: float | None) -> list[Difference]:
    rank = dist.get_rank()
    found = []
    for name in [*single.outputs, *(name for name in parallel.outputs if name not in single.outputs)]:
        found.append(
            _difference(name, "output", single.outputs.get(name), parallel.outputs.get(name), tolerance, 0.0, rank)
        )
    # No finer than rounding in the largest gradient of all: that of a parameter may be zero but for rounding.
    floor = max((float(x.abs().max()) for x in single.gradients.values() if x.numel()), default=0.0) * 1e-6
    for name, x in single.gradients.items():
        found.append(_difference(name, "gradient", x, parallel.gradients.get(name), tolerance, floor, rank))
    return found


def _difference(
    name: str,
    kind: Literal["output", "gradient"],
    expected: torch.Tensor | None,
    actual: torch.Tensor | None,
    tolerance: float | None,
    floor: float,
    rank: int,
) -> Difference:
    if expected is None or actual is None:
        note = "only the parallel run has it" if expected is None else "the parallel run lacks it"
        return Difference(name, kind, math.inf, math.inf, rank, tolerance or 0.0, note)
    allowed = TOLERANCE.get(expected.dtype, 0.0) if tolerance is None else tolerance
    if kind == "gradient" and tolerance is None:
        # Some models compute parts of themselves in fp32 whatever their dtype.
        allowed = max(allowed, 1e-5)
    if actual.shape != expected.shape:
        note = f"shape {tuple(actual.shape)}, needed {tuple(expected.shape)}"
        return Difference(name, kind, math.inf, math.inf, rank, allowed, note)
    if not expected.numel():
        return Difference(name, kind, 0.0, 0.0, rank, allowed)
    have, want = actual.double(), expected.double()
    if not bool(want.isfinite().all()):
        same = bool(torch.equal(have.nan_to_num(), want.nan_to_num()))
        distance = 0.0 if same else math.inf
        return Difference(name, kind, distance, distance, rank, allowed, "the single process's is not finite")
    if not bool(have.isfinite().all()):
        return Difference(name, kind, math.inf, math.inf, rank, allowed, "not finite")
    absolute = float((have - want).abs().max())
    largest = max(float(want.abs().max()), floor)
    return Difference(
        name, kind, absolute, absolute / largest if largest else (math.inf if absolute else 0.0), rank, allowed
    )


@dataclass(frozen=True)
class _Raised:
    error: Exception
    at: float

    def said(self, when: str) -> tuple[float, str]:
        text = f"{when}{type(self.error).__name__}: {self.error}"
        if not isinstance(self.error, MeshcpError):
            # What the model itself raises does not say where, and with a wrong plan that is all there is to know.
            own = [f for f in traceback.extract_tb(self.error.__traceback__) if not _in_library(f.filename)]
            if own:
                text += f" (in {os.path.basename(own[-1].filename)}, line {own[-1].lineno}: {own[-1].line})"
        return self.at, text


def _in_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) or f"{os.sep}einops{os.sep}" in file


def _attempt(function: Callable[[], T]) -> tuple[T | None, _Raised | None]:
    try:
        return function(), None
    except Exception as error:
        return None, _Raised(error, time.time())


class _Groups:
    """Process groups for the parallel run alone, and one over all context-parallel ranks to agree by."""

    def __init__(self, context: ContextMesh, timeout: float) -> None:
        limit = datetime.timedelta(seconds=timeout)
        members = _members(context)
        self._open: list[dist.ProcessGroup] = []
        # It must outlive the wait of whoever is stuck in the run, and work where a GPU's stream is stuck.
        self._all = _new_group(members, limit * 4, "gloo")
        names = []
        for degree, group in context.axes:
            if degree > 1:
                own = _new_group(dist.get_process_group_ranks(_compat.resolve_group(group)), limit)
                self._open.append(own)
                names.append(str(own.group_name))
            else:
                names.append(group)
        self.context = dataclasses.replace(context, ring_group=names[0], ulysses_group=names[1])

    def errors(self, raised: _Raised | None, when: str = "") -> dict[int, str]:
        """What each rank raised, the earliest first; empty where none did. Collective."""
        mine = None if raised is None else raised.said(when)
        found: list[Any] = [None] * self._all.size()
        dist.all_gather_object(found, mine, group=self._all)
        ranks = dist.get_process_group_ranks(self._all)
        order = sorted((said[0], rank, said[1]) for rank, said in zip(ranks, found, strict=True) if said is not None)
        return {rank: said for _, rank, said in order}

    def worst(self, mine: list[Difference]) -> tuple[Difference, ...]:
        """Each difference of the rank where it is largest. Collective."""
        found: list[Any] = [None] * self._all.size()
        dist.all_gather_object(found, mine, group=self._all)
        by_name: dict[tuple[str, str], Difference] = {}
        for difference in (d for part in found for d in part):
            key = (difference.kind, difference.name)
            if key not in by_name or difference.relative > by_name[key].relative:
                by_name[key] = difference
        return tuple(by_name.values())

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        """The mean over all context-parallel ranks. Collective."""
        total = x.to("cpu", copy=True)
        dist.all_reduce(total, group=self._all)
        return (total / self._all.size()).to(x.device)

    def wake_others(self, error: Exception) -> None:
        """Close the groups of the run: who waits in one of them for this rank is told so by the transport."""
        # A group that a frame of the exception still holds stays open.
        traceback.clear_frames(error.__traceback__)
        self._close_run()

    def close(self) -> None:
        self._close_run()
        dist.destroy_process_group(self._all)

    def _close_run(self) -> None:
        while self._open:
            dist.destroy_process_group(self._open.pop())


def _new_group(ranks: list[int], timeout: datetime.timedelta, backend: str | None = None) -> dist.ProcessGroup:
    """A group that only its members make: the rest of the world may be elsewhere. Its time-outs are exceptions."""
    # Else NCCL ends the process of a rank that waits for too long. Groups read this when they are made.
    name = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        return _compat.new_group(ranks, timeout, backend)
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _members(context: ContextMesh) -> list[int]:
    """Global ranks of the context-parallel group of this rank."""
    mesh, names = context.mesh, context.mesh.mesh_dim_names or ()
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    index = tuple(
        slice(None) if name in ("ring", "ulysses") else place for name, place in zip(names, coordinate, strict=True)
    )
    return sorted(mesh.mesh[index].flatten().tolist())
