from __future__ import annotations

import functools
from typing import Any

import torch
from diffusers.models.embeddings import get_3d_rotary_pos_embed_allegro

from tests.model_cases import Row, with_config

CONFIG = {
    "patch_size": 2,
    "num_attention_heads": 3,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "cross_attention_dim": 36,
    "sample_height": 8,
    "sample_width": 8,
    "sample_frames": 8,
    "caption_channels": 10,
}


def inputs(
    generator: torch.Generator,
    *,
    grid: tuple[int, int, int],
    text: tuple[int, ...],
    rope: bool = True,
    video_mask: bool = False,
) -> dict[str, Any]:
    frames, height, width = grid
    batch, longest = len(text), max(text)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    made: dict[str, Any] = {
        "hidden_states": random(batch, 4, frames, 2 * height, 2 * width),
        "encoder_hidden_states": random(batch, longest, 10),
        "timestep": torch.tensor([400, 900][:batch]),
        "encoder_attention_mask": (torch.arange(longest) < torch.tensor(text)[:, None]).double(),
    }
    if video_mask:
        made["attention_mask"] = torch.ones(batch, frames, 2 * height, 2 * width, dtype=torch.float64)
        made["attention_mask"][-1, :, -2:] = 0.0
    if rope:
        freqs_t, freqs_h, freqs_w, *grids = get_3d_rotary_pos_embed_allegro(
            embed_dim=12,
            crops_coords=((0, 0), (height, width)),
            grid_size=(height, width),
            temporal_size=frames,
            interpolation_scale=(2.2, 2.0, 2.0),
        )
        positions = torch.cartesian_prod(*(axis.long() for axis in grids)).T.reshape(3, 1, -1).contiguous()
        made["image_rotary_emb"] = ((freqs_t, freqs_h, freqs_w), tuple(positions))
    return made


def make(**options: Any) -> Any:
    return functools.partial(inputs, **options)


# The rotary embedding is applied in fp32.
EVEN = Row(
    "even",
    "AllegroTransformer3DModel",
    CONFIG,
    make(grid=(2, 2, 4), text=(8, 8)),
    tolerance=1e-5,
    gradient_tolerance=1e-5,
)

ROWS = [
    EVEN,
    with_config(EVEN, "odd-with-padded-text", inputs=make(grid=(3, 3, 3), text=(7, 4))),
    with_config(EVEN, "text-of-3", inputs=make(grid=(5, 3, 1), text=(3,))),
    with_config(EVEN, "padded-video", inputs=make(grid=(3, 3, 2), text=(5, 5), video_mask=True)),
    with_config(
        EVEN,
        "without-rope",
        inputs=make(grid=(3, 3, 3), text=(5, 2), rope=False),
        tolerance=1e-10,
        gradient_tolerance=1e-10,
    ),
]
