"""torch.compile of parallel models: one graph, the same numbers, one compilation a shape."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest

from tests import compile_cases
from tests.harness import Pool
from tests.model_cases import Mesh, Row, rows, with_config
from tests.rows import flux, qwenimage, wan

SMALL = {**flux.CONFIG, "num_layers": 1, "num_single_layers": 1}
FLUX = [
    with_config(flux.EVEN, "even", config=SMALL),
    with_config(flux.EVEN, "odd", config=SMALL, inputs=flux.make(image=15, text=7)),
]
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
    check(pool.run(4, compile_cases.compiled, FLUX[1:], MESHES[2], "aot_eager", timeout=300), [1, 1])


@pytest.mark.timeout(600)
def test_inductor_with_a_cache_that_the_ranks_share(pool: Pool, tmp_path: Path) -> None:
    # The second call starts from what the first one, and the other rank, left in the cache.
    for _ in range(2):
        results = pool.run(2, compile_cases.compiled_with_cache, FLUX[1:], MESHES[1], os.fspath(tmp_path), timeout=300)
        # Inductor fuses the rotary embedding, which FLUX computes in fp32, and rounds otherwise than eager code.
        check(results, [1, 1], tolerance=2e-5, gradients=1e-4)


@pytest.mark.timeout(400)
def test_repeated_blocks_compile_once_a_class_and_shape(pool: Pool) -> None:
    # Blocks of one class share a graph, but for FLUX's first single block, whose input has other strides than the
    # others' also on one process.
    rows = [with_config(flux.EVEN, "two-of-each", config=flux.CONFIG)]
    check(pool.run(2, compile_cases.compiled, rows, MESHES[0], "aot_eager", True, timeout=300), [3, 3])


def _row(model: str) -> Row:
    return next(row for row in rows() if row.model == model and "odd" in row.name)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("model", ["WanTransformer3DModel", "QwenImageTransformer2DModel"])
def test_other_models_compile_to_one_graph(pool: Pool, model: str) -> None:
    for result in pool.run(2, compile_cases.compiled, [_row(model)], MESHES[0], "aot_eager", timeout=300):
        assert all(output < 1e-6 and gradient < 1e-4 for output, gradient in result["differences"]), result
        assert result["compiles"] == [1, 1]


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


@pytest.mark.skipif("MESHCP_EVERY_MODE" not in os.environ, reason="minutes each: MESHCP_EVERY_MODE=1 runs them")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "x".join(f"{name}{degree}" for name, degree in mesh))
@pytest.mark.parametrize("regional", [False, True], ids=["whole", "regional"])
@pytest.mark.parametrize("model", PAIRS)
def test_every_mode_compiles_once_a_shape(
    pool: Pool, tmp_path: Path, model: str, regional: bool, mesh: Mesh, backend: str
) -> None:
    world = math.prod(degree for _, degree in mesh)
    # FLUX has two classes of blocks.
    once = 2 if regional and model == "flux" else 1
    for _ in range(2 if backend == "inductor" else 1):
        for result in pool.run(
            world,
            compile_cases.compiled_with_cache,
            PAIRS[model],
            mesh,
            os.fspath(tmp_path),
            backend,
            regional,
            timeout=1000,
        ):
            assert all(output < 2e-5 and gradient < 1e-4 for output, gradient in result["differences"]), result
            assert result["compiles"] == [once, once, 2 * once, 2 * once]
