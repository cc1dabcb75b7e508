"""Sana and Sana-Sprint, also with Sana's ControlNet. Attention is linear: its state is a sum over the image. The
feed-forward convolves over the image."""

from __future__ import annotations

from ..placements import seq
from ..plan import Plan
from ..styles import FoldTokens, GatherOutputs, LinearAttention, LocalAttention, ShardInputs

SANA = Plan(
    {
        "": ShardInputs(controlnet_block_samples=seq(1, "image", ndim=3, optional=True)),
        "transformer_blocks.0": ShardInputs(hidden_states=seq(1, "image", ndim=3)),
        "transformer_blocks.*": FoldTokens("image", height="height", width="width", convolution="ff"),
        "transformer_blocks.*.attn1": LinearAttention(streams=("image",)),
        "transformer_blocks.*.attn2": LocalAttention(),
        "proj_out": GatherOutputs(seq(1, "image"), inner=True),
    },
    classes="SanaTransformer2DModel",
)
