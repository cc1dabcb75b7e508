"""PixArt-Alpha and PixArt-Sigma (one class). Patches are cut by a convolution, so the image is sharded after it; the
text stays whole."""

from __future__ import annotations

from ..placements import seq
from ..plan import Plan
from ..styles import ContextParallelAttention, GatherOutputs, LocalAttention, ShardInputs

PIXART = Plan(
    {
        "transformer_blocks.0": ShardInputs(hidden_states=seq(1, "image", ndim=3)),
        "transformer_blocks.*.attn1": ContextParallelAttention(streams=("image",), mask="attention_mask"),
        "transformer_blocks.*.attn2": LocalAttention(),
        "proj_out": GatherOutputs(seq(1, "image"), inner=True),
    },
    classes="PixArtTransformer2DModel",
)
