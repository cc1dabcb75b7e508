"""Bria 3.2 and Bria FIBO (text to image and edit). Made like FLUX: text and image are sharded as they come in."""

from __future__ import annotations

from ..placements import seq
from ..plan import Plan
from ..styles import ContextParallelAttention, GatherOutputs, RefuseInputs, ShardInputs

_INPUTS = {
    "hidden_states": seq(1, "image", ndim=3),
    "encoder_hidden_states": seq(1, "text", ndim=3),
    "img_ids": seq(-2, "image"),
    "txt_ids": seq(-2, "text"),
}
_BLOCKS = {
    "transformer_blocks.*.attn": ContextParallelAttention(streams=("text", "image")),
    "single_transformer_blocks.*.attn": ContextParallelAttention(streams=("text", "image")),
    "proj_out": GatherOutputs(seq(1, "image")),
}

BRIA = Plan(
    {
        "": (
            ShardInputs(**_INPUTS, controlnet_block_samples=seq(1, "image", ndim=3, optional=True)),
            RefuseInputs(controlnet_single_block_samples="the model adds them from the wrong token on"),
        ),
        **_BLOCKS,
    },
    classes="BriaTransformer2DModel",
    notes="no residuals for the single blocks (the model adds them from the wrong token on)",
)

BRIA_FIBO = Plan(
    # FIBO feeds each block the text of another layer of its language model.
    {"": ShardInputs(**_INPUTS, text_encoder_layers=seq(1, "text", ndim=3)), **_BLOCKS},
    classes="BriaFiboTransformer2DModel",
)
