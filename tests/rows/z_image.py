from __future__ import annotations

import functools
from typing import Any

import torch

from tests.model_cases import Row, with_config

CONFIG = {
    "all_patch_size": (2,),
    "all_f_patch_size": (1,),
    "in_channels": 4,
    "dim": 48,
    "n_layers": 2,
    "n_refiner_layers": 2,
    "n_heads": 3,
    "n_kv_heads": 3,
    "cap_feat_dim": 12,
    "axes_dims": [4, 6, 6],
    "axes_lens": [128, 32, 32],
}
# The model pads with X_PAD_DIM = 64 channels where a sample has no image, so Omni needs 16 channels.
OMNI = {**CONFIG, "in_channels": 16, "siglip_feat_dim": 10}


def _random(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def inputs(
    generator: torch.Generator, *, sizes: list[tuple[int, int]], texts: list[int], control: int = 0
) -> dict[str, Any]:
    """``sizes``: height and width of each sample's latents; ``texts``: tokens of each sample's prompt."""
    made: dict[str, Any] = {
        "x": [_random(generator, 4, 1, *size) for size in sizes],
        "t": torch.linspace(0.2, 0.9, len(sizes), dtype=torch.float64),
        "cap_feats": [_random(generator, text, 12) for text in texts],
    }
    if control:
        longest = max(
            _padded(height * width // 4) + _padded(text) for (height, width), text in zip(sizes, texts, strict=True)
        )
        made["controlnet_block_samples"] = {
            index: _random(generator, len(sizes), longest, 48) for index in range(control)
        }
    return made


def _padded(length: int) -> int:
    return -(-length // 32) * 32


def omni(generator: torch.Generator, *, siglip: bool) -> dict[str, Any]:
    """A sample with a condition image and one without, as the Omni pipeline makes them."""

    def image(height: int, width: int) -> torch.Tensor:
        return _random(generator, 16, 1, height, width)

    def features() -> torch.Tensor:
        return _random(generator, 2, 3, 10)

    return {
        "x": [[image(4, 4), image(6, 6)], [None, image(6, 10)]],
        "t": torch.tensor([0.2, 0.9], dtype=torch.float64),
        "cap_feats": [[_random(generator, n, 12) for n in lengths] for lengths in ([5, 7, 2], [35, 4])],
        "siglip_feats": [[features(), None], [None, None]] if siglip else [None, None],
        "image_noise_mask": [[0, 1], [0, 1]],
    }


def make(**options: Any) -> Any:
    return functools.partial(inputs, **options)


# Z-Image applies its rotary embedding in fp32.
EVEN = Row(
    "even",
    "ZImageTransformer2DModel",
    CONFIG,
    make(sizes=[(8, 16)] * 2, texts=[32, 32]),
    gradient_tolerance=3e-6,
)

ROWS = [
    EVEN,
    with_config(EVEN, "padded", inputs=make(sizes=[(6, 10)] * 2, texts=[35, 9])),
    with_config(EVEN, "unequal-images", inputs=make(sizes=[(6, 10), (12, 14)], texts=[35, 9])),
    with_config(EVEN, "text-of-3", inputs=make(sizes=[(2, 2)], texts=[3])),
    with_config(EVEN, "controlnet", inputs=make(sizes=[(6, 10)] * 2, texts=[5, 35], control=2)),
    with_config(EVEN, "omni", config=OMNI, inputs=functools.partial(omni, siglip=True)),
    with_config(EVEN, "omni-without-siglip", config=OMNI, inputs=functools.partial(omni, siglip=False)),
]
