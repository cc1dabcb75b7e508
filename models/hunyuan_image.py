"""HunyuanImage 2.1, its distilled form and its refiner.

The text is refined whole and its tokens are put in order by their masks (valid ByT5 and language-model tokens first),
so image and text are sharded at the first block; the key mask over both stays global.
"""

from __future__ import annotations

from ..placements import seq
from ..plan import Plan
from ..styles import ContextParallelAttention, GatherOutputs, LocalAttention, ShardInputs

_JOINT = ContextParallelAttention(streams=("image", "text"))
_ROPE = ShardInputs(image_rotary_emb=seq(0, "image", ndim=2))

HUNYUAN_IMAGE = Plan(
    {
        "context_embedder.token_refiner.refiner_blocks.*.attn": LocalAttention(),
        "transformer_blocks.0": ShardInputs(
            hidden_states=seq(1, "image", ndim=3), encoder_hidden_states=seq(1, "text", ndim=3)
        ),
        "transformer_blocks.*": _ROPE,
        "single_transformer_blocks.*": _ROPE,
        "transformer_blocks.*.attn": _JOINT,
        "single_transformer_blocks.*.attn": _JOINT,
        "proj_out": GatherOutputs(seq(1, "image"), inner=True),
    },
    classes="HunyuanImageTransformer2DModel",
)
