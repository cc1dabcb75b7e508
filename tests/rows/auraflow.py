from __future__ import annotations

import functools
from typing import Any

import torch

from tests.model_cases import Row, with_config

CONFIG = {
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 4,
    "num_mmdit_layers": 2,
    "num_single_dit_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 3,
    "joint_attention_dim": 16,
    "caption_projection_dim": 24,
    "out_channels": 4,
    "pos_embed_max_size": 256,
}


def inputs(generator: torch.Generator, *, grid: tuple[int, int], text: int, batch: int = 2) -> dict[str, Any]:
    """``grid``: height and width in patches of 2 x 2. Prompts are padded with zeros; there is no mask."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    made: dict[str, Any] = {
        "hidden_states": random(batch, 4, 2 * grid[0], 2 * grid[1]),
        "encoder_hidden_states": random(batch, text, 16),
        "timestep": torch.tensor([0.37, 0.9])[:batch],
    }
    made["encoder_hidden_states"][0, text - text // 3 :] = 0
    return made


def fuse(model: Any) -> None:
    model.fuse_qkv_projections()


def make(**options: Any) -> Any:
    return functools.partial(inputs, **options)


# The layer norms compute in fp32.
EVEN = Row("even", "AuraFlowTransformer2DModel", CONFIG, make(grid=(4, 4), text=8), gradient_tolerance=3e-6)

ROWS = [
    EVEN,
    with_config(EVEN, "odd", inputs=make(grid=(3, 5), text=7)),
    with_config(EVEN, "text-of-3", inputs=make(grid=(1, 13), text=3, batch=1)),
    with_config(EVEN, "two-tokens", inputs=make(grid=(1, 2), text=1)),
    with_config(
        EVEN, "no-single-blocks", config={**CONFIG, "num_single_dit_layers": 0}, inputs=make(grid=(3, 3), text=5)
    ),
    with_config(EVEN, "fused", inputs=make(grid=(3, 3), text=5), prepare=fuse),
]
