"""torch.compile of parallel models: one graph, the same numbers, one compilation a shape."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest

from tests import compile_cases
from tests.harness import Pool
from tests.model_cases import Mesh, with_config
from tests.rows import flux, qwenimage, wan

SMALL = {**flux.CONFIG, "num_layers": 1, "num_single_layers": 1}
FLUX = [
    with_config(flux.EVEN, "even", config=SMALL),
    with_config(flux.EVEN, "odd", config=SMALL, inputs=flux.make(image=15, text=7)),
]
# Half the work for the compiler: what the single blocks add, the first test sees.
ONE_BLOCK = [with_config(FLUX[1], "one-block", config={**SMALL, "num_single_layers": 0})]
MESHES: tuple[Mesh, ...] = ((("ulysses", 2),), (("ring", 2),), (("ring", 2), ("ulysses", 2)))


def check(
    results: list[dict[str, Any]], compiles: list[int], tolerance: float = 1e-10, gradients: float = 3e-6
) -> None:
    for result in results:
        for output, gradient in result["differences"]:
            assert output < tolerance
            # FLUX applies its rotary embedding in fp32.
            assert gradient < gradients
        assert result["compiles"] == compiles


@pytest.mark.timeout(400)
def test_one_graph_and_one_compilation_a_shape(pool: Pool) -> None:
    check(pool.run(2, compile_cases.compiled, FLUX, MESHES[0], "aot_eager", timeout=300), [1, 1, 2, 2])


@pytest.mark.timeout(400)
def test_both_axes_in_one_graph(pool: Pool) -> None:
    check(pool.run(4, compile_cases.compiled, ONE_BLOCK, MESHES[2], "aot_eager", timeout=300), [1, 1])


@pytest.mark.timeout(600)
def test_inductor_with_a_cache_that_the_ranks_share(pool: Pool, tmp_path: Path) -> None:
    # The second call starts from what the first one, and the other rank, left in the cache. The block alone, half the
    # work for the compiler: the whole model is in test_every_mode_compiles_once_a_shape.
    for _ in range(2):
        results = pool.run(
            2, compile_cases.compiled_with_cache, ONE_BLOCK, MESHES[1], os.fspath(tmp_path), "inductor", True,
            timeout=300,
        )  # fmt: skip
        # Inductor fuses the rotary embedding, which FLUX computes in fp32, and rounds otherwise than eager code.
        check(results, [1, 1], tolerance=2e-5, gradients=1e-4)


WAN, QWEN = {**wan.CONFIG, "num_layers": 1}, {**qwenimage.CONFIG, "num_layers": 1}
PAIRS = {
    "flux": FLUX,
    "wan": [
        with_config(wan.EVEN, "even", config=WAN, inputs=wan.make(grid=(3, 4, 2), text=8)),
        with_config(wan.EVEN, "odd", config=WAN, inputs=wan.make(grid=(3, 3, 3), text=7)),
    ],
    "qwenimage": [
        with_config(
            qwenimage.EVEN, "even", config=QWEN, inputs=qwenimage.make(shapes=[(1, 4, 4)], text=8, valid=(8, 6))
        ),
        with_config(
            qwenimage.EVEN, "odd", config=QWEN, inputs=qwenimage.make(shapes=[(1, 3, 5)], text=9, valid=(6, 2))
        ),
    ],
}


@pytest.mark.timeout(400)
def test_repeated_blocks_compile_once_a_class(pool: Pool) -> None:
    # The first block is given a part of a tensor that is longer, the second what a block returns.
    two = [with_config(PAIRS["wan"][1], "two", config={**WAN, "num_layers": 2})]
    check(pool.run(2, compile_cases.compiled, two, MESHES[0], "aot_eager", True, timeout=300), [1, 1], 1e-6, 1e-4)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("model", "mesh", "gather_kv"), [("wan", MESHES[0], False), ("qwenimage", MESHES[1], True)])
def test_other_models_compile_to_one_graph(pool: Pool, model: str, mesh: Mesh, gather_kv: bool) -> None:
    results = pool.run(2, compile_cases.compiled, PAIRS[model][1:], mesh, "aot_eager", gather_kv=gather_kv, timeout=300)
    check(results, [1, 1], 1e-6, 1e-4)


@pytest.mark.timeout(400)
def test_symbolic_sizes_are_made_plain(pool: Pool) -> None:
    check(pool.run(2, compile_cases.compiled, FLUX[1:], MESHES[0], "eager", False, True, timeout=300), [1, 1])


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_refuses_inputs_that_differ(pool: Pool, in_place: bool) -> None:
    for said in pool.run(2, compile_cases.differing_inputs, FLUX[0], in_place):
        assert "hidden_states" in said
        assert "differ" in said


@pytest.mark.timeout(400)
def test_blocks_compile_under_tensor_parallel(pool: Pool) -> None:
    for difference, compiles in pool.run(2, compile_cases.tensor_parallel, FLUX[0], timeout=300):
        assert difference < 1e-10
        assert compiles == 2


@pytest.mark.timeout(400)
def test_a_model_compiles_beneath_its_guidance(pool: Pool) -> None:
    for difference, compiles, cut, said in pool.run(2, compile_cases.guided, FLUX[0], timeout=300):
        assert difference < 1e-10
        assert compiles == 1
        assert cut == 2
        assert "model.compile()" in said


@pytest.mark.skipif("MESHCP_EVERY_MODE" not in os.environ, reason="minutes each: MESHCP_EVERY_MODE=1 runs them")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "x".join(f"{name}{degree}" for name, degree in mesh))
@pytest.mark.parametrize("gather_kv", [False, True], ids=["passed", "gathered"])
@pytest.mark.parametrize("regional", [False, True], ids=["whole", "regional"])
@pytest.mark.parametrize("model", PAIRS)
def test_every_mode_compiles_once_a_shape(
    pool: Pool, tmp_path: Path, model: str, regional: bool, gather_kv: bool, mesh: Mesh, backend: str
) -> None:
    if gather_kv and "ring" not in dict(mesh):
        pytest.skip("nothing to gather without ring")
    world = math.prod(degree for _, degree in mesh)
    # FLUX has two classes of blocks.
    once = 2 if regional and model == "flux" else 1
    for _ in range(2 if backend == "inductor" else 1):
        results = pool.run(
            world, compile_cases.compiled_with_cache, PAIRS[model], mesh, os.fspath(tmp_path), backend, regional,
            gather_kv, timeout=1000,
        )  # fmt: skip
        check(results, [once, once, 2 * once, 2 * once], tolerance=2e-5, gradients=1e-4)
