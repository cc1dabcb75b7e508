from __future__ import annotations

import functools
from typing import Any

import torch

from tests.model_cases import Row, with_config

CONFIG = {
    "in_channels": 4,
    "patch_size": 2,
    "hidden_size": 24,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "intermediate_size": 32,
    "num_layers": 2,
    "pad_token_id": 0,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "original_max_position_embeddings": 64,
    "rope_scaling": {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
    "pos_embed_max_size": 16,
    "time_step_dim": 16,
}


def inputs(
    generator: torch.Generator, *, grid: tuple[int, int], text: int, valid: tuple[int, ...], image: bool = False
) -> dict[str, Any]:
    """``grid``: height and width in patches of 2 x 2. ``valid``: length of each prompt, padded on the left to ``text``.

    The mask is that of OmniGenCollator: text is causal, the output image sees all, nothing sees the padding.
    """

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tokens = grid[0] * grid[1]
    rows, ids = [], []
    for length in valid:
        pad = text - length
        mask = torch.ones(text + 1 + tokens, text + 1 + tokens)
        mask[: text + 1, : text + 1].tril_()
        mask[: text + 1, text + 1 :] = 0
        mask[pad:, :pad] = 0
        mask[:pad] = 1
        if image:
            # The prompt's last four tokens stand for an input image of 2 x 2 patches.
            mask[text - 4 : text, text - 4 : text] = 1
        rows.append(mask)
        ids.append(torch.cat([torch.zeros(pad), torch.arange(length + 1 + tokens)]))
    return {
        "hidden_states": random(len(valid), 4, 2 * grid[0], 2 * grid[1]),
        "timestep": torch.tensor([0.37, 0.9])[: len(valid)],
        "input_ids": torch.randint(1, 40, (len(valid), text), generator=generator),
        "input_img_latents": [random(1, 4, 4, 4) for _ in valid] if image else [],
        "input_image_sizes": {index: [[text - 4, text]] for index in range(len(valid))} if image else {},
        "attention_mask": torch.stack(rows).double(),
        "position_ids": torch.stack(ids).long(),
    }


def make(**options: Any) -> Any:
    return functools.partial(inputs, **options)


# The rotary embedding is applied in fp32.
EVEN = Row(
    "even", "OmniGenTransformer2DModel", CONFIG, make(grid=(3, 5), text=8, valid=(8, 8)), gradient_tolerance=3e-6
)

ROWS = [
    EVEN,
    with_config(EVEN, "odd", inputs=make(grid=(4, 4), text=8, valid=(4, 8))),
    with_config(EVEN, "text-of-3", inputs=make(grid=(1, 13), text=3, valid=(3, 1))),
    with_config(EVEN, "input-image", inputs=make(grid=(2, 4), text=7, valid=(7, 5), image=True)),
]
