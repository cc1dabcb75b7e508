from __future__ import annotations

import functools
from typing import Any

import torch

from tests.model_cases import Row, with_config

CONFIG = {
    "hidden_size": 20,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "in_channels": 10,
    "audio_acoustic_hidden_dim": 4,
    "patch_size": 2,
    "sliding_window": 3,
    "encoder_hidden_size": 12,
}


def inputs(generator: torch.Generator, *, audio: int, text: int, batch: int = 2) -> dict[str, Any]:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    timestep = torch.tensor([0.3, 0.8][:batch], dtype=torch.float64)
    return {
        "hidden_states": random(batch, audio, 4),
        "timestep": timestep,
        "timestep_r": timestep,
        "encoder_hidden_states": random(batch, text, 12),
        "context_latents": random(batch, audio, 6),
    }


def make(**options: Any) -> Any:
    return functools.partial(inputs, **options)


# Norms take their variance in fp32, and the rotary embedding is applied in fp32.
EVEN = Row(
    "even",
    "AceStepTransformer1DModel",
    CONFIG,
    make(audio=32, text=8),
    tolerance=1e-5,
    gradient_tolerance=1e-5,
)

ROWS = [
    EVEN,
    with_config(EVEN, "odd", inputs=make(audio=45, text=7)),
    with_config(EVEN, "text-of-3", inputs=make(audio=25, text=3, batch=1)),
    with_config(
        EVEN, "all-layers-with-a-window",
        config={**CONFIG, "layer_types": ["sliding_attention"] * 2, "sliding_window": 1},
        inputs=make(audio=38, text=5),
    ),
]  # fmt: skip
