from __future__ import annotations

import functools
from typing import Any

import torch

from tests.model_cases import Row, with_config

CONFIG = {
    "hidden_size": 24,
    "num_attention_heads": 3,
    "num_layers": 2,
    "ffn_hidden_size": 32,
    "in_channels": 8,
    "out_channels": 8,
    "patch_size": 1,
    "text_in_dim": 12,
    "rope_axes_dim": (4, 2, 2),
}


def inputs(generator: torch.Generator, *, size: tuple[int, int], lengths: tuple[int, ...]) -> dict[str, Any]:
    """``lengths``: that of each prompt; the longest gives the length of the text."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "hidden_states": random(len(lengths), 8, *size),
        "timestep": torch.tensor([371.0, 900.0], dtype=torch.float64)[: len(lengths)],
        "text_bth": random(len(lengths), max(lengths), 12),
        "text_lens": torch.tensor(lengths),
    }


def make(**options: Any) -> Any:
    return functools.partial(inputs, **options)


# The modulation computes in fp32.
EVEN = Row("even", "ErnieImageTransformer2DModel", CONFIG, make(size=(4, 4), lengths=(8, 8)), gradient_tolerance=3e-6)

ROWS = [
    EVEN,
    with_config(EVEN, "odd", inputs=make(size=(3, 5), lengths=(4, 7))),
    with_config(EVEN, "text-of-3", inputs=make(size=(1, 13), lengths=(3,))),
    with_config(EVEN, "empty-prompt", inputs=make(size=(2, 3), lengths=(0, 5))),
    with_config(EVEN, "two-tokens", inputs=make(size=(1, 1), lengths=(1, 1))),
]
