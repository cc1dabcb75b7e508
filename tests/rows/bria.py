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
    "axes_dims_rope": (4, 6, 6),
}
FIBO = {**CONFIG, "text_encoder_dim": 6}


def inputs(
    generator: torch.Generator,
    *,
    image: int,
    text: int,
    batch: int = 2,
    fibo: bool = False,
    ids_ndim: int = 2,
    mask: bool = False,
    guidance: bool = False,
    control: int = 0,
) -> dict[str, Any]:

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    made: dict[str, Any] = {
        "hidden_states": random(batch, image, 8),
        "encoder_hidden_states": random(batch, text, 12),
        "timestep": torch.tensor([371.0, 900.0], dtype=torch.float64)[:batch],
        "img_ids": torch.randint(0, 9, (image, 3), generator=generator).double(),
        "txt_ids": torch.zeros(text, 3, dtype=torch.float64),
    }
    if fibo:
        made["text_encoder_layers"] = [random(batch, text, 6) for _ in range(4)]
    if ids_ndim == 3:
        made["img_ids"], made["txt_ids"] = (made[n].expand(batch, -1, -1) for n in ("img_ids", "txt_ids"))
    if mask:
        valid = torch.ones(batch, text + image, dtype=torch.bool)
        valid[0, text - text // 3 : text] = False
        # Editing at several sizes pads the latents as well.
        valid[-1, -2:] = False
        made["joint_attention_kwargs"] = {"attention_mask": valid[:, None, None, :]}
    if guidance:
        made["guidance"] = torch.full((batch,), 3.5, dtype=torch.float64)
    if control:
        made["controlnet_block_samples"] = [random(batch, image, 80) for _ in range(control)]
    return made


def make(**options: Any) -> Any:
    return functools.partial(inputs, **options)


# The rotary embedding is applied in fp32.
BRIA = Row("even", "BriaTransformer2DModel", CONFIG, make(image=16, text=8), gradient_tolerance=3e-6)
BRIA_FIBO = Row("even", "BriaFiboTransformer2DModel", FIBO, make(image=16, text=8, fibo=True), gradient_tolerance=3e-6)

ROWS = [
    BRIA,
    with_config(BRIA, "odd", inputs=make(image=15, text=7, ids_ndim=3)),
    with_config(BRIA, "text-of-3", inputs=make(image=13, text=3, batch=1)),
    with_config(BRIA, "two-tokens", inputs=make(image=2, text=1)),
    with_config(BRIA, "controlnet", inputs=make(image=11, text=5, control=1)),
    BRIA_FIBO,
    with_config(BRIA_FIBO, "odd", inputs=make(image=15, text=7, fibo=True, mask=True)),
    with_config(BRIA_FIBO, "text-of-3", inputs=make(image=13, text=3, fibo=True, mask=True)),
    with_config(BRIA_FIBO, "two-tokens", inputs=make(image=2, text=1, fibo=True, batch=1)),
    with_config(
        BRIA_FIBO,
        "guidance",
        config={**FIBO, "guidance_embeds": True},
        inputs=make(image=9, text=5, fibo=True, guidance=True),
    ),
]
