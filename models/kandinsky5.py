"""Kandinsky 5 (image, video, image to video). Text is refined whole and stays so, as keys and values of the
cross-attention; the output layer wants the video as a grid, so it is gathered after the last block."""

from __future__ import annotations

from ..placements import seq
from ..plan import Plan
from ..styles import ContextParallelAttention, GatherOutputs, LocalAttention, RefuseInputs, ShardInputs

KANDINSKY5 = Plan(
    {
        "": RefuseInputs(
            sparse_params="block-sparse attention (nabla) chooses its blocks from the queries and keys of the whole "
            "sequence, of which a rank holds a part; use a checkpoint with attention_type='regular' (the 5-second ones)"
        ),
        "text_transformer_blocks.*.self_attention": LocalAttention(),
        "visual_transformer_blocks.0": ShardInputs(visual_embed=seq(1, "video", ndim=3)),
        "visual_transformer_blocks.*": ShardInputs(rope=seq(1, "video", ndim=6)),
        "visual_transformer_blocks.*.self_attention": ContextParallelAttention(streams=("video",)),
        "visual_transformer_blocks.*.cross_attention": LocalAttention(),
        "visual_transformer_blocks.-1": GatherOutputs(seq(1, "video"), inner=True),
    },
    classes="Kandinsky5Transformer3DModel",
    notes="block-sparse (nabla) attention of the 10-second models is refused",
)
