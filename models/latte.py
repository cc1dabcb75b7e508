"""Latte. Frames are attended one by one, then each patch over the frames. The patches are sharded, so the spatial
attention runs across ranks, and the temporal one needs nothing of another rank."""

from __future__ import annotations

from ..placements import seq
from ..plan import Plan
from ..styles import ContextParallelAttention, GatherOutputs, LocalAttention, ShardInputs

LATTE = Plan(
    {
        "transformer_blocks.0": ShardInputs(hidden_states=seq(1, "patches", ndim=3)),
        "transformer_blocks.*.attn1": ContextParallelAttention(streams=("patches",)),
        "transformer_blocks.*.attn2": LocalAttention(),
        # One row for each patch of each sample: [B * patches, C].
        "temporal_transformer_blocks.*": ShardInputs(timestep=seq(0, "patches", ndim=2, folded=True)),
        "temporal_transformer_blocks.*.attn1": LocalAttention(),
        "proj_out": GatherOutputs(seq(1, "patches"), inner=True),
    },
    classes="LatteTransformer3DModel",
)
