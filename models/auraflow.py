"""AuraFlow. The model puts its register tokens in front of the text, so both are one stream, sharded after that."""

from __future__ import annotations

from ..placements import seq
from ..plan import Plan
from ..styles import ContextParallelAttention, GatherOutputs, ShardInputs

_JOINT = ContextParallelAttention(streams=("text", "image"))

AURAFLOW = Plan(
    {
        "joint_transformer_blocks.0": ShardInputs(
            hidden_states=seq(1, "image", ndim=3), encoder_hidden_states=seq(1, "text", ndim=3)
        ),
        "joint_transformer_blocks.*.attn": _JOINT,
        "single_transformer_blocks.*.attn": _JOINT,
        "proj_out": GatherOutputs(seq(1, "image"), inner=True),
    },
    classes="AuraFlowTransformer2DModel",
)
