"""OmniGen. Text, input images, time token and output image are one sequence with an S x S mask; it is one stream."""

from __future__ import annotations

from ..placements import seq
from ..plan import Plan
from ..styles import ContextParallelAttention, GatherOutputs, ShardInputs

OMNIGEN = Plan(
    {
        "layers.0": ShardInputs(hidden_states=seq(1, "tokens", ndim=3)),
        "layers.*": ShardInputs(image_rotary_emb=seq(0, "tokens", ndim=2)),
        "layers.*.self_attn": ContextParallelAttention(streams=("tokens",)),
        # The model cuts the output image off by its global length after this norm.
        "norm": GatherOutputs(seq(1, "tokens"), inner=True),
    },
    classes="OmniGenTransformer2DModel",
)
