"""Words of plans that say which part of a tensor is cut: whole and local streams, grids, folds, caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import meshcp
from meshcp.layout import StreamLengths
from meshcp.mesh import context_mesh
from meshcp.placements import grid, seq
from meshcp.styles import FoldTokens, GatherStores, LinearAttention, ShardInputs
from tests import model_cases
from tests.harness import Pool
from tests.rows import glm_image, pixart, qwenimage21, sana


def cut_and_join(lengths: dict[str, int], cut: Any, joined: Any) -> tuple[list[int], list[int]]:
    """The numbers from 0 cut as ``cut`` says, and gathered again as ``joined`` says."""
    context = context_mesh(init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("ring",)))
    streams = StreamLengths(context)
    for name, length in lengths.items():
        streams.tell(name, length, "the test")
    here = sum(streams.held(n)[1] - streams.held(n)[0] if n in cut.local else lengths[n] for n in cut.streams)
    part = streams.shard(torch.arange(here), cut, "x")
    return part.tolist(), streams.gather(part, joined, "x").tolist() if joined else []


def test_whole_streams_are_neither_cut_nor_gathered(pool: Pool) -> None:
    where = seq(0, "prefix", "target", whole=("prefix",))
    parts = pool.run(2, cut_and_join, {"prefix": 3, "target": 3}, where, where)
    assert [part for part, _ in parts] == [[0, 1, 2, 3, 4], [0, 1, 2, 5]]
    assert all(whole == [0, 1, 2, 3, 4, 5] for _, whole in parts)


def test_local_streams_stay_as_they_are(pool: Pool) -> None:
    where = seq(0, "image", "text", local=("text",))
    parts = pool.run(2, cut_and_join, {"image": 4, "text": 3}, where, None)
    assert [part for part, _ in parts] == [[0, 1, 4, 5], [2, 3, 4]]


def test_whole_and_local_must_be_among_the_streams() -> None:
    with pytest.raises(ValueError, match="needed: different ones of the streams"):
        seq(1, "image", local=("text",))
    with pytest.raises(ValueError, match="needed: different ones of the streams"):
        seq(1, "image", local=("image",), whole=("image",))


def failure(row: model_cases.Row, plan: meshcp.Plan | None, check_inputs: bool = True, **inputs: Any) -> str:
    """What a parallel forward of the row says, given other inputs."""
    model = model_cases.build(row)
    try:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ulysses",))
        meshcp.parallelize(model, mesh, plan, check_inputs=check_inputs)
        model(**{**model_cases.make_inputs(row), **inputs})
    except meshcp.MeshcpError as error:
        return str(error)
    return "no error"


def say(pool: Pool, row: model_cases.Row, plan: meshcp.Plan | None = None, **options: Any) -> str:
    said: str = pool.run(2, failure, row, plan, **options)[0]
    return said


def test_a_grid_without_sizes_is_refused(pool: Pool) -> None:
    plan = meshcp.Plan({"": ShardInputs(img_shapes=grid("target", 0, 7))}).entries[0]
    whole = meshcp.models.PLANS["QwenImage21Transformer2DModel"]
    wrong = meshcp.Plan({**dict(whole.entries), "": plan[1]})
    assert "needs sizes of a grid in it (grid('target', 0, 7))" in say(pool, qwenimage21.EVEN, wrong)


@pytest.mark.parametrize(
    ("row", "path", "style"),
    [
        (sana.EVEN, "transformer_blocks.*", FoldTokens("image", height="high", width="width", convolution="ff")),
        (sana.EVEN, "transformer_blocks.*", FoldTokens("image", height="height", width="width", convolution="conv")),
        (glm_image.EVEN, "transformer_blocks.*", GatherStores(cache=seq(1, "text", "image"))),
    ],
)
def test_names_that_the_module_does_not_know_are_refused(
    pool: Pool, row: model_cases.Row, path: str, style: meshcp.styles.MeshcpStyle
) -> None:
    plan = meshcp.models.PLANS[row.model]
    assert "correct the name" in say(pool, row, meshcp.Plan({**dict(plan.entries), path: style}))


def test_linear_attention_needs_a_processor_that_sums(pool: Pool) -> None:
    plan = meshcp.models.PLANS["SanaTransformer2DModel"]
    wrong = {**dict(plan.entries), "transformer_blocks.*.attn2": LinearAttention(("image",))}
    assert "ran without a torch.matmul of values and keys" in say(
        pool, sana.EVEN, meshcp.Plan(wrong), check_inputs=False
    )


def test_cross_attention_without_a_text_is_refused(pool: Pool) -> None:
    row = model_cases.with_config(pixart.EVEN, "no-caption", config={**pixart.CONFIG, "caption_channels": None})
    said = say(pool, row, encoder_hidden_states=None, encoder_attention_mask=None)
    assert "is a cross-attention that got no encoder_hidden_states" in said
