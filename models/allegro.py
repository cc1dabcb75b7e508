"""Allegro. Patches are cut by a convolution, so the video is sharded at the first block; the text stays whole."""

from __future__ import annotations

from ..placements import parts, seq
from ..plan import Plan
from ..styles import ContextParallelAttention, GatherOutputs, LocalAttention, ShardInputs

ALLEGRO = Plan(
    {
        "transformer_blocks.0": ShardInputs(hidden_states=seq(1, "video", ndim=3)),
        # (tables of frequencies by position, positions [1, video] of the tokens in t, h and w)
        "transformer_blocks.*": ShardInputs(image_rotary_emb=parts(None, seq(1, "video", ndim=2), optional=True)),
        "transformer_blocks.*.attn1": ContextParallelAttention(streams=("video",), mask="attention_mask"),
        "transformer_blocks.*.attn2": LocalAttention(),
        "proj_out": GatherOutputs(seq(1, "video"), inner=True),
    },
    classes="AllegroTransformer3DModel",
)
