"""The training contract: the mean over context-parallel ranks of every gradient is the single process's."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import meshcp
from meshcp import seq
from tests import model_cases
from tests.harness import Pool, make_mesh
from tests.rows import flux
from tests.test_composition import FLUX, TOLERANCE, gradients, shard_fsdp, worst

Mesh = tuple[tuple[str, int], ...]


def inputs(seed: int, image: int, text: int = 5, batch: int = 2) -> dict[str, Any]:
    return flux.inputs(torch.Generator().manual_seed(seed), image=image, text=text, batch=batch)


def single() -> nn.Module:
    return model_cases.build(FLUX)


# -- loss on the local shard -------------------------------------------------------------------------------------------


def _target(seed: int, image: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + seed)
    target = torch.randn(2, image, 8, generator=generator, dtype=torch.float64)
    # Weights that lie unevenly over the sequence: all at the end in one sample.
    weights = torch.rand(2, image, 1, generator=generator, dtype=torch.float64)
    weights[0, : image - 1] = 0
    return target, weights


def local_losses(mesh: Mesh, image: int, weighed: bool, axes: tuple[str, ...] | None, fsdp: bool) -> list[str]:
    device_mesh = make_mesh(mesh)
    samples = 2 if axes else 1
    place = device_mesh.get_local_rank("dp") if axes else 0
    # One process: the mean over the tokens of all samples together.
    model = single()
    losses, counted = [], []
    for seed in range(samples):
        target, weights = _target(seed, image)
        loss = (model(**inputs(seed, image)).sample - target).square()
        losses.append(loss * weights if weighed else loss)
        counted.append(weights.expand_as(loss) if weighed else torch.ones_like(loss))
    expected = torch.stack(losses).sum() / torch.stack(counted).sum()
    expected.backward()
    want, expected = gradients(model), expected.detach()

    model, wrong = single(), []
    handle = meshcp.parallelize(model, device_mesh, gather=False)
    if fsdp:
        shard_fsdp(model, meshcp.fsdp_mesh(device_mesh))
    prediction = model(**inputs(place, image)).sample
    target, weights = (handle.shard(x, seq(1, "image")) for x in _target(place, image))
    loss = (prediction - target).square()
    mean = meshcp.local_mean(loss, device_mesh, weights=weights if weighed else None, axes=axes)
    if not abs(float(mean.detach() / expected) - 1) < 1e-10:
        wrong.append(f"{mesh} {image}: the mean is {float(mean.detach())}, not {float(expected)}")
    mean.backward()
    if not fsdp:
        meshcp.average_gradients(model, device_mesh, axes=axes)
    off, name = worst(gradients(model), want)
    if not off < TOLERANCE:
        wrong.append(f"{mesh} {image} weighed={weighed}: gradient of {name} differs by {off:.1e}")
    if image % dist.get_world_size():
        # What local_mean is for: the mean of means is another number.
        naive = (loss.mean() if loss.numel() else loss.sum()).detach()
        dist.all_reduce(naive)
        if abs(float(naive / dist.get_world_size() / expected) - 1) < 1e-6:
            wrong.append(f"{mesh} {image}: the mean of means is right as well, so this test shows nothing")
    return wrong


def all_local_losses(world: int) -> list[str]:
    wrong = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP2-wrapped module")
        if world == 4:
            mesh: Mesh = (("ring", 2), ("ulysses", 2))
            wrong += local_losses(mesh, 13, False, None, fsdp=True)
            # Two tokens on four ranks: two ranks have none.
            wrong += local_losses(mesh, 2, True, None, fsdp=False)
            dp = ("dp", "ring", "ulysses")
            wrong += local_losses((("dp", 2), ("ulysses", 2)), 9, True, dp[::2], fsdp=True)
        else:
            wrong += local_losses((("ulysses", 2), ("ring", 3)), 15, True, None, fsdp=True)
            wrong += local_losses((("ring", 3), ("ulysses", 2)), 12, False, None, fsdp=False)
    return wrong


@pytest.mark.parametrize("world", [4, 6])
def test_a_mean_over_tokens_stays_the_mean_on_unequal_shards(pool: Pool, world: int) -> None:
    for rank, wrong in enumerate(pool.run(world, all_local_losses, world, timeout=100)):
        assert not wrong, f"rank {rank}: " + "\n".join(wrong)


# -- micro-batches and activation checkpointing ------------------------------------------------------------------------


def _wrap_blocks(model: nn.Module) -> None:
    for blocks in (model.transformer_blocks, model.single_transformer_blocks):
        for index, block in enumerate(blocks):
            blocks[index] = checkpoint_wrapper(block)


CHECKPOINTING: dict[str, Callable[[Any], None]] = {
    "none": lambda model: None,
    "diffusers": lambda model: model.enable_gradient_checkpointing(),
    "torch": _wrap_blocks,
}

# Lengths whose shards cannot be told from each other on some ranks: 9 and 8 over 4 ranks begin with 3 and 2 rows.
MICRO = ((9, 5), (8, 6), (15, 5))


def accumulate(mesh: Mesh, checkpointing: str, order: str, fsdp: bool) -> list[str]:
    device_mesh = make_mesh(mesh)
    model = single()
    for seed, (image, text) in enumerate(MICRO):
        (model_cases._loss([model(**inputs(seed, image, text)).sample]) / len(MICRO)).backward()
    want = gradients(model)
    model = single()
    if "tp" in dict(mesh):
        parallelize_module(model, device_mesh["tp"], meshcp.tp_plan(model, device_mesh))
    meshcp.parallelize(model, device_mesh)
    CHECKPOINTING[checkpointing](model)
    if fsdp:
        shard_fsdp(model, meshcp.fsdp_mesh(device_mesh))

    def loss(seed: int) -> Tensor:
        image, text = MICRO[seed]
        return model_cases._loss([model(**inputs(seed, image, text)).sample]) / len(MICRO)

    if order == "each":
        for seed in range(len(MICRO)):
            loss(seed).backward()
    elif order == "forwards first":
        losses = [loss(seed) for seed in range(len(MICRO))]
        for each in losses:
            each.backward()
    else:
        torch.stack([loss(seed) for seed in range(len(MICRO))]).sum().backward()
    if not fsdp:
        meshcp.average_gradients(model, device_mesh)
    actual = {name.replace("_checkpoint_wrapped_module.", ""): g for name, g in gradients(model).items()}
    off, name = worst(actual, want)
    return [] if off < TOLERANCE else [f"{mesh} {checkpointing} {order} fsdp={fsdp}: {name} differs by {off:.1e}"]


ACCUMULATIONS: dict[int, list[tuple[Mesh, str, str, bool]]] = {
    4: [
        ((("ring", 2), ("ulysses", 2)), "none", "each", True),
        ((("ring", 2), ("ulysses", 2)), "diffusers", "forwards first", False),
        ((("ulysses", 4),), "torch", "one backward", False),
        ((("ring", 4),), "torch", "each", True),
        ((("ring", 2), ("tp", 2)), "diffusers", "each", True),
        ((("ulysses", 2), ("tp", 2)), "torch", "forwards first", False),
    ],
    6: [((("ring", 3), ("tp", 2)), "none", "each", True), ((("ring", 3), ("ulysses", 2)), "diffusers", "each", False)],
}


def all_accumulations(world: int) -> list[str]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP2-wrapped module")
        return [line for case in ACCUMULATIONS[world] for line in accumulate(*case)]


@pytest.mark.parametrize("world", [4, 6])
def test_micro_batches_and_activation_checkpointing(pool: Pool, world: int) -> None:
    for rank, wrong in enumerate(pool.run(world, all_accumulations, world, timeout=100)):
        assert not wrong, f"rank {rank}: " + "\n".join(wrong)


# -- average_gradients, sum_over_tp, clip_grad_norm_ -------------------------------------------------------------------


class Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.everywhere = nn.Parameter(torch.ones(3))
        self.narrow = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        self.somewhere = nn.Parameter(torch.ones(2))
        self.nowhere = nn.Parameter(torch.ones(4))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)


def missing_gradients() -> dict[str, Any]:
    mesh = make_mesh((("dp", 2), ("ring", 3)))
    rank, model = dist.get_rank(), Uneven()
    model.everywhere.grad = torch.arange(3.0) + rank
    model.narrow.grad = torch.full((2,), float(rank), dtype=torch.bfloat16)
    if rank == 4:
        model.somewhere.grad = torch.full((2,), 6.0)
    meshcp.average_gradients(model, mesh)
    ring = {name: p.grad for name, p in model.named_parameters()}
    ring = {name: None if g is None else g.tolist() for name, g in ring.items()}
    meshcp.average_gradients(model, mesh, axes=("dp",))
    return {"ring": ring, "both": model.somewhere.grad.tolist() if model.somewhere.grad is not None else None}


def test_parameters_without_a_gradient_count_as_zero_and_never_hang(pool: Pool) -> None:
    for rank, found in enumerate(pool.run(6, missing_gradients)):
        middle = 1.0 if rank < 3 else 4.0
        assert found["ring"] == {
            "everywhere": [middle, middle + 1, middle + 2],
            "narrow": [middle] * 2,
            "somewhere": None if rank < 3 else [2.0, 2.0],
            "nowhere": None,
            "frozen": None,
        }
        assert found["both"] == [1.0, 1.0]


class Heads(nn.Module):
    """Projections to heads and back, with a norm over the width of a head."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.norm_q = nn.RMSNorm(2)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm_q(self.up(x).unflatten(-1, (-1, 2))).flatten(-2))


def own_tensor_parallel() -> dict[str, Any]:
    mesh = make_mesh((("tp", 2), ("ring", 2)))
    x = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(mesh.get_local_rank("ring")))
    model = Heads()
    for ring in range(2):
        part = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(ring))
        (model(part).square().sum() / 2).backward()
    want = gradients(model)
    model = Heads()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model(x).square().sum().backward()
    meshcp.average_gradients(model, mesh)
    before = worst(gradients(model), want)
    meshcp.sum_over_tp(model, mesh, "norm_*.weight")
    after = worst(gradients(model), want)
    total = torch.stack([g.norm() for g in want.values()]).norm()
    largest = torch.stack([g.abs().max() for g in want.values()]).max()
    norms = [
        abs(float(meshcp.clip_grad_norm_(model, 1e9) / total) - 1),
        abs(float(meshcp.clip_grad_norm_(model.parameters(), 1e9, float("inf")) / largest) - 1),
    ]
    said = [_refused(meshcp.sum_over_tp, model, mesh, name) for name in ("up.weight", "norm_k.*")]
    theirs = single()
    parallelize_module(theirs, mesh["tp"], meshcp.tp_plan(theirs, mesh))
    said.append(_refused(meshcp.sum_over_tp, theirs, mesh, "*.norm_q.weight"))
    model.up.weight = nn.Parameter(distribute_tensor(torch.ones(8, 6), mesh["ring"]))
    said.append(_refused(meshcp.average_gradients, model, mesh))
    said.append(_refused(meshcp.average_gradients, model, mesh, axes=("dp",)))
    return {"before": before, "after": after, "norms": norms, "said": said}


def _refused(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except meshcp.MeshcpError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_tensor_parallel_plan_of_ones_own(pool: Pool) -> None:
    for found in pool.run(4, own_tensor_parallel):
        off, name = found["before"]
        assert off > 0.1
        assert name == "norm_q.weight"
        assert found["after"][0] < 1e-5
        assert max(found["norms"]) < 1e-6
        sharded, unmatched, twice, data, axis = found["said"]
        assert sharded.startswith("LayoutError: up.weight is sharded over 'tp'")
        assert unmatched.startswith("LayoutError: ['norm_k.*'] match no parameter of Heads")
        assert "is summed over 'tp' in the backward pass" in twice
        assert data.startswith("LayoutError: up.weight is a DTensor on mesh axes ('ring',)")
        assert axis.startswith("MeshError: axes=('dp',): the mesh has axes ('tp', 'ring')")


def test_clipping_is_torchs_where_torchs_works() -> None:
    for norm_type in (2.0, 1.0, float("inf")):
        ours, theirs = Heads(), Heads()
        for model in (ours, theirs):
            model(torch.ones(1, 2, 6)).square().sum().backward()
        expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.1, norm_type)
        torch.testing.assert_close(meshcp.clip_grad_norm_(ours, 0.1, norm_type), expected)
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad)


# -- seeds -------------------------------------------------------------------------------------------------------------


def draws() -> list[Any]:
    mesh = make_mesh((("ring", 2), ("dp", 2)))
    found: list[Any] = []
    for step in (0, 0, 1):
        generator = meshcp.seed_everything(7, mesh, step=step)
        dropout = torch.nn.functional.dropout(torch.ones(20), 0.5)
        noise = torch.randn(2, generator=generator)
        found.append((noise.tolist(), dropout.tolist(), random.random(), numpy.random.rand()))
    return found


def test_ranks_on_one_sample_draw_alike_and_others_do_not(pool: Pool) -> None:
    by_rank = pool.run(4, draws)
    assert by_rank[0] == by_rank[2]
    assert by_rank[1] == by_rank[3]
    for step in range(3):
        for mine, other in zip(by_rank[0][step], by_rank[1][step], strict=True):
            assert mine != other
    for draw in by_rank:
        assert draw[0] == draw[1]
        assert all(first != second for first, second in zip(draw[0], draw[2], strict=True))
    assert by_rank[0][0][0] == torch.randn(2, generator=torch.Generator().manual_seed(7)).tolist()


def step_of_training(seeded: bool, check: bool) -> str:
    """One step with noise; what happens without a common seed."""
    mesh = make_mesh((("dp", 2), ("ulysses", 2)))
    unlike = torch.Generator().manual_seed(7 + dist.get_rank())
    generator = meshcp.seed_everything(7, mesh) if seeded else unlike
    given = inputs(0, 9)
    given["hidden_states"] = torch.randn(given["hidden_states"].shape, generator=generator, dtype=torch.float64)
    model = single()
    with torch.no_grad():
        expected = model(**given).sample
        meshcp.parallelize(model, mesh, check_inputs=check)
        try:
            actual = model(**given).sample
        except meshcp.InputError as error:
            return f"refused: {error}"
    return "right" if model_cases._difference(actual, expected) < 1e-10 else "wrong"


def test_what_goes_wrong_without_a_common_seed(pool: Pool) -> None:
    assert pool.run(4, step_of_training, True, True) == ["right"] * 4
    refused = pool.run(4, step_of_training, False, True)
    assert all("hidden_states" in said and "meshcp.seed_everything" in said for said in refused), refused
    # Nobody looks: the picture is made of two noises.
    assert pool.run(4, step_of_training, False, False) == ["wrong"] * 4
