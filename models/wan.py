"""Wan (2.1 and 2.2: text, image and first-last-frame to video; TI2V with a timestep for each token), and its kin.

Patches are cut by a convolution, so the video is sharded after it. The text, and the image embeddings in front of it,
stay whole: they are the keys and values of the cross-attention.
"""

from __future__ import annotations

from ..placements import seq
from ..plan import Plan
from ..styles import (
    ContextParallelAttention,
    GatherInputs,
    GatherOutputs,
    LocalAttention,
    ShardInputs,
    ShardOutputs,
)

_ROPE = ShardOutputs(seq(1, "video", ndim=4), seq(1, "video", ndim=4))

WAN = Plan(
    {
        # Wan 2.2 TI2V gives each token its own timestep [B, video]; the others one a sample [B].
        "": ShardInputs(timestep=seq(1, "video", when_ndim=2)),
        "rope": _ROPE,
        "blocks.0": ShardInputs(hidden_states=seq(1, "video", ndim=3)),
        "blocks.*.attn1": ContextParallelAttention(streams=("video",)),
        "blocks.*.attn2": LocalAttention(),
        "proj_out": GatherOutputs(seq(1, "video"), inner=True),
    },
    classes=("WanTransformer3DModel", "ChronoEditTransformer3DModel"),
)

WAN_VACE = Plan(
    {
        "rope": _ROPE,
        # Every control block is given the video as it came in; the control itself goes from block to block.
        "vace_blocks.*": ShardInputs(hidden_states=seq(1, "video", ndim=3)),
        "vace_blocks.0": ShardInputs(control_hidden_states=seq(1, "video", ndim=3)),
        "vace_blocks.*.attn1": ContextParallelAttention(streams=("video",)),
        "vace_blocks.*.attn2": LocalAttention(),
        "blocks.0": ShardInputs(hidden_states=seq(1, "video", ndim=3)),
        "blocks.*.attn1": ContextParallelAttention(streams=("video",)),
        "blocks.*.attn2": LocalAttention(),
        "proj_out": GatherOutputs(seq(1, "video"), inner=True),
    },
    classes="WanVACETransformer3DModel",
)

SKYREELS_V2 = Plan(
    {
        "rope": _ROPE,
        "blocks.0": ShardInputs(hidden_states=seq(1, "video", ndim=3)),
        # Diffusion forcing: a timestep for each frame, spread over its tokens.
        "blocks.*": ShardInputs(temb=seq(2, "video", when_ndim=4)),
        "blocks.*.attn1": ContextParallelAttention(streams=("video",)),
        "blocks.*.attn2": LocalAttention(),
        # The last modulation is spread over all tokens in the forward of the model.
        "blocks.-1": GatherOutputs(seq(1, "video"), inner=True),
    },
    classes="SkyReelsV2Transformer3DModel",
)

WAN_ANIMATE = Plan(
    {
        "rope": _ROPE,
        "blocks.0": ShardInputs(hidden_states=seq(1, "video", ndim=3)),
        "blocks.*.attn1": ContextParallelAttention(streams=("video",)),
        "blocks.*.attn2": LocalAttention(),
        # Attends frame by frame to a few face tokens, and a rank's tokens are no whole number of frames.
        "face_adapter.*": (
            GatherInputs(hidden_states=seq(1, "video")),
            LocalAttention(),
            ShardOutputs(seq(1, "video")),
        ),
        "proj_out": GatherOutputs(seq(1, "video"), inner=True),
    },
    classes="WanAnimateTransformer3DModel",
    notes="the face adapters (every fifth block) run whole on every rank",
)
