"""ERNIE-Image. Tokens come first in its tensors ([image + text, B, C]), also in the modulation, which it expands to
every token."""

from __future__ import annotations

from ..placements import seq
from ..plan import Plan
from ..styles import ContextParallelAttention, GatherOutputs, ShardInputs

ERNIE_IMAGE = Plan(
    {
        "layers.0": ShardInputs(x=seq(0, "tokens", ndim=3)),
        "layers.*": ShardInputs(rotary_pos_emb=seq(1, "tokens", ndim=4), temb=seq(0, "tokens", ndim=3)),
        "layers.*.self_attention": ContextParallelAttention(streams=("tokens",)),
        "final_linear": GatherOutputs(seq(0, "tokens"), inner=True),
    },
    classes="ErnieImageTransformer2DModel",
)
