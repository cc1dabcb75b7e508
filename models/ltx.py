"""LTX-Video (text, image and conditioned video; long video with several prompts)."""

from __future__ import annotations

from ..placements import seq
from ..plan import Plan
from ..styles import ContextParallelAttention, GatherOutputs, LocalAttention, ShardInputs, ShardOutputs

LTX = Plan(
    {
        "": ShardInputs(
            hidden_states=seq(1, "video", ndim=3),
            # [B], [B, 1], or where frames are given [B, video] or [B, video, 1].
            timestep=seq(1, "video", when_ndim=(2, 3)),
        ),
        # Made from the frame count, height and width, or from coordinates: whole on every rank.
        "rope": ShardOutputs(seq(1, "video", ndim=3), seq(1, "video", ndim=3)),
        "transformer_blocks.*.attn1": ContextParallelAttention(streams=("video",)),
        "transformer_blocks.*.attn2": LocalAttention(),
        "proj_out": GatherOutputs(seq(1, "video")),
    },
    classes="LTXVideoTransformer3DModel",
)
