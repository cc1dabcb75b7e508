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
    "num_single_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 3,
    "caption_channels": [16, 12],
    "text_emb_dim": 10,
    "num_routed_experts": 4,
    "num_activated_experts": 2,
    "axes_dims_rope": (4, 2, 2),
    "max_resolution": (8, 8),
    "llama_layers": [0, 1, 2, 2],
}


def inputs(
    generator: torch.Generator,
    *,
    grid: tuple[int, int],
    t5: int,
    llama: int,
    batch: int = 2,
    patches: bool = False,
) -> dict[str, Any]:
    """``grid``: height and width in patches of 2 x 2; all but squares are padded to 16 patches, with a mask."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    made: dict[str, Any] = {
        "hidden_states": random(batch, 4, 2 * grid[0], 2 * grid[1]),
        "timesteps": torch.tensor([371, 900])[:batch],
        "encoder_hidden_states_t5": random(batch, t5, 16),
        "encoder_hidden_states_llama3": random(3, batch, llama, 12),
        "pooled_embeds": random(batch, 10),
    }
    if patches:
        # Cut into patches and padded by the caller.
        made["hidden_states"] = random(batch, 16, 16)
        made["img_ids"] = torch.randint(0, 4, (batch, 16, 3), generator=generator).double()
        made["img_sizes"] = [(2, 5)] * batch
        valid = torch.arange(16) < 10
        made["hidden_states_masks"] = valid.double().expand(batch, -1)
    return made


def make(**options: Any) -> Any:
    return functools.partial(inputs, **options)


# The rotary embedding is applied in fp32.
EVEN = Row("even", "HiDreamImageTransformer2DModel", CONFIG, make(grid=(4, 4), t5=8, llama=8), gradient_tolerance=3e-6)

ROWS = [
    EVEN,
    with_config(EVEN, "odd-square", inputs=make(grid=(3, 3), t5=7, llama=5)),
    with_config(EVEN, "not-square", inputs=make(grid=(2, 5), t5=6, llama=7)),
    with_config(EVEN, "text-of-3", inputs=make(grid=(3, 3), t5=3, llama=3, batch=1)),
    with_config(EVEN, "dense", config={**CONFIG, "num_routed_experts": 0}, inputs=make(grid=(1, 1), t5=1, llama=2)),
    with_config(EVEN, "patches", inputs=make(grid=(3, 3), t5=4, llama=5, patches=True)),
]
