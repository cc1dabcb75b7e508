from __future__ import annotations

import functools
from typing import Any

import torch

from tests.model_cases import Row, with_config

CONFIG = {
    "in_channels": 4,
    "patch_size": 2,
    "context_in_dim": 12,
    "hidden_size": 24,
    "mlp_ratio": 2.0,
    "num_heads": 3,
    "depth": 2,
    "axes_dim": [4, 4],
}


def inputs(
    generator: torch.Generator, *, grid: tuple[int, int], text: int, valid: tuple[int, ...] = ()
) -> dict[str, Any]:
    """``grid``: height and width in patches of 2 x 2. ``valid``: length of each prompt; without it there is no mask."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    batch = len(valid) or 2
    made: dict[str, Any] = {
        "hidden_states": random(batch, 4, 2 * grid[0], 2 * grid[1]),
        "timestep": torch.tensor([0.37, 0.9], dtype=torch.float64)[:batch],
        "encoder_hidden_states": random(batch, text, 12),
        "attention_mask": None,
    }
    if valid:
        made["attention_mask"] = torch.arange(text) < torch.tensor(valid)[:, None]
    return made


def make(**options: Any) -> Any:
    return functools.partial(inputs, **options)


# The rotary embedding is applied in fp32.
EVEN = Row("even", "PRXTransformer2DModel", CONFIG, make(grid=(4, 4), text=8, valid=(8, 8)), gradient_tolerance=3e-6)

ROWS = [
    EVEN,
    with_config(EVEN, "odd", inputs=make(grid=(3, 5), text=7, valid=(4, 7))),
    with_config(EVEN, "text-of-3", inputs=make(grid=(1, 13), text=3, valid=(1, 3))),
    with_config(EVEN, "no-mask", inputs=make(grid=(1, 2), text=1)),
    with_config(
        EVEN,
        "pixel",
        config={**CONFIG, "bottleneck_size": 8, "resolution_embeds": True},
        inputs=make(grid=(3, 3), text=5, valid=(5, 2)),
    ),
]
