"""What else hangs on a parallel model: caches that decide by what they see, and modules that someone has replaced.

A cache that compares the residuals of a rank's own tokens decides differently on different ranks, and then the ranks
wait for each other in different collectives. Caches that decide by the step alone agree by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from . import _compat
from .errors import LayoutError, PlanError
from .placements import seq
from .styles import ContextParallelAttention, MeshcpStyle, Runtime, Undo

# Diffusers' hooks by class name. These decide by the number of the step and the timestep, which ranks have alike.
_BY_STEP = frozenset(
    {
        "FBCBlockHook",
        "FasterCacheBlockHook",
        "FasterCacheDenoiserHook",
        "MagCacheBlockHook",
        "MagCacheHeadHook",
        "PyramidAttentionBroadcastHook",
        "TaylorSeerCacheHook",
    }
)
_INSTEAD = "FirstBlockCache, MagCache, TaylorSeer, FasterCache and pyramid attention broadcast work"
_REFUSED = {
    "TextKVCacheTransformerHook": f"it finds the text by its address in memory, which sharding changes; {_INSTEAD}",
    "SeaCacheRootHook": f"it decides by a spectrum of the rank's own part of the input; {_INSTEAD}",
    "ContextParallelSplitHook": "Diffusers' own context parallelism is on; reload the model without parallel_config",
    "ContextParallelGatherHook": "Diffusers' own context parallelism is on; reload the model without parallel_config",
    "SmoothedEnergyGuidanceHook": "it blurs queries over the whole sequence; use another guidance",
    "AttentionProcessorSkipHook": "it replaces the attention of one process; skip whole blocks instead",
}


@dataclass
class Attachment:
    """A style on a module, and where in the model the module sits.

    Attributes:
        parent, name: ``parent.name`` is the module; None and ``""`` for the model itself.
        undo: takes the style off.
    """

    path: str
    module: nn.Module
    style: MeshcpStyle
    parent: nn.Module | None
    name: str
    undo: Undo

    def refresh(self, runtime: Runtime) -> None:
        """Move to the module that has taken the place of this one, or under a forward that was put over it.

        PEFT and quantisers replace a module by a wrapper or by another of its kind. Left on the old one, a gather would
        happen inside of a LoRA layer, whose other branch then has other lengths.
        """
        current = self.module if self.parent is None else _compat.children_of(self.parent).get(self.name)
        if current is self.module and getattr(self.undo, "attached", True):
            return
        self.undo()
        if current is None:
            self.undo = _nothing
            return
        self.style.check(current, self.path, runtime)
        self.module, self.undo = current, self.style.attach(current, self.path, runtime)

    def remove(self) -> None:
        """Take the style off, from wherever it has moved to."""
        self.undo()


def _nothing() -> None:
    """Undo nothing."""


def attach_all(
    model: nn.Module, matches: Sequence[tuple[str, nn.Module, MeshcpStyle]], runtime: Runtime, into: list[Undo]
) -> list[Attachment]:
    """Attach every style; ``into`` gets the way back after each."""
    places = {
        id(child): (parent, name)
        for parent in model.modules()
        for name, child in _compat.children_of(parent).items()
        if child is not None
    }
    found = []
    for path, module, style in matches:
        parent, name = (None, "") if module is model else places[id(module)]
        attachment = Attachment(path, module, style, parent, name, style.attach(module, path, runtime))
        into.append(attachment.remove)
        found.append(attachment)
    return found


class Caches:
    """Makes Diffusers' caches decide alike on every rank, or refuses them. They may come and go at any time."""

    def __init__(self, model: nn.Module, attachments: Sequence[Attachment], runtime: Runtime, gather: bool) -> None:
        self.model, self.attachments, self.runtime, self.gather = model, attachments, runtime, gather
        # Walking the tree takes milliseconds on a large model; hooks sit on modules that are there from the start.
        self.modules = tuple(model.modules())
        self.adapted: list[Any] = []

    def check(self) -> None:
        """Look at the hooks that are there now.

        Raises:
            PlanError: a hook that would make ranks disagree or compute something else.
        """
        for module, _, hook in _compat.hooks(self.modules):
            kind = type(hook).__name__
            if kind == "FBCHeadBlockHook":
                self._adapt(module, hook)
            refuse(kind, hook, type(self.model).__name__, self.gather)

    def undo(self) -> None:
        """Let every cache decide by itself again."""
        while self.adapted:
            self.adapted.pop().__dict__.pop(_compat.FIRST_BLOCK_DECISION, None)

    def _adapt(self, block: nn.Module, hook: Any) -> None:
        if _compat.FIRST_BLOCK_DECISION in hook.__dict__:
            return
        inner = {id(module) for module in block.modules()}
        streams = next(
            (
                attachment.style.streams
                for attachment in self.attachments
                if isinstance(attachment.style, ContextParallelAttention) and id(attachment.module) in inner
            ),
            None,
        )
        # A first block that attends locally sees the same on every rank.
        if streams is not None:
            hook.__dict__[_compat.FIRST_BLOCK_DECISION] = torch.compiler.disable(self._decision(hook, streams))
            self.adapted.append(hook)

    def _decision(self, hook: Any, streams: tuple[str, ...]) -> Callable[[torch.Tensor], bool]:
        runtime, model = self.runtime, type(self.model).__name__
        single = [(stream,) for stream in sorted(streams, key=lambda name: name == "text")]
        # Blocks that return the text apart compare the other streams only.
        candidates = [*single, streams] if _compat.returns_text_apart(hook) else [streams, *single]

        def should_compute(residual: torch.Tensor) -> bool:
            previous = _compat.first_block_residual(hook)
            if previous is None:
                return True
            held = next((c for c in candidates if _fits(runtime, c, residual)), None)
            dtype = torch.float32 if residual.device.type == "mps" else torch.float64
            sums = torch.zeros(3, dtype=dtype, device=residual.device)
            if held is not None:
                where = seq(1, *held)
                new, old = (runtime.lengths.trim(x, where, "FirstBlockCache's residual") for x in (residual, previous))
                sums[0], sums[1], sums[2] = (new - old).abs().sum(), old.abs().sum(), old.shape[1]
            for degree, group in runtime.context.axes:
                if degree > 1:
                    dist.all_reduce(sums, group=_compat.resolve_group(group))
            change, size, rows = sums.tolist()
            known = runtime.lengths.known
            if rows not in {sum(known[stream] for stream in candidate) for candidate in candidates}:
                raise LayoutError(
                    f"FirstBlockCache on {model}: the first block returns {tuple(residual.shape)} here, whose rows are "
                    f"none of {candidates}. Call model.disable_cache(), or use MagCache, which compares nothing"
                )
            return bool(change / size > hook.threshold) if size else True

        decision: Callable[[torch.Tensor], bool] = torch.compiler.disable(should_compute)
        return decision


def _fits(runtime: Runtime, streams: tuple[str, ...], x: torch.Tensor) -> bool:
    context = runtime.context
    layout = runtime.lengths.layout(streams, "FirstBlockCache")
    held = layout.held(context.ring_rank, context.ulysses_rank)
    return x.ndim == 3 and x.shape[1] == sum(stop - start for start, stop in held)


def refuse(kind: str, hook: Any, model: str, gather: bool) -> None:
    """Raise where a Diffusers hook does not go with context parallelism."""
    reason = _REFUSED.get(kind)
    if reason is None and kind.startswith("MagCache") and hook.config.calibrate:
        reason = "it would calibrate on the rank's own tokens; calibrate without parallelism, the ratios hold for both"
    elif reason is None and kind == "FasterCacheDenoiserHook" and not gather:
        reason = "it splits the output by frequency, and gather=False leaves it sharded; use gather=True"
    elif reason is None and _compat.is_stateful(hook) and kind not in _BY_STEP and kind != "FBCHeadBlockHook":
        reason = f"meshcp does not know whether it decides alike on every rank; {_INSTEAD}"
    if reason is not None:
        raise PlanError(f"{model} has the Diffusers hook {kind}, which does not go with context parallelism: {reason}")
