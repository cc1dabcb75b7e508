"""Context parallelism for Diffusers transformers, native to DeviceMesh and DTensor."""

from __future__ import annotations

from .attention import attention
from .errors import AttentionError, InputError, LayoutError, MeshcpError, MeshError, PlanError
from .mesh import init_mesh
from .parallelize import Handle, parallelize
from .placements import SequenceLayout, count, seq
from .plan import Plan
from .styles import ContextParallelAttention, GatherOutputs, LocalAttention, ShardInputs, ShardOutputs

__version__ = "0.1.0"

__all__ = [
    "AttentionError",
    "ContextParallelAttention",
    "GatherOutputs",
    "Handle",
    "InputError",
    "LayoutError",
    "LocalAttention",
    "MeshError",
    "MeshcpError",
    "Plan",
    "PlanError",
    "SequenceLayout",
    "ShardInputs",
    "ShardOutputs",
    "attention",
    "count",
    "init_mesh",
    "parallelize",
    "seq",
]
