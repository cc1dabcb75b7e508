from __future__ import annotations

import functools
from typing import Any

import torch

from tests.model_cases import Row, with_config

CONFIG = {
    "num_attention_heads": 3,
    "attention_head_dim": 8,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 2,
    "cross_attention_dim": 24,
    "sample_size": 8,
    "patch_size": 2,
    "caption_channels": 16,
    "use_additional_conditions": False,
}


def inputs(
    generator: torch.Generator,
    *,
    grid: tuple[int, int],
    text: int,
    batch: int = 2,
    sizes: bool = False,
    image_mask: bool = False,
) -> dict[str, Any]:
    """``grid``: height and width in patches of 2 x 2."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mask = torch.ones(batch, text, dtype=torch.int64)
    mask[0, text - text // 3 :] = 0
    made: dict[str, Any] = {
        "hidden_states": random(batch, 4, 2 * grid[0], 2 * grid[1]),
        "encoder_hidden_states": random(batch, text, 16),
        "timestep": torch.tensor([371, 900])[:batch],
        "encoder_attention_mask": mask,
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }
    if sizes:
        # Alpha at 1024 pixels and above is told the resolution and the aspect ratio.
        made["added_cond_kwargs"] = {"resolution": random(batch, 2), "aspect_ratio": random(batch, 1)}
    if image_mask:
        made["attention_mask"] = torch.arange(grid[0] * grid[1]) < torch.tensor([[5], [grid[0] * grid[1]]])[:batch]
    return made


def fuse(model: Any) -> None:
    model.fuse_qkv_projections()


def make(**options: Any) -> Any:
    return functools.partial(inputs, **options)


# The bias of keys has no gradient but rounding: it moves all scores of a query alike.
EVEN = Row("even", "PixArtTransformer2DModel", CONFIG, make(grid=(4, 4), text=8), gradient_tolerance=1e-9)

ROWS = [
    EVEN,
    with_config(EVEN, "odd", inputs=make(grid=(3, 5), text=7)),
    with_config(EVEN, "text-of-3", inputs=make(grid=(1, 13), text=3, batch=1)),
    with_config(EVEN, "two-tokens", inputs=make(grid=(1, 2), text=3)),
    with_config(
        EVEN,
        "alpha-1024",
        config={**CONFIG, "use_additional_conditions": True},
        inputs=make(grid=(3, 3), text=5, sizes=True),
    ),
    with_config(EVEN, "image-mask", inputs=make(grid=(3, 5), text=5, image_mask=True)),
    with_config(EVEN, "fused", inputs=make(grid=(3, 3), text=5), prepare=fuse),
]
