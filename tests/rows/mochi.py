from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import nn

from tests.model_cases import Row, with_config

CONFIG = {
    "patch_size": 2,
    "num_attention_heads": 3,
    "attention_head_dim": 8,
    "num_layers": 2,
    "pooled_projection_dim": 12,
    "in_channels": 4,
    "text_embed_dim": 16,
    "time_embed_dim": 4,
}


def on_cpu(model: nn.Module) -> None:
    """The rotary embedding asks for autocast to fp32, which the CPU has not, and casts by itself anyway."""
    warnings.filterwarnings("ignore", message="In CPU autocast")


def inputs(
    generator: torch.Generator, *, grid: tuple[int, int, int], text: int, valid: tuple[int, ...]
) -> dict[str, Any]:
    frames, height, width = grid
    batch = len(valid)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "hidden_states": random(batch, 4, frames, 2 * height, 2 * width),
        "encoder_hidden_states": random(batch, text, 16),
        "timestep": torch.tensor([300, 700][:batch]),
        "encoder_attention_mask": torch.arange(text) < torch.tensor(valid)[:, None],
    }


def make(**options: Any) -> Any:
    return functools.partial(inputs, **options)


# Norms, their scales and the rotary embedding are computed in fp32.
EVEN = Row(
    "even",
    "MochiTransformer3DModel",
    CONFIG,
    make(grid=(2, 2, 4), text=8, valid=(8, 8)),
    prepare=on_cpu,
    tolerance=1e-5,
    gradient_tolerance=1e-5,
)

ROWS = [
    EVEN,
    with_config(EVEN, "odd-with-padded-text", inputs=make(grid=(3, 3, 3), text=7, valid=(7, 4))),
    with_config(EVEN, "most-ranks-hold-padding-only", inputs=make(grid=(3, 3, 2), text=12, valid=(2, 11))),
    with_config(EVEN, "empty-prompt-of-zeros", inputs=make(grid=(3, 3, 2), text=6, valid=(0, 5))),
    with_config(EVEN, "text-of-3", inputs=make(grid=(5, 3, 1), text=3, valid=(2,))),
]
