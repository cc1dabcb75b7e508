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
    "num_attention_heads": 3,
    "joint_attention_dim": 12,
    "axes_dims_rope": (4, 6, 6),
    "approximator_num_channels": 16,
    "approximator_hidden_dim": 20,
    "approximator_layers": 2,
}


def inputs(
    generator: torch.Generator,
    *,
    image: int,
    text: int,
    batch: int = 2,
    valid: tuple[int, ...] | None = None,
    mask_dtype: torch.dtype = torch.float64,
    ids_ndim: int = 2,
    control: tuple[int, int] | None = None,
) -> dict[str, Any]:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    made: dict[str, Any] = {
        "hidden_states": random(batch, image, 8),
        "encoder_hidden_states": random(batch, text, 12),
        "timestep": torch.linspace(0.2, 0.9, batch, dtype=torch.float64),
        "img_ids": torch.randint(0, 9, (image, 3), generator=generator).double(),
        "txt_ids": torch.zeros(text, 3, dtype=torch.float64),
    }
    if valid is not None:
        # The pipelines keep one padding token visible, and pass numbers where the attention takes them for a bias.
        visible = torch.arange(text) <= torch.tensor(valid)[:, None]
        made["attention_mask"] = torch.cat([visible, torch.ones(batch, image)], dim=1).to(mask_dtype)
    if ids_ndim == 3:
        made["img_ids"], made["txt_ids"] = (made[n].expand(batch, -1, -1) for n in ("img_ids", "txt_ids"))
    if control:
        made["controlnet_block_samples"] = [random(batch, image, 48) for _ in range(control[0])]
        made["controlnet_single_block_samples"] = [random(batch, image, 48) for _ in range(control[1])]
    return made


def make(**options: Any) -> Any:
    return functools.partial(inputs, **options)


# Chroma applies its rotary embedding in fp32.
EVEN = Row("even", "ChromaTransformer2DModel", CONFIG, make(image=16, text=8, valid=(7, 5)), gradient_tolerance=3e-6)

ROWS = [
    EVEN,
    with_config(EVEN, "no-mask", inputs=make(image=15, text=7)),
    with_config(EVEN, "odd", inputs=make(image=15, text=9, valid=(6, 2))),
    with_config(EVEN, "boolean-mask", inputs=make(image=13, text=9, valid=(6, 2), mask_dtype=torch.bool)),
    with_config(EVEN, "text-of-3", inputs=make(image=13, text=3, valid=(2, 0), ids_ndim=3)),
    with_config(EVEN, "controlnet", inputs=make(image=11, text=5, valid=(3, 4), control=(2, 1))),
]
