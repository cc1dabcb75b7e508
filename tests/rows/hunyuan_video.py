from __future__ import annotations

import functools
from typing import Any

import torch

from tests.model_cases import Row, with_config

CONFIG = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 3,
    "attention_head_dim": 12,
    "num_layers": 2,
    "num_single_layers": 2,
    "num_refiner_layers": 1,
    "mlp_ratio": 2.0,
    "patch_size": 2,
    "patch_size_t": 1,
    "guidance_embeds": True,
    "text_embed_dim": 16,
    "pooled_projection_dim": 8,
    "rope_axes_dim": (4, 4, 4),
}


def padding(batch: int, length: int) -> torch.Tensor:
    """``[B, length]``: ones and then zeros, another number for each sample."""
    valid = torch.tensor([max(1, length - 3), max(1, length // 2)])[:batch]
    return (torch.arange(length)[None] < valid[:, None]).long()


def inputs(
    generator: torch.Generator,
    *,
    grid: tuple[int, int, int],
    text: int,
    batch: int = 2,
    channels: int = 4,
    guidance: bool = True,
) -> dict[str, Any]:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    frames, height, width = grid
    made: dict[str, Any] = {
        "hidden_states": random(batch, channels, frames, 2 * height, 2 * width),
        "timestep": torch.tensor([371.0, 900.0])[:batch],
        "encoder_hidden_states": random(batch, text, 16),
        "encoder_attention_mask": padding(batch, text),
        "pooled_projections": random(batch, 8),
    }
    if guidance:
        made["guidance"] = torch.tensor([6000.0] * batch)
    return made


def make(**options: Any) -> Any:
    return functools.partial(inputs, **options)


# The rotary embedding is applied in fp32.
EVEN = Row(
    "even",
    "HunyuanVideoTransformer3DModel",
    CONFIG,
    make(grid=(3, 2, 4), text=8),
    tolerance=1e-6,
    gradient_tolerance=1e-5,
)
REPLACE = {**CONFIG, "image_condition_type": "token_replace", "guidance_embeds": False}

CONFIG_15 = {
    "in_channels": 9,
    "out_channels": 4,
    "num_attention_heads": 3,
    "attention_head_dim": 12,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "mlp_ratio": 2.0,
    "patch_size": 1,
    "patch_size_t": 1,
    "text_embed_dim": 16,
    "text_embed_2_dim": 14,
    "image_embed_dim": 10,
    "rope_axes_dim": (4, 4, 4),
}


def inputs_15(
    generator: torch.Generator,
    *,
    grid: tuple[int, int, int],
    text: int,
    glyphs: int = 5,
    image: int = 4,
    batch: int = 2,
    given: bool = False,
    meanflow: bool = False,
) -> dict[str, Any]:
    """``glyphs``: length of the ByT5 text; ``given``: whether an image is, else its embeddings are zeros."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    made: dict[str, Any] = {
        "hidden_states": random(batch, 9, *grid),
        "timestep": torch.tensor([371.0, 900.0], dtype=torch.float64)[:batch],
        "encoder_hidden_states": random(batch, text, 16),
        "encoder_attention_mask": padding(batch, text),
        "encoder_hidden_states_2": random(batch, glyphs, 14),
        # A prompt without quoted words has no glyph tokens at all.
        "encoder_attention_mask_2": padding(batch, glyphs) * torch.tensor([[0], [1]])[:batch],
        "image_embeds": random(batch, image, 10) * given,
    }
    if meanflow:
        made["timestep_r"] = torch.tensor([300.0, 850.0], dtype=torch.float64)[:batch]
    return made


def make_15(**options: Any) -> Any:
    return functools.partial(inputs_15, **options)


EVEN_15 = Row(
    "even",
    "HunyuanVideo15Transformer3DModel",
    CONFIG_15,
    make_15(grid=(3, 2, 4), text=8),
    tolerance=1e-6,
    gradient_tolerance=1e-5,
)


def inputs_framepack(
    generator: torch.Generator, *, grid: tuple[int, int, int], text: int, image: int = 4, batch: int = 2
) -> dict[str, Any]:
    made = inputs(generator, grid=grid, text=text, batch=batch)
    frames, height, width = grid

    def latents(count: int) -> torch.Tensor:
        shape = (batch, 4, count, 2 * height, 2 * width)
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    made["image_embeds"] = torch.randn(batch, image, 10, generator=generator, dtype=torch.float64)
    # As the pipeline has them: one frame in front, 16 and 2 and 1 of history, then the new ones.
    made["latents_clean"], made["indices_latents_clean"] = latents(2), torch.tensor([0, 19])
    made["latents_history_2x"], made["indices_latents_history_2x"] = latents(2), torch.arange(17, 19)
    made["latents_history_4x"], made["indices_latents_history_4x"] = latents(16), torch.arange(1, 17)
    made["indices_latents"] = torch.arange(20, 20 + frames)
    return made


def make_framepack(**options: Any) -> Any:
    return functools.partial(inputs_framepack, **options)


FRAMEPACK = with_config(
    EVEN,
    "even",
    model="HunyuanVideoFramepackTransformer3DModel",
    config={**CONFIG, "has_image_proj": True, "image_proj_dim": 10, "has_clean_x_embedder": True},
    inputs=make_framepack(grid=(3, 2, 2), text=8),
)

ROWS = [
    EVEN,
    with_config(EVEN, "odd", inputs=make(grid=(3, 3, 3), text=7)),
    with_config(EVEN, "text-of-3", inputs=make(grid=(1, 1, 13), text=3)),
    with_config(EVEN, "two-tokens", inputs=make(grid=(1, 1, 2), text=1, batch=1)),
    with_config(
        EVEN,
        "latent-concat",
        config={**CONFIG, "image_condition_type": "latent_concat", "in_channels": 9, "guidance_embeds": False},
        inputs=make(grid=(3, 3, 1), text=7, channels=9, guidance=False),
    ),
    with_config(EVEN, "token-replace", config=REPLACE, inputs=make(grid=(3, 3, 3), text=7, guidance=False)),
    with_config(EVEN, "token-replace-even", config=REPLACE, inputs=make(grid=(3, 2, 4), text=8, guidance=False)),
    with_config(EVEN, "token-replace-3", config=REPLACE, inputs=make(grid=(3, 1, 1), text=3, guidance=False)),
    with_config(EVEN, "token-replace-image", config=REPLACE, inputs=make(grid=(1, 3, 3), text=5, guidance=False)),
    EVEN_15,
    with_config(EVEN_15, "odd", inputs=make_15(grid=(3, 3, 3), text=7)),
    with_config(EVEN_15, "short-texts", inputs=make_15(grid=(1, 1, 13), text=3, glyphs=1, image=1)),
    with_config(EVEN_15, "two-tokens", inputs=make_15(grid=(1, 1, 2), text=1, glyphs=1, image=1, batch=1)),
    with_config(EVEN_15, "image", inputs=make_15(grid=(3, 3, 3), text=7, given=True)),
    with_config(
        EVEN_15,
        "meanflow",
        config={**CONFIG_15, "use_meanflow": True},
        inputs=make_15(grid=(5, 1, 3), text=7, given=True, meanflow=True),
    ),
    FRAMEPACK,
    with_config(FRAMEPACK, "odd", inputs=make_framepack(grid=(3, 3, 1), text=7)),
    # With one sample the padding of the text is cut off.
    with_config(FRAMEPACK, "one-sample", inputs=make_framepack(grid=(3, 1, 3), text=7, batch=1)),
    with_config(FRAMEPACK, "text-of-3", inputs=make_framepack(grid=(1, 1, 1), text=3, image=1)),
]
