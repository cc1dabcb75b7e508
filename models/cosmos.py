"""Cosmos (Predict1, Predict2, Predict2.5, Transfer2.5). The video is sharded at the first block; text and image
context, the keys and values of the cross-attention, stay whole."""

from __future__ import annotations

from ..placements import seq
from ..plan import Plan
from ..styles import ContextParallelAttention, GatherOutputs, LocalAttention, ShardInputs

# One timestep a sample [B, C], or one a frame, repeated for each of its tokens [B, video, C].
_TIMESTEPS = {"embedded_timestep": seq(1, "video", when_ndim=3), "temb": seq(1, "video", when_ndim=3)}

COSMOS = Plan(
    {
        "transformer_blocks.0": ShardInputs(hidden_states=seq(1, "video", ndim=3)),
        "transformer_blocks.*": ShardInputs(
            image_rotary_emb=seq(0, "video", ndim=2),
            extra_pos_emb=seq(1, "video", ndim=3, optional=True),
            controlnet_residual=seq(1, "video", ndim=3, optional=True),
            **_TIMESTEPS,
        ),
        "transformer_blocks.*.attn1": ContextParallelAttention(streams=("video",)),
        "transformer_blocks.*.attn2": LocalAttention(),
        "norm_out": ShardInputs(**_TIMESTEPS),
        "proj_out": GatherOutputs(seq(1, "video"), inner=True),
    },
    classes="CosmosTransformer3DModel",
)
