from __future__ import annotations

import functools
from typing import Any

import torch

from tests.model_cases import Row, with_config

CONFIG = {
    "in_visual_dim": 4,
    "out_visual_dim": 4,
    "in_text_dim": 10,
    "in_text_dim2": 8,
    "time_dim": 12,
    "patch_size": (1, 2, 2),
    "model_dim": 36,
    "ff_dim": 24,
    "num_text_blocks": 1,
    "num_visual_blocks": 2,
    "axes_dims": (4, 4, 4),
    "visual_cond": True,
    "in_audio_dim": 5,
    "out_audio_dim": 5,
    "model_dim_a": 24,
    "time_dim_a": 12,
    "ff_dim_a": 16,
    "axes_dims_a": (4, 4, 4),
    "ca_rope": True,
    "cross_gates": True,
    "fix_modulation": True,
}


def inputs(
    generator: torch.Generator,
    *,
    grid: tuple[int, int, int],
    text: int,
    audio: int = 0,
    batch: int = 2,
    valid: tuple[int, ...] = (),
    token_types: bool = False,
) -> dict[str, Any]:
    frames, height, width = grid

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    made: dict[str, Any] = {
        "hidden_states": random(batch, frames, 2 * height, 2 * width, 9),
        "encoder_hidden_states": random(batch, text, 10),
        "pooled_projections": random(batch, 8),
        "timestep": torch.tensor([300.0, 700.0][:batch], dtype=torch.float64),
    }
    if audio:
        made["audio_hidden_states"] = random(batch, audio, 5)
    if valid:
        made["encoder_attention_mask"] = torch.arange(text) < torch.tensor(valid)[:, None]
    if token_types:
        # The last frame is a reference, at the position of the first.
        made["visual_token_type_ids"] = (torch.arange(frames) == frames - 1).long().expand(batch, -1)
        made["visual_rope_pos"] = (
            torch.arange(frames) % (frames - 1), torch.arange(height), torch.arange(width),
        )  # fmt: skip
    return made


def make(**options: Any) -> Any:
    return functools.partial(inputs, **options)


# Norms, modulation, residuals and the rotary embedding are computed in fp32.
EVEN = Row(
    "even",
    "Kandinsky6Transformer3DModel",
    CONFIG,
    make(grid=(2, 2, 4), text=8, audio=8),
    tolerance=1e-5,
    gradient_tolerance=1e-4,
)

ROWS = [
    EVEN,
    with_config(EVEN, "odd-with-padded-text", inputs=make(grid=(3, 3, 3), text=7, audio=11, valid=(7, 4))),
    with_config(EVEN, "text-of-3-and-two-audio-tokens", inputs=make(grid=(5, 3, 1), text=3, audio=2, batch=1)),
    with_config(EVEN, "without-audio", inputs=make(grid=(3, 3, 2), text=5)),
    with_config(
        EVEN,
        "reference-frame",
        config={
            **CONFIG, "visual_token_type_num_embeddings": 2, "ca_rope": False, "cross_gates": False,
            "fix_modulation": False,
        },
        inputs=make(grid=(4, 2, 3), text=5, audio=7, token_types=True),
    ),
]  # fmt: skip
