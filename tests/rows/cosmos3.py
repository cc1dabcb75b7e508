from __future__ import annotations

import functools
from typing import Any

import torch

from tests.model_cases import Row, with_config

CONFIG = {
    "head_dim": 12,
    "hidden_size": 20,
    "intermediate_size": 16,
    "latent_channel": 4,
    "latent_patch_size": 2,
    "num_attention_heads": 6,
    "num_hidden_layers": 2,
    "num_key_value_heads": 3,
    "patch_latent_dim": 16,
    "vocab_size": 17,
    "rope_axes_dim": (2, 2, 2),
}


def inputs(
    generator: torch.Generator,
    *,
    grid: tuple[int, int, int],
    text: int,
    given_frames: int = 0,
    sound: int = 0,
    action: int = 0,
) -> dict[str, Any]:
    """One packed sequence, as the pipeline makes it: text, vision, action, sound."""
    frames, height, width = grid
    patches = height * width

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    vision = torch.arange(text, text + frames * patches)
    length = text + frames * patches + action + sound
    noisy = torch.arange(given_frames, frames)
    made: dict[str, Any] = {
        "input_ids": torch.randint(0, 17, (text,), generator=generator),
        "text_indexes": torch.arange(text),
        "position_ids": torch.randint(0, 9, (3, length), generator=generator),
        "und_len": text,
        "sequence_length": length,
        "vision_tokens": [random(1, 4, frames, 2 * height, 2 * width)],
        "vision_token_shapes": [grid],
        "vision_sequence_indexes": vision,
        "vision_mse_loss_indexes": vision[given_frames * patches :],
        "vision_timesteps": torch.full(((frames - given_frames) * patches,), 400.0, dtype=torch.float64),
        "vision_noisy_frame_indexes": [noisy],
    }
    start = text + frames * patches
    for name, count, tokens in (("action", action, random(action, 5)), ("sound", sound, random(6, sound))):
        if count:
            made[f"{name}_tokens"] = [tokens]
            made[f"{name}_token_shapes"] = [(count, 1, 1)]
            made[f"{name}_sequence_indexes"] = torch.arange(start, start + count)
            made[f"{name}_mse_loss_indexes"] = torch.arange(start, start + count)
            made[f"{name}_timesteps"] = torch.full((count,), 400.0, dtype=torch.float64)
            made[f"{name}_noisy_frame_indexes"] = [torch.arange(count)]
            start += count
    if action:
        made["action_domain_ids"] = [torch.tensor(1)]
    return made


def make(**options: Any) -> Any:
    return functools.partial(inputs, **options)


# RMSNorm takes its variance in fp32, which is felt by gradients.
EVEN = Row("even", "Cosmos3OmniTransformer", CONFIG, make(grid=(2, 2, 4), text=8), gradient_tolerance=3e-6)

ROWS = [
    EVEN,
    with_config(EVEN, "odd-image-to-video", inputs=make(grid=(3, 3, 3), text=7, given_frames=1)),
    with_config(EVEN, "text-of-3", inputs=make(grid=(5, 1, 3), text=3)),
    with_config(
        EVEN,
        "sound-and-action",
        config={
            **CONFIG,
            "sound_gen": True,
            "sound_dim": 6,
            "action_gen": True,
            "action_dim": 5,
            "num_embodiment_domains": 3,
        },
        inputs=make(grid=(3, 2, 2), text=5, sound=4, action=3),
    ),
    # The norms of this backbone are computed in fp32.
    with_config(
        EVEN,
        "nemotron-backbone",
        config={**CONFIG, "hidden_act": "relu2", "qk_norm_for_text": False, "use_und_k_norm_for_gen": True},
        inputs=make(grid=(3, 3, 2), text=5),
        tolerance=1e-5,
        gradient_tolerance=1e-5,
    ),
]
