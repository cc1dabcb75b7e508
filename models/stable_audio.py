"""Stable Audio Open. A global token is put before the audio, and the sequence is sharded with it at the first block."""

from __future__ import annotations

from ..placements import seq
from ..plan import Plan
from ..styles import ContextParallelAttention, GatherOutputs, LocalAttention, ShardInputs

STABLE_AUDIO = Plan(
    {
        "transformer_blocks.0": ShardInputs(hidden_states=seq(1, "tokens", ndim=3)),
        "transformer_blocks.*": ShardInputs(rotary_embedding=seq(0, "tokens", ndim=2, optional=True)),
        "transformer_blocks.*.attn1": ContextParallelAttention(streams=("tokens",), mask="attention_mask"),
        "transformer_blocks.*.attn2": LocalAttention(),
        "proj_out": GatherOutputs(seq(1, "tokens"), inner=True),
    },
    classes="StableAudioDiTModel",
)
