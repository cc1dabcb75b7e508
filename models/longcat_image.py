"""LongCat-Image (text to image and edit). Made like FLUX: text and image are sharded as they come in."""

from __future__ import annotations

from ..placements import seq
from ..plan import Plan
from ..styles import ContextParallelAttention, GatherOutputs, ShardInputs

LONGCAT_IMAGE = Plan(
    {
        "": ShardInputs(
            hidden_states=seq(1, "image", ndim=3),
            encoder_hidden_states=seq(1, "text", ndim=3),
            img_ids=seq(-2, "image"),
            txt_ids=seq(-2, "text"),
        ),
        "transformer_blocks.*.attn": ContextParallelAttention(streams=("text", "image")),
        "single_transformer_blocks.*.attn": ContextParallelAttention(streams=("text", "image")),
        "proj_out": GatherOutputs(seq(1, "image")),
    },
    classes="LongCatImageTransformer2DModel",
)
