"""``parallelize(model, mesh, plan)``: validate, attach, and return the handle that undoes it."""

from __future__ import annotations

import contextlib
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from . import _compat
from .agreement import check_agreement, check_outputs
from .attachments import Attachment, Caches, attach_all
from .data_parallel import ShardsBesideDDP
from .errors import PlanError, check_switches
from .layout import map_tensors
from .mesh import ContextMesh, context_mesh
from .models import plan_for
from .placements import StreamDim
from .plan import Plan, clean_path
from .styles import (
    ContextParallelAttention,
    GatherOutputs,
    LinearAttention,
    LocalAttention,
    MeshcpStyle,
    Runtime,
    TrimOutputs,
    UncoveredCalls,
    Undo,
)
from .styles.base import forward_parameters

_MARK = "_meshcp"


class Handle:
    """A parallel model: what it is made of, and the way back.

    Attributes:
        model, mesh, plan: what was given to :func:`parallelize` (``plan`` as found in the registry if none was).
        context: the (ring, ulysses) view of the mesh.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, plan: Plan, context: ContextMesh, runtime: Runtime) -> None:
        self.model, self.mesh, self.plan, self.context = model, mesh, plan, context
        self._runtime = runtime
        self._undo: list[Undo] = []
        self._attachments: list[Attachment] = []
        self._caches: Caches | None = None

    def __repr__(self) -> str:
        state = "" if self._undo else ", removed"
        return (
            f"<meshcp.Handle of {type(self.model).__name__} on ring {self.context.ring} x ulysses "
            f"{self.context.ulysses}{state}>"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        # The copied modules would still run the forwards, and so the weights, of the ones that they were copied from.
        raise PlanError(
            f"this {type(self.model).__name__} is parallel, so it cannot be copied (copy.deepcopy) or pickled; copy it "
            "before meshcp.parallelize or after handle.remove(), and save it by its state_dict or save_pretrained"
        )

    def remove(self) -> None:
        """Restore the model as it was before ``parallelize``. A second call does nothing."""
        while self._undo:
            self._undo.pop()()
        self.model.__dict__.pop(_MARK, None)

    @property
    def lengths(self) -> dict[str, int]:
        """Global length of each stream in the latest forward pass."""
        return dict(self._runtime.lengths.known)

    def shard(self, x: torch.Tensor, where: StreamDim) -> torch.Tensor:
        """This rank's part of a tensor that every rank holds whole, such as the target of a loss.

        ``where`` is as in a plan: ``seq(1, "image")``. The streams are those of the latest forward pass.
        """
        who = "the tensor given to handle.shard"
        return self._runtime.lengths.trim(self._runtime.lengths.shard(x, where, who), where, who)

    def gather(self, x: torch.Tensor, where: StreamDim) -> torch.Tensor:
        """The whole tensor from every rank's part; the way back of :meth:`shard`. Collective over the context axes."""
        return self._runtime.lengths.gather(x, where, "the tensor given to handle.gather")

    def describe(self) -> str:
        """What this rank holds, in a line: its place on the mesh, its rows of each stream, its heads."""
        context = self.context
        gathered = " (KV gathered)" if self._runtime.gather_kv else ""
        place = f"ring {context.ring_rank}/{context.ring}{gathered} ulysses {context.ulysses_rank}/{context.ulysses}"
        lengths = self.lengths
        if not lengths:
            return f"{place}: no forward pass yet"
        layout = self._runtime.lengths.layout(tuple(lengths), "describe")
        parts = []
        for index, (name, length) in enumerate(lengths.items()):
            start, stop = layout.stream(index, context.ring_rank, context.ulysses_rank)
            rows = f"{start}..{stop - 1}" if start < stop else "none"
            parts.append(f"{name} {rows} of {length}")
        heads = sorted({plan.describe_heads() for plan in self._runtime.plans.values()})
        return f"{place}: {', '.join(parts)}; heads {', '.join(heads)}"


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Plan | None = None,
    *,
    check_inputs: bool = True,
    gather: bool = True,
    gather_kv: bool = False,
) -> Handle:
    """Make the attention of a Diffusers transformer run across the ``ring`` and ``ulysses`` axes of a mesh.

    The model is changed in place by hooks; its class, parameters and ``state_dict`` stay as they are. Every rank of
    the mesh calls this with the same model, and then calls the model with the same, whole inputs.

    Args:
        model: a transformer, such as ``pipe.transformer``.
        mesh: any mesh with an axis named ``ring``, ``ulysses`` or both, beside any others.
        plan: what to do with which module; found by the class of the model if None.
        check_inputs: compare inputs, weights, plan and outputs between ranks in the first forward pass, and refuse
            attention that happens outside of the plan's modules.
        gather: False leaves the outputs sharded (in the place of the plan's ``GatherOutputs``), for a loss that
            is computed on each rank's part: see :func:`meshcp.local_mean`.
        gather_kv: True has the ranks of the ring axis gather the keys and values of the whole sequence in one
            collective a layer, where otherwise they pass them round in ``ring - 1`` steps. The bytes are the same.
            Less latency where messages are small, any attention backend and second derivatives; but each rank holds
            all keys and values of the layer that runs (twice, while they arrive), in training those of every layer
            until its backward pass (unless activation checkpointing drops them), and nothing is computed while they
            travel. No effect where ring is 1.

    Returns:
        A handle; ``handle.remove()`` restores the model.

    Raises:
        PlanError: no plan for the class, or one that does not fit: a path that matches nothing, an unknown input, an
            attention module that no entry covers, a model that is parallel already. An option that is no bool.
        MeshError: a mesh without the axes, without this rank, or whose ranks do not ascend along an axis.
        AttentionError: ring above 1 with an attention backend that gives no log-sum-exp, and no ``gather_kv``.

        Whatever is raised, the model is left untouched.
    """
    _check_model(model)
    return attach(model, mesh, context_mesh(mesh), plan, check_inputs=check_inputs, gather=gather, gather_kv=gather_kv)


def attach(
    model: nn.Module,
    mesh: DeviceMesh,
    context: ContextMesh,
    plan: Plan | None,
    *,
    check_inputs: bool = True,
    gather: bool = True,
    gather_kv: bool = False,
) -> Handle:
    """:func:`parallelize`, with the process groups of ``context`` in the place of those of ``mesh``."""
    _check_model(model)
    check_switches(PlanError, check_inputs=check_inputs, gather=gather, gather_kv=gather_kv)
    if plan is None:
        plan = plan_for(model)
    elif not isinstance(plan, Plan):
        raise PlanError(
            f"the plan is {type(plan).__name__}; needed: meshcp.Plan({{path: style}}), or None to find it by class"
        )
    runtime = Runtime(context, gather_kv)
    matches = plan.match(model)
    if not gather:
        trimmed = [isinstance(style, GatherOutputs) and not style.inner for _, _, style in matches]
        if not any(trimmed):
            raise PlanError(
                f"gather=False leaves outputs sharded, but {type(model).__name__} itself goes on with the whole "
                "sequence (it puts patches together, for one), so its outputs are whole on every rank; leave "
                "gather=True"
            )
        matches = [
            (path, module, TrimOutputs(*style.outputs) if trim and isinstance(style, GatherOutputs) else style)
            for trim, (path, module, style) in zip(trimmed, matches, strict=True)
        ]
    fitting: list[tuple[str, nn.Module, MeshcpStyle]] = []
    for path, module, style in matches:
        if not isinstance(style, MeshcpStyle):
            raise PlanError(
                f"plan entry {path!r} is {style!r}, a style of torch's parallelize_module; apply tensor parallelism "
                "before: parallelize_module(model, mesh['tp'], tp_plan), then meshcp.parallelize"
            )
        style.check(module, path, runtime)
        fitting.append((path, module, style))
    _check_coverage(model, plan, fitting)
    handle = Handle(model, mesh, plan, context, runtime)
    try:
        _compat.separate_compile_caches(context.ring_group, context.ulysses_group)
        _attach_model(model, handle, check_inputs, gather)
        handle._attachments += attach_all(model, fitting, runtime, handle._undo)
        handle._caches = Caches(model, handle._attachments, runtime, gather)
        handle._undo.append(handle._caches.undo)
        handle._caches.check()
    except BaseException:
        handle.remove()
        raise
    model.__dict__[_MARK] = handle
    return handle


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        hint = ": pass its transformer, pipe.transformer" if hasattr(model, "transformer") else ""
        raise PlanError(f"a model (torch.nn.Module) is needed, found {type(model).__name__}{hint}")
    if isinstance(model, DistributedDataParallel):
        raise PlanError("the model is wrapped in DistributedDataParallel; parallelize it first, then wrap it")
    if _compat.is_compiled_module(model):
        raise PlanError("the model is what torch.compile returned; parallelize the model itself, then compile it")
    if _MARK in model.__dict__:
        raise PlanError(
            f"this {type(model).__name__} is parallel already, on {model.__dict__[_MARK].context}; call "
            "handle.remove() before you parallelize it anew"
        )


def _check_coverage(model: nn.Module, plan: Plan, matches: list[tuple[str, nn.Module, MeshcpStyle]]) -> None:
    covered = {
        id(module)
        for _, module, style in matches
        if isinstance(style, ContextParallelAttention | LinearAttention | LocalAttention)
    }
    missed = []
    for name, module in model.named_modules():
        if _compat.is_attention(module) and not any(id(inner) in covered for inner in module.modules()):
            missed.append(clean_path(name))
    # A module inside a covered one runs under its cover.
    covered_paths = [
        path
        for path, _, style in matches
        if isinstance(style, ContextParallelAttention | LinearAttention | LocalAttention)
    ]
    missed = [path for path in missed if not any(path.startswith(f"{outer}.") for outer in covered_paths)]
    if missed:
        shown = ", ".join(missed[:4]) + (f" and {len(missed) - 4} more" if len(missed) > 4 else "")
        raise PlanError(
            f"the plan covers no style for the attention in {shown} of {type(model).__name__}; over a sharded sequence "
            "local attention would be silently wrong. Add ContextParallelAttention(streams) for each, or "
            "LocalAttention() where keys and values are whole on every rank"
        )


def _facts(handle: Handle, gather: bool) -> dict[str, str]:
    """What must be alike on every rank beside tensors, in words."""
    return {
        "model": type(handle.model).__name__,
        "gather": str(gather),
        "gather_kv": str(handle._runtime.gather_kv),
        "gradients enabled": str(torch.is_grad_enabled()),
        **{f"plan entry {path!r}": repr(styles) for path, styles in handle.plan.entries},
    }


def _attach_model(model: nn.Module, handle: Handle, check_inputs: bool, gather: bool) -> None:
    """What happens around the whole forward: fresh lengths, and the checks of the first one."""
    runtime, name = handle._runtime, type(model).__name__
    names = forward_parameters(model)
    first = check_inputs
    watching: list[contextlib.ExitStack] = []
    shards = ShardsBesideDDP(model)
    handle._undo.append(shards.undo)

    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        runtime.running = True
        runtime.lengths.begin()
        if torch.compiler.is_compiling():
            return
        for attachment in handle._attachments:
            attachment.refresh(runtime)
        if handle._caches is not None:
            handle._caches.check()
        while watching:
            watching.pop().close()
        shards.begin()
        if first:
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            check_agreement(runtime.context, model, given, _facts(handle, gather))
            watch = contextlib.ExitStack()
            if not _compat.runs_compiled(model):
                # A graph would be guarded by the mode, and compiled anew for the second forward without it.
                watch.enter_context(UncoveredCalls(runtime, name))
            watching.append(watch)

    def end(_: nn.Module, args: Any, output: Any) -> None:
        nonlocal first
        runtime.running = False
        runtime.lengths.end()
        if torch.is_grad_enabled() and output is not None and not torch.compiler.is_compiling():
            # With activation checkpointing the backward pass runs attention again, perhaps after another forward pass
            # with other lengths. It comes through the outputs first.
            resume, average = runtime.lengths.resume_later(), shards.averager()

            def reached(_: torch.Tensor) -> None:
                resume()
                if average is not None:
                    average()

            map_tensors(
                dict(output) if isinstance(output, dict) else output,
                lambda x, _: x.register_hook(reached) if x.requires_grad else None,
                "output",
            )
        if watching and not torch.compiler.is_compiling():
            while watching:
                watching.pop().close()
            if output is not None:
                if gather:
                    check_outputs(runtime.context, output, name)
                # Not before: whoever catches a refusal and calls again must be refused again.
                first = False

    handle._undo.append(model.register_forward_pre_hook(_compat.left_to_python(begin), with_kwargs=True).remove)
    handle._undo.append(model.register_forward_hook(_compat.left_to_python(end), always_call=True).remove)
