"""torch.compile of parallel models: one graph, the same numbers, one compilation a shape."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests import compile_cases
from tests.harness import Pool
from tests.model_cases import Mesh, Row, rows, with_config
from tests.rows import flux

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
