from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from tests.model_cases import Row, with_config

CONFIG = {
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 3,
    "joint_attention_dim": 12,
    "caption_projection_dim": 48,
    "pooled_projection_dim": 10,
    "pos_embed_max_size": 20,
}
DUAL = {**CONFIG, "num_layers": 3, "dual_attention_layers": (0, 1), "qk_norm": "rms_norm"}


def inputs(
    generator: torch.Generator,
    *,
    size: tuple[int, int],
    text: int,
    batch: int = 2,
    control: int = 0,
    skip_layers: list[int] | None = None,
    ip: bool = False,
    condition: int | None = None,
    tokens: bool = False,
) -> dict[str, Any]:
    """``size``: of the latents; patches have 2 x 2. ``tokens``: latents come as tokens [B, image, C], without text."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    image = size[0] * size[1] // 4
    made: dict[str, Any] = {
        "hidden_states": random(batch, image, 48) if tokens else random(batch, 4, *size),
        "pooled_projections": random(batch, 10),
        "timestep": torch.linspace(200, 900, batch, dtype=torch.float64),
    }
    if not tokens:
        made["encoder_hidden_states"] = random(batch, text, 12)
    if control:
        made["block_controlnet_hidden_states"] = [random(batch, image, 48) for _ in range(control)]
    if skip_layers is not None:
        made["skip_layers"] = skip_layers
    if ip:
        made["joint_attention_kwargs"] = {"ip_adapter_image_embeds": random(batch, 5, 14)}
    if condition is not None:
        made["controlnet_cond"] = random(batch, condition, *size)
    return made


def make(**options: Any) -> Any:
    return functools.partial(inputs, **options)


def randomise(module: nn.Module, seed: int) -> nn.Module:
    """``module`` in fp64 with parameters that are the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    module = module.to(torch.float64)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2)
    return module


def add_ip_adapter(model: nn.Module) -> None:
    """What ``pipe.load_ip_adapter`` does to the transformer."""
    from diffusers.models.attention_processor import SD3IPAdapterJointAttnProcessor2_0
    from diffusers.models.embeddings import IPAdapterTimeImageProjection

    processors = {}
    for index, name in enumerate(model.attn_processors):
        processor = SD3IPAdapterJointAttnProcessor2_0(
            hidden_size=48, ip_hidden_states_dim=48, head_dim=16, timesteps_emb_dim=22
        )
        processors[name] = randomise(processor, index)
    model.set_attn_processor(processors)
    projection = IPAdapterTimeImageProjection(
        embed_dim=14, output_dim=48, hidden_dim=22, dim_head=11, heads=2, num_queries=3, timestep_in_dim=20
    )
    model.image_proj = randomise(projection, 50)


EVEN = Row("even", "SD3Transformer2DModel", CONFIG, make(size=(8, 8), text=8))
# Diffusers' RMSNorm of queries and keys, in the dual configuration and in the adapter, takes the variance in fp32.
NORMED = with_config(EVEN, "normed", config=DUAL, gradient_tolerance=3e-6)

ROWS = [
    EVEN,
    with_config(EVEN, "odd", inputs=make(size=(6, 10), text=7)),
    with_config(NORMED, "dual-layers", inputs=make(size=(6, 10), text=7)),
    with_config(EVEN, "text-of-3", inputs=make(size=(2, 26), text=3, batch=1)),
    with_config(NORMED, "controlnet", inputs=make(size=(6, 10), text=5, control=2)),
    with_config(NORMED, "first-layer-skipped", inputs=make(size=(6, 6), text=5, skip_layers=[0])),
    with_config(NORMED, "ip-adapter", inputs=make(size=(6, 6), text=5, ip=True), prepare=add_ip_adapter),
]
