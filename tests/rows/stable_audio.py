from __future__ import annotations

import functools
from typing import Any

import torch
from diffusers.models.embeddings import get_1d_rotary_pos_embed

from tests.model_cases import Row, with_config

CONFIG = {
    "sample_size": 32,
    "in_channels": 6,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 6,
    "num_key_value_attention_heads": 3,
    "out_channels": 6,
    "cross_attention_dim": 24,
    "time_proj_dim": 8,
    "global_states_input_dim": 10,
    "cross_attention_input_dim": 12,
}


def inputs(
    generator: torch.Generator,
    *,
    audio: int,
    text: int,
    batch: int = 2,
    text_mask: tuple[int, ...] = (),
    audio_mask: tuple[int, ...] = (),
    rope: bool = True,
) -> dict[str, Any]:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    made: dict[str, Any] = {
        "hidden_states": random(batch, 6, audio),
        "timestep": torch.tensor([0.3], dtype=torch.float64),
        "encoder_hidden_states": random(batch, text, 12),
        "global_hidden_states": random(batch, 1, 10),
        "return_dict": False,
    }
    if rope:
        made["rotary_embedding"] = get_1d_rotary_pos_embed(4, audio + 1, use_real=True, repeat_interleave_real=False)
    if text_mask:
        made["encoder_attention_mask"] = torch.arange(text) < torch.tensor(text_mask)[:, None]
    if audio_mask:
        made["attention_mask"] = torch.arange(audio) < torch.tensor(audio_mask)[:, None]
    return made


def make(**options: Any) -> Any:
    return functools.partial(inputs, **options)


# The rotary embedding is applied in fp32.
EVEN = Row(
    "even",
    "StableAudioDiTModel",
    CONFIG,
    make(audio=23, text=8),
    tolerance=1e-5,
    gradient_tolerance=1e-5,
)

ROWS = [
    EVEN,
    with_config(EVEN, "odd-with-padded-text", inputs=make(audio=30, text=7, text_mask=(7, 4))),
    with_config(EVEN, "text-of-3", inputs=make(audio=14, text=3, batch=1)),
    with_config(EVEN, "padded-audio", inputs=make(audio=18, text=5, audio_mask=(18, 11))),
    with_config(
        EVEN, "without-rope", inputs=make(audio=18, text=5, rope=False), tolerance=1e-10, gradient_tolerance=1e-10
    ),
]
