from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from tests.model_cases import Row, with_config

CONFIG = {
    "patch_size": 1,
    "in_channels": 8,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 3,
    "joint_attention_dim": 12,
    "timestep_guidance_channels": 16,
    "axes_dims_rope": (4, 4, 4, 4),
}
KLEIN = {**CONFIG, "guidance_embeds": False}


def inputs(
    generator: torch.Generator,
    *,
    image: int,
    text: int,
    batch: int = 2,
    guidance: bool = True,
    ids_ndim: int = 3,
    extract: int | None = None,
) -> dict[str, Any]:
    """``extract``: this many of the image tokens are those of reference images, whose keys and values go to a cache."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    made: dict[str, Any] = {
        "hidden_states": random(batch, image, 8),
        "encoder_hidden_states": random(batch, text, 12),
        "timestep": torch.linspace(0.2, 0.9, batch, dtype=torch.float64),
        "img_ids": torch.randint(0, 9, (image, 4), generator=generator),
        "txt_ids": torch.randint(0, 9, (text, 4), generator=generator),
    }
    if ids_ndim == 3:
        made["img_ids"], made["txt_ids"] = (made[n].expand(batch, -1, -1) for n in ("img_ids", "txt_ids"))
    if guidance:
        made["guidance"] = torch.full((batch,), 3.5, dtype=torch.float64)
    if extract is not None:
        made |= {"kv_cache_mode": "extract", "num_ref_tokens": extract}
    return made


def make(**options: Any) -> Any:
    return functools.partial(inputs, **options)


def keep_keys_and_values(model: nn.Module) -> None:
    """The processors that the Klein KV pipeline sets."""
    from diffusers.models.transformers.transformer_flux2 import Flux2KVAttnProcessor, Flux2KVParallelSelfAttnProcessor

    for block in model.transformer_blocks:
        block.attn.set_processor(Flux2KVAttnProcessor())
    for block in model.single_transformer_blocks:
        block.attn.set_processor(Flux2KVParallelSelfAttnProcessor())


# Flux2 applies its rotary embedding in fp32.
EVEN = Row("even", "Flux2Transformer2DModel", CONFIG, make(image=16, text=8), gradient_tolerance=3e-6)
KV = with_config(EVEN, "kv", config=KLEIN, prepare=keep_keys_and_values)

ROWS = [
    EVEN,
    with_config(EVEN, "odd", inputs=make(image=15, text=7, ids_ndim=2)),
    with_config(EVEN, "klein", config=KLEIN, inputs=make(image=11, text=5, guidance=False)),
    with_config(EVEN, "text-of-3", inputs=make(image=13, text=3, batch=1)),
    with_config(KV, "kv-without-references", inputs=make(image=13, text=7, guidance=False)),
    with_config(KV, "kv-extract", inputs=make(image=19, text=7, guidance=False, extract=6)),
    with_config(KV, "kv-extract-three", inputs=make(image=5, text=3, guidance=False, extract=3)),
]
