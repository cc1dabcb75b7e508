from __future__ import annotations

import functools
from typing import Any

import torch

from tests.model_cases import Row, with_config

CONFIG = {
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 3,
    "text_embed_dim": 16,
    "time_embed_dim": 12,
    "condition_dim": 8,
    "pos_embed_max_size": 16,
    "sample_size": 8,
}


def inputs(
    generator: torch.Generator, *, grid: tuple[int, int], text: int, batch: int = 2, channels: int = 4
) -> dict[str, Any]:
    """``grid``: height and width in patches of 2 x 2. Prompts are padded to a multiple of 16; there is no mask."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "hidden_states": random(batch, channels, 2 * grid[0], 2 * grid[1]),
        "encoder_hidden_states": random(batch, text, 16),
        "timestep": torch.tensor([371, 900])[:batch],
        "original_size": torch.tensor([[64.0, 80.0]], dtype=torch.float64).repeat(batch, 1),
        "target_size": torch.tensor([[64.0, 64.0]], dtype=torch.float64).repeat(batch, 1),
        "crop_coords": torch.zeros(batch, 2, dtype=torch.float64),
    }


def make(**options: Any) -> Any:
    return functools.partial(inputs, **options)


# CogView4 applies its rotary embedding in fp32.
FOUR = Row("even", "CogView4Transformer2DModel", CONFIG, make(grid=(4, 4), text=8), gradient_tolerance=3e-6)
# The bias of keys has no gradient but rounding: it moves all scores of a query alike.
THREE = Row("even", "CogView3PlusTransformer2DModel", CONFIG, make(grid=(4, 4), text=8), gradient_tolerance=1e-9)

ROWS = [
    FOUR,
    with_config(FOUR, "odd", inputs=make(grid=(3, 5), text=7)),
    with_config(FOUR, "text-of-3", inputs=make(grid=(1, 13), text=3, batch=1)),
    with_config(FOUR, "two-tokens", inputs=make(grid=(1, 2), text=1)),
    with_config(FOUR, "control", config={**CONFIG, "in_channels": 8}, inputs=make(grid=(3, 3), text=5, channels=8)),
    THREE,
    with_config(THREE, "odd", inputs=make(grid=(3, 5), text=7)),
    with_config(THREE, "text-of-3", inputs=make(grid=(1, 13), text=3, batch=1)),
    with_config(THREE, "two-tokens", inputs=make(grid=(1, 2), text=1)),
]
