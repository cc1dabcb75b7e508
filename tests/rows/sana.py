from __future__ import annotations

import functools
from typing import Any

import torch

from tests.model_cases import Row, with_config

CONFIG = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 3,
    "attention_head_dim": 8,
    "num_layers": 2,
    "num_cross_attention_heads": 3,
    "cross_attention_head_dim": 8,
    "cross_attention_dim": 24,
    "caption_channels": 12,
    "sample_size": 4,
    "patch_size": 1,
}
SPRINT = {**CONFIG, "guidance_embeds": True, "qk_norm": "rms_norm_across_heads"}


def inputs(
    generator: torch.Generator,
    *,
    size: tuple[int, int],
    text: int,
    valid: tuple[int, ...],
    guidance: bool = False,
    control: int = 0,
) -> dict[str, Any]:
    """``valid``: length of each prompt within ``text``."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    batch = len(valid)
    made: dict[str, Any] = {
        "hidden_states": random(batch, 4, *size),
        "encoder_hidden_states": random(batch, text, 12),
        "encoder_attention_mask": (torch.arange(text) < torch.tensor(valid)[:, None]).long(),
        "timestep": torch.tensor([371.0, 900.0], dtype=torch.float64)[:batch],
    }
    if guidance:
        made["guidance"] = torch.full((batch,), 0.45, dtype=torch.float64)
    if control:
        made["controlnet_block_samples"] = tuple(random(batch, size[0] * size[1], 24) for _ in range(control))
    return made


def make(**options: Any) -> Any:
    return functools.partial(inputs, **options)


# Linear attention computes in fp32.
EVEN = Row(
    "even",
    "SanaTransformer2DModel",
    CONFIG,
    make(size=(4, 4), text=8, valid=(8, 8)),
    tolerance=1e-5,
    gradient_tolerance=1e-4,
)

ROWS = [
    EVEN,
    with_config(EVEN, "odd", inputs=make(size=(3, 5), text=7, valid=(4, 7))),
    with_config(EVEN, "one-row", inputs=make(size=(1, 13), text=3, valid=(3,))),
    with_config(EVEN, "one-column", inputs=make(size=(7, 1), text=3, valid=(1, 3))),
    with_config(EVEN, "two-tokens", inputs=make(size=(1, 2), text=3, valid=(1, 3))),
    with_config(EVEN, "controlnet", inputs=make(size=(2, 5), text=5, valid=(5, 5), control=1)),
    with_config(EVEN, "sprint", config=SPRINT, inputs=make(size=(5, 3), text=5, valid=(5, 2), guidance=True)),
]
