"""Ideogram 4. Text and image come packed into one sequence with a block mask over its segments; it is one stream."""

from __future__ import annotations

from ..placements import seq
from ..plan import Plan
from ..styles import ContextParallelAttention, GatherOutputs, ShardInputs

IDEOGRAM4 = Plan(
    {
        "layers.0": ShardInputs(hidden_states=seq(1, "tokens", ndim=3)),
        # The condition is [B, 1, C], or [B, tokens, C] where each token has its own timestep.
        "layers.*": ShardInputs(image_rotary_emb=seq(1, "tokens", ndim=3), adaln_input=seq(1, "tokens", when_ndim=3)),
        "layers.*.attention": ContextParallelAttention(streams=("tokens",)),
        "final_layer": (ShardInputs(conditioning=seq(1, "tokens", when_ndim=3)), GatherOutputs(seq(1, "tokens"))),
    },
    classes="Ideogram4Transformer2DModel",
)
