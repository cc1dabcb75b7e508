from __future__ import annotations

import functools
from typing import Any

import torch

from tests.model_cases import Row, with_config

CONFIG = {
    "in_channels": 8,
    "num_layers": 2,
    "attention_head_dim": 12,
    "num_attention_heads": 3,
    "intermediate_size": 32,
    "adaln_dim": 16,
    "llm_features_dim": 20,
    "mrope_section": (2, 2, 2),
}


def inputs(
    generator: torch.Generator, *, image: int, text: int, valid: tuple[int, ...], per_token: bool = False
) -> dict[str, Any]:
    """``valid``: length of each prompt, padded on the left to ``text`` by tokens of a segment of their own."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    batch, tokens = len(valid), text + image
    is_text = torch.arange(text) >= text - torch.tensor(valid)[:, None]
    indicator = torch.full((batch, tokens), 2)
    indicator[:, :text] = torch.where(is_text, 3, 0)
    segments = torch.ones(batch, tokens, dtype=torch.int64)
    segments[:, :text] = torch.where(is_text, 1, -1)
    timestep = torch.tensor([0.37, 0.9], dtype=torch.float64)[:batch]
    return {
        "hidden_states": random(batch, tokens, 8),
        "timestep": timestep[:, None].expand(-1, tokens) if per_token else timestep,
        "encoder_hidden_states": random(batch, tokens, 20),
        "position_ids": torch.randint(0, 9, (batch, tokens, 3), generator=generator),
        "segment_ids": segments,
        "indicator": indicator,
    }


def make(**options: Any) -> Any:
    return functools.partial(inputs, **options)


# The RMS norms compute their variance in fp32.
EVEN = Row("even", "Ideogram4Transformer2DModel", CONFIG, make(image=16, text=8, valid=(8, 8)), gradient_tolerance=3e-6)

ROWS = [
    EVEN,
    with_config(EVEN, "odd", inputs=make(image=15, text=8, valid=(4, 8))),
    with_config(EVEN, "text-of-3", inputs=make(image=13, text=3, valid=(3, 1))),
    # What the unconditional transformer gets.
    with_config(EVEN, "no-text", inputs=make(image=13, text=0, valid=(0,))),
    with_config(EVEN, "per-token-timestep", inputs=make(image=9, text=5, valid=(5, 2), per_token=True)),
    with_config(EVEN, "one-token", inputs=make(image=1, text=0, valid=(0, 0))),
]
