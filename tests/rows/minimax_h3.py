from __future__ import annotations

import functools
from typing import Any

import torch

from tests.model_cases import Row, with_config

CONFIG = {
    "num_attention_heads": 3,
    "attention_head_dim": 12,
    "hidden_size": 20,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "ffn_dim": 16,
    "in_channels": 3,
    "audio_in_channels": 5,
    "patch_size": (1, 2, 2),
    "text_dim": 10,
    "freq_dim": 8,
    "time_embed_hidden_dim": 12,
    "time_embed_dim": 10,
    "rope_freq_dim": 2,
}


def inputs(
    generator: torch.Generator, *, text: int, given: int, video: int, audio: int, batch: int = 1
) -> dict[str, Any]:
    """Text, then the rows of a given frame at timestep 0, then the video and between its rows the audio."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    length = text + given + video + audio
    rest = torch.arange(text + given, length)
    # Video and audio rows alternate as far as there are both, so the packed order is that of no modality alone.
    is_audio = torch.zeros(video + audio, dtype=torch.bool)
    is_audio[1 : 2 * audio : 2] = True
    video_indices = torch.cat([torch.arange(text, text + given), rest[~is_audio]])
    audio_indices = rest[is_audio]
    tags = torch.zeros(length, dtype=torch.long)
    tags[:text] = 1
    tags[audio_indices] = 2
    timestep_indices = torch.zeros(length, dtype=torch.long)
    timestep_indices[rest] = 1
    timestep_indices[audio_indices] = 2
    return {
        "hidden_states": random(batch, given + video, 12),
        "audio_hidden_states": random(batch, audio, 5),
        "encoder_hidden_states": random(batch, text, 10),
        "timestep": torch.tensor([0.0, 0.4, 0.7], dtype=torch.float64),
        "timestep_indices": timestep_indices,
        "token_tags": tags,
        "position_ids": torch.randint(0, 9, (length, 3), generator=generator).double(),
        "video_indices": video_indices,
        "audio_indices": audio_indices,
        "text_indices": torch.arange(text),
    }


def make(**options: Any) -> Any:
    return functools.partial(inputs, **options)


EVEN = Row("even", "MiniMaxH3Transformer3DModel", CONFIG, make(text=8, given=4, video=16, audio=4))

ROWS = [
    EVEN,
    with_config(EVEN, "odd-batch-of-2", inputs=make(text=7, given=3, video=13, audio=6, batch=2)),
    with_config(EVEN, "text-of-3", inputs=make(text=3, given=0, video=11, audio=5)),
    with_config(EVEN, "five-tokens", inputs=make(text=1, given=0, video=3, audio=1)),
]
