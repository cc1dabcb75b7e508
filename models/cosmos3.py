"""Cosmos3. Text attends causally to itself; what is generated (vision, sound, action) attends to text and to itself."""

from __future__ import annotations

from ..placements import parts, seq
from ..plan import Plan
from ..styles import ContextParallelAttention, GatherOutputs, ShardInputs

_TEXT, _GEN = seq(0, "text", ndim=2), seq(0, "generated", ndim=2)

COSMOS3 = Plan(
    {
        "layers.0": ShardInputs(und_seq=_TEXT, gen_seq=_GEN),
        "layers.*": ShardInputs(rotary_emb=parts(_TEXT, _TEXT, _GEN, _GEN)),
        "layers.*.self_attn": ContextParallelAttention(
            streams=("text",), then=ContextParallelAttention(streams=("generated",), kv=("text", "generated"))
        ),
        # The rows of each modality are taken out of the whole sequence by index.
        "norm": GatherOutputs(_TEXT, inner=True),
        "norm_moe_gen": GatherOutputs(_GEN, inner=True),
    },
    classes="Cosmos3OmniTransformer",
)
