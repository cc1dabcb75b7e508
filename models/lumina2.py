"""Lumina 2. Each sample's valid text and its image are packed without a gap before the layers: one stream there.

The noise refiner sees the image alone and is sharded on its own; the context refiner sees the text, whole.
"""

from __future__ import annotations

from ..placements import seq
from ..plan import Plan
from ..styles import ContextParallelAttention, GatherOutputs, LocalAttention, ShardInputs

LUMINA2 = Plan(
    {
        "noise_refiner.0": ShardInputs(hidden_states=seq(1, "image", ndim=3)),
        "noise_refiner.*": ShardInputs(image_rotary_emb=seq(1, "image", ndim=3)),
        "noise_refiner.*.attn": ContextParallelAttention(streams=("image",)),
        "noise_refiner.-1": GatherOutputs(seq(1, "image"), inner=True),
        "context_refiner.*.attn": LocalAttention(),
        "layers.0": ShardInputs(hidden_states=seq(1, "tokens", ndim=3)),
        "layers.*": ShardInputs(image_rotary_emb=seq(1, "tokens", ndim=3)),
        "layers.*.attn": ContextParallelAttention(streams=("tokens",)),
        "norm_out": GatherOutputs(seq(1, "tokens"), inner=True),
    },
    classes="Lumina2Transformer2DModel",
)
