"""Kandinsky 6 (text and image to video with audio). Video and audio are streams of their own and attend to each other;
text is refined whole for each of them and stays so. The output layers want whole sequences."""

from __future__ import annotations

from ..placements import seq
from ..plan import Plan
from ..styles import ContextParallelAttention, GatherOutputs, LocalAttention, ShardInputs

KANDINSKY6 = Plan(
    {
        "video_text_transformer_blocks.*.attn": LocalAttention(),
        "audio_text_transformer_blocks.*.attn": LocalAttention(),
        "visual_transformer_blocks.0": ShardInputs(
            vis=seq(1, "video", ndim=3), aud=seq(1, "audio", ndim=3, optional=True)
        ),
        "visual_transformer_blocks.*": ShardInputs(
            vis_rope=seq(0, "video", ndim=5), aud_rope=seq(0, "audio", ndim=5, optional=True)
        ),
        "visual_transformer_blocks.*.video_dec_block.self_attention": ContextParallelAttention(streams=("video",)),
        "visual_transformer_blocks.*.audio_dec_block.self_attention": ContextParallelAttention(streams=("audio",)),
        "visual_transformer_blocks.*.*.cross_attention": LocalAttention(),
        "visual_transformer_blocks.*.va_cross_attention": ContextParallelAttention(streams=("video",), kv=("audio",)),
        "visual_transformer_blocks.*.av_cross_attention": ContextParallelAttention(streams=("audio",), kv=("video",)),
        "visual_transformer_blocks.-1": GatherOutputs(seq(1, "video"), seq(1, "audio", optional=True), inner=True),
    },
    classes="Kandinsky6Transformer3DModel",
)
