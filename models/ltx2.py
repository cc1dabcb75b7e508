"""LTX-2 (2.0, 2.3 and 2.5): video and audio, each its own stream, that attend to themselves and to each other."""

from __future__ import annotations

from ..placements import seq
from ..plan import Plan
from ..styles import ContextParallelAttention, GatherOutputs, LocalAttention, ShardInputs

# Positions of patches, as [B, axes, tokens, 2] or [B, axes, tokens]: each rank makes the embedding of its own tokens.
_VIDEO_ROPE = ShardInputs(coords=seq(2, "video"))
_AUDIO_ROPE = ShardInputs(coords=seq(2, "audio"))


def _attention(queries: str, keys: str | None = None) -> ContextParallelAttention:
    # Spatio-temporal guidance skips self-attention in some blocks.
    kv = None if keys is None else (keys,)
    return ContextParallelAttention(streams=(queries,), kv=kv, mask="attention_mask", may_skip=keys is None)


LTX2 = Plan(
    {
        "": ShardInputs(
            hidden_states=seq(1, "video", ndim=3),
            audio_hidden_states=seq(1, "audio", ndim=3),
            # One a sample, or one a token where frames are given.
            timestep=seq(1, "video", when_ndim=(2, 3)),
            audio_timestep=seq(1, "audio", when_ndim=(2, 3), optional=True),
            video_keyframes_mask=seq(1, "video", ndim=3, optional=True),
        ),
        "rope": _VIDEO_ROPE,
        "audio_rope": _AUDIO_ROPE,
        "cross_attn_rope": _VIDEO_ROPE,
        "cross_attn_audio_rope": _AUDIO_ROPE,
        "transformer_blocks.*.attn1": _attention("video"),
        "transformer_blocks.*.audio_attn1": _attention("audio"),
        "transformer_blocks.*.attn2": LocalAttention(),
        "transformer_blocks.*.audio_attn2": LocalAttention(),
        "transformer_blocks.*.audio_to_video_attn": _attention("video", "audio"),
        "transformer_blocks.*.video_to_audio_attn": _attention("audio", "video"),
        "proj_out": GatherOutputs(seq(1, "video")),
        "audio_proj_out": GatherOutputs(seq(1, "audio")),
    },
    classes="LTX2VideoTransformer3DModel",
)
