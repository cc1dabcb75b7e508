from __future__ import annotations

import functools
from typing import Any

import torch

from tests.model_cases import Row, with_config

CONFIG = {
    "patch_size": 1,
    "in_channels": 8,
    "out_channels": 8,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 3,
    "context_in_dim": 12,
    "mlp_ratio": 2,
    "axes_dims_rope": (4, 2, 2),
}


def inputs(
    generator: torch.Generator,
    *,
    target: tuple[int, int],
    text: int,
    valid: tuple[int, ...] = (),
    conditions: tuple[tuple[int, int], ...] = (),
    cache: str = "",
) -> dict[str, Any]:
    """``target`` and ``conditions``: height and width in tokens, even: a slot of the language model is 2 x 2.

    ``valid``: length of each prompt within ``text``; without it there is no mask. Two tokens of text stand in front of
    each condition image, the rest after them.
    """
    from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    batch = len(valid) or 2
    slots: list[bool] = []
    for height, width in conditions:
        slots += [False, False] + [True] * (height * width // 4)
    slots += [False] * (text - 2 * len(conditions))
    shapes = [(1, *size) for size in (*conditions, target)]
    prompt = len(slots)
    slots += [True] * (target[0] * target[1] // 4)
    made: dict[str, Any] = {
        "hidden_states": random(batch, sum(h * w for _, h, w in shapes), 8),
        "encoder_hidden_states": random(batch, prompt, 12),
        "timestep": torch.tensor([0.37, 0.9], dtype=torch.float64)[:batch],
        "img_shapes": [shapes] * batch,
        "img_mask": torch.tensor(slots).expand(batch, -1),
        "encoder_hidden_states_mask": None,
    }
    if valid:
        made["encoder_hidden_states_mask"] = torch.arange(prompt) < prompt - text + torch.tensor(valid)[:, None]
    if cache:
        made["kv_cache"], made["kv_cache_mode"] = QwenImage21KVCache(num_layers=2), cache
    if cache == "cached":
        made["kv_cache"].first = {**made, "kv_cache_mode": "extract"}
        made["timestep"] = made["timestep"] / 2
    return made


def fill_cache_first(model: torch.nn.Module) -> None:
    """Like the pipeline: the first step fills the cache that the steps after it read."""

    def fill(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        first = getattr(kwargs.get("kv_cache"), "__dict__", {}).pop("first", None)
        if first is not None:
            model(**first)

    model.register_forward_pre_hook(fill, with_kwargs=True)


def make(**options: Any) -> Any:
    return functools.partial(inputs, **options)


# Norms compute in fp32, and the rotary embedding is applied in complex64.
EVEN = Row("even", "QwenImage21Transformer2DModel", CONFIG, make(target=(4, 4), text=8), gradient_tolerance=3e-6)

ROWS = [
    EVEN,
    with_config(EVEN, "odd", inputs=make(target=(2, 6), text=7, valid=(4, 7))),
    with_config(EVEN, "text-of-3", inputs=make(target=(2, 2), text=3, valid=(3,), cache="extract")),
    with_config(
        EVEN, "edit", inputs=make(target=(4, 4), text=9, valid=(9, 6), conditions=((2, 2), (2, 4)), cache="extract")
    ),
    with_config(
        EVEN,
        "edit-cached",
        prepare=fill_cache_first,
        inputs=make(target=(2, 6), text=7, valid=(5, 7), conditions=((2, 4),), cache="cached"),
    ),
    with_config(EVEN, "not-causal", config={**CONFIG, "causal_condition": False}, inputs=make(target=(2, 6), text=5)),
]
