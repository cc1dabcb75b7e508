"""PRX (latent and pixel). Image tokens attend to the text and to each other; the text only gives keys and values."""

from __future__ import annotations

from ..placements import seq
from ..plan import Plan
from ..styles import ContextParallelAttention, GatherOutputs, ShardInputs

PRX = Plan(
    {
        "blocks.0": ShardInputs(hidden_states=seq(1, "image", ndim=3)),
        "blocks.*": ShardInputs(encoder_hidden_states=seq(1, "text", ndim=3), image_rotary_emb=seq(2, "image", ndim=6)),
        "blocks.*.attention": ContextParallelAttention(
            streams=("image",), kv=("text", "image"), key_masks={"attention_mask": "text"}
        ),
        "final_layer": GatherOutputs(seq(1, "image"), inner=True),
    },
    classes="PRXTransformer2DModel",
)
