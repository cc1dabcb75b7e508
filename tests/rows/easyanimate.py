from __future__ import annotations

import functools
from typing import Any

import torch

from tests.model_cases import Row, with_config

CONFIG = {
    "num_attention_heads": 3,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "patch_size": 2,
    "num_layers": 2,
    "mmdit_layers": 2,
    "time_embed_dim": 6,
    "text_embed_dim": 10,
}


def inputs(
    generator: torch.Generator,
    *,
    grid: tuple[int, int, int],
    text: int,
    batch: int = 2,
    t5: int = 0,
    inpaint: int = 0,
    control: int = 0,
) -> dict[str, Any]:
    frames, height, width = grid

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    made: dict[str, Any] = {
        "hidden_states": random(batch, 4, frames, 2 * height, 2 * width),
        "timestep": torch.tensor([300, 700][:batch]),
        "encoder_hidden_states": random(batch, text, 10),
    }
    if t5:
        made["encoder_hidden_states_t5"] = random(batch, t5, 8)
    if inpaint:
        made["inpaint_latents"] = random(batch, inpaint, frames, 2 * height, 2 * width)
    if control:
        made["control_latents"] = random(batch, control, frames, 2 * height, 2 * width)
    return made


def make(**options: Any) -> Any:
    return functools.partial(inputs, **options)


# Block norms are computed in fp32.
EVEN = Row(
    "even",
    "EasyAnimateTransformer3DModel",
    CONFIG,
    make(grid=(2, 2, 4), text=8),
    tolerance=1e-5,
    gradient_tolerance=1e-5,
)

ROWS = [
    EVEN,
    with_config(EVEN, "odd", inputs=make(grid=(3, 3, 3), text=7)),
    with_config(EVEN, "text-of-3", inputs=make(grid=(5, 3, 1), text=3, batch=1)),
    with_config(
        EVEN,
        "two-text-encoders-and-a-block-that-shares-projections",
        config={**CONFIG, "mmdit_layers": 1, "text_embed_dim_t5": 8, "after_norm": True},
        inputs=make(grid=(3, 3, 3), text=5, t5=4),
    ),
    with_config(EVEN, "inpaint", config={**CONFIG, "in_channels": 9}, inputs=make(grid=(3, 3, 2), text=5, inpaint=5)),
    with_config(EVEN, "control", config={**CONFIG, "in_channels": 8}, inputs=make(grid=(3, 3, 2), text=5, control=4)),
]
