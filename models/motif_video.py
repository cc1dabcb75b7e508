"""Motif-Video. Image embeddings stand in front of the text, which has a cross-attention of its own; the last single
blocks (decoder) start again from the video and attend to what the others made of it, without text."""

from __future__ import annotations

from ..placements import count, seq
from ..plan import Plan
from ..styles import ContextParallelAttention, GatherOutputs, ShardInputs

_VIDEO, _CONTEXT, _ROPE = seq(1, "video", ndim=3), seq(1, "image", "text", ndim=3), seq(0, "video", ndim=2)
_ENCODER, _DECODER = (
    "single_transformer_blocks.[:-num_decoder_layers]",
    "single_transformer_blocks.[-num_decoder_layers:]",
)

_JOINT = ContextParallelAttention(streams=("video", "image", "text"))
# Video and what the encoder made of it are cut alike, so they are the same stream twice.
_DECODE = ContextParallelAttention(streams=("video", "video"))
_CROSS = ContextParallelAttention(
    streams=("video",), kv=("text",), mask="attention_mask", mask_streams=("video", "image", "text")
)

MOTIF_VIDEO = Plan(
    {
        "transformer_blocks.*": ShardInputs(image_embed_seq_len=count("image"), image_rotary_emb=_ROPE),
        "transformer_blocks.0": ShardInputs(hidden_states=_VIDEO, encoder_hidden_states=_CONTEXT),
        "transformer_blocks.*.attn": _JOINT,
        "transformer_blocks.*.cross_attn": _CROSS,
        _ENCODER: ShardInputs(image_embed_seq_len=count("image"), image_rotary_emb=_ROPE),
        f"{_ENCODER}.attn": _JOINT,
        f"{_ENCODER}.cross_attn": _CROSS,
        _DECODER: ShardInputs(image_rotary_emb=_ROPE),
        "single_transformer_blocks.[-num_decoder_layers]": ShardInputs(hidden_states=_VIDEO),
        f"{_DECODER}.attn": _DECODE,
        "proj_out": GatherOutputs(seq(1, "video"), inner=True),
    },
    classes="MotifVideoTransformer3DModel",
    optional=(
        "transformer_blocks.*.cross_attn",
        f"{_ENCODER}.cross_attn",
        _DECODER,
        "single_transformer_blocks.[-num_decoder_layers]",
        f"{_DECODER}.attn",
    ),
)
