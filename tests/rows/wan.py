from __future__ import annotations

import functools
from typing import Any

import torch

from tests.model_cases import Row, with_config

CONFIG = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 3,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 16,
    "ffn_dim": 32,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}
IMAGE = {**CONFIG, "image_dim": 20, "added_kv_proj_dim": 36}


def inputs(
    generator: torch.Generator,
    *,
    grid: tuple[int, int, int],
    text: int,
    batch: int = 2,
    channels: int = 4,
    image: int = 0,
    last_frame: bool = False,
    per_token: bool = False,
    control: tuple[int, int] | None = None,
    forcing: tuple[int, ...] = (),
    fps: list[int] | None = None,
) -> dict[str, Any]:
    """``grid``: frames, height and width in patches of (1, 2, 2); ``control``: frames and number of scales for VACE;
    ``forcing``: a timestep for each frame."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    frames, height, width = grid
    made: dict[str, Any] = {
        "hidden_states": random(batch, channels, frames, 2 * height, 2 * width),
        "timestep": torch.tensor([371.0, 900.0])[:batch],
        "encoder_hidden_states": random(batch, text, 16),
    }
    # The pipeline cuts each prompt to its own length and pads it with zeros; there is no mask.
    made["encoder_hidden_states"][0, text - text // 3 :] = 0
    if image:
        # First and last frame come as a batch of twice the size: the embedder joins the two.
        made["encoder_hidden_states_image"] = random(batch * (2 if last_frame else 1), image, 20)
    if control:
        made["control_hidden_states"] = random(batch, 6, control[0], 2 * height, 2 * width)
        made["control_hidden_states_scale"] = torch.linspace(0.5, 1, control[1], dtype=torch.float64)
    if forcing:
        made |= {"timestep": torch.tensor([forcing] * batch).float(), "enable_diffusion_forcing": True}
    if fps:
        made["fps"] = fps
    if per_token:
        # The first frame is given, so its tokens are at time 0.
        first = torch.arange(frames * height * width) < height * width
        made["timestep"] = torch.where(first, 0.0, made["timestep"][:, None])
    return made


def make(**options: Any) -> Any:
    return functools.partial(inputs, **options)


# Wan keeps the residual stream, its norms and its modulation in fp32 whatever the weights are in.
EVEN = Row(
    "even",
    "WanTransformer3DModel",
    CONFIG,
    make(grid=(3, 4, 2), text=8),
    tolerance=3e-6,
    gradient_tolerance=3e-5,
)
CHRONO = with_config(
    EVEN,
    "even",
    model="ChronoEditTransformer3DModel",
    config={**IMAGE, "in_channels": 9},
    inputs=make(grid=(3, 4, 2), text=512, image=5, channels=9),
)
SKYREELS = with_config(EVEN, "even", model="SkyReelsV2Transformer3DModel")


def animate_inputs(generator: torch.Generator, *, grid: tuple[int, int, int], batch: int = 2) -> dict[str, Any]:
    """``grid``: the first frame is the character, the others have a pose, and four face frames each but for one."""
    frames, height, width = grid
    made = inputs(generator, grid=grid, text=512, batch=batch, channels=12, image=5)
    pose = torch.randn(batch, 4, frames - 1, 2 * height, 2 * width, generator=generator, dtype=torch.float64)
    face = torch.randn(batch, 3, 4 * (frames - 2) + 1, 16, 16, generator=generator, dtype=torch.float64)
    return made | {"pose_hidden_states": pose, "face_pixel_values": face}


def animate(**options: Any) -> Any:
    return functools.partial(animate_inputs, **options)


ANIMATE = with_config(
    EVEN,
    "even",
    model="WanAnimateTransformer3DModel",
    config={
        **IMAGE,
        "in_channels": 12,
        "latent_channels": 4,
        "motion_encoder_channel_sizes": {"4": 8, "8": 8, "16": 8},
        "motion_encoder_size": 16,
        "motion_style_dim": 8,
        "motion_dim": 4,
        "motion_encoder_dim": 8,
        "face_encoder_hidden_dim": 8,
        "face_encoder_num_heads": 2,
        "inject_face_latents_blocks": 1,
    },
    inputs=animate(grid=(3, 2, 4)),
)
VACE = with_config(
    EVEN,
    "even",
    model="WanVACETransformer3DModel",
    config={**CONFIG, "num_layers": 3, "vace_layers": [0, 2], "vace_in_channels": 6},
    inputs=make(grid=(3, 4, 2), text=8, control=(3, 2)),
)

ROWS = [
    EVEN,
    with_config(EVEN, "odd", inputs=make(grid=(3, 3, 3), text=7)),
    with_config(EVEN, "text-of-3", inputs=make(grid=(1, 1, 13), text=3, batch=1)),
    with_config(EVEN, "two-tokens", inputs=make(grid=(1, 1, 2), text=1)),
    # The processor takes the last 512 keys for the text, so the text has that length here.
    with_config(
        EVEN, "i2v", config={**IMAGE, "in_channels": 9}, inputs=make(grid=(3, 3, 1), text=512, image=5, channels=9)
    ),
    with_config(
        EVEN,
        "flf2v",
        config={**IMAGE, "pos_embed_seq_len": 10},
        inputs=make(grid=(5, 1, 3), text=512, image=5, last_frame=True),
    ),
    with_config(EVEN, "ti2v", inputs=make(grid=(3, 3, 3), text=7, per_token=True)),
    with_config(EVEN, "ti2v-short", inputs=make(grid=(3, 1, 1), text=3, per_token=True, batch=1)),
    VACE,
    with_config(VACE, "odd", inputs=make(grid=(3, 3, 3), text=7, control=(3, 2))),
    # A reference image is a frame in front, of which the control may have none.
    with_config(VACE, "padded-control", inputs=make(grid=(4, 3, 1), text=7, control=(3, 2))),
    with_config(VACE, "text-of-3", inputs=make(grid=(1, 1, 3), text=3, batch=1, control=(1, 2))),
    CHRONO,
    with_config(CHRONO, "edit", inputs=make(grid=(2, 3, 3), text=512, image=5, channels=9)),
    with_config(CHRONO, "short", inputs=make(grid=(1, 1, 3), text=512, image=1, channels=9, batch=1)),
    SKYREELS,
    with_config(SKYREELS, "odd", inputs=make(grid=(3, 3, 3), text=7)),
    with_config(SKYREELS, "text-of-3", inputs=make(grid=(1, 1, 13), text=3, batch=1)),
    with_config(
        SKYREELS, "i2v", config={**IMAGE, "in_channels": 9}, inputs=make(grid=(3, 3, 1), text=512, image=5, channels=9)
    ),
    with_config(
        SKYREELS,
        "forcing",
        config={**CONFIG, "num_frame_per_block": 2, "inject_sample_info": True},
        inputs=make(grid=(4, 3, 1), text=7, batch=1, forcing=(0, 300, 600, 900), fps=[1]),
    ),
    with_config(SKYREELS, "forcing-free", inputs=make(grid=(3, 3, 1), text=7, forcing=(0, 400, 900))),
    with_config(
        SKYREELS,
        "causal",
        config={**CONFIG, "num_frame_per_block": 3, "inject_sample_info": True},
        inputs=make(grid=(6, 1, 3), text=3, fps=[0, 1]),
    ),
    ANIMATE,
    with_config(ANIMATE, "odd", inputs=animate(grid=(4, 3, 3))),
    with_config(ANIMATE, "short", inputs=animate(grid=(2, 1, 1), batch=1)),
]
