"""The operator against a softmax written out by hand: every mode, mask, length, head count and dtype."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import meshcp
from tests import attention_cases
from tests.attention_cases import MASKS, Case, reference
from tests.harness import Pool, assert_close_to, bf16_no_worse, whole


def mesh(**axes: int) -> tuple[tuple[str, int], ...]:
    return tuple(axes.items())


MESHES = (
    mesh(ulysses=2),
    mesh(ring=2),
    mesh(ulysses=3),
    mesh(ring=3),
    mesh(ulysses=4),
    mesh(ring=4),
    mesh(ring=2, ulysses=2),
    mesh(ulysses=2, ring=2),
    mesh(ring=2, ulysses=3),
    mesh(ring=3, ulysses=2),
    mesh(ulysses=3, ring=2),
)
COMPOSED = (mesh(dp=2, ring=2), mesh(ring=2, dp=2, ulysses=1), mesh(ulysses=2, tp=2), mesh(ring=2, tp=2, ulysses=1))


def cases_on(axes: tuple[tuple[str, int], ...]) -> list[Case]:
    """What every mesh runs: even and uneven, every mask, GQA, empty shards, cross-attention."""
    plain = [
        Case(axes),
        Case(axes, heads=6, queries=24, batch=1),
        Case(axes, heads=5, queries=13, scale=0.3),
        Case(axes, heads=5, queries=1, keys=2),
        Case(axes, heads=1, queries=3),
        Case(axes, heads=3, queries=7, keys=17, value_width=5),
        Case(axes, heads=5, queries=11, dtype=torch.float32),
        Case(axes, heads=4, kv_heads=2, queries=9),
        Case(axes, heads=6, kv_heads=1, queries=9, keys=4),
        Case(axes, heads=6, kv_heads=3, queries=5),
        Case(axes, heads=5, queries=13, causal=True),
        Case(axes, heads=4, kv_heads=2, queries=12, causal=True),
        Case(axes, heads=2, queries=4, keys=11, causal=True),
        Case(axes, heads=3, queries=9, keys=5, kv_replicated=True),
        Case(axes, heads=3, queries=9, keys=5, kv_replicated=True, mask="query_bool"),
        Case(axes, heads=3, queries=9, keys=5, kv_replicated=True, causal=True),
        Case(axes, heads=5, queries=9, ulysses_on_heads=True, mask="head_bool"),
    ]
    masks = [Case(axes, heads=5, queries=11, keys=13, mask=mask) for mask in MASKS[1:]]
    sharded = [Case(axes, heads=3, queries=11, mask=mask, mask_is_sharded=True) for mask in ("key_bool", "query_bool")]
    cases = plain + masks + sharded
    # An axis of degree 1 beside it makes no other call; DTensor's redistributions there are what takes long.
    if dict(axes).get("ring", 1) > 1 and dict(axes).get("ulysses") != 1:
        cases += [dataclasses.replace(case, gather_kv=True) for case in cases if not case.kv_replicated]
    return cases


def valid(case: Case) -> bool:
    # Grouped heads that tensor parallel does not divide are refused (tested below).
    tp = dict(case.mesh).get("tp", 1)
    return case.kv_heads is None or (case.heads % tp == 0 and case.kv_heads % tp == 0)


def check(case: Case, results: list[list[torch.Tensor]]) -> None:
    for rank, result in enumerate(results):
        for name, actual, expected in zip(
            ("out", "dq", "dk", "dv"), result, reference(case, torch.float64), strict=True
        ):
            try:
                if expected.abs().max() < 1e-12:
                    # One key: the softmax is 1 whatever q and k are, and what is left of their gradients is rounding.
                    assert actual.abs().max() < (1e-6 if case.dtype == torch.float32 else 1e-12)
                    continue
                assert_close_to(actual, expected, case.dtype)
            except AssertionError as error:
                raise AssertionError(f"{case}, rank {rank}, {name}: {error}") from None


@pytest.mark.parametrize("axes", MESHES + COMPOSED, ids=lambda axes: "x".join(f"{n}{d}" for n, d in axes))
def test_every_mode(pool: Pool, axes: tuple[tuple[str, int], ...]) -> None:
    cases = [case for case in cases_on(axes) if valid(case)]
    by_rank = pool.run(cases[0].world, attention_cases.run_cases, cases, timeout=100)
    for index, case in enumerate(cases):
        check(case, [results[index] for results in by_rank])


@pytest.mark.parametrize(
    ("axes", "gather_kv"),
    [
        (mesh(ulysses=3), False),
        (mesh(ring=3), True),
        (mesh(ring=2, ulysses=2), False),
        (mesh(ulysses=2, ring=2), True),
        (mesh(ring=2, ulysses=3), True),
        (mesh(ulysses=3, ring=2), False),
    ],
)
def test_sequences_of_several_streams(pool: Pool, axes: tuple[tuple[str, int], ...], gather_kv: bool) -> None:
    for rank, wrong in enumerate(pool.run(Case(axes).world, attention_cases.several_streams, axes, gather_kv)):
        assert not wrong, f"rank {rank}: " + "; ".join(wrong)


@pytest.mark.parametrize("axes", [mesh(ulysses=3), mesh(ring=3), mesh(ring=2, ulysses=2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_worse_than_one_process(
    pool: Pool, axes: tuple[tuple[str, int], ...], dtype: torch.dtype
) -> None:
    cases = [
        Case(axes, heads=5, queries=61, width=16, batch=2, dtype=dtype, mask=mask, causal=causal)
        for mask, causal in (("none", False), ("key_bool", False), ("head_additive", False), ("none", True))
    ]
    # KV heads that several ranks compute with, so that each has a part of their gradient.
    cases += [
        Case(axes, heads=heads, kv_heads=kv_heads, queries=61, width=16, dtype=dtype, mask=mask, seed=seed)
        for heads, kv_heads in ((8, 2), (2, 1))
        for mask, seed in (("none", 0), ("head_additive", 1), ("none", 2), ("none", 7))
    ]
    if "ring" in dict(axes):
        cases += [dataclasses.replace(case, gather_kv=True) for case in cases]
    by_rank = pool.run(cases[0].world, attention_cases.run_cases, cases)
    for index, case in enumerate(cases):
        exact = reference(dataclasses.replace(case, dtype=dtype), torch.float32)
        single = attention_cases.single_process(case)
        for result in (results[index] for results in by_rank):
            for actual, one, ref in zip(result, single, exact, strict=True):
                if dtype == torch.bfloat16:
                    bf16_no_worse(actual, one, ref)
                else:
                    error, bound = (actual.float() - ref).abs().max(), (one.float() - ref).abs().max()
                    assert error <= 1.5 * bound, (str(case), error, bound)


@st.composite
def random_case(draw: st.DrawFn) -> Case:
    axes = draw(st.sampled_from([m for m in MESHES if len(m) > 1 or m[0][1] > 2]))
    kv_heads = draw(st.one_of(st.none(), st.integers(1, 3)))
    heads = draw(st.integers(1, 3)) * kv_heads if kv_heads else draw(st.integers(1, 7))
    mask = draw(st.sampled_from(MASKS))
    replicated = draw(st.integers(0, 5)) == 0
    same = draw(st.booleans())
    return Case(
        axes,
        heads=heads,
        kv_heads=kv_heads,
        queries=draw(st.integers(1, 29)),
        keys=None if same else draw(st.integers(1, 29)),
        batch=draw(st.integers(1, 3)),
        width=draw(st.sampled_from([4, 8, 12])),
        mask=mask,
        mask_is_sharded=draw(st.booleans()) and mask != "none" and not replicated,
        causal=mask == "none" and draw(st.booleans()),
        dtype=draw(st.sampled_from([torch.float64, torch.float32])),
        kv_replicated=replicated,
        gather_kv=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


@hypothesis.settings(max_examples=40, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(case=random_case())
def test_random_cases(pool: Pool, case: Case) -> None:
    check(case, [results[0] for results in pool.run(case.world, attention_cases.run_cases, [case])])


def test_plain_tensors_get_ordinary_attention() -> None:
    q, k, v = (torch.randn(2, 3, 5, 4, dtype=torch.float64) for _ in range(3))
    keep = torch.tensor([[True] * 3 + [False] * 2, [True] * 5])
    expected = attention_cases.softmax_attention(q, k, v, keep, False, None)
    assert_close_to(meshcp.attention(q, k, v, keep), expected)


def refusals() -> list[str]:
    """The message of each refused call."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    device_mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ring",))
    unnamed = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))

    def make(*shape: int, placement: object = None, on: object = device_mesh) -> DTensor:
        return distribute_tensor(torch.randn(*shape), on, [placement or Shard(2)])

    q = make(1, 4, 6, 8)
    learned = torch.zeros(1, 1, 6, 6, requires_grad=True)
    calls = [
        lambda: meshcp.attention(q, q, q, dropout_p=0.1),
        lambda: meshcp.attention(q, torch.randn(1, 4, 6, 8), q),
        lambda: meshcp.attention(q, q, q, torch.ones(1, 1, 6, 6).bool(), causal=True),
        lambda: meshcp.attention(q, q, q, torch.ones(3, 5).bool()),
        lambda: meshcp.attention(q, q, q, torch.ones(1, 6).long()),
        lambda: meshcp.attention(q, q, q, learned),
        lambda: meshcp.attention(q, make(1, 2, 6, 8), make(1, 2, 6, 8)),
        lambda: meshcp.attention(q, make(1, 4, 6, 4), make(1, 4, 6, 4)),
        lambda: meshcp.attention(make(1, 4, 6, 8, placement=Shard(3)), q, q),
        lambda: meshcp.attention(*[make(1, 4, 6, 8, placement=Replicate(), on=unnamed)] * 3),
        lambda: meshcp.attention(q, q, q.double()),
        lambda: meshcp.attention(q, q, q, gather_kv=[]),
    ]
    messages = []
    for call in calls:
        try:
            call()
            messages.append("not refused")
        except meshcp.MeshcpError as error:
            messages.append(str(error))
    return messages


def test_refusals_say_what_to_do(pool: Pool) -> None:
    expected = [
        "dropout inside distributed attention",
        "must all be DTensors or all plain tensors",
        "both a mask and causal=True",
        "attention mask of shape (3, 5); needed in global form",
        "attention mask of dtype torch.int64; needed: bool",
        "the attention mask requires a gradient",
        "4 query heads and 2 KV heads: pass enable_gqa=True",
        "shapes that do not fit",
        "q is Shard(dim=3) on mesh axis 'ring'",
        'needs an axis named "ring" or "ulysses"',
        "q is torch.float32, k torch.float32, v torch.float64; needed: one dtype",
        "gather_kv=[] is of type list; needed: gather_kv=True or gather_kv=False",
    ]
    for messages in pool.run(2, refusals):
        for message, part in zip(messages, expected, strict=True):
            assert part in message, message


def opcheck() -> None:
    q, k, v = (torch.randn(2, 5, 3, 4, dtype=torch.float64).transpose(1, 2).detach().requires_grad_() for _ in range(3))
    mask = torch.rand(2, 1, 5, 5) < 0.7
    for arguments, options in itertools.product([(q, k, v), (q, k, v, mask)], [{}, {"scale": 0.5}]):
        torch.library.opcheck(torch.ops.meshcp.attention.default, arguments, options)
    torch.library.opcheck(torch.ops.meshcp.attention.default, (q, k, v), {"causal": True})


# opcheck itself looks at the gradients of tensors that are no leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_the_operator_keeps_the_rules_of_custom_operators() -> None:
    opcheck()


def leaf_gradients() -> list[tuple[tuple[int, ...], float]]:
    """Strides of each leaf's gradient, and its error, on two equal meshes one after the other."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    tensors = [
        torch.randn(2, 6, 13, 8, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(3)
    ]
    plain = [x.clone().requires_grad_() for x in tensors]
    attention_cases.softmax_attention(*plain, None, False, None).square().sum().backward()
    found = []
    for first in (Shard(2), Shard(1)):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ulysses", "ring"))
        leaves = [
            distribute_tensor(x, mesh, [placement, Shard(2)]).requires_grad_()
            for x, placement in zip(tensors, (first, Shard(2), Shard(2)), strict=True)
        ]
        meshcp.attention(*leaves).square().sum().full_tensor().backward()
        for leaf, want in zip(leaves, plain, strict=True):
            error = leaf.grad.full_tensor() - want.grad
            found.append((leaf.grad.stride(), float(error.abs().max())))
    return found


def test_gradients_lie_alike_on_every_rank_and_equal_meshes_do_not_mix(pool: Pool) -> None:
    # 13 rows on 2 x 2 ranks: by torch's own to_local the gradients' strides differ between ranks, and the second mesh
    # waits for itself in two different groups.
    for result in pool.run(4, leaf_gradients):
        for stride, error in result:
            assert stride == (6 * 13 * 8, 13 * 8, 8, 1)
            assert error < 1e-12


def second_derivatives() -> dict[str, tuple[float, str]]:
    """For each mode: the error of the second derivatives, or of the first if there are none, and what is said."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.nn.attention import SDPBackend, sdpa_kernel

    tensors = [
        torch.randn(1, 4, 7, 8, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(3)
    ]

    def first(attention: Any, leaves: list[Any]) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(whole(attention(*leaves).square().sum()), leaves, create_graph=True)

    def second(grads: tuple[torch.Tensor, ...], leaves: list[Any]) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(torch.stack([whole(g.square().sum()) for g in grads]).sum(), leaves)

    def error(found: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> float:
        return max(
            float((whole(f) - w).detach().abs().max() / w.detach().abs().max())
            for f, w in zip(found, want, strict=True)
        )

    plain = [x.clone().requires_grad_() for x in tensors]
    want = first(lambda q, k, v: attention_cases.softmax_attention(q, k, v, None, False, None), plain)
    want_second = second(want, plain)
    results = {}
    for mode in ("ulysses", "ring", "gathered"):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ulysses" if mode == "ulysses" else "ring",))
        leaves = [distribute_tensor(x, mesh, [Shard(2)]).requires_grad_() for x in tensors]
        with sdpa_kernel(SDPBackend.MATH):
            grads = first(functools.partial(meshcp.attention, gather_kv=mode == "gathered"), leaves)
            try:
                results[mode] = error(second(grads, leaves), want_second), "computed"
            except meshcp.AttentionError as refused:
                results[mode] = error(grads, want), str(refused)
    return results


def test_second_derivatives_are_right_or_refused(pool: Pool) -> None:
    for result in pool.run(2, second_derivatives):
        for mode in ("ulysses", "gathered"):
            assert result[mode][0] < 1e-12
            assert result[mode][1] == "computed"
        assert result["ring"][0] < 1e-12
        assert "the gradient of ring attention is differentiated once more" in result["ring"][1]


def bf16_over_the_ring() -> set[tuple[bool, bool]]:
    """[out, dq, dk, dv] on a ring against one process; the ways, (autocast, gather_kv), in which it ran."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("ring",))
    ways = set()
    # Among them the two of forty at which the error was largest when it was too large.
    for seed, autocast in itertools.product([0, 1, 2, 3, 24, 34], [False, True]):
        *tensors, grad = (
            torch.randn(2, 5, 61, 16, generator=torch.Generator().manual_seed(each)).bfloat16()
            for each in (7 * seed, 7 * seed + 1, 7 * seed + 2, 99 + seed)
        )

        def run(
            attention: Any,
            place: Any = lambda x: x,
            dtype: torch.dtype = torch.float32 if autocast else torch.bfloat16,
            tensors: Any = tensors,
            grad: torch.Tensor = grad,
        ) -> list[torch.Tensor]:
            leaves = [place(x.to(dtype)).requires_grad_() for x in tensors]
            out = attention(*leaves)
            gradients = torch.autograd.grad(out, leaves, place(grad.to(out.dtype)))
            return [whole(x.detach()).float() for x in (out, *gradients)]

        exact = run(functools.partial(attention_cases.softmax_attention, mask=None, causal=False, scale=None),
                    dtype=torch.float32)  # fmt: skip
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            one = run(torch.nn.functional.scaled_dot_product_attention)
            for gather_kv in (False, True):
                three = run(
                    functools.partial(meshcp.attention, gather_kv=gather_kv),
                    lambda x: distribute_tensor(x, mesh, [Shard(2)]),
                )
                for actual, single, ref in zip(three, one, exact, strict=True):
                    bf16_no_worse(actual, single, ref)
                ways.add((autocast, gather_kv))
    return ways


def test_bf16_over_the_ring_is_no_worse_than_one_process(pool: Pool) -> None:
    for ways in pool.run(3, bf16_over_the_ring):
        assert len(ways) == 4


def under_autocast() -> list[tuple[torch.dtype, torch.dtype, float]]:
    """Dtypes of the output and of a gradient, and the output's error, on ulysses, on ring and with KV gathered."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    tensors = [torch.randn(1, 4, 13, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    want = attention_cases.softmax_attention(*tensors, None, False, None)
    found = []
    for axis, gather_kv in (("ulysses", False), ("ring", False), ("ring", True)):
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=(axis,))
        leaves = [distribute_tensor(x, mesh, [Shard(2)]).requires_grad_() for x in tensors]
        with torch.autocast("cpu", torch.bfloat16):
            out = meshcp.attention(*leaves, torch.zeros(1, 1, 13, 13), gather_kv=gather_kv)
        out.sum().backward()
        assert isinstance(leaves[0].grad, DTensor)
        error = float((out.detach().full_tensor() - want).abs().max() / want.abs().max())
        found.append((out.dtype, leaves[0].grad.dtype, error))
    return found


def test_autocast_gives_its_dtype_in_every_mode(pool: Pool) -> None:
    for result in pool.run(3, under_autocast):
        for out, grad, error in result:
            assert (out, grad) == (torch.bfloat16, torch.float32)
            assert error < 1e-2
