"""The shipped weights draw digits that a classifier of real ones reads, and several processes draw what one draws."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import meshcp
from tests.harness import Pool

DIGITS_DIR = Path(__file__).parents[1] / "examples" / "digits"
sys.path.append(str(DIGITS_DIR))  # the example's scripts import each other as scripts do: from their own folder

from digits_pipeline import MODEL_DIR, build_pipeline, generate, model_config  # noqa: E402

pytestmark = pytest.mark.timeout(240)  # half a minute of CPU time, on cores that may be busy with other work

LABELS = [index % 10 for index in range(200)]
STEPS = 8
COMPARED = 20  # pictures; each depends on its own seed alone, so the first of a large batch are those of a small one
SIZES = [(8, 8), (7, 9)]  # image tokens: 64, and 63, which four ranks share as unevenly as the 5 text tokens


def draw(counts: list[int], parallel: bool) -> list[Tensor]:
    """The first digits of `LABELS` in each of `SIZES`, as many as `counts` says: `[N, 1, H, W]` each."""
    pipe = build_pipeline()
    if parallel:
        meshcp.parallelize(pipe.transformer, meshcp.init_mesh(ring=2, ulysses=2, device_type="cpu"))
    return [generate(pipe, LABELS[:count], *size, steps=STEPS) for size, count in zip(SIZES, counts, strict=True)]


Judge = Callable[[Tensor, list[int]], float]


@pytest.fixture(scope="module")
def recognised() -> Judge:
    """The share of pictures `[N, 1, H, W]` that a classifier, trained on real digits only, reads as their labels."""
    import digits_data  # not above: the workers import this file too, and have no use for scikit-learn

    classifier = digits_data.train_classifier()
    return lambda images, labels: digits_data.recognised(classifier, images, labels)


@pytest.fixture(scope="module")
def parallel_pictures(pool: Pool) -> list[list[Tensor]]:
    """For each rank of ring 2 x ulysses 2, the pictures in each of `SIZES`."""
    return pool.run(4, draw, [len(LABELS), COMPARED], parallel=True, timeout=200)


@pytest.fixture(scope="module")
def single_pictures(pool: Pool) -> list[Tensor]:
    """What one process draws in each of `SIZES`."""
    (pictures,) = pool.run(1, draw, [COMPARED, COMPARED], parallel=False, timeout=200)
    return pictures


def test_classifier_recognises_digits_generated_in_parallel(
    parallel_pictures: list[list[Tensor]], recognised: Judge
) -> None:
    images = parallel_pictures[0][0]
    assert images.shape == (200, 1, 16, 16)
    assert images.min() >= 0
    assert images.max() <= 1
    assert recognised(images, LABELS) >= 0.95


def test_classifier_does_not_recognise_what_is_wrong(parallel_pictures: list[list[Tensor]], recognised: Judge) -> None:
    """Its verdict is worth something only if other labels, and pictures of nothing, score no better than chance."""
    images = parallel_pictures[0][0]
    assert recognised(images, [(label + 1) % 10 for label in LABELS]) < 0.1
    assert recognised(torch.rand(images.shape, generator=torch.Generator().manual_seed(0)), LABELS) < 0.3


@pytest.mark.parametrize("index", range(len(SIZES)), ids=["64 tokens", "63 tokens"])
def test_parallel_pictures_are_those_of_one_process(
    parallel_pictures: list[list[Tensor]], single_pictures: list[Tensor], index: int
) -> None:
    for of_rank in parallel_pictures:
        torch.testing.assert_close(of_rank[index][:COMPARED], single_pictures[index], atol=1e-4, rtol=0)


def test_shipped_model_is_small_and_as_the_training_script_builds_it() -> None:
    assert sum(file.stat().st_size for file in MODEL_DIR.iterdir()) < 6_000_000
    shipped = json.loads((MODEL_DIR / "config.json").read_text())
    expected = json.loads(json.dumps(model_config()))  # tuples become lists
    assert {name: shipped[name] for name in expected} == expected
