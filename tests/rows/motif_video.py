from __future__ import annotations

import functools
from typing import Any

import torch

from tests.model_cases import Row, with_config

CONFIG = {
    "in_channels": 9,
    "out_channels": 4,
    "num_attention_heads": 3,
    "attention_head_dim": 12,
    "num_layers": 1,
    "num_single_layers": 3,
    "num_decoder_layers": 2,
    "mlp_ratio": 1.0,
    "patch_size": 2,
    "patch_size_t": 1,
    "text_embed_dim": 10,
    "image_embed_dim": 8,
    "rope_axes_dim": (4, 4, 4),
    "enable_text_cross_attention_dual": True,
    "enable_text_cross_attention_single": True,
}


def fp64_time(model: Any) -> None:
    """The timestep embedding is fed fp32 whatever its weights are, unless they are half precision."""
    model.time_text_embed.timestep_embedder.float()
    model.time_text_embed.register_forward_hook(lambda module, args, output: output.double())


def inputs(
    generator: torch.Generator,
    *,
    grid: tuple[int, int, int],
    text: int,
    batch: int = 2,
    image: int = 0,
    valid: tuple[int, ...] = (),
) -> dict[str, Any]:
    frames, height, width = grid

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    made: dict[str, Any] = {
        "hidden_states": random(batch, 9, frames, 2 * height, 2 * width),
        "timestep": torch.tensor([300, 700][:batch]),
        "encoder_hidden_states": random(batch, text, 10),
    }
    if image:
        made["image_embeds"] = random(batch, image, 8)
    if valid:
        made["encoder_attention_mask"] = (torch.arange(text) < torch.tensor(valid)[:, None]).long()
    return made


def make(**options: Any) -> Any:
    return functools.partial(inputs, **options)


# The rotary embedding is applied in fp32.
EVEN = Row(
    "even",
    "MotifVideoTransformer3DModel",
    CONFIG,
    make(grid=(2, 2, 4), text=8, image=4, valid=(8, 8)),
    prepare=fp64_time,
    tolerance=1e-5,
    gradient_tolerance=1e-5,
)

ROWS = [
    EVEN,
    with_config(EVEN, "odd-with-padded-text", inputs=make(grid=(3, 3, 3), text=7, image=5, valid=(7, 4))),
    with_config(EVEN, "text-of-3", inputs=make(grid=(5, 3, 1), text=3, batch=1, valid=(2,))),
    with_config(EVEN, "without-image-and-mask", inputs=make(grid=(3, 3, 2), text=5)),
    with_config(
        EVEN,
        "no-decoder-and-no-cross-attention",
        config={
            **CONFIG, "num_single_layers": 1, "num_decoder_layers": 0, "enable_text_cross_attention_dual": False,
            "enable_text_cross_attention_single": False,
        },
        inputs=make(grid=(3, 3, 2), text=5, image=3, valid=(5, 2)),
    ),
]  # fmt: skip
