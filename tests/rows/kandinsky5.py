from __future__ import annotations

import functools
import types
import warnings
from typing import Any

import torch
from diffusers.models.transformers.transformer_kandinsky import Kandinsky5Attention, Kandinsky5AttnProcessor
from torch import nn

from tests.model_cases import Row, with_config

CONFIG = {
    "in_visual_dim": 4,
    "in_text_dim": 10,
    "in_text_dim2": 8,
    "time_dim": 12,
    "out_visual_dim": 4,
    "patch_size": (1, 2, 2),
    "model_dim": 36,
    "ff_dim": 24,
    "num_text_blocks": 1,
    "num_visual_blocks": 2,
    "axes_dims": (4, 4, 4),
}


def fp32_time(model: nn.Module) -> None:
    """Diffusers keeps this module in fp32, and feeds it fp32; norms of queries and keys get fp32 with any weights."""
    model.time_embeddings.float()
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")


def unrounded(model: nn.Module) -> None:
    """As :func:`fp32_time`, and queries and keys stay fp32 after the rotary embedding, where Diffusers rounds to bf16.

    The rest of the processor is the unmodified one: a name in its inner function is exchanged.
    """
    fp32_time(model)
    code = Kandinsky5AttnProcessor.__call__.__code__
    inner = [constant for constant in code.co_consts if "bfloat16" in getattr(constant, "co_names", ())]
    assert len(inner) == 1, "Diffusers rounds elsewhere now"
    names = tuple("float32" if name == "bfloat16" else name for name in inner[0].co_names)
    constants = tuple(c.replace(co_names=names) if c is inner[0] else c for c in code.co_consts)
    whole = Kandinsky5AttnProcessor.__call__
    call = types.FunctionType(code.replace(co_consts=constants), whole.__globals__, argdefs=whole.__defaults__)
    exact = type("Unrounded", (Kandinsky5AttnProcessor,), {"__call__": call})
    for module in model.modules():
        if isinstance(module, Kandinsky5Attention):
            module.set_processor(exact())


def inputs(
    generator: torch.Generator, *, grid: tuple[int, int, int], text: int, batch: int = 2, channels: int = 4
) -> dict[str, Any]:
    frames, height, width = grid

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "hidden_states": random(batch, frames, 2 * height, 2 * width, channels),
        "encoder_hidden_states": random(batch, text, 10),
        "timestep": torch.tensor([300.0, 700.0][:batch], dtype=torch.float64),
        "pooled_projections": random(batch, 8),
        "visual_rope_pos": [torch.arange(frames), torch.arange(height), torch.arange(width)],
        "text_rope_pos": torch.arange(text),
        "scale_factor": (1.0, 2.0, 2.0),
    }


def make(**options: Any) -> Any:
    return functools.partial(inputs, **options)


# Norms and residuals are computed in fp32, and queries and keys are rounded to bf16 after the rotary embedding; so are
# their gradients, which on three ranks are three times as large before they are averaged. What that hides, the odd row
# shows, without the rounding.
EVEN = Row(
    "even",
    "Kandinsky5Transformer3DModel",
    CONFIG,
    make(grid=(2, 2, 4), text=8),
    prepare=fp32_time,
    tolerance=1e-5,
    gradient_tolerance=5e-2,
)

ROWS = [
    EVEN,
    with_config(EVEN, "odd", inputs=make(grid=(3, 3, 3), text=7), prepare=unrounded, gradient_tolerance=1e-5),
    with_config(EVEN, "text-of-3", inputs=make(grid=(5, 3, 1), text=3, batch=1)),
    with_config(
        EVEN,
        "image-to-video",
        config={**CONFIG, "visual_cond": True},
        inputs=make(grid=(3, 3, 2), text=5, channels=9),
    ),
]
