"""What a plan can ask of a module: shard its inputs or outputs, gather its outputs, attend across the mesh.

Each style is frozen data. ``check`` says whether it fits a module, without touching it; ``attach`` makes it work and
returns how to undo that. What happens in a forward pass is in :class:`Runtime`, one for each parallel model.
"""

from .attention import ContextParallelAttention, LocalAttention, UncoveredCalls
from .base import MeshcpStyle, Runtime, Undo
from .inputs import CarryStream, GatherInputs, GatherStores, RefuseInputs, ShardInputs
from .linear import FoldTokens, LinearAttention
from .outputs import GatherOutputs, ShardOutputs, TrimOutputs

__all__ = [
    "CarryStream",
    "ContextParallelAttention",
    "FoldTokens",
    "GatherInputs",
    "GatherOutputs",
    "GatherStores",
    "LinearAttention",
    "LocalAttention",
    "MeshcpStyle",
    "RefuseInputs",
    "Runtime",
    "ShardInputs",
    "ShardOutputs",
    "TrimOutputs",
    "UncoveredCalls",
    "Undo",
]
