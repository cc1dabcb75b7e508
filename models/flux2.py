"""FLUX.2 (dev, Klein), also with Klein's cache of the keys and values of reference images.

The first pass with reference images (``kv_cache_mode="extract"``) has them in front of the image; they attend to
themselves alone, all else to everything. Each rank keeps its own rows in the cache. Later passes ("cached") leave them
out and attend to the cached rows. In passes of other kinds both streams are empty.
"""

from __future__ import annotations

from ..placements import count, seq
from ..plan import Plan
from ..styles import CarryStream, ContextParallelAttention, GatherOutputs, ShardInputs

_JOINT = ContextParallelAttention(
    streams=("text", "image"),
    kv=("text", "ref", "cached", "image"),
    then=ContextParallelAttention(streams=("ref",)),
)

FLUX2 = Plan(
    {
        "": (
            CarryStream("kv_cache", made_from="ref", holds="cached"),
            ShardInputs(
                num_ref_tokens=count("ref", default=0),
                hidden_states=seq(1, "ref", "image", ndim=3),
                encoder_hidden_states=seq(1, "text", ndim=3),
                img_ids=seq(-2, "ref", "image"),
                txt_ids=seq(-2, "text"),
            ),
        ),
        "transformer_blocks.*.attn": _JOINT,
        "single_transformer_blocks.*.attn": _JOINT,
        "proj_out": GatherOutputs(seq(1, "image")),
    },
    classes="Flux2Transformer2DModel",
)
