from __future__ import annotations

import functools
from typing import Any

import torch

from tests.model_cases import Row, with_config

CONFIG = {
    "in_channels": 8,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "timestep_embed_dim": 16,
    "text_hidden_dim": 12,
    "num_text_layers": 3,
    "text_num_attention_heads": 3,
    "text_num_key_value_heads": 3,
    "text_intermediate_size": 16,
    "num_layerwise_text_blocks": 1,
    "num_refiner_text_blocks": 1,
    "axes_dims_rope": (4, 2, 2),
}


def inputs(generator: torch.Generator, *, image: int, text: int, valid: tuple[int, ...] = ()) -> dict[str, Any]:
    """``valid``: length of each prompt within ``text``; without it there is no mask."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    batch = len(valid) or 2
    ids = torch.cat([torch.zeros(text, 3, dtype=torch.int64), torch.randint(0, 9, (image, 3), generator=generator)])
    made: dict[str, Any] = {
        "hidden_states": random(batch, image, 8),
        "encoder_hidden_states": random(batch, text, 3, 12),
        "timestep": torch.tensor([0.37, 0.9], dtype=torch.float64)[:batch],
        "position_ids": ids,
        "encoder_attention_mask": None,
    }
    if valid:
        made["encoder_attention_mask"] = torch.arange(text) < torch.tensor(valid)[:, None]
    return made


def keep_norms_in_fp32(model: torch.nn.Module) -> None:
    """As from_pretrained does (``_keep_in_fp32_modules``)."""
    for module in model.modules():
        if type(module).__name__ == "Krea2RMSNorm":
            module.float()


def make(**options: Any) -> Any:
    return functools.partial(inputs, **options)


# The RMS norms compute in fp32, and the rotary embedding is applied in it.
EVEN = Row(
    "even",
    "Krea2Transformer2DModel",
    CONFIG,
    make(image=16, text=8),
    prepare=keep_norms_in_fp32,
    gradient_tolerance=3e-6,
)

ROWS = [
    EVEN,
    with_config(EVEN, "odd", inputs=make(image=15, text=7, valid=(4, 7))),
    with_config(EVEN, "text-of-3", inputs=make(image=13, text=3, valid=(3, 2))),
    with_config(EVEN, "two-tokens", inputs=make(image=2, text=1, valid=(1,))),
]
