"""Two models that share modules, of which one is parallel or both: Z-Image's ControlNet and its transformer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshcp
from tests.harness import Pool
from tests.model_cases import _difference, build, tensors_of, with_config
from tests.rows import controlnets, z_image

SIZES, TEXTS = [(6, 10), (6, 10)], [35, 9]


def share(which: str, first_removed: str) -> float:
    """Largest difference from the single process of a step as in the pipeline, with ``which`` models parallel."""
    transformer = build(z_image.EVEN)
    controlnet = build(with_config(controlnets.Z_IMAGE_EVEN, "shared", prepare=None))
    type(controlnet).from_transformer(controlnet, transformer)

    def step() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(5)
        made: dict[str, Any] = controlnets.z_image_inputs(generator, sizes=SIZES, texts=TEXTS)
        own = {name: made[name] for name in ("x", "t", "cap_feats")}
        with torch.no_grad():
            residuals = controlnet(**made)
            alone = transformer.context_refiner[0](torch.ones(1, 3, 48, dtype=torch.float64), None, None)
            return [*tensors_of(residuals), alone, *tensors_of(transformer(**own, controlnet_block_samples=residuals))]

    expected = step()
    models: dict[str, nn.Module] = {"transformer": transformer, "controlnet": controlnet}
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ulysses",))
    handles = {name: meshcp.parallelize(model, mesh) for name, model in models.items() if name in which}
    # Twice: the second step finds what the first one left.
    steps = [step(), step()]
    handles.pop(first_removed).remove()
    steps.append(step())
    while handles:
        handles.popitem()[1].remove()
    steps.append(step())
    forwards = [module for model in models.values() for module in model.modules() if "forward" in module.__dict__]
    assert not forwards, "remove() left forwards behind"
    return max(_difference(a, e) for actual in steps for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize(
    ("which", "first_removed"),
    [
        ("transformer", "transformer"),
        ("controlnet", "controlnet"),
        ("transformer and controlnet", "transformer"),
        ("transformer and controlnet", "controlnet"),
    ],
)
def test_shared_modules_work_for_the_model_that_runs(pool: Pool, which: str, first_removed: str) -> None:
    assert max(pool.run(2, share, which, first_removed)) < 1e-10
