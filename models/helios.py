"""Helios. The frames of the past (long, mid and short history) stand before the video as a stream of their own: blocks
and the output layer tell the two apart by the length of the video."""

from __future__ import annotations

from ..placements import count, seq
from ..plan import Plan
from ..styles import ContextParallelAttention, GatherOutputs, LocalAttention, ShardInputs

_BOTH = seq(1, "history", "video")

HELIOS = Plan(
    {
        "blocks.*": ShardInputs(original_context_length=count("video"), temb=_BOTH, rotary_emb=_BOTH),
        "blocks.0": ShardInputs(hidden_states=_BOTH),
        "blocks.*.attn1": ContextParallelAttention(streams=("history", "video")),
        "blocks.*.attn2": LocalAttention(),
        "norm_out": ShardInputs(original_context_length=count("video"), temb=_BOTH),
        "proj_out": GatherOutputs(seq(1, "video"), inner=True),
    },
    classes="HeliosTransformer3DModel",
)
