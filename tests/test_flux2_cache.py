"""Flux2's cache of the keys and values of reference images: filled in one forward pass, used in later ones."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import meshcp
from tests.harness import Pool, make_mesh
from tests.model_cases import MESHES, Mesh, _difference, build
from tests.rows.flux2 import KV, inputs

REFERENCES = 6


def cached_pass(mesh: Mesh) -> float:
    """Largest difference from the single process: filling the cache, using it, and without it."""
    generator = torch.Generator().manual_seed(3)
    first = inputs(generator, image=REFERENCES + 11, text=5, guidance=False, extract=REFERENCES)
    second = inputs(generator, image=11, text=5, guidance=False)
    model = build(KV)

    def run() -> list[torch.Tensor]:
        with torch.no_grad():
            extracted, cache = model(**first, return_dict=False)
            used = [model(**second, kv_cache=cache, kv_cache_mode="cached", return_dict=False)[0] for _ in range(2)]
            plain = model(**second, return_dict=False)[0]
        return [extracted, *used, plain]

    expected = run()
    device_mesh = make_mesh(mesh)
    handle = meshcp.parallelize(model, device_mesh)
    actual = run()
    handle.remove()
    assert not torch.allclose(expected[1], expected[3]), "the cache makes no difference"
    return max(_difference(a, e) for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize("mesh", [mesh for meshes in MESHES.values() for mesh in meshes], ids=str)
def test_cached_passes_are_those_of_one_process(pool: Pool, mesh: Mesh) -> None:
    world = 1
    for _, degree in mesh:
        world *= degree
    assert max(pool.run(world, cached_pass, mesh)) < 1e-10


def foreign_cache() -> str:
    generator = torch.Generator().manual_seed(3)
    first = inputs(generator, image=REFERENCES + 11, text=5, guidance=False, extract=REFERENCES)
    second = inputs(generator, image=11, text=5, guidance=False)
    model = build(KV)
    with torch.no_grad():
        _, cache = model(**first, return_dict=False)
        meshcp.parallelize(model, init_device_mesh("cpu", (2,), mesh_dim_names=("ulysses",)))
        try:
            model(**second, kv_cache=cache, kv_cache_mode="cached")
        except meshcp.MeshcpError as error:
            return str(error)
    return "nothing raised"


def test_a_cache_that_holds_whole_streams_is_refused(pool: Pool) -> None:
    for said in pool.run(2, foreign_cache):
        assert "'kv_cache' of the model is a Flux2KVCache that another model made" in said
