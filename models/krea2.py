"""Krea 2. The text is fused whole and put in front of the image; the two are one stream from the first block on."""

from __future__ import annotations

from ..placements import seq
from ..plan import Plan
from ..styles import ContextParallelAttention, GatherOutputs, LocalAttention, ShardInputs

KREA2 = Plan(
    {
        "text_fusion.layerwise_blocks.*.attn": LocalAttention(),
        "text_fusion.refiner_blocks.*.attn": LocalAttention(),
        "transformer_blocks.0": ShardInputs(hidden_states=seq(1, "tokens", ndim=3)),
        "transformer_blocks.*": ShardInputs(image_rotary_emb=seq(0, "tokens", ndim=2)),
        "transformer_blocks.*.attn": ContextParallelAttention(streams=("tokens",)),
        # The model cuts the text off by its global length, before its last layer.
        "transformer_blocks.-1": GatherOutputs(seq(1, "tokens"), inner=True),
    },
    classes="Krea2Transformer2DModel",
)
