"""HunyuanDiT, also with its ControlNet's residuals. The text stays whole; it gives the keys of the cross-attention."""

from __future__ import annotations

from ..placements import seq
from ..plan import Plan
from ..styles import ContextParallelAttention, GatherOutputs, LocalAttention, ShardInputs

HUNYUAN_DIT = Plan(
    {
        "": ShardInputs(controlnet_block_samples=seq(1, "image", ndim=3, optional=True)),
        "blocks.0": ShardInputs(hidden_states=seq(1, "image", ndim=3)),
        "blocks.*": ShardInputs(image_rotary_emb=seq(0, "image", ndim=2, optional=True)),
        "blocks.*.attn1": ContextParallelAttention(streams=("image",)),
        "blocks.*.attn2": LocalAttention(),
        "proj_out": GatherOutputs(seq(1, "image"), inner=True),
    },
    classes="HunyuanDiT2DModel",
)
