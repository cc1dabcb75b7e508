"""Z-Image (also Omni): prompts and images of unequal lengths, each padded to a multiple of 32, then to the longest.

The noise refiner runs over the image alone and is sharded for itself; the refiners over text and SigLIP features are
short and run whole on every rank. Afterwards each sample's parts are joined into one sequence, sharded anew.
"""

from __future__ import annotations

from ..placements import seq
from ..plan import Plan
from ..styles import ContextParallelAttention, GatherOutputs, LocalAttention, ShardInputs

Z_IMAGE = Plan(
    {
        "": ShardInputs(controlnet_block_samples=seq(1, "tokens", ndim=3, optional=True)),
        "noise_refiner.0": ShardInputs(x=seq(1, "image", ndim=3)),
        "noise_refiner.*": ShardInputs(
            freqs_cis=seq(1, "image", ndim=3), noise_mask=seq(1, "image", ndim=2, optional=True)
        ),
        "noise_refiner.*.attention": ContextParallelAttention(streams=("image",)),
        "noise_refiner.-1": GatherOutputs(seq(1, "image"), inner=True),
        "context_refiner.*.attention": LocalAttention(),
        "siglip_refiner.*.attention": LocalAttention(),
        "layers.0": ShardInputs(x=seq(1, "tokens", ndim=3)),
        "layers.*": ShardInputs(freqs_cis=seq(1, "tokens", ndim=3), noise_mask=seq(1, "tokens", ndim=2, optional=True)),
        "layers.*.attention": ContextParallelAttention(streams=("tokens",)),
        "all_final_layer.*": (
            ShardInputs(noise_mask=seq(1, "tokens", ndim=2, optional=True)),
            GatherOutputs(seq(1, "tokens"), inner=True),
        ),
    },
    classes="ZImageTransformer2DModel",
    optional=("siglip_refiner.*.attention",),
)
