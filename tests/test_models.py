"""Every model, in every mode, against itself on one process."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from meshcp.models import PLANS
from tests import model_cases
from tests.harness import Pool
from tests.model_cases import MESHES, Mesh, Row
from tests.rows import flux

ROWS = model_cases.rows()
GATHERED: dict[int, tuple[Mesh, ...]] = {2: (), 3: MESHES[3], 4: ()}


def _cases() -> list[tuple[Row, int]]:
    """The first two rows of a class (even, odd) on every mesh; each further one on those of 3 ranks or of 4, in turn.

    MESHCP_EVERY_MODE=1 runs all rows on all meshes, which takes twice as long.
    """
    every = bool(os.environ.get("MESHCP_EVERY_MODE"))
    seen: Counter[str] = Counter()
    cases = []
    for row in ROWS:
        seen[row.model] += 1
        worlds = sorted(MESHES) if every or seen[row.model] <= 2 else [3 + seen[row.model] % 2]
        cases += [(row, world) for world in worlds]
    return cases


@pytest.mark.parametrize(("row", "world"), _cases(), ids=str)
def test_parallel_model_is_the_single_process_model(pool: Pool, row: Row, world: int) -> None:
    for rank, wrong in enumerate(pool.run(world, model_cases.compare, row, MESHES[world], gathered=GATHERED[world])):
        assert not wrong, f"rank {rank}: " + "; ".join(wrong)


def _entries() -> list[tuple[Row, str]]:
    """For each class the first of its rows, with every entry of its plan."""
    first: dict[str, Row] = {}
    for row in ROWS:
        first.setdefault(row.model, row)
    return [(row, path) for row in first.values() for path, _ in (row.plan or PLANS[row.model]).entries]


@pytest.mark.parametrize(("row", "path"), _entries(), ids=lambda value: str(value) or "model")
def test_a_plan_that_lacks_an_entry_is_refused_or_harmless(pool: Pool, row: Row, path: str) -> None:
    said = pool.run(2, model_cases.without_entry, row, path)
    assert all(what.startswith("refused") or what == "harmless" for what in said), said


def test_every_plan_has_rows() -> None:
    assert set(PLANS) == {row.model for row in ROWS}


@pytest.mark.parametrize("row", {row.model: row for row in reversed(ROWS)}.values(), ids=str)
def test_outputs_left_sharded_are_parts_or_refused(pool: Pool, row: Row) -> None:
    said = pool.run(2, model_cases.left_sharded, row)
    assert all(what == "right" or what.startswith("refused") for what in said), said


EVERY_MESH: dict[int, tuple[Mesh, ...]] = {
    2: MESHES[2],
    3: ((("ulysses", 3),), (("ring", 3),)),
    4: ((("ulysses", 4),), (("ring", 4),), (("ring", 2), ("ulysses", 2)), (("ulysses", 2), ("ring", 2))),
    6: ((("ring", 2), ("ulysses", 3)), (("ring", 3), ("ulysses", 2)), (("ulysses", 6),)),
}


@pytest.mark.parametrize("world", sorted(EVERY_MESH))
@pytest.mark.parametrize("row", [flux.EVEN, flux.ROWS[1]], ids=str)
def test_flux_gradients_on_every_mesh(pool: Pool, row: Row, world: int) -> None:
    meshes = EVERY_MESH[world]
    gathered = tuple(mesh for mesh in meshes if dict(mesh).get("ring", 1) > 1)
    for rank, wrong in enumerate(pool.run(world, model_cases.compare, row, meshes, meshes, gathered, True)):
        assert not wrong, f"rank {rank}: " + "; ".join(wrong)
