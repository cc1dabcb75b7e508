"""CogVideoX 1.0 and 1.5 (text, image and video to video, Fun control), and ConsisID.

Text and patches get a joint positional embedding, so they are sharded where the first block begins.
"""

from __future__ import annotations

from ..placements import seq
from ..plan import Plan
from ..styles import ContextParallelAttention, GatherOutputs, ShardInputs

_BLOCKS = {
    "transformer_blocks.0": ShardInputs(
        hidden_states=seq(1, "video", ndim=3), encoder_hidden_states=seq(1, "text", ndim=3)
    ),
    "transformer_blocks.*": ShardInputs(image_rotary_emb=seq(0, "video", ndim=2, optional=True)),
    "transformer_blocks.*.attn1": ContextParallelAttention(streams=("text", "video")),
}

COGVIDEOX = Plan(
    {
        **_BLOCKS,
        "proj_out": GatherOutputs(seq(1, "video"), inner=True),
    },
    classes="CogVideoXTransformer3DModel",
)

# Text is joined to the video for the last norm and cut off again by its whole length. The face's cross-attention in
# between is per token and its keys are whole.
CONSISID = Plan(
    {
        **_BLOCKS,
        "transformer_blocks.-1": GatherOutputs(seq(1, "video"), seq(1, "text"), inner=True),
    },
    classes="ConsisIDTransformer3DModel",
)
