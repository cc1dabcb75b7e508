from __future__ import annotations

import functools
from typing import Any

import torch

from tests.model_cases import Row, with_config

CONFIG = {
    "num_attention_heads": 3,
    "attention_head_dim": 8,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 2,
    "cross_attention_dim": 24,
    "attention_bias": True,
    "sample_size": 16,
    "patch_size": 2,
    "activation_fn": "gelu-approximate",
    "num_embeds_ada_norm": 1000,
    "norm_type": "ada_norm_single",
    "norm_elementwise_affine": False,
    "norm_eps": 1e-6,
    "caption_channels": 10,
    "video_length": 3,
}


def inputs(
    generator: torch.Generator, *, size: int, text: int, batch: int = 2, frames: int = 3, temporal: bool = True
) -> dict[str, Any]:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "hidden_states": random(batch, 4, frames, 2 * size, 2 * size),
        "timestep": torch.tensor([300, 700][:batch]),
        "encoder_hidden_states": random(batch, text, 10),
        "enable_temporal_attentions": temporal,
    }


def make(**options: Any) -> Any:
    return functools.partial(inputs, **options)


EVEN = Row("even", "LatteTransformer3DModel", CONFIG, make(size=4, text=8))

ROWS = [
    EVEN,
    with_config(EVEN, "odd", inputs=make(size=5, text=7)),
    with_config(EVEN, "text-of-3", inputs=make(size=3, text=3, batch=1)),
    with_config(EVEN, "one-frame", inputs=make(size=5, text=5, frames=1)),
    with_config(EVEN, "no-temporal-attention", inputs=make(size=3, text=5, temporal=False)),
    with_config(EVEN, "two-patches", inputs=make(size=1, text=3)),
]
