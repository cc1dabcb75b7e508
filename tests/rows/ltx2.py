from __future__ import annotations

import functools
from typing import Any

import torch

from tests.model_cases import Row, with_config

CONFIG = {
    "in_channels": 8,
    "out_channels": 8,
    "num_attention_heads": 3,
    "attention_head_dim": 12,
    "cross_attention_dim": 36,
    "audio_in_channels": 6,
    "audio_out_channels": 6,
    "audio_num_attention_heads": 3,
    "audio_attention_head_dim": 8,
    "audio_cross_attention_dim": 24,
    "num_layers": 2,
    "caption_channels": 16,
}
# LTX-2.3: gates, modulated cross-attention, attention that can be skipped; text goes in without a projection.
CONFIG_23 = {
    **CONFIG,
    "gated_attn": True,
    "audio_gated_attn": True,
    "cross_attn_mod": True,
    "audio_cross_attn_mod": True,
    "rope_type": "split",
    "perturbed_attn": True,
    "use_prompt_embeddings": False,
}
CONFIG_25 = {
    **CONFIG_23,
    "ff_bias": False,
    "use_prompt_adaln_single": False,
    "use_keyframes_abs_pos_embedding": True,
}


def inputs(
    generator: torch.Generator,
    *,
    grid: tuple[int, int, int],
    audio: int,
    text: int,
    batch: int = 2,
    given: bool = False,
    reference: int = 0,
    projected: bool = True,
    coords: bool = False,
    sigma: bool = False,
    keyframes: bool = False,
    **others: Any,
) -> dict[str, Any]:
    """``given``: the first frame is; ``reference``: tokens of a reference video, and a mask of what sees them."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    frames, height, width = grid
    video = frames * height * width
    time = torch.tensor([371.0, 900.0], dtype=torch.float64)[:batch]
    free = (torch.arange(video) >= height * width).double()
    mask = (torch.arange(text)[None] < torch.tensor([[max(1, text - 3)], [max(1, text // 2)]])[:batch]).long()
    made: dict[str, Any] = {
        "hidden_states": random(batch, video, 8),
        "audio_hidden_states": random(batch, audio, 6),
        "encoder_hidden_states": random(batch, text, 16 if projected else 36),
        "audio_encoder_hidden_states": random(batch, text, 16 if projected else 24),
        "timestep": time[:, None] * free if given else time,
        "audio_timestep": time,
        "encoder_attention_mask": mask,
        "audio_encoder_attention_mask": mask,
        "num_frames": frames,
        "height": height,
        "width": width,
        "fps": 24.0,
        "audio_num_frames": audio,
        **others,
    }
    if coords:
        made["video_coords"] = random(batch, 3, video, 2).abs() * 9
        made["audio_coords"] = random(batch, 1, audio, 2).abs()
    if sigma:
        made |= {"sigma": time, "audio_sigma": time}
    if reference:
        visible = torch.ones(1, video, video, dtype=torch.float64)
        visible[:, :-reference, -reference:] = visible[:, -reference:, :-reference] = 0.999
        visible[:, -reference:, 0] = 0
        made["video_self_attention_mask"] = visible.expand(batch, -1, -1)
    if keyframes:
        made["video_keyframes_mask"] = (1 - free)[None, :, None].expand(batch, -1, -1)
    return made


def make(**options: Any) -> Any:
    return functools.partial(inputs, **options)


# LTX-2 applies its rotary embedding in fp32.
EVEN = Row(
    "even",
    "LTX2VideoTransformer3DModel",
    CONFIG,
    make(grid=(3, 2, 4), audio=8, text=8),
    tolerance=1e-6,
    gradient_tolerance=1e-5,
)
STG = {"spatio_temporal_guidance_blocks": [1], "sigma": True, "use_cross_timestep": True, "projected": False}

ROWS = [
    EVEN,
    with_config(EVEN, "odd", inputs=make(grid=(3, 3, 3), audio=7, text=7)),
    with_config(EVEN, "audio-of-3", inputs=make(grid=(1, 1, 13), audio=3, text=3)),
    with_config(EVEN, "two-tokens", inputs=make(grid=(1, 1, 2), audio=1, text=1, batch=1)),
    with_config(EVEN, "image", inputs=make(grid=(3, 3, 3), audio=7, text=7, given=True, coords=True)),
    with_config(EVEN, "reference", inputs=make(grid=(3, 3, 3), audio=5, text=7, given=True, reference=4)),
    with_config(EVEN, "isolated", inputs=make(grid=(3, 3, 1), audio=5, text=7, isolate_modalities=True)),
    with_config(
        EVEN,
        "2.3",
        config=CONFIG_23,
        inputs=make(grid=(3, 3, 3), audio=7, text=7, projected=False, sigma=True, use_cross_timestep=True),
    ),
    with_config(EVEN, "2.3-guided", config=CONFIG_23, inputs=make(grid=(3, 3, 1), audio=7, text=7, **STG)),
    with_config(
        EVEN,
        "2.3-guided-in-part",
        config=CONFIG_23,
        inputs=make(
            grid=(3, 3, 1), audio=7, text=7, perturbation_mask=torch.tensor([0.0, 1.0], dtype=torch.float64), **STG
        ),
    ),
    with_config(
        EVEN,
        "2.5-keyframes",
        config=CONFIG_25,
        inputs=make(grid=(5, 1, 3), audio=7, text=7, projected=False, given=True, keyframes=True),
    ),
]
