"""FLUX.1 (dev, schnell, Fill, Control, Kontext: one class). Text and image are sharded as they come in."""

from __future__ import annotations

from ..placements import seq
from ..plan import Plan
from ..styles import ContextParallelAttention, GatherOutputs, LocalAttention, ShardInputs

# The first attention call is the joint one; an IP-Adapter adds cross-attention over its own few tokens, which are whole
# on every rank.
_JOINT = ContextParallelAttention(streams=("text", "image"), then=LocalAttention())

FLUX = Plan(
    {
        "": ShardInputs(
            hidden_states=seq(1, "image", ndim=3),
            encoder_hidden_states=seq(1, "text", ndim=3),
            img_ids=seq(-2, "image"),
            txt_ids=seq(-2, "text"),
            controlnet_block_samples=seq(1, "image", ndim=3, optional=True),
            controlnet_single_block_samples=seq(1, "image", ndim=3, optional=True),
        ),
        "transformer_blocks.*.attn": _JOINT,
        "single_transformer_blocks.*.attn": _JOINT,
        "proj_out": GatherOutputs(seq(1, "image")),
    },
    classes="FluxTransformer2DModel",
)
