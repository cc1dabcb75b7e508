from __future__ import annotations

import functools
from typing import Any

import torch

from tests.model_cases import Row, with_config

CONFIG = {
    "num_attention_heads": 3,
    "attention_head_dim": 8,
    "in_channels": 4,
    "patch_size": 2,
    "sample_size": 8,
    "hidden_size": 24,
    "num_layers": 4,
    "mlp_ratio": 2.0,
    "cross_attention_dim": 12,
    "cross_attention_dim_t5": 16,
    "pooled_projection_dim": 10,
    "text_len": 5,
    "text_len_t5": 4,
}


def inputs(
    generator: torch.Generator,
    *,
    grid: tuple[int, int],
    batch: int = 2,
    style: bool = True,
    control: bool = False,
    rope: bool = True,
) -> dict[str, Any]:
    """``grid``: height and width in patches of 2 x 2. Texts are always as long as the model says."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tokens = grid[0] * grid[1]
    mask, mask_t5 = torch.ones(batch, 5, dtype=torch.int64), torch.ones(batch, 4, dtype=torch.int64)
    mask[0, 3:] = 0
    mask_t5[-1, 2:] = 0
    made: dict[str, Any] = {
        "hidden_states": random(batch, 4, 2 * grid[0], 2 * grid[1]),
        "timestep": torch.tensor([371.0, 900.0], dtype=torch.float64)[:batch],
        "encoder_hidden_states": random(batch, 5, 12),
        "text_embedding_mask": mask,
        "encoder_hidden_states_t5": random(batch, 4, 16),
        "text_embedding_mask_t5": mask_t5,
        "image_rotary_emb": (random(tokens, 8).cos(), random(tokens, 8).sin()) if rope else None,
    }
    if style:
        made["image_meta_size"] = torch.tensor([[64.0, 64.0, 64.0, 80.0, 0.0, 0.0]], dtype=torch.float64).repeat(
            batch, 1
        )
        made["style"] = torch.zeros(batch, dtype=torch.int64)
    if control:
        made["controlnet_block_samples"] = [random(batch, tokens, 24)]
    return made


def make(**options: Any) -> Any:
    return functools.partial(inputs, **options)


# Layer norms compute in fp32, and the rotary embedding is applied in it.
EVEN = Row("even", "HunyuanDiT2DModel", CONFIG, make(grid=(4, 4)), gradient_tolerance=3e-6)

ROWS = [
    EVEN,
    with_config(EVEN, "odd", inputs=make(grid=(3, 5))),
    with_config(EVEN, "two-tokens", inputs=make(grid=(1, 2), batch=1, rope=False)),
    with_config(
        EVEN,
        "controlnet-1.2",
        config={**CONFIG, "use_style_cond_and_image_meta_size": False},
        inputs=make(grid=(3, 3), style=False, control=True),
    ),
]
