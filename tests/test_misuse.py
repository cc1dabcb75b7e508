"""What users did to a parallel model that was once silently wrong."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import meshcp
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
