"""What users did to a parallel model that was once silently wrong."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import meshcp
from meshcp.models.flux import FLUX
from meshcp.styles.base import forward_parameters
from tests.attention_cases import softmax_attention
from tests.harness import Pool, assert_close_to
from tests.model_cases import build, make_inputs
from tests.rows import flux


def refused_twice() -> list[str]:
    """A call that is refused, and the same call once more."""
    model = build(flux.EVEN)
    meshcp.parallelize(model, init_device_mesh("cpu", (2,), mesh_dim_names=("ring",)))
    inputs = make_inputs(flux.EVEN)
    inputs["hidden_states"] = inputs["hidden_states"] + dist.get_rank()
    messages = []
    for _ in range(2):
        try:
            model(**inputs)
            messages.append("accepted")
        except meshcp.InputError as error:
            messages.append(str(error))
    return messages


def test_who_calls_again_after_a_refusal_is_refused_again(pool: Pool) -> None:
    for messages in pool.run(2, refused_twice):
        assert all("hidden_states on ranks [1]" in message for message in messages), messages


def disagreements() -> dict[str, str]:
    """What each of four ranks, ring x tp, is told when rank 1 differs."""
    odd, said = dist.get_rank() == 1, {}
    inputs = make_inputs(flux.EVEN)

    def told(
        case: str, model: Any, mesh: DeviceMesh, plan: meshcp.Plan | None = None, gather_kv: bool = False, **given: Any
    ) -> None:
        meshcp.parallelize(model, mesh, plan, gather_kv=gather_kv)
        try:
            model(**{**inputs, **given})
            said[case] = "accepted"
        except meshcp.MeshcpError as error:
            said[case] = f"{type(error).__name__}: {error}"

    def tensor_parallel() -> tuple[Any, DeviceMesh]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "tp"))
        model = build(flux.EVEN)
        with torch.no_grad():
            model.x_embedder.bias[-1] += odd_bias
        parallelize_module(model, mesh["tp"], meshcp.tp_plan(model, mesh))
        return model, mesh

    odd_bias = 0.0
    told("nothing", *tensor_parallel())
    told("inputs", *tensor_parallel(), pooled_projections=inputs["pooled_projections"] + odd)
    model, mesh = tensor_parallel()
    with torch.no_grad():
        model.proj_out.bias.add_(odd)
        model.single_transformer_blocks[0].proj_out.weight.to_local()[-1, -1] += odd
    told("shard", model, mesh)
    odd_bias = 1e-6 * odd
    told("whole", *tensor_parallel())
    told("gather_kv", *tensor_parallel(), gather_kv=odd)
    names = ("ulysses", "ring") if odd else ("ring", "ulysses")
    local = meshcp.Plan({**dict(FLUX.entries), "single_transformer_blocks.*.attn": meshcp.LocalAttention()})
    for case, chosen, axes in (("plan", local if odd else FLUX, names[:: -1 if odd else 1]), ("mesh", FLUX, names)):
        told(case, build(flux.EVEN), init_device_mesh("cpu", (2, 2), mesh_dim_names=axes), chosen)
    return said


def test_ranks_that_disagree_are_told_of_it_all(pool: Pool) -> None:
    for said in pool.run(4, disagreements):
        assert said["nothing"] == "accepted"
        inputs = "InputError: the inputs differ between ranks of ring, ulysses and tp: pooled_projections on ranks [1] "
        assert said["inputs"].startswith(inputs)
        # Rank 3 holds the same shard as rank 1, which differs; both ranks of tp 0 hear of it.
        assert "proj_out.bias on ranks [1]; single_transformer_blocks.0.proj_out.weight on ranks [3]" in said["shard"]
        assert "x_embedder.bias on ranks [1] (compared with rank 0," in said["whole"]
        assert "gather_kv on ranks [1] (compared with rank 0; rank 0 has False; rank 1 has True)" in said["gather_kv"]
        assert said["plan"].startswith("PlanError: context-parallel ranks do not run the same: plan entry 'single_tr")
        assert "rank 1 has (LocalAttention(),)" in said["plan"]
        assert "mesh axes on ranks [1] (compared with rank 0; rank 0 has {'ring': 2, 'ulysses': 2}" in said["mesh"]


def copied_and_called_by_forward() -> list[str]:
    model = build(flux.EVEN)
    meshcp.parallelize(model, init_device_mesh("cpu", (2,), mesh_dim_names=("ulysses",)))
    messages = []
    for call in (lambda: copy.deepcopy(model), lambda: model.forward(**make_inputs(flux.EVEN))):
        try:
            call()
            messages.append("accepted")
        except meshcp.MeshcpError as error:
            messages.append(str(error))
    return messages


def test_copies_and_calls_of_forward_itself_are_refused(pool: Pool) -> None:
    for copied, forward in pool.run(2, copied_and_called_by_forward):
        assert "cannot be copied (copy.deepcopy)" in copied
        assert forward != "accepted"


def replicated_keys_with_sharded_heads() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    q, k, v = (
        torch.randn(2, 6, rows, 4, generator=generator, dtype=torch.float64).requires_grad_() for rows in (9, 5, 5)
    )
    expected = softmax_attention(q, k, v, None, False, None)
    expected.sum().backward()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
    placements = ([Shard(2), Shard(1)], [Replicate(), Replicate()], [Replicate(), Replicate()])
    leaves = [
        distribute_tensor(x.detach(), mesh, p).requires_grad_() for x, p in zip((q, k, v), placements, strict=True)
    ]
    out = meshcp.attention(*leaves)
    out.sum().backward()
    assert_close_to(out.full_tensor().detach(), expected.detach())
    for leaf, reference in zip(leaves, (q, k, v), strict=True):
        assert leaf.grad is not None
        assert reference.grad is not None
        assert_close_to(leaf.grad.full_tensor(), reference.grad)  # type: ignore[attr-defined]
    return [out.full_tensor().detach()]


def test_replicated_keys_follow_heads_that_are_sharded(pool: Pool) -> None:
    pool.run(4, replicated_keys_with_sharded_heads)


class Unusual(nn.Module):
    """Its author calls the instance otherwise than everybody."""

    def forward(this, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:  # noqa: N805
        return x * scale


def test_arguments_are_found_whatever_the_instance_is_called() -> None:
    assert forward_parameters(Unusual()) == ["x", "scale"]
