from __future__ import annotations

import functools
from typing import Any

import torch

from tests.model_cases import Row, with_config

CONFIG = {
    "patch_size": [1, 2, 2],
    "in_channels": 4,
    "hidden_size": 36,
    "num_attention_heads": 3,
    "text_dim": 10,
    "mlp_width_ratio": 1.0,
    "num_layers": 2,
    "rope_dim_list": [4, 4, 4],
}


def inputs(
    generator: torch.Generator, *, size: tuple[int, int], text: int, batch: int = 2, items: int = 0
) -> dict[str, Any]:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    height, width = size
    shape = (batch, items, 4, 1) if items else (batch, 4, 1)
    return {
        "hidden_states": random(*shape, 2 * height, 2 * width),
        "timestep": torch.tensor([300.0, 700.0][:batch], dtype=torch.float64),
        "encoder_hidden_states": random(batch, text, 10),
    }


def plus_inputs(
    generator: torch.Generator,
    *,
    shapes: list[list[tuple[int, int, int]]],
    text: int,
    valid: tuple[int, ...] | None = None,
) -> dict[str, Any]:
    """A target and its references for each sample, each of another size, end to end and padded."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    batch = len(shapes)
    longest = max(sum(t * h * w for t, h, w in sample) for sample in shapes)
    made: dict[str, Any] = {
        "hidden_states": random(batch, longest, 4, 1, 2, 2),
        "timestep": torch.tensor([300.0, 700.0][:batch], dtype=torch.float64),
        "encoder_hidden_states": random(batch, text, 10),
        "shape_list": shapes,
    }
    if valid:
        made["encoder_hidden_states_mask"] = (torch.arange(text) < torch.tensor(valid)[:, None]).long()
    return made


def make(**options: Any) -> Any:
    return functools.partial(inputs, **options)


def make_plus(**options: Any) -> Any:
    return functools.partial(plus_inputs, **options)


# Norms and the rotary embedding are computed in fp32.
EVEN = Row(
    "even",
    "JoyImageEditTransformer3DModel",
    CONFIG,
    make(size=(4, 4), text=8),
    tolerance=1e-5,
    gradient_tolerance=1e-5,
)
PLUS = with_config(
    EVEN,
    "even",
    model="JoyImageEditPlusTransformer3DModel",
    inputs=make_plus(shapes=[[(1, 4, 2), (1, 2, 4)]] * 2, text=8),
)

ROWS = [
    EVEN,
    with_config(EVEN, "odd-with-a-reference", inputs=make(size=(5, 3), text=7, items=2)),
    with_config(EVEN, "text-of-3", inputs=make(size=(3, 5), text=3, batch=1, items=1)),
    with_config(EVEN, "positions-of-text", config={**CONFIG, "rope_type": "mrope"}, inputs=make(size=(5, 3), text=5)),
    PLUS,
    with_config(
        PLUS,
        "odd-with-padded-text-and-images",
        inputs=make_plus(shapes=[[(1, 3, 3), (1, 2, 4), (1, 3, 2)], [(1, 3, 3), (1, 2, 2)]], text=7, valid=(7, 4)),
    ),
    with_config(PLUS, "text-of-3", inputs=make_plus(shapes=[[(1, 3, 5)]], text=3, valid=(2,))),
]
