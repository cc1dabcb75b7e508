"""EasyAnimate (T2V, control, inpaint). Both streams are sharded at the first block: patches are cut by a convolution,
and two text encoders are joined before."""

from __future__ import annotations

from ..placements import seq
from ..plan import Plan
from ..styles import ContextParallelAttention, GatherOutputs, ShardInputs

EASYANIMATE = Plan(
    {
        "transformer_blocks.0": ShardInputs(
            hidden_states=seq(1, "video", ndim=3), encoder_hidden_states=seq(1, "text", ndim=3)
        ),
        "transformer_blocks.*": ShardInputs(image_rotary_emb=seq(0, "video", ndim=2)),
        "transformer_blocks.*.attn1": ContextParallelAttention(streams=("text", "video")),
        "proj_out": GatherOutputs(seq(1, "video"), inner=True),
    },
    classes="EasyAnimateTransformer3DModel",
)
