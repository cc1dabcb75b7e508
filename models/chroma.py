"""Chroma: FLUX without guidance and pooled text, with an attention mask over text and image."""

from __future__ import annotations

from ..plan import Plan
from .flux import FLUX

# The mask [B, text + image] stays whole: each block makes its outer product, and the attention takes its rows of that.
CHROMA = Plan(dict(FLUX.entries), classes="ChromaTransformer2DModel")
