"""Compiled parallel models, run on every rank and compared with the eager single process."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.tensor.parallel import parallelize_module

import meshcp
from tests.harness import make_mesh, world_mean
from tests.model_cases import Mesh, Row, _difference, build, make_inputs, tensors_of


def _gradient_difference(model: nn.Module, expected: dict[str, Tensor]) -> float:
    worst = 0.0
    parameters = dict(model.named_parameters())
    means = world_mean([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters.values()])
    for name, mean in zip(parameters, means, strict=True):
        assert bool(mean.isfinite().all()), name
        scale = expected[name].abs().max().clamp(min=1e-9)
        worst = max(worst, float((mean - expected[name]).abs().max() / scale))
    return worst


def _quiet() -> None:
    # Dynamo looks for the gradient of every input of a block that it compiles alone.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    # Dynamo of torch 2.11 makes one while it traces an autograd function.
    warnings.filterwarnings("ignore", message="<class 'torch.autograd.function.Function'> should not be instantiated")


def compiled(
    rows: list[Row],
    mesh: Mesh,
    backend: str,
    regional: bool = False,
    dynamic: bool | None = None,
    gather_kv: bool = False,
) -> dict[str, Any]:
    """Compile once, run each row (same model, other shapes) twice (other values): differences, and how often it was
    compiled by then."""
    torch._dynamo.reset()
    _quiet()
    counter = CompileCounterWithBackend(backend)
    model = build(rows[0])
    expected = []
    calls = [(row, seed) for row in rows for seed in (11, 12)]
    for row, seed in calls:
        outputs = tensors_of(model(**make_inputs(row, seed)))
        outputs[0].square().mean().backward()
        grads = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        model.zero_grad(set_to_none=True)
        expected.append((outputs[0].detach(), grads))
    meshcp.parallelize(model, make_mesh(mesh), gather_kv=gather_kv)
    options: dict[str, Any] = {"fullgraph": True, "backend": counter, "dynamic": dynamic}
    if regional:
        model.compile_repeated_blocks(**options)  # type: ignore[operator]
        run: Any = model
    else:
        run = torch.compile(model, **options)
    differences, compiles = [], []
    for (row, seed), (output, grads) in zip(calls, expected, strict=True):
        found = tensors_of(run(**make_inputs(row, seed)))[0]
        difference = _difference(found.detach(), output)
        found.square().mean().backward()
        differences.append((difference, _gradient_difference(model, grads)))
        model.zero_grad(set_to_none=True)
        compiles.append(counter.frame_count)
    torch._dynamo.reset()
    return {"differences": differences, "compiles": compiles}


def compiled_with_cache(
    rows: list[Row],
    mesh: Mesh,
    directory: str,
    backend: str = "inductor",
    regional: bool = False,
    gather_kv: bool = False,
) -> dict[str, Any]:
    """:func:`compiled` with a cache directory that the ranks share."""
    import os

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = directory
    # Inductor of torch 2.11 imports a module that uses it.
    warnings.filterwarnings("ignore", message="`torch.jit.script_method` is deprecated")
    # QwenImage rotates in complex numbers, which inductor leaves to eager kernels, on one process as well.
    warnings.filterwarnings("ignore", message="Torchinductor does not support code generation for complex operators")
    return compiled(rows, mesh, backend, regional, gather_kv=gather_kv)


def differing_inputs(row: Row, in_place: bool) -> str:
    """What a compiled model says to inputs that differ between ranks."""
    torch._dynamo.reset()
    model = build(row)
    meshcp.parallelize(model, make_mesh((("ulysses", 2),)))
    run: Any = model
    if in_place:
        model.compile(fullgraph=True, backend="eager")
    else:
        run = torch.compile(model, fullgraph=True, backend="eager")
    try:
        run(**make_inputs(row, dist.get_rank()))
    except meshcp.InputError as error:
        return str(error)
    return "nothing"


def tensor_parallel(row: Row) -> tuple[float, int]:
    """Blocks compiled each by itself under tensor parallel: the difference, and how often they were compiled."""
    torch._dynamo.reset()
    _quiet()
    counter = CompileCounterWithBackend("aot_eager")
    model, mesh = build(row), make_mesh((("tp", 2),))
    with torch.no_grad():
        expected = tensors_of(model(**make_inputs(row, 11)))[0]
        parallelize_module(model, mesh["tp"], meshcp.tp_plan(model, mesh))
        model.compile_repeated_blocks(fullgraph=True, backend=counter)  # type: ignore[operator]
        found = tensors_of(model(**make_inputs(row, 11)))[0]
    torch._dynamo.reset()
    return _difference(found, expected), counter.frame_count


def guided(row: Row) -> tuple[float, int, int, str]:
    """A model compiled after its guidance was made parallel: the difference, how often it was compiled, how many calls
    were cut over the axis; and what a call through ``torch.compile(model)`` says."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    model = build(row).requires_grad_(False)
    expected = [tensors_of(model(**make_inputs(row, seed)))[0] for seed in (11, 12)]
    handle = meshcp.parallelize_guidance(model, make_mesh((("cfg", 2),)))
    try:
        torch.compile(model, fullgraph=True, backend=counter)(**make_inputs(row, 11))
        said = "nothing"
    except meshcp.InputError as error:
        said = str(error)
    model.compile(fullgraph=True, backend=counter)
    found = [tensors_of(model(**make_inputs(row, seed)))[0] for seed in (11, 12)]
    worst = max(_difference(f, e) for f, e in zip(found, expected, strict=True))
    handle.remove()
    assert model.compile.__func__ is nn.Module.compile
    torch._dynamo.reset()
    return worst, counter.frame_count, handle.cut, said
