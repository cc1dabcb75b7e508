"""ACE-Step 1.5. Audio is patched by a convolution and sharded after it; text, lyrics and timbre stay whole."""

from __future__ import annotations

from ..placements import seq
from ..plan import Plan
from ..styles import ContextParallelAttention, GatherOutputs, LocalAttention, ShardInputs

ACE_STEP = Plan(
    {
        "layers.0": ShardInputs(hidden_states=seq(1, "audio", ndim=3)),
        "layers.*": ShardInputs(position_embeddings=seq(0, "audio", ndim=2)),
        # With flash backends the window of a layer is an option of the kernel, and no mask is made.
        "layers.*.self_attn": ContextParallelAttention(streams=("audio",), native_only=True),
        "layers.*.cross_attn": LocalAttention(),
        "norm_out": GatherOutputs(seq(1, "audio"), inner=True),
    },
    classes="AceStepTransformer1DModel",
    notes="attention backends other than Diffusers' own choice are refused",
)
