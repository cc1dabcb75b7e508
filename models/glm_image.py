"""GLM-Image (text to image and edit). Text and image are sharded once the prior tokens are added to the patches.

When editing, a first pass over each condition image fills a cache with its keys and values, whole on every rank; the
passes that follow attend to them.
"""

from __future__ import annotations

from ..placements import seq
from ..plan import Plan
from ..styles import ContextParallelAttention, GatherOutputs, GatherStores, RefuseInputs, ShardInputs

GLM_IMAGE = Plan(
    {
        "": RefuseInputs(attention_mask="its processor makes a mask of local tokens out of it"),
        "transformer_blocks.0": ShardInputs(
            hidden_states=seq(1, "image", ndim=3), encoder_hidden_states=seq(1, "text", ndim=3)
        ),
        # The rotary embedding is for the image tokens alone.
        "transformer_blocks.*": (
            ShardInputs(image_rotary_emb=seq(0, "image", ndim=2)),
            GatherStores(kv_cache=seq(1, "text", "image")),
        ),
        "transformer_blocks.*.attn1": ContextParallelAttention(streams=("text", "image"), whole="condition"),
        "proj_out": GatherOutputs(seq(1, "image"), inner=True),
    },
    classes="GlmImageTransformer2DModel",
    notes="no text mask (no pipeline passes one)",
)
