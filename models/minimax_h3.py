"""MiniMax-H3. Video, audio and text are scattered into one packed sequence by index, which is sharded at the first
block and gathered before the rows of each modality are taken out again."""

from __future__ import annotations

from ..placements import seq
from ..plan import Plan
from ..styles import ContextParallelAttention, GatherOutputs, LocalAttention, ShardInputs

MINIMAX_H3 = Plan(
    {
        "token_refiner.refiner_blocks.*.attn": LocalAttention(),
        "transformer_blocks.0": ShardInputs(hidden_states=seq(1, "tokens", ndim=3)),
        "transformer_blocks.*": ShardInputs(
            adaln_indices=seq(0, "tokens", ndim=1), rotary_emb=seq(0, "tokens", ndim=2)
        ),
        "transformer_blocks.*.attn": ContextParallelAttention(streams=("tokens",)),
        "norm_out": ShardInputs(timestep_indices=seq(0, "tokens", ndim=1)),
        "proj_out": GatherOutputs(seq(1, "tokens"), inner=True),
        "audio_proj_out": GatherOutputs(seq(1, "tokens"), inner=True),
    },
    classes="MiniMaxH3Transformer3DModel",
)
