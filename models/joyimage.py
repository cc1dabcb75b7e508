"""JoyImage-Edit and Edit-Plus. Target and references are one sequence of patches, sharded at the first block."""

from __future__ import annotations

from ..placements import parts, seq
from ..plan import Plan
from ..styles import ContextParallelAttention, GatherOutputs, ShardInputs

JOYIMAGE = Plan(
    {
        "double_blocks.0": ShardInputs(
            hidden_states=seq(1, "image", ndim=3), encoder_hidden_states=seq(1, "text", ndim=3)
        ),
        # (rope of the image, rope of the text or None)
        "double_blocks.*": ShardInputs(
            image_rotary_emb=parts(seq(0, "image", ndim=2), seq(0, "text", ndim=2, optional=True))
        ),
        "double_blocks.*.attn": ContextParallelAttention(streams=("image", "text")),
        "proj_out": GatherOutputs(seq(1, "image"), inner=True),
    },
    classes="JoyImageEditTransformer3DModel",
)

# Padding is masked by a mask of all keys, made before the blocks.
JOYIMAGE_PLUS = Plan(
    {
        "double_blocks.0": ShardInputs(
            hidden_states=seq(1, "image", ndim=3), encoder_hidden_states=seq(1, "text", ndim=3)
        ),
        "double_blocks.*": ShardInputs(image_rotary_emb=seq(1, "image", ndim=3)),
        "double_blocks.*.attn": ContextParallelAttention(streams=("image", "text")),
        "proj_out": GatherOutputs(seq(1, "image"), inner=True),
    },
    classes="JoyImageEditPlusTransformer3DModel",
)
