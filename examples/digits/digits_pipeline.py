"""A real `diffusers.FluxPipeline` around the small transformer in `model/` that draws handwritten digits.

The prompt is the English name of the digit, one token a letter; every name fits in five letters. The transformer has to
read the letters: `pooled_prompt_embeds` tells it only how long the name is. A mistake in how text tokens are spread
over ranks therefore shows as wrong digits, not as a small difference.

There is no VAE: the "latents" are the pixels in [-1, 1], one channel, packed by FLUX in 2 x 2 patches to tokens of 4
numbers.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from einops import rearrange
from torch import Tensor
from torch.nn.functional import one_hot

MODEL_DIR = Path(__file__).parent / "model"

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEXT_TOKENS = 5
ALPHABET = " abcdefghijklmnopqrstuvwxyz"  # the blank fills short names
TEXT_DIM = len(ALPHABET) + TEXT_TOKENS
POOLED_DIM = TEXT_TOKENS + 1

PATCH = 2  # FLUX packs 2 x 2 latent pixels to one token
# Without a VAE the pipeline assumes the usual one, which shrinks a picture 8 times, and wants sizes in its pixels.
PIPELINE_PIXELS_PER_TOKEN = 8 * PATCH


def model_config() -> dict[str, Any]:
    """2.6 million parameters. Six heads, so that four ranks share them unevenly."""
    return {
        "in_channels": PATCH * PATCH,
        "num_layers": 2,
        "num_single_layers": 3,
        "attention_head_dim": 24,
        "num_attention_heads": 6,
        "joint_attention_dim": TEXT_DIM,
        "pooled_projection_dim": POOLED_DIM,
        "guidance_embeds": False,
        "axes_dims_rope": (4, 10, 10),
    }


def embed_labels(labels: list[int], device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Prompt embeddings `[N, 5, 32]` and pooled embeddings `[N, 6]` of the digits' names.

    A text token is the one-hot letter beside the one-hot place in the name, the pooled embedding the one-hot length of
    the name. Both are scaled to a mean square of 1, the size that the transformer's first layers are initialised for.
    """
    names = [NAMES[label].ljust(TEXT_TOKENS) for label in labels]
    letters = torch.tensor([[ALPHABET.index(letter) for letter in name] for name in names])
    places = torch.arange(TEXT_TOKENS).expand_as(letters)
    lengths = torch.tensor([len(NAMES[label]) for label in labels])
    text = torch.cat([one_hot(letters, len(ALPHABET)), one_hot(places, TEXT_TOKENS)], dim=-1) * (TEXT_DIM / 2) ** 0.5
    pooled = one_hot(lengths, POOLED_DIM) * POOLED_DIM**0.5
    return text.to(device, torch.float32), pooled.to(device, torch.float32)


def pack(images: Tensor) -> Tensor:
    """Pictures `[N, C, 2h, 2w]` to FLUX tokens `[N, h * w, 4C]`."""
    return rearrange(images, "n c (h p) (w q) -> n (h w) (c p q)", p=PATCH, q=PATCH)


def unpack(tokens: Tensor, height_tokens: int, width_tokens: int) -> Tensor:
    """FLUX tokens `[N, h * w, 4C]` to pictures `[N, C, 2h, 2w]`."""
    return rearrange(tokens, "n (h w) (c p q) -> n c (h p) (w q)", h=height_tokens, w=width_tokens, p=PATCH, q=PATCH)


def build_pipeline(model_dir: Path = MODEL_DIR, device: torch.device | str = "cpu") -> FluxPipeline:
    """The pipeline with the trained transformer, stored in half precision and computing in single."""
    pipe = FluxPipeline(
        transformer=FluxTransformer2DModel.from_pretrained(model_dir, torch_dtype=torch.float32),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=None,
        text_encoder=None,
        text_encoder_2=None,
        tokenizer=None,
        tokenizer_2=None,
    )
    pipe.set_progress_bar_config(
        disable=True
    )  # it would draw one bar a rank; `generate` reports steps to its caller instead
    return pipe.to(device)


def generate(
    pipe: FluxPipeline,
    labels: list[int],
    height_tokens: int = 8,
    width_tokens: int = 8,
    steps: int = 20,
    seed: int = 0,
    on_step: Callable[[], None] | None = None,
) -> Tensor:
    """Draw one picture a label: `[N, 1, 2 * height_tokens, 2 * width_tokens]` in [0, 1], on the CPU.

    Picture i depends on its label and on `seed + i` alone: not on its batch, the device or the number of ranks. The
    generators live on the CPU of every rank and are seeded alike, so that all ranks start from the same noise.
    """
    prompt_embeds, pooled_prompt_embeds = embed_labels(labels, pipe.device)

    def report_step(pipe: FluxPipeline, step: int, timestep: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if on_step is not None:
            on_step()
        return tensors

    tokens = pipe(
        prompt_embeds=prompt_embeds,
        pooled_prompt_embeds=pooled_prompt_embeds,
        height=height_tokens * PIPELINE_PIXELS_PER_TOKEN,
        width=width_tokens * PIPELINE_PIXELS_PER_TOKEN,
        num_inference_steps=steps,
        generator=[torch.Generator().manual_seed(seed + index) for index in range(len(labels))],
        callback_on_step_end=report_step,
        output_type="latent",
    ).images
    return decode(unpack(tokens, height_tokens, width_tokens))


def decode(images: Tensor) -> Tensor:
    """The stand-in for a VAE: pixels in [-1, 1] to pixels in [0, 1], on the CPU."""
    return (images.float().cpu() / 2 + 0.5).clamp(0, 1)
