"""Classes that meshcp has no plan for, and why."""

from __future__ import annotations

REFUSED: dict[str, str] = {}
"""Class name -> one sentence."""

REFUSED["WanAnimate2Transformer3DModel"] = (
    "its attention processor packs whole frames into a buffer of the full video and attends through a flex block mask "
    "over that buffer, so a rank that holds a part of a frame cannot fill it"
)

REFUSED["SanaVideoTransformer3DModel"] = (
    "its linear attention sums over the whole sequence without an attention call, and its feed-forward is a "
    "convolution over frames, rows and columns, of which a rank holds no whole number; run it with data parallelism "
    "instead"
)

REFUSED["NucleusMoEImageTransformer2DModel"] = (
    "its experts each choose their tokens out of the whole image (expert-choice routing), so the feed-forward layers, "
    "most of its work, would run whole on every rank; run it with data parallelism instead"
)

for _name in ("FluxMultiControlNetModel", "SD3MultiControlNetModel", "QwenImageMultiControlNetModel"):
    REFUSED[_name] = "it only adds up what its ControlNets make: parallelize each of model.nets by itself"
