"""Stable Diffusion 3 and 3.5 (joint attention, and image-only attention in the dual layers), also with an IP-Adapter.

The image becomes tokens in ``pos_embed``, a convolution over the whole picture. Blocks can be left out of a forward
pass (skip-layer guidance), so nothing is sharded at the first one.
"""

from __future__ import annotations

from ..placements import seq
from ..plan import Plan
from ..styles import ContextParallelAttention, GatherOutputs, LocalAttention, ShardInputs, ShardOutputs

# An IP-Adapter adds a second call: the image over itself and the adapter's tokens.
_IP = ContextParallelAttention(streams=("image",), kv=("image", "ip"))

SD3 = Plan(
    {
        "": ShardInputs(
            encoder_hidden_states=seq(1, "text", ndim=3),
            block_controlnet_hidden_states=seq(1, "image", ndim=3, optional=True),
        ),
        "pos_embed": ShardOutputs(seq(1, "image", ndim=3)),
        # The adapter's image features [B, ip, C]; the timestep embedding beside them has two dimensions.
        "transformer_blocks.*": ShardInputs(joint_attention_kwargs=seq(1, "ip", optional=True, when_ndim=3)),
        "transformer_blocks.*.attn": ContextParallelAttention(streams=("image", "text"), then=_IP),
        "transformer_blocks.*.attn2": ContextParallelAttention(streams=("image",), then=_IP),
        "image_proj.layers.*.attn": LocalAttention(),
        "proj_out": GatherOutputs(seq(1, "image"), inner=True),
    },
    classes="SD3Transformer2DModel",
    optional=("transformer_blocks.*.attn2", "image_proj.layers.*.attn"),
    notes="perturbed-attention guidance is refused",
)
