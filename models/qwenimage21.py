"""QwenImage 2.1 (text to image and edit, with and without its cache of the prefix).

The prefix - prompt and condition images, causal block by block - never looks at the target image, and its keys and
values serve every later step from a cache. It stays whole on every rank; the target image is sharded.
"""

from __future__ import annotations

from ..placements import grid, seq
from ..plan import Plan
from ..styles import ContextParallelAttention, GatherOutputs, ShardInputs

_PREFIX = ("prefix",)
# One flag a token, or none where all tokens share the timestep.
_MASK = seq(0, "prefix", "target", ndim=1, whole=_PREFIX, optional=True)

QWENIMAGE21 = Plan(
    {
        "": ShardInputs(img_shapes=grid("target", 0, -1)),
        "transformer_blocks.0": ShardInputs(hidden_states=seq(1, "prefix", "target", ndim=3, whole=_PREFIX)),
        "transformer_blocks.*": ShardInputs(
            rotary_emb=seq(0, "prefix", "target", ndim=2, whole=_PREFIX), target_token_mask=_MASK
        ),
        # Calls for rows of the prefix see keys of the prefix only: they are local.
        "transformer_blocks.*.attn": ContextParallelAttention(streams=("target",), whole="prefix"),
        "norm_out": ShardInputs(target_token_mask=_MASK),
        "proj_out": GatherOutputs(seq(1, "prefix", "target", whole=_PREFIX)),
    },
    classes="QwenImage21Transformer2DModel",
    notes="not with QwenImage21FlexAttnProcessor",
)
