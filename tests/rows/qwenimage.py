from __future__ import annotations

import functools
import math
from typing import Any

import torch

from tests.model_cases import Row, with_config

CONFIG = {
    "patch_size": 1,
    "in_channels": 8,
    "out_channels": 8,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 3,
    "joint_attention_dim": 12,
    "axes_dims_rope": (4, 6, 6),
}

Shapes = list[tuple[int, int, int]]


def inputs(
    generator: torch.Generator,
    *,
    shapes: Shapes,
    text: int,
    batch: int = 2,
    valid: tuple[int, ...] | None = None,
    mask_dtype: torch.dtype = torch.int64,
    control: int = 0,
    is_rgb: bool = False,
    condition: int | None = None,
) -> dict[str, Any]:
    """``shapes``: (frames, height, width) of the image and of each image that it is edited from. ``valid``: how many
    tokens of each prompt are not padding."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    image = sum(math.prod(shape) for shape in shapes)
    made: dict[str, Any] = {
        "hidden_states": random(batch, image, 8),
        "encoder_hidden_states": random(batch, text, 12),
        "timestep": torch.linspace(0.2, 0.9, batch, dtype=torch.float64),
        "img_shapes": [shapes] * batch,
    }
    if valid is not None:
        made["encoder_hidden_states_mask"] = (torch.arange(text) < torch.tensor(valid)[:, None]).to(mask_dtype)
    if control:
        made["controlnet_block_samples"] = [random(batch, image, 48) for _ in range(control)]
    if is_rgb:
        made["additional_t_cond"] = torch.tensor([0] * batch)
    if condition is not None:
        made["controlnet_cond"] = random(batch, image, condition)
    return made


def make(**options: Any) -> Any:
    return functools.partial(inputs, **options)


EDIT: Shapes = [(1, 3, 3), (1, 2, 5), (1, 2, 2)]
# Three layers and the condition image, which comes last.
LAYERS: Shapes = [(1, 3, 3)] * 4

# Qwen-Image applies its rotary embedding in fp32.
EVEN = Row(
    "even",
    "QwenImageTransformer2DModel",
    CONFIG,
    make(shapes=[(1, 4, 4)], text=8, valid=(8, 6)),
    gradient_tolerance=3e-6,
)

ROWS = [
    EVEN,
    with_config(EVEN, "no-mask", inputs=make(shapes=[(1, 3, 5)], text=7)),
    with_config(EVEN, "odd", inputs=make(shapes=[(1, 3, 5)], text=9, valid=(6, 2))),
    with_config(EVEN, "text-of-3", inputs=make(shapes=[(1, 1, 13)], text=3, valid=(3, 1), mask_dtype=torch.bool)),
    with_config(EVEN, "edit", inputs=make(shapes=EDIT, text=7, valid=(7, 4))),
    with_config(
        EVEN, "edit-plus", config={**CONFIG, "zero_cond_t": True}, inputs=make(shapes=EDIT, text=7, valid=(7, 4))
    ),
    with_config(
        EVEN,
        "layered",
        config={**CONFIG, "use_additional_t_cond": True, "use_layer3d_rope": True},
        inputs=make(shapes=LAYERS, text=7, valid=(5, 7), is_rgb=True),
    ),
    with_config(EVEN, "controlnet", inputs=make(shapes=[(1, 3, 5)], text=7, valid=(5, 7), control=1)),
]
