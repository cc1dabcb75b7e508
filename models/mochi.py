"""Mochi. Patches are cut by a convolution and text is pooled first, so both are sharded at the first block."""

from __future__ import annotations

from ..placements import seq
from ..plan import Plan
from ..styles import ContextParallelAttention, GatherOutputs, LocalAttention, ShardInputs

MOCHI = Plan(
    {
        "time_embed.pooler": LocalAttention(),
        "transformer_blocks.0": ShardInputs(
            hidden_states=seq(1, "video", ndim=3), encoder_hidden_states=seq(1, "text", ndim=3)
        ),
        "transformer_blocks.*": ShardInputs(image_rotary_emb=seq(0, "video", ndim=3)),
        "transformer_blocks.*.attn1": ContextParallelAttention(
            streams=("video", "text"), key_masks={"attention_mask": "text"}, per_sample=True
        ),
        "proj_out": GatherOutputs(seq(1, "video"), inner=True),
    },
    classes="MochiTransformer3DModel",
    notes="text must be padded on the right",
)
