"""Compiled parallel models, run on every rank and compared with the eager single process."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh

import meshcp
from tests.model_cases import Mesh, Row, build, make_inputs, tensors_of


def _gradient_difference(model: nn.Module, expected: dict[str, Tensor]) -> float:
    worst = 0.0
    for name, parameter in model.named_parameters():
        have = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        dist.all_reduce(have)
        have /= dist.get_world_size()
        assert bool(have.isfinite().all()), name
        scale = expected[name].abs().max().clamp(min=1e-9)
        worst = max(worst, float((have - expected[name]).abs().max() / scale))
    return worst


def compiled(rows: list[Row], mesh: Mesh, backend: str, regional: bool = False) -> dict[str, Any]:
    """Compile once, run each row (same model, other inputs): differences, and how often it was compiled."""
    torch._dynamo.reset()
    # Dynamo looks for the gradient of every input of a block that it compiles alone.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    # Dynamo of torch 2.11 makes one while it traces an autograd function.
    warnings.filterwarnings("ignore", message="<class 'torch.autograd.function.Function'> should not be instantiated")
    counter = CompileCounterWithBackend(backend)
    model = build(rows[0])
    expected = []
    for row in rows:
        outputs = tensors_of(model(**make_inputs(row)))
        outputs[0].square().mean().backward()
        grads = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        model.zero_grad(set_to_none=True)
        expected.append((outputs[0].detach(), grads))
    device_mesh = init_device_mesh("cpu", tuple(d for _, d in mesh), mesh_dim_names=tuple(n for n, _ in mesh))
    meshcp.parallelize(model, device_mesh)
    if regional:
        model.compile_repeated_blocks(fullgraph=True, backend=counter)  # type: ignore[operator]
        run: Any = model
    else:
        run = torch.compile(model, fullgraph=True, backend=counter)
    differences, compiles = [], []
    for row, (output, grads) in zip(rows, expected, strict=True):
        for _ in range(2):
            found = tensors_of(run(**make_inputs(row)))[0]
            difference = float((found.detach() - output).abs().max() / output.abs().max())
            found.square().mean().backward()
            differences.append((difference, _gradient_difference(model, grads)))
            model.zero_grad(set_to_none=True)
            compiles.append(counter.frame_count)
    torch._dynamo.reset()
    return {"differences": differences, "compiles": compiles}


def compiled_with_cache(
    rows: list[Row], mesh: Mesh, directory: str, backend: str = "inductor", regional: bool = False
) -> dict[str, Any]:
    """:func:`compiled` with a cache directory that the ranks share."""
    import os

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = directory
    # Inductor of torch 2.11 imports a module that uses it.
    warnings.filterwarnings("ignore", message="`torch.jit.script_method` is deprecated")
    return compiled(rows, mesh, backend, regional)
