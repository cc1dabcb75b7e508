from __future__ import annotations

import functools
from typing import Any

import torch

from tests.model_cases import Row, with_config

# Version 1.0 2B: sincos positions; 5B: rotary; 5B image to video: rotary and learned; 1.5: patches over time.
CONFIG = {
    "num_attention_heads": 3,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "time_embed_dim": 8,
    "text_embed_dim": 12,
    "num_layers": 2,
    "sample_width": 6,
    "sample_height": 4,
    "sample_frames": 9,
    "patch_size": 2,
    "temporal_compression_ratio": 4,
    "max_text_seq_length": 8,
}
ROTARY = {**CONFIG, "use_rotary_positional_embeddings": True}


def inputs(
    generator: torch.Generator,
    *,
    grid: tuple[int, int, int],
    text: int,
    batch: int = 2,
    channels: int = 4,
    rotary: bool = False,
    patch_t: int = 1,
    ofs: bool = False,
) -> dict[str, Any]:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    frames, height, width = grid
    made: dict[str, Any] = {
        "hidden_states": random(batch, frames * patch_t, channels, 2 * height, 2 * width),
        "encoder_hidden_states": random(batch, text, 12),
        "timestep": torch.tensor([371, 900])[:batch],
    }
    if rotary:
        angles = random(frames * height * width, 16)
        made["image_rotary_emb"] = (angles.cos(), angles.sin())
    if ofs:
        made["ofs"] = torch.full((1,), 2.0, dtype=torch.float64)
    return made


def make(**options: Any) -> Any:
    return functools.partial(inputs, **options)


EVEN = Row("even", "CogVideoXTransformer3DModel", CONFIG, make(grid=(3, 2, 3), text=8))
# The rotary embedding is applied in fp32.
TURNED = with_config(
    EVEN,
    "rotary",
    config=ROTARY,
    inputs=make(grid=(3, 2, 4), text=8, rotary=True),
    tolerance=1e-6,
    gradient_tolerance=1e-5,
)


def face_inputs(generator: torch.Generator, **options: Any) -> dict[str, Any]:
    made = inputs(generator, **options)
    batch = made["hidden_states"].shape[0]
    made["id_cond"] = torch.randn(batch, 10, generator=generator, dtype=torch.float64)
    made["id_vit_hidden"] = [torch.randn(batch, 4, 8, generator=generator, dtype=torch.float64) for _ in range(2)]
    return made


def face(**options: Any) -> Any:
    return functools.partial(face_inputs, **options)


# The softmax of the face's cross-attention is in fp32 as well.
CONSISID = with_config(
    TURNED,
    "even",
    model="ConsisIDTransformer3DModel",
    config={
        **ROTARY,
        "use_learned_positional_embeddings": True,
        "is_train_face": True,
        "cross_attn_interval": 1,
        "cross_attn_dim_head": 8,
        "cross_attn_num_heads": 2,
        "LFE_id_dim": 10,
        "LFE_vit_dim": 8,
        "LFE_depth": 2,
        "LFE_dim_head": 4,
        "LFE_num_heads": 2,
        "LFE_num_id_token": 2,
        "LFE_num_querie": 3,
        "LFE_output_dim": 32,
        "LFE_ff_mult": 2,
        "LFE_num_scale": 2,
    },
    inputs=face(grid=(3, 2, 3), text=8, rotary=True),
)

ROWS = [
    TURNED,
    with_config(TURNED, "rotary-odd", inputs=make(grid=(3, 3, 3), text=7, rotary=True)),
    with_config(TURNED, "rotary-text-of-3", inputs=make(grid=(1, 1, 13), text=3, rotary=True)),
    with_config(TURNED, "rotary-two-tokens", inputs=make(grid=(1, 1, 2), text=1, rotary=True, batch=1)),
    with_config(
        TURNED,
        "image",
        config={**ROTARY, "use_learned_positional_embeddings": True, "in_channels": 8},
        inputs=make(grid=(3, 2, 3), text=8, channels=8, rotary=True),
    ),
    with_config(
        TURNED,
        "1.5-image",
        config={**ROTARY, "patch_size_t": 2, "ofs_embed_dim": 8, "in_channels": 8},
        inputs=make(grid=(3, 3, 1), text=7, channels=8, rotary=True, patch_t=2, ofs=True),
    ),
    EVEN,
    with_config(EVEN, "odd", inputs=make(grid=(3, 3, 3), text=8)),
    with_config(EVEN, "text-of-3", config={**CONFIG, "max_text_seq_length": 3}, inputs=make(grid=(1, 1, 5), text=3)),
    CONSISID,
    with_config(
        CONSISID,
        "odd",
        config={**CONSISID.config, "use_learned_positional_embeddings": False},
        inputs=face(grid=(3, 3, 3), text=7, rotary=True),
    ),
    with_config(
        CONSISID,
        "faceless-text-of-3",
        config={**ROTARY, "max_text_seq_length": 3},
        inputs=make(grid=(1, 1, 13), text=3, rotary=True),
    ),
]
