from __future__ import annotations

import functools
from typing import Any

import torch

from tests.model_cases import Row, with_config

CONFIG = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 3,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 10,
    "freq_dim": 8,
    "ffn_dim": 16,
    "num_layers": 2,
    "rope_dim": (4, 4, 4),
}


def inputs(
    generator: torch.Generator,
    *,
    grid: tuple[int, int, int],
    text: int,
    history: tuple[int, int, int] | None = (2, 2, 4),
    batch: int = 2,
    indices: bool = True,
) -> dict[str, Any]:
    frames, height, width = grid

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    made: dict[str, Any] = {
        "hidden_states": random(batch, 4, frames, 2 * height, 2 * width),
        "timestep": torch.tensor([300, 700][:batch]),
        "encoder_hidden_states": random(batch, text, 10),
    }
    start = 0
    if history:
        for name, length in zip(("long", "mid", "short"), reversed(history), strict=True):
            made[f"latents_history_{name}"] = random(batch, 4, length, 2 * height, 2 * width)
            made[f"indices_latents_history_{name}"] = torch.arange(start, start + length).expand(batch, -1)
            start += length
    if indices:
        made["indices_hidden_states"] = torch.arange(start, start + frames).expand(batch, -1)
    return made


def make(**options: Any) -> Any:
    return functools.partial(inputs, **options)


# Norms, modulation and residuals are computed in fp32.
EVEN = Row(
    "even",
    "HeliosTransformer3DModel",
    CONFIG,
    make(grid=(2, 2, 4), text=8),
    tolerance=1e-5,
    gradient_tolerance=1e-5,
)

ROWS = [
    EVEN,
    with_config(EVEN, "odd", inputs=make(grid=(3, 3, 3), text=7, history=(1, 3, 5))),
    with_config(EVEN, "text-of-3", inputs=make(grid=(5, 1, 3), text=3, batch=1)),
    with_config(EVEN, "without-history", inputs=make(grid=(3, 3, 2), text=5, history=None)),
    with_config(EVEN, "without-history-and-indices", inputs=make(grid=(3, 3, 2), text=5, history=None, indices=False)),
    with_config(
        EVEN,
        "amplified-history-at-the-same-timestep",
        config={
            **CONFIG, "guidance_cross_attn": False, "zero_history_timestep": False, "is_amplify_history": True,
        },
        inputs=make(grid=(3, 3, 2), text=5),
    ),
]  # fmt: skip
