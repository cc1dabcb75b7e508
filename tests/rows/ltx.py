from __future__ import annotations

import functools
from typing import Any

import torch

from tests.model_cases import Row, with_config

CONFIG = {
    "in_channels": 8,
    "out_channels": 8,
    "num_attention_heads": 3,
    "attention_head_dim": 12,
    "cross_attention_dim": 36,
    "num_layers": 2,
    "caption_channels": 16,
}


def inputs(
    generator: torch.Generator,
    *,
    grid: tuple[int, int, int],
    text: int,
    batch: int = 2,
    mask: bool = True,
    timestep: str = "sample",
    coords: bool = False,
) -> dict[str, Any]:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    frames, height, width = grid
    video = frames * height * width
    time = torch.tensor([371.0, 900.0])[:batch]
    # Frames that are given have a timestep of 0, or a smaller one.
    given = torch.cat([torch.ones(height * width), torch.zeros(video - height * width)]) * 0.9
    made: dict[str, Any] = {
        "hidden_states": random(batch, video, 8),
        "encoder_hidden_states": random(batch, text, 16),
        "timestep": {
            "sample": time,
            "column": time[:, None],
            "token": torch.minimum(time[:, None], (1 - given[None]) * 1000),
            "token-3d": time[:, None, None] * (1 - given[None, :, None]),
        }[timestep],
        "encoder_attention_mask": torch.ones(batch, text),
    }
    if mask:
        made["encoder_attention_mask"][0, max(1, text - 3) :] = 0
        made["encoder_attention_mask"][-1, max(1, text // 2) :] = 0
    if coords:
        made["video_coords"] = random(batch, 3, video).abs() * 10
    else:
        made |= {"num_frames": frames, "height": height, "width": width, "rope_interpolation_scale": (8 / 25, 32, 32)}
    return made


def make(**options: Any) -> Any:
    return functools.partial(inputs, **options)


# LTX applies its rotary embedding in fp32.
EVEN = Row(
    "even",
    "LTXVideoTransformer3DModel",
    CONFIG,
    make(grid=(3, 2, 4), text=8),
    tolerance=1e-6,
    gradient_tolerance=1e-5,
)

ROWS = [
    EVEN,
    with_config(EVEN, "odd", inputs=make(grid=(3, 3, 3), text=7)),
    with_config(EVEN, "text-of-3", inputs=make(grid=(1, 1, 13), text=3)),
    with_config(EVEN, "two-tokens", inputs=make(grid=(1, 1, 2), text=1, batch=1, mask=False)),
    with_config(EVEN, "image", inputs=make(grid=(3, 3, 3), text=7, timestep="token")),
    with_config(EVEN, "condition", inputs=make(grid=(5, 1, 3), text=7, timestep="token", coords=True)),
    with_config(EVEN, "condition-free", inputs=make(grid=(5, 1, 3), text=7, timestep="column", coords=True)),
    with_config(EVEN, "long", inputs=make(grid=(3, 1, 3), text=7, timestep="token-3d", coords=True)),
    with_config(EVEN, "one-token", inputs=make(grid=(1, 1, 1), text=3, timestep="token")),
]
