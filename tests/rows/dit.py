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
    "sample_size": 8,
    "patch_size": 2,
    "num_embeds_ada_norm": 10,
}


def inputs(generator: torch.Generator, *, side: int, batch: int = 2) -> dict[str, Any]:
    """A square of ``side`` x ``side`` patches of 2 x 2: the model knows no other."""
    return {
        "hidden_states": torch.randn(batch, 4, 2 * side, 2 * side, generator=generator, dtype=torch.float64),
        "timestep": torch.tensor([371, 900])[:batch],
        "class_labels": torch.tensor([3, 10])[:batch],
    }


def make(**options: Any) -> Any:
    return functools.partial(inputs, **options)


# The bias of keys has no gradient but rounding: it moves all scores of a query alike.
EVEN = Row("even", "DiTTransformer2DModel", CONFIG, make(side=4), gradient_tolerance=1e-9)

ROWS = [
    EVEN,
    with_config(EVEN, "odd", inputs=make(side=3)),
    with_config(EVEN, "four-tokens", inputs=make(side=2, batch=1)),
]
