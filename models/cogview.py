"""CogView4 (text to image, Control) and CogView3Plus. Text and image are sharded once the image is cut into patches."""

from __future__ import annotations

from ..placements import seq
from ..plan import Plan
from ..styles import ContextParallelAttention, GatherOutputs, RefuseInputs, ShardInputs

_BLOCK = ShardInputs(hidden_states=seq(1, "image", ndim=3), encoder_hidden_states=seq(1, "text", ndim=3))
_JOINT = ContextParallelAttention(streams=("text", "image"))

COGVIEW4 = Plan(
    {
        "": RefuseInputs(attention_mask="its processor makes a mask of local tokens out of it"),
        "transformer_blocks.0": _BLOCK,
        # The rotary embedding is for the image tokens alone.
        "transformer_blocks.*": ShardInputs(image_rotary_emb=seq(0, "image", ndim=2)),
        "transformer_blocks.*.attn1": _JOINT,
        "proj_out": GatherOutputs(seq(1, "image"), inner=True),
    },
    classes="CogView4Transformer2DModel",
    notes="no text mask and no packed batches (no pipeline passes them)",
)

COGVIEW3_PLUS = Plan(
    {
        "transformer_blocks.0": _BLOCK,
        "transformer_blocks.*.attn1": _JOINT,
        "proj_out": GatherOutputs(seq(1, "image"), inner=True),
    },
    classes="CogView3PlusTransformer2DModel",
)
