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
    "num_single_layers": 2,
    "num_refiner_layers": 1,
    "patch_size": (1, 1),
    "text_embed_dim": 12,
    "rope_axes_dim": (4, 4),
}
BYT5 = {**CONFIG, "text_embed_2_dim": 10}


def inputs(
    generator: torch.Generator,
    *,
    size: tuple[int, ...],
    text: int,
    valid: tuple[int, ...],
    byt5: tuple[int, ...] | None = None,
    guidance: bool = False,
    meanflow: bool = False,
) -> dict[str, Any]:
    """``valid``: length of each prompt within ``text``; ``byt5``: that of the second within 6."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    batch = len(valid)
    made: dict[str, Any] = {
        "hidden_states": random(batch, 4, *size),
        "timestep": torch.tensor([371.0, 900.0], dtype=torch.float64)[:batch],
        "encoder_hidden_states": random(batch, text, 12),
        "encoder_attention_mask": (torch.arange(text) < torch.tensor(valid)[:, None]).long(),
    }
    if byt5 is not None:
        made["encoder_hidden_states_2"] = random(batch, 6, 10)
        made["encoder_attention_mask_2"] = (torch.arange(6) < torch.tensor(byt5)[:, None]).long()
    if guidance:
        made["guidance"] = torch.full((batch,), 3500.0, dtype=torch.float64)
    if meanflow:
        made["timestep_r"] = torch.tensor([171.0, 600.0], dtype=torch.float64)[:batch]
    return made


def make(**options: Any) -> Any:
    return functools.partial(inputs, **options)


# The rotary embedding is applied in fp32.
EVEN = Row(
    "even", "HunyuanImageTransformer2DModel", CONFIG, make(size=(4, 4), text=8, valid=(8, 8)), gradient_tolerance=3e-6
)

ROWS = [
    EVEN,
    with_config(EVEN, "odd-byt5", config=BYT5, inputs=make(size=(3, 5), text=7, valid=(4, 7), byt5=(0, 5))),
    with_config(EVEN, "text-of-3", inputs=make(size=(1, 13), text=3, valid=(3, 1))),
    with_config(
        EVEN,
        "distilled",
        config={**BYT5, "guidance_embeds": True, "use_meanflow": True},
        inputs=make(size=(3, 3), text=5, valid=(5,), byt5=(2,), guidance=True, meanflow=True),
    ),
    with_config(
        EVEN,
        "refiner",
        config={**CONFIG, "patch_size": (1, 1, 1), "rope_axes_dim": (2, 2, 4), "guidance_embeds": True},
        inputs=make(size=(1, 3, 5), text=5, valid=(2, 5), guidance=True),
    ),
]
