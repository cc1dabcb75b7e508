"""Context parallelism for Diffusers transformers, native to DeviceMesh and DTensor."""

from __future__ import annotations

from .attention import attention
from .errors import AttentionError, CheckpointError, InputError, LayoutError, MeshcpError, MeshError, PlanError
from .gradients import (
    average_gradients,
    clip_grad_norm_,
    fsdp_mesh,
    local_mean,
    seed_everything,
    sum_over_tp,
)
from .guidance import GuidanceHandle, parallelize_guidance
from .loading import load_sharded, save_sharded
from .mesh import init_mesh
from .models.tensor_parallel import tp_plan
from .parallelize import Handle, parallelize
from .placements import SequenceLayout, count, grid, parts, seq
from .plan import Plan
from .styles import (
    CarryStream,
    ContextParallelAttention,
    FoldTokens,
    GatherInputs,
    GatherOutputs,
    GatherStores,
    LinearAttention,
    LocalAttention,
    RefuseInputs,
    ShardInputs,
    ShardOutputs,
)
from .verify import verify

__version__ = "0.1.0"

__all__ = [
    "AttentionError",
    "CarryStream",
    "CheckpointError",
    "ContextParallelAttention",
    "FoldTokens",
    "GatherInputs",
    "GatherOutputs",
    "GatherStores",
    "GuidanceHandle",
    "Handle",
    "InputError",
    "LayoutError",
    "LinearAttention",
    "LocalAttention",
    "MeshError",
    "MeshcpError",
    "Plan",
    "PlanError",
    "RefuseInputs",
    "SequenceLayout",
    "ShardInputs",
    "ShardOutputs",
    "attention",
    "average_gradients",
    "clip_grad_norm_",
    "count",
    "fsdp_mesh",
    "grid",
    "init_mesh",
    "load_sharded",
    "local_mean",
    "parallelize",
    "parallelize_guidance",
    "parts",
    "save_sharded",
    "seed_everything",
    "seq",
    "sum_over_tp",
    "tp_plan",
    "verify",
]
