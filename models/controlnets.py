"""ControlNets: each a parallel model of its own, whose residuals come out whole.

The transformer that takes the residuals shards them again as it does its other inputs.
"""

from __future__ import annotations

from ..placements import seq
from ..plan import Plan
from ..styles import ContextParallelAttention, GatherOutputs, LocalAttention, ShardInputs, ShardOutputs
from .qwenimage import JOINT

_TEXT_IMAGE = ContextParallelAttention(streams=("text", "image"))
_ROPE = ShardInputs(image_rotary_emb=seq(0, "text", "image"))

# A union ControlNet puts a token for its mode in front of the text, and XLabs' condition is a picture: what comes of
# them is cut at the first block.
FLUX_CONTROLNET = Plan(
    {
        "transformer_blocks.0": ShardInputs(
            hidden_states=seq(1, "image", ndim=3), encoder_hidden_states=seq(1, "text", ndim=3)
        ),
        "transformer_blocks.*": _ROPE,
        "transformer_blocks.*.attn": _TEXT_IMAGE,
        "single_transformer_blocks.*": _ROPE,
        "single_transformer_blocks.*.attn": _TEXT_IMAGE,
        "controlnet_blocks.*": GatherOutputs(seq(1, "image")),
        "controlnet_single_blocks.*": GatherOutputs(seq(1, "image")),
    },
    classes="FluxControlNetModel",
)

# The ControlNet of SD3.5 8b has no text, and may be given the image as tokens.
SD3_CONTROLNET = Plan(
    {
        "": ShardInputs(encoder_hidden_states=seq(1, "text", ndim=3, empty=True)),
        "transformer_blocks.0": ShardInputs(hidden_states=seq(1, "image", ndim=3)),
        "transformer_blocks.*.attn": ContextParallelAttention(streams=("image", "text")),
        "transformer_blocks.*.attn2": ContextParallelAttention(streams=("image",)),
        "controlnet_blocks.*": GatherOutputs(seq(1, "image")),
    },
    classes="SD3ControlNetModel",
    optional=("transformer_blocks.*.attn2",),
)

QWENIMAGE_CONTROLNET = Plan(
    {
        "": ShardInputs(hidden_states=seq(1, "image", ndim=3), controlnet_cond=seq(1, "image", ndim=3)),
        "pos_embed": ShardOutputs(seq(0, "image"), seq(0, "text")),
        "transformer_blocks.0": ShardInputs(encoder_hidden_states=seq(1, "text", ndim=3)),
        "transformer_blocks.*.attn": JOINT,
        "controlnet_blocks.*": GatherOutputs(seq(1, "image")),
    },
    classes="QwenImageControlNetModel",
)

# The refiners run over the image alone, with residuals added between them, so each layer gathers what it makes. The
# control layers carry a stack [layers, B, tokens, C] on, and in one variant run first over the image and then anew over
# image and text.
_REFINER = (
    ShardInputs(
        c=seq(-2, "image", if_taken=True),
        x=seq(1, "image", ndim=3),
        freqs_cis=seq(1, "image", ndim=3),
    ),
    GatherOutputs(seq(-2, "image"), inner=True),
)
_REFINE = ContextParallelAttention(streams=("image",))

Z_IMAGE_CONTROLNET = Plan(
    {
        "noise_refiner.*": _REFINER,
        "noise_refiner.*.attention": _REFINE,
        "control_noise_refiner.*": _REFINER,
        "control_noise_refiner.*.attention": _REFINE,
        "context_refiner.*.attention": LocalAttention(),
        "control_layers.0": ShardInputs(c=seq(-2, "tokens", anew=True), x=seq(1, "tokens", ndim=3)),
        "control_layers.*": ShardInputs(freqs_cis=seq(1, "tokens", ndim=3)),
        "control_layers.*.attention": ContextParallelAttention(streams=("tokens",)),
        "control_layers.-1": GatherOutputs(seq(-2, "tokens")),
    },
    classes="ZImageControlNetModel",
    optional=("control_noise_refiner.*", "control_noise_refiner.*.attention"),
)
