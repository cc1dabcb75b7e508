"""Context, tensor and data parallelism on one mesh: every gradient is the single process's."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import meshcp
from meshcp.tensor_parallel import ShardHeads
from tests import model_cases
from tests.harness import Pool, make_mesh, whole
from tests.model_cases import Row
from tests.rows import flux

TINY = {**flux.CONFIG, "num_layers": 1, "num_single_layers": 1}


def _qwen(generator: torch.Generator, masked: bool = True) -> dict[str, Any]:
    text, shape = 7, (1, 3, 5)
    made: dict[str, Any] = {
        "hidden_states": torch.randn(2, 15, 16, generator=generator, dtype=torch.float64),
        "encoder_hidden_states": torch.randn(2, text, 12, generator=generator, dtype=torch.float64),
        "timestep": torch.tensor([0.3, 0.8], dtype=torch.float64),
        "img_shapes": [[shape]] * 2,
    }
    if masked:
        made["encoder_hidden_states_mask"] = torch.arange(text) < torch.tensor([[4], [text]])
    return made


def _wan(generator: torch.Generator) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(1, 4, 3, 6, 10, generator=generator, dtype=torch.float64),
        "encoder_hidden_states": torch.randn(1, 5, 12, generator=generator, dtype=torch.float64),
        "timestep": torch.tensor([3]),
    }


def _sd3(generator: torch.Generator) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(2, 4, 6, 10, generator=generator, dtype=torch.float64),
        "encoder_hidden_states": torch.randn(2, 5, 12, generator=generator, dtype=torch.float64),
        "pooled_projections": torch.randn(2, 10, generator=generator, dtype=torch.float64),
        "timestep": torch.tensor([3.0, 700.0], dtype=torch.float64),
    }


FLUX = Row("tiny", "FluxTransformer2DModel", TINY, flux.make(image=15, text=7))
FLUX_EVEN = Row("tiny-even", "FluxTransformer2DModel", TINY, flux.make(image=24, text=12))
QWEN = Row(
    "tiny",
    "QwenImageTransformer2DModel",
    {
        "patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16,
        "num_attention_heads": 5, "joint_attention_dim": 12, "axes_dims_rope": (4, 6, 6),
    },
    _qwen,
)  # fmt: skip
WAN = Row(
    "tiny",
    "WanTransformer3DModel",
    {
        "patch_size": (1, 2, 2), "num_attention_heads": 5, "attention_head_dim": 16, "in_channels": 4,
        "out_channels": 4, "text_dim": 12, "freq_dim": 16, "ffn_dim": 31, "num_layers": 2, "rope_max_seq_len": 32,
    },
    _wan,
)  # fmt: skip
SD3 = Row(
    "tiny",
    "SD3Transformer2DModel",
    {
        "sample_size": 16, "patch_size": 2, "in_channels": 4, "num_layers": 2, "attention_head_dim": 16,
        "num_attention_heads": 5, "joint_attention_dim": 12, "caption_projection_dim": 80, "pooled_projection_dim": 10,
        "out_channels": 4, "pos_embed_max_size": 16, "dual_attention_layers": (0,), "qk_norm": "rms_norm",
    },
    _sd3,
)  # fmt: skip

# Rotary embeddings and modulations are computed in fp32 by the models themselves, so that heads summed in another order
# round otherwise.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Case:
    """One model on one mesh.

    ``reducer``: who takes the mean over ranks: ``""`` (``average_gradients``), ``"ddp"``, or ``"fsdp"`` over the axes
    ``shard`` (all if None) and ``replicate``; what they leave is left to ``average_gradients``.
    """

    row: Row
    mesh: tuple[tuple[str, int], ...]
    reducer: str = "fsdp"
    shard: tuple[str, ...] | None = None
    replicate: tuple[str, ...] = ()
    parallelize_last: bool = False


CASES: dict[int, list[Case]] = {
    4: [
        Case(FLUX, (("dp", 2), ("ulysses", 2)), replicate=("dp",)),
        Case(FLUX_EVEN, (("ring", 2), ("ulysses", 2))),
        Case(FLUX, (("ulysses", 2), ("dp", 1), ("ring", 2)), parallelize_last=True),
        Case(FLUX, (("ring", 2), ("ulysses", 2)), shard=("ulysses",), replicate=("ring",)),
        Case(FLUX, (("ring", 2), ("fsdp", 2)), shard=("fsdp",)),
        Case(FLUX, (("ring", 2), ("dp", 2)), reducer="ddp"),
        Case(FLUX, (("ulysses", 2), ("dp", 2)), reducer=""),
        Case(FLUX, (("ring", 2), ("tp", 2))),
        Case(FLUX, (("tp", 2), ("ulysses", 2)), reducer=""),
        Case(FLUX, (("ulysses", 2), ("tp", 2)), reducer="ddp"),
        Case(QWEN, (("ulysses", 2), ("tp", 2))),
        Case(WAN, (("tp", 2), ("ring", 2))),
        Case(SD3, (("ring", 1), ("fsdp", 2), ("tp", 2))),
    ],
    6: [
        Case(FLUX, (("ring", 3), ("tp", 2))),
        Case(FLUX, (("tp", 3), ("ulysses", 2))),
        Case(FLUX, (("dp", 2), ("ulysses", 3)), replicate=("dp",)),
        Case(FLUX_EVEN, (("ulysses", 2), ("ring", 3)), reducer="ddp"),
        Case(QWEN, (("tp", 2), ("ring", 3)), reducer=""),
        Case(WAN, (("ulysses", 2), ("tp", 3))),
        Case(SD3, (("ulysses", 3), ("tp", 2))),
    ],
}


def _blocks(model: nn.Module) -> list[nn.Module]:
    return [block for _, child in model.named_children() if isinstance(child, nn.ModuleList) for block in child]


def shard_fsdp(model: nn.Module, mesh: DeviceMesh) -> None:
    for block in _blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Gloo has no PREMUL_SUM.
            module.set_force_sum_reduction_for_comms(True)


def sample(row: Row, index: int) -> dict[str, Any]:
    return model_cases.make_inputs(row, 11 + index)


_REFERENCES: dict[tuple[str, int], tuple[list[list[Tensor]], dict[str, Tensor]]] = {}


def reference(row: Row, samples: int) -> tuple[list[list[Tensor]], dict[str, Tensor]]:
    """Outputs for each sample, and the mean of the gradients, on one process."""
    if (known := _REFERENCES.get((str(row), samples))) is not None:
        return known
    model = model_cases.build(row)
    outputs = []
    for index in range(samples):
        found = model_cases.tensors_of(model(**sample(row, index)))
        (model_cases._loss(found) / samples).backward()
        outputs.append([x.detach() for x in found])
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return _REFERENCES.setdefault((str(row), samples), (outputs, gradients))


def data_place(mesh: DeviceMesh) -> tuple[int, int]:
    """(this rank's data coordinate, how many there are)."""
    place, count, here = 0, 1, mesh.get_coordinate()
    assert here is not None
    for axis, name in enumerate(mesh.mesh_dim_names or ()):
        if name not in ("ring", "ulysses", "tp", "cfg"):
            place, count = place * mesh.size(axis) + here[axis], count * mesh.size(axis)
    return place, count


def compose(case: Case, mesh: DeviceMesh) -> nn.Module:
    """The model with everything on it, in the documented order."""
    model = model_cases.build(case.row)
    if "tp" in (mesh.mesh_dim_names or ()):
        parallelize_module(model, mesh["tp"], meshcp.tp_plan(model, mesh))
    if not case.parallelize_last:
        meshcp.parallelize(model, mesh)
    if case.reducer == "fsdp":
        shard_fsdp(model, meshcp.fsdp_mesh(mesh, shard=case.shard, replicate=case.replicate))
    if case.parallelize_last:
        meshcp.parallelize(model, mesh)
    if case.reducer == "ddp":
        return DistributedDataParallel(model, process_group=meshcp.fsdp_mesh(mesh).get_group())
    return model


def worst(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """The largest difference of any gradient, relative to its own largest value, and whose it is."""
    assert actual.keys() == expected.keys(), set(actual) ^ set(expected)
    # Nothing is larger than NaN, and max() would pass it over.
    assert all(bool(g.isfinite().all()) for g in actual.values()), "a gradient is not finite"
    largest = max(float(g.abs().max()) for g in expected.values())
    return max(
        (float((actual[n] - e).abs().max()) / max(float(e.abs().max()), 1e-6 * largest), n) for n, e in expected.items()
    )


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("module."): whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def run(case: Case) -> list[str]:
    mesh = make_mesh(case.mesh)
    place, count = data_place(mesh)
    outputs, expected = reference(case.row, count)
    model, wrong = compose(case, mesh), []
    actual = model_cases.tensors_of(model(**sample(case.row, place)))
    difference = max(model_cases._difference(a.detach(), e) for a, e in zip(actual, outputs[place], strict=True))
    if not difference < TOLERANCE:
        wrong.append(f"{case.mesh}: output differs by {difference:.1e}")
    model_cases._loss(actual).backward()
    if case.reducer != "ddp":
        # Beside FSDP over all axes this has nothing to do; called always, it must know that.
        names = [n for n in mesh.mesh_dim_names or () if n != "tp" and (case.reducer != "fsdp" or n != "dp")]
        meshcp.average_gradients(model, mesh, axes=names)
    difference, name = worst(gradients(model), expected)
    if not difference < TOLERANCE:
        wrong.append(f"{case.row} {case.mesh} {case.reducer}: gradient of {name} differs by {difference:.1e}")
    expected_norm = torch.stack([g.norm() for g in expected.values()]).norm()
    norm = meshcp.clip_grad_norm_(model, 0.5 * float(expected_norm))
    clipped = {n: g * 0.5 for n, g in expected.items()}
    difference, name = worst(gradients(model), clipped)
    if not (difference < 2 * TOLERANCE and abs(float(norm / expected_norm) - 1) < TOLERANCE):
        wrong.append(f"{case.row} {case.mesh}: clipped gradient of {name} differs by {difference:.1e}, norm {norm}")
    return wrong


def run_all(world: int, rows: tuple[str, ...]) -> list[str]:
    with warnings.catch_warnings():
        # FLUX's single blocks return views of one tensor, and nobody changes them in place.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module")
        return [line for case in CASES[world] if case.row.model in rows for line in run(case)]


@pytest.mark.parametrize("world", sorted(CASES))
@pytest.mark.parametrize("model", ["Flux", "others"])
def test_gradients_are_those_of_a_single_process(pool: Pool, world: int, model: str) -> None:
    rows = ("FluxTransformer2DModel",) if model == "Flux" else tuple(row.model for row in (QWEN, WAN, SD3))
    for rank, wrong in enumerate(pool.run(world, run_all, world, rows, timeout=100)):
        assert not wrong, f"rank {rank}: " + "\n".join(wrong)


# -- order, optimizers, refusals ---------------------------------------------------------------------------------------


def _refused(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except meshcp.MeshcpError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def orders() -> dict[str, str]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ring", "tp"))
    tp, said = mesh["tp"], {}
    model = model_cases.build(FLUX)
    before = meshcp.tp_plan(model, mesh)
    handle = meshcp.parallelize(model, mesh)
    said["plan after parallelize"] = _refused(meshcp.tp_plan, model, mesh)
    said["tp after parallelize"] = _refused(parallelize_module, model, tp, before)
    handle.remove()
    said["an adapter"] = _refused(parallelize_module, model, tp, {"proj_out": ShardHeads(columns=("to_q",))})
    parallelize_module(model, tp, before)
    said["twice"] = _refused(parallelize_module, model, tp, before)
    model = model_cases.build(FLUX)
    fully_shard(model, mesh=mesh["ring"])
    said["plan after fully_shard"] = _refused(meshcp.tp_plan, model, mesh)
    said["tp after fully_shard"] = _refused(parallelize_module, model, tp, before)
    model = model_cases.build(FLUX)
    said["plan after ddp"] = _refused(meshcp.tp_plan, DistributedDataParallel(model), mesh)
    said["parallelize after ddp"] = _refused(meshcp.parallelize, DistributedDataParallel(model), mesh)
    model = model_cases.build(FLUX)
    parallelize_module(model, tp, before)
    meshcp.parallelize(model, mesh)
    said["ddp over tp"] = _refused(DistributedDataParallel(model), **sample(FLUX, 0))
    said["ddp with a mesh"] = _refused(DistributedDataParallel, model, device_mesh=mesh["ring"])
    model = model_cases.build(dataclasses.replace(FLUX, config={**TINY, "num_attention_heads": 1}))
    said["too few heads"] = _refused(parallelize_module, model, tp, meshcp.tp_plan(model, mesh))
    model = model_cases.build(QWEN)
    model.transformer_blocks[0].attn.fused_projections = True
    said["fused"] = _refused(parallelize_module, model, tp, meshcp.tp_plan(model, mesh))
    said["no plan"] = _refused(meshcp.tp_plan, nn.Linear(2, 2), mesh)
    said["absent"] = str(meshcp.tp_plan(model, mesh["ring"]))
    said["mesh"] = _refused(parallelize_module, model, mesh, meshcp.tp_plan(model, mesh))
    descending = DeviceMesh("cpu", [1, 0], mesh_dim_names=("tp",))
    said["order"] = _refused(parallelize_module, model_cases.build(FLUX), descending, before)
    return said


def test_a_wrong_order_is_refused_with_the_right_one(pool: Pool) -> None:
    for said in pool.run(2, orders):
        for case in ("plan after parallelize", "tp after parallelize", "plan after fully_shard", "tp after fully_shard",
                     "plan after ddp"):  # fmt: skip
            assert "the order is 1. parallelize_module" in said[case], (case, said[case])
        assert "parallelize it first, then wrap it" in said["parallelize after ddp"]
        assert "averages over ranks [0, 1], but" in said["ddp over tp"]
        assert "give DDP the group: DistributedDataParallel(model, process_group=" in said["ddp with a mesh"]
        assert "apply the plan once" in said["twice"]
        assert "it is for attention modules" in said["an adapter"]
        assert "has 1 heads, fewer than the tp degree 2" in said["too few heads"]
        assert "unfuse_qkv_projections" in said["fused"]
        assert "no tensor parallel plan for Linear" in said["no plan"]
        assert "needed: its tp axis" in said["mesh"]
        assert "along mesh axis 'tp' are the ranks [1, 0], which do not ascend" in said["order"]
        assert said["absent"] == "{}"


def ddp_beside_tp() -> list[str]:
    """Three micro-batches, two of them under ``no_sync``, frozen parameters, shards that differ before DDP is made."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "ring", "tp"))
    place, count = data_place(mesh)

    def freeze(model: nn.Module) -> nn.Module:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("to_q" in name or "ff" in name)
        return model

    single = freeze(model_cases.build(FLUX))
    for index in range(3 * count):
        (model_cases._loss(model_cases.tensors_of(single(**sample(FLUX, index)))) / 3 / count).backward()
    expected = {name: p.grad for name, p in single.named_parameters() if p.grad is not None}
    model = model_cases.build(FLUX)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(place)
    parallelize_module(freeze(model), mesh["tp"], meshcp.tp_plan(model, mesh))
    handle = meshcp.parallelize(model, mesh)
    ddp = DistributedDataParallel(model, process_group=meshcp.fsdp_mesh(mesh).get_group())
    for micro in range(3):
        with ddp.no_sync() if micro < 2 else contextlib.nullcontext():
            (model_cases._loss(model_cases.tensors_of(ddp(**sample(FLUX, 3 * place + micro)))) / 3).backward()
    handle.remove()
    difference, name = worst(gradients(ddp), expected)
    return [f"{name}: {difference}"] if not difference < TOLERANCE else []


def test_ddp_beside_tp_accumulates_and_synchronises(pool: Pool) -> None:
    for wrong in pool.run(4, ddp_beside_tp):
        assert not wrong


def optimizer_step(fsdp: bool) -> tuple[float, str, dict[str, str]]:
    """Three steps of AdamW with clipping; the largest difference of any parameter from one process's."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "tp"))

    def train(model: nn.Module, clip: Callable[..., Any], average: bool) -> dict[str, Tensor]:
        # Large, so that an element whose gradient is rounding alone does not take a step of its sign.
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
        for step in range(3):
            model_cases._loss(model_cases.tensors_of(model(**sample(FLUX, step)))).backward()
            if average:
                meshcp.average_gradients(model, mesh)
            clip(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return {name: whole(p.detach()) for name, p in model.named_parameters()}

    expected = train(model_cases.build(FLUX), torch.nn.utils.clip_grad_norm_, False)
    model = compose(Case(FLUX, (), reducer="fsdp" if fsdp else ""), mesh)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP2-wrapped module")
        off, name = worst(train(model, meshcp.clip_grad_norm_, not fsdp), expected)
    kinds = {n: str(p.placements) if isinstance(p, DTensor) else "plain" for n, p in model.named_parameters()}
    return off, name, kinds


@pytest.mark.parametrize("fsdp", [False, True])
def test_an_optimizer_takes_the_same_steps(pool: Pool, fsdp: bool) -> None:
    for off, name, kinds in pool.run(4, optimizer_step, fsdp):
        assert off < TOLERANCE, name
        # What the optimizer holds really is cut.
        assert "Shard" in kinds["single_transformer_blocks.0.proj_out.weight"]
        assert len(set(kinds.values())) > 1
