from __future__ import annotations

import functools
from typing import Any

import torch

from tests.model_cases import Row, with_config

CONFIG = {
    "patch_size": 1,
    "in_channels": 8,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 5,
    "joint_attention_dim": 12,
    "pooled_projection_dim": 10,
    "axes_dims_rope": (4, 6, 6),
}


def inputs(
    generator: torch.Generator,
    *,
    image: int,
    text: int,
    batch: int = 2,
    guidance: bool = False,
    ids_ndim: int = 2,
    control: tuple[int, int] | None = None,
) -> dict[str, Any]:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    made: dict[str, Any] = {
        "hidden_states": random(batch, image, 8),
        "encoder_hidden_states": random(batch, text, 12),
        "pooled_projections": random(batch, 10),
        "timestep": torch.linspace(0.2, 0.9, batch, dtype=torch.float64),
        "img_ids": torch.randint(0, 9, (image, 3), generator=generator).double(),
        "txt_ids": torch.zeros(text, 3, dtype=torch.float64),
    }
    if guidance:
        made["guidance"] = torch.full((batch,), 3.5, dtype=torch.float64)
    if ids_ndim == 3:
        made["img_ids"], made["txt_ids"] = (made[n].expand(batch, -1, -1) for n in ("img_ids", "txt_ids"))
    if control:
        made["controlnet_block_samples"] = [random(batch, image, 80) for _ in range(control[0])]
        made["controlnet_single_block_samples"] = [random(batch, image, 80) for _ in range(control[1])]
    return made


def make(**options: Any) -> Any:
    return functools.partial(inputs, **options)


# Flux applies its rotary embedding in fp32, so three ranks' worth of gradient rounds otherwise than one's.
EVEN = Row("even", "FluxTransformer2DModel", CONFIG, make(image=16, text=8), gradient_tolerance=3e-6)

ROWS = [
    EVEN,
    with_config(EVEN, "odd", inputs=make(image=15, text=7)),
    with_config(EVEN, "text-of-3", inputs=make(image=13, text=3, batch=1)),
    with_config(EVEN, "two-tokens", inputs=make(image=2, text=1)),
    with_config(
        EVEN, "guidance", config={**CONFIG, "guidance_embeds": True}, inputs=make(image=9, text=5, guidance=True)
    ),
    with_config(EVEN, "controlnet", inputs=make(image=11, text=5, control=(2, 1))),
]
