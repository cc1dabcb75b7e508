"""Qwen-Image (also Edit, Edit Plus, Layered: one class).

The model wants the whole text to know its length and to check its mask, so the text is sharded at the first block.
The attention processor would join the text mask with ones for the local image rows; the plan takes the mask out of its
hands.
"""

from __future__ import annotations

from ..placements import seq
from ..plan import Plan
from ..styles import ContextParallelAttention, GatherOutputs, ShardInputs, ShardOutputs

JOINT = ContextParallelAttention(streams=("text", "image"), key_masks={"encoder_hidden_states_mask": "text"})

QWENIMAGE = Plan(
    {
        "": ShardInputs(
            hidden_states=seq(1, "image", ndim=3),
            controlnet_block_samples=seq(1, "image", ndim=3, optional=True),
        ),
        "pos_embed": ShardOutputs(seq(0, "image"), seq(0, "text")),
        "transformer_blocks.0": ShardInputs(encoder_hidden_states=seq(1, "text", ndim=3)),
        "transformer_blocks.*": ShardInputs(modulate_index=seq(1, "image", ndim=2, optional=True)),
        "transformer_blocks.*.attn": JOINT,
        "proj_out": GatherOutputs(seq(1, "image")),
    },
    classes="QwenImageTransformer2DModel",
)
