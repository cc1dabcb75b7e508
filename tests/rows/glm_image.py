from __future__ import annotations

import functools
from typing import Any

import torch

from tests.model_cases import Row, with_config

CONFIG = {
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 3,
    "text_embed_dim": 12,
    "time_embed_dim": 16,
    "condition_dim": 8,
    "prior_vq_quantizer_codebook_size": 32,
}


def inputs(
    generator: torch.Generator,
    *,
    grid: tuple[int, int],
    text: int,
    batch: int = 2,
    caches: str = "",
    drop: bool = False,
) -> dict[str, Any]:
    """``grid``: height and width in patches of 2 x 2. The pipeline passes caches also where it does not use them."""
    from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tokens = grid[0] * grid[1]
    made: dict[str, Any] = {
        "hidden_states": random(batch, 4, 2 * grid[0], 2 * grid[1]),
        "encoder_hidden_states": random(batch, text, 12),
        "prior_token_id": torch.randint(0, 32, (batch, tokens), generator=generator),
        "prior_token_drop": torch.full((batch, tokens), drop),
        "timestep": torch.tensor([371.0, 900.0])[:batch],
        "target_size": torch.tensor([[64.0, 80.0]], dtype=torch.float64).repeat(batch, 1),
        "crop_coords": torch.zeros(batch, 2, dtype=torch.float64),
        "kv_caches": GlmImageKVCache(num_layers=2),
    }
    if caches == "read":
        made["kv_caches"].passes = [
            inputs(generator, grid=size, text=0, batch=1) | {"kv_caches": made["kv_caches"]}
            for size in ((3, 3), (1, 2))
        ]
    elif caches:
        made["kv_caches"].set_mode(caches)
    return made


def fill_caches_first(model: torch.nn.Module) -> None:
    """Like the pipeline: a pass over each condition image fills the cache that the passes after it read."""

    def fill(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        caches = kwargs["kv_caches"]
        passes = caches.__dict__.pop("passes", ())
        if passes:
            caches.set_mode("write")
            for first in passes:
                model(**first)
            caches.set_mode("read")

    model.register_forward_pre_hook(fill, with_kwargs=True)


def make(**options: Any) -> Any:
    return functools.partial(inputs, **options)


# The rotary embedding is applied in fp32.
EVEN = Row("even", "GlmImageTransformer2DModel", CONFIG, make(grid=(4, 4), text=8), gradient_tolerance=3e-6)

ROWS = [
    EVEN,
    with_config(EVEN, "odd", inputs=make(grid=(3, 5), text=7, caches="skip", drop=True)),
    with_config(EVEN, "text-of-3", inputs=make(grid=(1, 13), text=3, batch=1)),
    with_config(EVEN, "edit", inputs=make(grid=(3, 5), text=4, caches="read"), prepare=fill_caches_first),
    # How the pipeline fills its cache from a condition image: no text at all.
    with_config(EVEN, "no-text", inputs=make(grid=(3, 3), text=0, batch=1, caches="write")),
]
