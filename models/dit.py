"""DiT (class-conditional). Patches are cut by a convolution, so the image is sharded after it."""

from __future__ import annotations

from ..placements import seq
from ..plan import Plan
from ..styles import ContextParallelAttention, GatherOutputs, ShardInputs

DIT = Plan(
    {
        "transformer_blocks.0": ShardInputs(hidden_states=seq(1, "image", ndim=3)),
        "transformer_blocks.*.attn1": ContextParallelAttention(streams=("image",)),
        "proj_out_2": GatherOutputs(seq(1, "image"), inner=True),
    },
    classes="DiTTransformer2DModel",
)
