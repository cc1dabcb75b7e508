from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from tests.model_cases import Row, build, with_config
from tests.rows import flux, qwenimage, sd3, z_image

FLUX = {**flux.CONFIG, "num_single_layers": 1}
FLUX_UNION = {**FLUX, "num_mode": 3}
FLUX_HINT = {**FLUX, "patch_size": 2, "conditioning_embedding_channels": 2, "num_single_layers": 0}


def flux_inputs(generator: torch.Generator, *, image: int, text: int, mode: bool = False, hint: bool = False) -> Any:
    """``mode``: of a union ControlNet. ``hint``: the condition is a picture, of a token for each 16 x 16 pixels."""
    made = flux.inputs(generator, image=image, text=text)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    made["controlnet_cond"] = random(2, 3, 16, 16 * image) if hint else random(2, image, 8)
    made["conditioning_scale"] = 0.7
    if mode:
        made["controlnet_mode"] = torch.tensor([[2], [0]])
    return made


def make_flux(**options: Any) -> Any:
    return functools.partial(flux_inputs, **options)


Z_IMAGE: dict[str, Any] = {
    "control_layers_places": [0, 1],
    "control_refiner_layers_places": [0, 1],
    "control_in_dim": 6,
    "dim": 48,
    "n_refiner_layers": 2,
    "n_heads": 3,
    "n_kv_heads": 3,
}


def z_image_inputs(generator: torch.Generator, *, sizes: list[tuple[int, int]], texts: list[int]) -> dict[str, Any]:
    made = z_image.inputs(generator, sizes=sizes, texts=texts)
    made["control_context"] = [torch.randn(6, 1, *size, generator=generator, dtype=torch.float64) for size in sizes]
    made["conditioning_scale"] = 0.7
    return made


def make_z_image(**options: Any) -> Any:
    return functools.partial(z_image_inputs, **options)


def share_with_a_transformer(model: nn.Module) -> None:
    """What the pipeline does: the ControlNet takes embedders and refiners of its transformer."""
    transformer = build(z_image.EVEN)
    type(model).from_transformer(model, transformer)
    # The class forgets to set it, without which it cannot be trained.
    model.gradient_checkpointing = False


FLUX_EVEN = with_config(flux.EVEN, "even", model="FluxControlNetModel", config=FLUX, inputs=make_flux(image=16, text=8))
SD3_EVEN = with_config(
    sd3.EVEN,
    "even",
    model="SD3ControlNetModel",
    config={**sd3.CONFIG, "extra_conditioning_channels": 1},
    inputs=sd3.make(size=(8, 8), text=8, condition=5),
)
SD3_DUAL = {**sd3.CONFIG, "dual_attention_layers": (0,), "qk_norm": "rms_norm"}
SD3_LARGE = {**sd3.CONFIG, "joint_attention_dim": None, "use_pos_embed": False}
QWEN = {**qwenimage.CONFIG, "extra_condition_channels": 1}
QWEN_EVEN = with_config(
    qwenimage.EVEN,
    "even",
    model="QwenImageControlNetModel",
    config=QWEN,
    inputs=qwenimage.make(shapes=[(1, 4, 4)], text=8, valid=(8, 6), condition=9),
)

# Z-Image applies its rotary embedding in fp32.
Z_IMAGE_EVEN = Row(
    "even",
    "ZImageControlNetModel",
    {**Z_IMAGE, "add_control_noise_refiner": "control_noise_refiner"},
    make_z_image(sizes=[(8, 16)] * 2, texts=[32, 32]),
    prepare=share_with_a_transformer,
    gradient_tolerance=3e-6,
)

ROWS = [
    FLUX_EVEN,
    with_config(FLUX_EVEN, "odd", inputs=make_flux(image=15, text=7)),
    with_config(FLUX_EVEN, "union-text-of-3", config=FLUX_UNION, inputs=make_flux(image=13, text=3, mode=True)),
    with_config(FLUX_EVEN, "picture", config=FLUX_HINT, inputs=make_flux(image=5, text=7, hint=True)),
    SD3_EVEN,
    with_config(SD3_EVEN, "odd", inputs=sd3.make(size=(6, 10), text=7, condition=5)),
    with_config(
        sd3.NORMED,
        "dual-layers-text-of-3",
        model="SD3ControlNetModel",
        config=SD3_DUAL,
        inputs=sd3.make(size=(6, 10), text=3, condition=4),
    ),
    with_config(SD3_EVEN, "large", config=SD3_LARGE, inputs=sd3.make(size=(6, 10), text=0, condition=4, tokens=True)),
    QWEN_EVEN,
    with_config(QWEN_EVEN, "odd", inputs=qwenimage.make(shapes=[(1, 3, 5)], text=9, valid=(6, 2), condition=9)),
    with_config(QWEN_EVEN, "text-of-3", inputs=qwenimage.make(shapes=[(1, 1, 13)], text=3, condition=9)),
    Z_IMAGE_EVEN,
    with_config(Z_IMAGE_EVEN, "padded", inputs=make_z_image(sizes=[(6, 10)] * 2, texts=[35, 9])),
    with_config(
        Z_IMAGE_EVEN, "own-refiner", config=Z_IMAGE, inputs=make_z_image(sizes=[(6, 10), (12, 14)], texts=[3, 40])
    ),
    with_config(
        Z_IMAGE_EVEN,
        "refining-control-layers",
        config={**Z_IMAGE, "add_control_noise_refiner": "control_layers"},
        inputs=make_z_image(sizes=[(6, 10)] * 2, texts=[35, 9]),
    ),
    with_config(Z_IMAGE_EVEN, "text-of-3", inputs=make_z_image(sizes=[(2, 2)], texts=[3])),
]
