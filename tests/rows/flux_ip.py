"""FLUX with an IP-Adapter, and with ControlNet residuals that are repeated (XLabs)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.model_cases import with_config
from tests.rows.flux import CONFIG, EVEN, make
from tests.rows.sd3 import randomise


def ip_inputs(generator: torch.Generator, *, image: int, text: int, adapters: int) -> dict[str, Any]:
    made: dict[str, Any] = make(image=image, text=text)(generator)
    images = [torch.randn(2, 1, 14, generator=generator, dtype=torch.float64) for _ in range(adapters)]
    return {**made, "joint_attention_kwargs": {"ip_adapter_image_embeds": images}}


def one(generator: torch.Generator) -> dict[str, Any]:
    return ip_inputs(generator, image=13, text=5, adapters=1)


def two(generator: torch.Generator) -> dict[str, Any]:
    return ip_inputs(generator, image=13, text=3, adapters=2)


def repeated(generator: torch.Generator) -> dict[str, Any]:
    made: dict[str, Any] = make(image=11, text=5, control=(2, 1))(generator)
    del made["controlnet_single_block_samples"]
    return {**made, "controlnet_blocks_repeat": True}


def add_ip_adapter(model: nn.Module, adapters: int) -> None:
    """What ``pipe.load_ip_adapter`` does to the transformer: processors in the joint blocks, and a projection."""
    from diffusers.models.embeddings import ImageProjection, MultiIPAdapterImageProjection
    from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor

    processors = dict(model.attn_processors)
    for index, name in enumerate(processors):
        if name.startswith("transformer_blocks"):
            processor = FluxIPAdapterAttnProcessor(
                hidden_size=80, cross_attention_dim=12, num_tokens=(4,) * adapters, scale=[0.7, 0.3][:adapters]
            )
            processors[name] = randomise(processor, index)
    model.set_attn_processor(processors)
    projections = [
        ImageProjection(image_embed_dim=14, cross_attention_dim=12, num_image_text_embeds=4) for _ in range(adapters)
    ]
    model.encoder_hid_proj = randomise(MultiIPAdapterImageProjection(projections), 50)


def add_one(model: nn.Module) -> None:
    add_ip_adapter(model, 1)


def add_two(model: nn.Module) -> None:
    add_ip_adapter(model, 2)


ROWS = [
    with_config(EVEN, "ip-adapter", inputs=one, prepare=add_one),
    with_config(EVEN, "two-ip-adapters", inputs=two, prepare=add_two),
    with_config(EVEN, "repeated-residuals", config={**CONFIG, "num_layers": 3}, inputs=repeated),
]
