"""``DistributedDataParallel`` around a tensor-parallel model.

DDP cannot reduce ``DTensor``s. It leaves those of a parallel model alone, and their gradients are averaged over DDP's
own process group at the end of each backward pass in which DDP averages, so ``no_sync()`` and accumulation work as they
do for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from . import _compat
from .errors import PlanError
from .gradients import Axis, average

_NAME = "DistributedDataParallel"
_REMEDY = f"{_NAME}(model, process_group=meshcp.fsdp_mesh(mesh).get_group())"


class ShardsBesideDDP:
    """The ``DTensor`` parameters of a model, for as long as it is parallel; DDP or not is known in each forward pass.

    ``model._ddp_params_and_buffers_to_ignore`` is how torch has a model name what DDP must leave alone; DDP reads it
    when it is made.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._present = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        self._synced: DistributedDataParallel | None = None
        self._axis: Axis | None = None
        self._given = getattr(model, _compat.DDP_IGNORES, ())
        if self._present:
            setattr(model, _compat.DDP_IGNORES, self)

    def undo(self) -> None:
        if self.model.__dict__.get(_compat.DDP_IGNORES) is self:
            delattr(self.model, _compat.DDP_IGNORES)
            if self._given:
                setattr(self.model, _compat.DDP_IGNORES, self._given)

    def __iter__(self) -> Iterator[str]:
        """Names of the parameters that DDP leaves alone: called when DDP is made."""
        parts = [name for name, parameter in self.model.named_parameters() if _compat.taken_apart(parameter)]
        if parts:
            raise PlanError(
                f"{_NAME}(device_mesh=) has put plain tensors, the parts of this rank, in the place of {len(parts)} "
                f"tensor-parallel parameters ({parts[0]} ...), which norms and checkpoints would take for whole. Make "
                f"the model anew, and give DDP the group: {_REMEDY}"
            )
        yield from self._given
        yield from (name for name, parameter in self.model.named_parameters() if isinstance(parameter, DTensor))

    def begin(self) -> None:
        """A forward pass begins: is it DDP's, and will DDP average?"""
        ddp = _compat.active_ddp() if self._present else None
        if ddp is None or ddp.module is not self.model or any(isinstance(m, FSDPModule) for m in self.model.modules()):
            self._axis = None
            return
        if self._synced is not ddp:
            self._check(ddp)
            with torch.no_grad():
                # As DDP does with the others when it is made.
                for _, parameter in self._parameters():
                    assert isinstance(parameter, DTensor)
                    dist.broadcast(parameter.to_local(), group=ddp.process_group, group_src=0)
            self._synced = ddp
        averages = torch.is_grad_enabled() and ddp.require_backward_grad_sync
        group = ddp.process_group
        ranks = frozenset(dist.get_process_group_ranks(group))
        self._axis = Axis(_NAME, group, ranks) if averages and len(ranks) > 1 else None

    def averager(self) -> Callable[[], None] | None:
        """What the backward pass of this forward pass has to call when it reaches the outputs."""
        axis, queued = self._axis, False
        if axis is None:
            return None

        def average_at_the_end() -> None:
            nonlocal queued
            queued = False
            trained = [(path, parameter) for path, parameter in self._parameters() if parameter.requires_grad]
            average(trained, (axis,))

        def reached() -> None:
            nonlocal queued
            if not queued:
                queued = True
                _compat.at_the_end_of_backward(average_at_the_end)

        return reached

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [
            (name, parameter) for name, parameter in self.model.named_parameters() if isinstance(parameter, DTensor)
        ]

    def _check(self, ddp: DistributedDataParallel) -> None:
        ranks = set(dist.get_process_group_ranks(ddp.process_group))
        for name, parameter in self._parameters():
            assert isinstance(parameter, DTensor)
            shared = ranks.intersection(parameter.device_mesh.mesh.flatten().tolist())
            if len(shared) > 1:
                raise PlanError(
                    f"{_NAME} averages over ranks {sorted(ranks)}, but {name} is cut over {sorted(shared)} of them "
                    f"(mesh axes {parameter.device_mesh.mesh_dim_names}): it would average different parts. Give it "
                    f"the data and context axes only: {_REMEDY}"
                )
