"""HiDream-Image (Full, Dev, Fast and E1).

Each block gets the text of another layer of its language model, and carries T5's text and the last layer's along. Texts
are sharded as they come in, so that what the model cuts off by the length of what it carries is this rank's own.
"""

from __future__ import annotations

from ..placements import seq
from ..plan import Plan
from ..styles import ContextParallelAttention, GatherOutputs, ShardInputs, ShardOutputs

# Carried: T5's and the last layer's; then that of the block's own layer.
_TEXT = ("t5", "llama", "llama")
_JOINT = ContextParallelAttention(streams=("image", *_TEXT))

HIDREAM = Plan(
    {
        # [layers, B, text, C], or a list of [B, text, C].
        "": ShardInputs(encoder_hidden_states_t5=seq(1, "t5", ndim=3), encoder_hidden_states_llama3=seq(-2, "llama")),
        "x_embedder": ShardOutputs(seq(1, "image", ndim=3)),
        # Behind the whole image stand the texts, of which there are only this rank's rows.
        "pe_embedder": ShardInputs(ids=seq(1, "image", *_TEXT, ndim=3, local=_TEXT)),
        "double_stream_blocks.*": ShardInputs(hidden_states_masks=seq(1, "image", ndim=2, optional=True)),
        "single_stream_blocks.*": ShardInputs(
            hidden_states_masks=seq(1, "image", *_TEXT, ndim=2, optional=True, local=_TEXT)
        ),
        "double_stream_blocks.*.block.attn1": _JOINT,
        "single_stream_blocks.*.block.attn1": _JOINT,
        "final_layer": GatherOutputs(seq(1, "image"), inner=True),
    },
    classes="HiDreamImageTransformer2DModel",
)
