from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from tests.model_cases import Row, with_config

CONFIG = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 3,
    "attention_head_dim": 16,
    "num_layers": 2,
    "mlp_ratio": 2,
    "text_embed_dim": 10,
    "adaln_lora_dim": 6,
    "max_size": (8, 16, 16),
    "patch_size": (1, 2, 2),
    "rope_scale": (2.0, 1.0, 1.0),
    "concat_padding_mask": True,
    "extra_pos_embed_type": None,
}


def fp32_positions(model: nn.Module) -> None:
    """Diffusers keeps this module in fp32; its norm refuses fp64."""
    model.learnable_pos_embed.float()


def inputs(
    generator: torch.Generator,
    *,
    grid: tuple[int, int, int],
    text: int,
    batch: int = 2,
    condition: bool = False,
    frame_timesteps: bool = False,
    text_mask: tuple[int, ...] = (),
    fps: int | None = None,
    controlnet: int = 0,
    image_context: int = 0,
) -> dict[str, Any]:
    frames, height, width = grid

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    made: dict[str, Any] = {
        "hidden_states": random(batch, 4, frames, 2 * height, 2 * width),
        "timestep": torch.linspace(0.2, 0.9, batch, dtype=torch.float64),
        "encoder_hidden_states": random(batch, text, 10),
        "padding_mask": torch.zeros(1, 1, 16 * height, 16 * width, dtype=torch.float64),
        "fps": fps,
    }
    if condition:
        made["condition_mask"] = torch.zeros(batch, 1, frames, 2 * height, 2 * width, dtype=torch.float64)
        made["condition_mask"][:, :, 0] = 1.0
    if frame_timesteps:
        made["timestep"] = torch.rand(batch, 1, frames, 1, 1, generator=generator, dtype=torch.float64)
    if text_mask:
        made["attention_mask"] = torch.arange(text) < torch.tensor(text_mask)[:, None]
    if controlnet:
        made["block_controlnet_hidden_states"] = [random(batch, frames * height * width, 48) for _ in range(controlnet)]
    if image_context:
        made["encoder_hidden_states"] = (made["encoder_hidden_states"], random(batch, image_context, 8))
        # The image context has a projection of its own in the attention.
        made["attention_mask"] = None
    return made


def make(**options: Any) -> Any:
    return functools.partial(inputs, **options)


# The rotary embedding is applied in fp32, which is felt by gradients.
EVEN = Row("even", "CosmosTransformer3DModel", CONFIG, make(grid=(2, 2, 4), text=8), gradient_tolerance=3e-6)
TRANSFER = {
    **CONFIG,
    "in_channels": 5,
    "controlnet_block_every_n": 1,
    "img_context_dim_in": 8,
    "img_context_num_tokens": 4,
    "img_context_dim_out": 48,
    "use_crossattn_projection": True,
    "crossattn_proj_in_channels": 10,
    "encoder_hidden_states_channels": 10,
}

ROWS = [
    EVEN,
    with_config(EVEN, "odd-with-padded-text", inputs=make(grid=(3, 3, 3), text=7, text_mask=(7, 4), fps=16)),
    with_config(EVEN, "text-of-3", inputs=make(grid=(5, 1, 3), text=3, batch=1)),
    with_config(
        EVEN,
        "video-to-world-with-a-timestep-for-each-frame",
        config={**CONFIG, "in_channels": 5},
        inputs=make(grid=(3, 3, 3), text=5, condition=True, frame_timesteps=True, fps=16),
    ),
    with_config(
        EVEN,
        "learnable-positions",
        config={**CONFIG, "extra_pos_embed_type": "learnable"},
        inputs=make(grid=(3, 3, 2), text=5, fps=16),
        prepare=fp32_positions,
    ),
    with_config(
        EVEN,
        "transfer-with-controlnet-and-image-context",
        config=TRANSFER,
        inputs=make(grid=(3, 3, 3), text=5, condition=True, frame_timesteps=True, controlnet=2, image_context=4),
    ),
]
