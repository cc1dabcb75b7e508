"""`meshcp.verify`: it finds what is wrong, says where, hangs on nothing and leaves the model alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import meshcp
from meshcp import ContextParallelAttention, GatherOutputs, LocalAttention, Plan, ShardInputs, seq
from meshcp.verify import Report
from tests import model_cases
from tests.harness import Pool, make_mesh
from tests.model_cases import Mesh, Row

ULYSSES: Mesh = (("ulysses", 2),)
JOINT = ContextParallelAttention(streams=("text", "image"))


def _row(name: str = "odd") -> Row:
    return next(row for row in model_cases.rows() if str(row) == f"FluxTransformer2DModel-{name}")


def _plan(joint: Any = JOINT, **inputs: Any) -> Plan:
    """FLUX's plan, spelled out so that it can be got wrong."""
    streams = {
        "hidden_states": seq(1, "image"),
        "encoder_hidden_states": seq(1, "text"),
        "img_ids": seq(0, "image"),
        "txt_ids": seq(0, "text"),
    }
    return Plan(
        {
            "": ShardInputs(**{**streams, **inputs}),
            "transformer_blocks.*.attn": joint,
            "single_transformer_blocks.*.attn": joint,
            "proj_out": GatherOutputs(seq(1, "image")),
        }
    )


def _state(model: nn.Module) -> dict[str, Any]:
    return {
        name: (dict(vars(module)).keys(), len(module._forward_hooks), len(module._forward_pre_hooks))
        for name, module in model.named_modules()
    }


def _run(mesh: Mesh, plan: Plan | None = None, **options: Any) -> tuple[bool, str, Report]:
    model = model_cases.build(_row())
    before, inputs = _state(model), model_cases.make_inputs(_row())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    report = meshcp.verify(model, make_mesh(mesh), inputs, plan, **options)
    assert _state(model) == before
    assert all(bool((parameter.grad == 1).all()) for parameter in model.parameters())
    assert all(
        torch.equal(x, y) for x, y in zip(inputs.values(), model_cases.make_inputs(_row()).values(), strict=True)
    )
    return report.ok, repr(report), report


@pytest.mark.parametrize(
    "mesh", [ULYSSES, (("ring", 3),), (("ring", 2), ("ulysses", 2)), (("dp", 2), ("ulysses", 2))], ids=str
)
def test_a_right_plan_is_found_right(pool: Pool, mesh: Mesh) -> None:
    world = 1
    for _, degree in mesh:
        world *= degree
    said = pool.run(world, _run, mesh, gradients=True, tolerance=3e-6)
    for ok, text, report in said:
        assert ok, text
        assert text.startswith("right: FluxTransformer2DModel on ring")
        assert "image 15" in text
        assert report.differences[0].name == "output.sample"
        assert sum(d.kind == "gradient" for d in report.differences) > 50
    # Twice in the same processes: the groups of the first are gone.
    assert all(ok for ok, _, _ in pool.run(world, _run, mesh, gather_kv=True))


def test_a_wrong_plan_is_found_wrong_on_every_rank(pool: Pool) -> None:
    # Attention that stays local over a sharded sequence runs, and gives something else.
    said = pool.run(2, _run, ULYSSES, _plan(LocalAttention()))
    assert len({text for _, text, _ in said}) == 1
    ok, text, report = said[0]
    assert not ok
    assert text.startswith("WRONG")
    assert "above 1e-09" in text
    assert report.worst is not None
    assert report.worst.relative > 1e-2
    assert report.worst.rank in (0, 1)


def test_a_wrong_gradient_is_found_wrong(pool: Pool) -> None:
    for ok, text, _ in pool.run(2, _wrong_gradient):
        assert not ok
        assert "gradient of" in text


def _wrong_gradient() -> tuple[bool, str, Report]:
    model = model_cases.build(_row())
    mesh = make_mesh(ULYSSES)
    # Its gradient depends on which part of the sequence a rank has, its output does not.
    model.proj_out.register_forward_pre_hook(
        lambda _, args: (args[0] + 1e-9 * (args[0].detach().shape[1] - args[0]) * 0,)
    )
    model.norm_out.register_forward_hook(lambda _, args, out: out.detach() + 0.5 * (out - out.detach()) * out.shape[1])
    report = meshcp.verify(model, mesh, model_cases.make_inputs(_row()), gradients=True, tolerance=3e-6)
    return report.ok, repr(report), report


def test_inputs_by_position_and_inputs_that_the_model_changes(pool: Pool) -> None:
    for ok, text in pool.run(2, _changing):
        assert ok, text


def _changing() -> tuple[bool, str]:
    model = model_cases.build(_row())
    inputs = {**model_cases.make_inputs(_row()), "joint_attention_kwargs": {"scale": 0.5}}
    names = ["hidden_states", "encoder_hidden_states", "pooled_projections", "timestep", "img_ids", "txt_ids"]

    def change(_: nn.Module, args: Any, kwargs: Any) -> None:
        args[0].mul_(2)

    model.register_forward_pre_hook(change, with_kwargs=True)
    report = meshcp.verify(model, make_mesh(ULYSSES), [*(inputs[name] for name in names), None, None, None, None, True])
    assert torch.equal(inputs["hidden_states"], model_cases.make_inputs(_row())["hidden_states"])
    model = model_cases.build(_row())
    again = meshcp.verify(model, make_mesh(ULYSSES), inputs)
    assert inputs["joint_attention_kwargs"] == {"scale": 0.5}
    return report.ok and again.ok, repr(report)


class _Failing(nn.Module):
    def __init__(self, inner: nn.Module, rank: int) -> None:
        super().__init__()
        self.inner, self.rank, self.calls = inner, rank, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 1 and torch.distributed.get_rank() == self.rank:
            raise RuntimeError("no memory left")
        return self.inner(x)


def fails_on_one_rank(world: int, axis: str) -> tuple[str, bool, bool]:
    model = model_cases.build(_row())
    model.single_transformer_blocks[0].norm.linear = _Failing(model.single_transformer_blocks[0].norm.linear, 1)
    before = _state(model)
    # Others are woken by the transport: the timeout is longer than the test may take.
    report = meshcp.verify(model, make_mesh(((axis, world),)), model_cases.make_inputs(_row()), timeout=600)
    first = next(iter(report.errors))
    return repr(report), not report.ok and first == 1, _state(model) == before


@pytest.mark.parametrize("axis", ["ring", "ulysses"])
def test_a_rank_that_raises_leaves_no_other_waiting(pool: Pool, axis: str) -> None:
    for text, named, restored in pool.run(3, fails_on_one_rank, 3, axis):
        assert named, text
        assert "rank 1 raised RuntimeError: no memory left" in text
        assert restored


def refusals() -> dict[str, str]:
    rank = torch.distributed.get_rank()
    said = {}

    def attempt(name: str, mesh: Any, plan: Plan | None = None, model: nn.Module | None = None, **options: Any) -> None:
        model = model or model_cases.build(_row())
        before = _state(model)
        try:
            report = meshcp.verify(model, mesh, model_cases.make_inputs(_row()), plan, **options)
            said[name] = f"report: {report!r}"
        except meshcp.MeshcpError as error:
            said[name] = f"{type(error).__name__}: {error}"
        assert _state(model) == before

    mesh = make_mesh(ULYSSES)
    attempt("plan", mesh, _plan(hidden_state=seq(1, "image")))
    # Only rank 1 has a plan that does not fit.
    attempt("one plan", mesh, _plan(hidden_state=seq(1, "image")) if rank == 1 else _plan())
    attempt("streams", mesh, _plan(img_ids=seq(0, "text")))
    attempt("mesh", make_mesh((("dp", 2),)))
    cached = model_cases.build(_row())
    from diffusers import FirstBlockCacheConfig

    cached.enable_cache(FirstBlockCacheConfig())
    attempt("cache", mesh, model=cached)
    model = model_cases.build(_row())
    handle = meshcp.parallelize(model, mesh)
    attempt("parallel", mesh, model=model)
    handle.remove()
    return said


def test_what_parallelize_refuses_is_raised_and_the_rest_reported(pool: Pool) -> None:
    first, second = pool.run(2, refusals)
    assert "did you mean 'hidden_states'" in first["plan"]
    assert first["plan"].startswith("PlanError")
    assert first["one plan"].startswith("PlanError: rank 1 raised PlanError")
    assert second["one plan"].startswith("PlanError: ShardInputs names input 'hidden_state'")
    assert first["streams"].startswith("report: WRONG")
    assert "LayoutError" in first["streams"]
    assert "rank 0 raised" in first["streams"]
    assert "rank 1 raised" in first["streams"]
    assert first["mesh"].startswith("MeshError")
    assert "disable_cache" in first["cache"]
    assert "parallel already" in first["parallel"]


def rank_outside() -> str:
    mesh = torch.distributed.device_mesh.DeviceMesh("cpu", [0, 1], mesh_dim_names=("ulysses",))
    model = model_cases.build(_row())
    try:
        said = repr(meshcp.verify(model, mesh, model_cases.make_inputs(_row())))
    except meshcp.MeshError as error:
        said = str(error)
    # The next group of all ranks has the same name on all, although some have made more groups by now.
    torch.distributed.all_reduce(torch.zeros(1), group=torch.distributed.new_group())
    return said


def test_a_mesh_over_part_of_the_world(pool: Pool) -> None:
    said = pool.run(3, rank_outside)
    assert said[0].startswith("right")
    assert said[1].startswith("right")
    assert "rank 2 is not in the mesh" in said[2]
