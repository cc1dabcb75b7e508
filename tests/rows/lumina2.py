from __future__ import annotations

import functools
from typing import Any

import torch

from tests.model_cases import Row, with_config

CONFIG = {
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 4,
    "hidden_size": 48,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "num_attention_heads": 6,
    "num_kv_heads": 2,
    "multiple_of": 16,
    "axes_dim_rope": (4, 2, 2),
    "axes_lens": (64, 32, 32),
    "cap_feat_dim": 16,
}


def inputs(generator: torch.Generator, *, grid: tuple[int, int], text: int, valid: tuple[int, ...]) -> dict[str, Any]:
    """``grid``: height and width in patches of 2 x 2; ``valid``: length of each prompt within ``text``."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    batch = len(valid)
    return {
        "hidden_states": random(batch, 4, 2 * grid[0], 2 * grid[1]),
        "timestep": torch.tensor([0.37, 0.9])[:batch],
        "encoder_hidden_states": random(batch, text, 16),
        "encoder_attention_mask": (torch.arange(text) < torch.tensor(valid)[:, None]).long(),
    }


def make(**options: Any) -> Any:
    return functools.partial(inputs, **options)


# The rotary embedding is applied in complex64.
EVEN = Row(
    "even", "Lumina2Transformer2DModel", CONFIG, make(grid=(4, 4), text=8, valid=(8, 8)), gradient_tolerance=3e-6
)

ROWS = [
    EVEN,
    with_config(EVEN, "odd", inputs=make(grid=(3, 5), text=9, valid=(7, 4))),
    with_config(EVEN, "text-of-3", inputs=make(grid=(1, 13), text=3, valid=(3,))),
    with_config(EVEN, "all-shorter-than-padding", inputs=make(grid=(2, 3), text=9, valid=(1, 5))),
]
