"""HunyuanVideo (text and image to video, also with token replacement; SkyReels), Framepack and HunyuanVideo 1.5.

The text refiner, the masks and the reordering of text tokens by mask need the whole text, so they run on every rank;
video and text are sharded where the first block begins.
"""

from __future__ import annotations

from ..placements import count, seq
from ..plan import Plan
from ..styles import ContextParallelAttention, GatherOutputs, LocalAttention, ShardInputs, ShardOutputs

_FIRST_BLOCK = ShardInputs(hidden_states=seq(1, "video", ndim=3), encoder_hidden_states=seq(1, "text", ndim=3))
_JOINT = ContextParallelAttention(streams=("video", "text"))
# Tokens of the first frame, where the given image replaces noise; the other block classes have no such argument.
_FIRST_FRAME = count("video", leading=True, optional=True)
_DUAL = ShardInputs(freqs_cis=seq(0, "video", ndim=2), num_tokens=_FIRST_FRAME)
_SINGLE = ShardInputs(image_rotary_emb=seq(0, "video", ndim=2), num_tokens=_FIRST_FRAME)

HUNYUAN_VIDEO = Plan(
    {
        "context_embedder.token_refiner.refiner_blocks.*.attn": LocalAttention(),
        "transformer_blocks.0": _FIRST_BLOCK,
        "transformer_blocks.*": _DUAL,
        "transformer_blocks.*.attn": _JOINT,
        "single_transformer_blocks.*": _SINGLE,
        "single_transformer_blocks.*.attn": _JOINT,
        "proj_out": GatherOutputs(seq(1, "video"), inner=True),
    },
    classes="HunyuanVideoTransformer3DModel",
)

HUNYUAN_VIDEO_15 = Plan(
    {
        "rope": ShardOutputs(seq(0, "video", ndim=2), seq(0, "video", ndim=2)),
        "context_embedder.token_refiner.refiner_blocks.*.attn": LocalAttention(),
        "transformer_blocks.0": _FIRST_BLOCK,
        # The processor extends the mask of the text by ones for the video that it sees, which is this rank's.
        "transformer_blocks.*.attn": ContextParallelAttention(
            streams=("video", "text"), key_masks={"attention_mask": "text"}, mask_needed=True
        ),
        "proj_out": GatherOutputs(seq(1, "video"), inner=True),
    },
    classes="HunyuanVideo15Transformer3DModel",
)

HUNYUAN_VIDEO_FRAMEPACK = Plan(
    {
        "context_embedder.token_refiner.refiner_blocks.*.attn": LocalAttention(),
        # The video comes behind its history, and the text behind its image embeddings.
        "transformer_blocks.0": _FIRST_BLOCK,
        "transformer_blocks.*": _DUAL,
        "transformer_blocks.*.attn": _JOINT,
        "single_transformer_blocks.*": _SINGLE,
        "single_transformer_blocks.*.attn": _JOINT,
        # The history is cut off after the last block.
        "single_transformer_blocks.-1": GatherOutputs(seq(1, "video"), None, inner=True),
    },
    classes="HunyuanVideoFramepackTransformer3DModel",
)
