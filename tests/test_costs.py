"""What a layer costs, counted: collectives, point-to-point transfers and bytes, against the formula of the design."""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

import meshcp
from meshcp import collectives
from meshcp.attention.distributed import CallPlan
from meshcp.mesh import context_mesh
from meshcp.placements import SequenceLayout
from tests.harness import Pool, fake_world
from tests.model_cases import build, make_inputs
from tests.rows import flux


@dataclasses.dataclass
class Traffic:
    """What one rank sends to others, in bytes, and in how many operations."""

    all_to_all: int = 0
    ring: int = 0
    operations: Counter[str] = dataclasses.field(default_factory=Counter)


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traffic]:
    traffic = Traffic()
    original_start = collectives.RingExchange.start

    def all_to_all(x: torch.Tensor, receive: list[int], send: list[int], group: str) -> torch.Tensor:
        assert x.numel() == sum(send), "the wire holds more than its payload"
        own = send[collectives._compat.resolve_group(group).rank()]
        traffic.all_to_all += (sum(send) - own) * x.element_size()
        traffic.operations["all_to_all"] += 1
        # The simulated group refuses what the real ones allow, an empty input with a full output.
        return x.new_zeros(sum(receive))

    def start(self: collectives.RingExchange, send: torch.Tensor, receive: torch.Tensor) -> list[object]:
        traffic.ring += send.numel() * send.element_size()
        traffic.operations["ring"] += 1
        return original_start(self, send, receive)

    with monkeypatch.context() as patch:
        patch.setattr(collectives._compat, "start_all_to_all", all_to_all)
        patch.setattr(collectives._compat, "wait", lambda x: x)
        patch.setattr(collectives.RingExchange, "start", start)
        yield traffic


def run_layer(
    monkeypatch: pytest.MonkeyPatch, ring: int, ulysses: int, rank: int, *, heads: int, kv_heads: int, length: int,
    keys: int | None = None, replicated: bool = False, width: int = 4, batch: int = 2, gather_kv: bool = False,
) -> Traffic:  # fmt: skip
    """One attention as rank ``rank`` of a simulated world sees it."""
    with fake_world(ring * ulysses, rank):
        mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))

        def make(heads: int, rows: int, placements: list[Placement]) -> DTensor:
            block = meshcp.placements.shard_sizes(rows, ring)[rank // ulysses]
            local = meshcp.placements.shard_sizes(block, ulysses)[rank % ulysses]
            if placements[0] == Replicate():
                local = rows
            shape = torch.Size((batch, heads, rows, width))
            stride = (rows * heads * width, width, heads * width, 1)
            x = torch.randn(batch, local, heads, width).transpose(1, 2)
            return DTensor.from_local(x, mesh, placements, shape=shape, stride=stride)

        sharded: list[Placement] = [Shard(2), Shard(2)]
        kv: list[Placement] = [Replicate(), Replicate()] if replicated else sharded
        q = make(heads, length, sharded)
        k, v = (make(kv_heads, keys or length, kv) for _ in range(2))
        with counted(monkeypatch) as traffic:
            meshcp.attention(q, k, v, enable_gqa=heads != kv_heads, gather_kv=gather_kv)
        return traffic


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), (1, 4), (2, 1), (4, 1), (2, 2), (2, 4), (4, 2), (8, 8)])
@pytest.mark.parametrize("kv_heads", [8, 16])
@pytest.mark.parametrize("gather_kv", [False, True], ids=["passed", "gathered"])
def test_bytes_are_those_of_the_formula(
    monkeypatch: pytest.MonkeyPatch, ring: int, ulysses: int, kv_heads: int, gather_kv: bool
) -> None:
    heads, length, width, batch = 16, 128, 4, 2
    size = batch * length * heads * width * 4
    f, p = kv_heads / heads, ring * ulysses
    traffic = run_layer(
        monkeypatch, ring, ulysses, p - 1, heads=heads, kv_heads=kv_heads, length=length, gather_kv=gather_kv
    )
    over_ulysses, over_ring = size / p * 2 * (1 + f) * (ulysses - 1) / ulysses, size / p * 2 * f * (ring - 1)
    # What the ring passes on in ring - 1 steps, gathered keys send in one more all-to-all.
    assert traffic.all_to_all == over_ulysses + (over_ring if gather_kv else 0)
    assert traffic.ring == (0 if gather_kv else over_ring)
    assert traffic.operations["all_to_all"] == (2 if ulysses > 1 else 0) + (gather_kv and ring > 1)
    assert traffic.operations["ring"] == (0 if gather_kv else ring - 1)


@pytest.mark.parametrize(("ring", "length", "keys"), [(4, 13, 13), (3, 2, 2), (16, 37, 37), (4, 10, 3)])
def test_gathered_keys_hold_no_padding(monkeypatch: pytest.MonkeyPatch, ring: int, length: int, keys: int) -> None:
    heads, kv_heads, width, batch = 6, 3, 4, 2
    sent = [
        run_layer(
            monkeypatch, ring, 1, rank, heads=heads, kv_heads=kv_heads, length=length, keys=keys, gather_kv=True
        ).all_to_all
        for rank in range(ring)
    ]
    assert sum(sent) == (ring - 1) * keys * 2 * kv_heads * width * batch * 4


@pytest.mark.parametrize(
    ("ulysses", "heads", "kv_heads", "length"),
    [(4, 5, 5, 13), (3, 5, 5, 2), (16, 24, 24, 37), (4, 8, 2, 10), (6, 4, 1, 7)],
)
def test_uneven_exchanges_send_each_element_once_to_whoever_needs_it(
    monkeypatch: pytest.MonkeyPatch, ulysses: int, heads: int, kv_heads: int, length: int
) -> None:
    width, batch = 4, 2
    sent = [
        run_layer(monkeypatch, 1, ulysses, rank, heads=heads, kv_heads=kv_heads, length=length).all_to_all
        for rank in range(ulysses)
    ]

    def owner(position: int, total: int) -> int:
        return position // -(-total // ulysses)

    elements = 0
    for token in range(length):
        holder = owner(token, length)
        for rank in range(ulysses):
            if rank == holder:
                continue
            mine = [head for head in range(heads) if owner(head, heads) == rank]
            # q there and the output back, and the keys and values that these heads use.
            elements += 2 * len(mine) + 2 * len({head // (heads // kv_heads) for head in mine})
    assert sum(sent) == elements * batch * width * 4


class _Copies(TorchDispatchMode):
    """Counts the elements that are moved from one place in memory to another."""

    moving = ("aten::copy_", "aten::cat", "aten::clone", "aten::index_select")

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name in self.moving and out.is_floating_point():
            self.elements += out.numel()
        return out


@pytest.mark.parametrize("ring", [1, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_rows_are_put_in_order_only_where_the_order_counts(
    monkeypatch: pytest.MonkeyPatch, ring: int, masked: bool
) -> None:
    """Two streams, q, k and v are copied onto the wire and the output from it; nothing else is without a mask."""
    ulysses, streams, heads, width = 3, (5, 7), 6, 4
    with fake_world(ring * ulysses, 0):
        context = context_mesh(init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses")))
        layout = SequenceLayout(streams, ring, ulysses)
        plan = CallPlan(context, layout, layout, heads, heads, gather_kv=True)
        q, k, v = torch.randn(3, 1, sum(layout.local_lengths(0, 0)), heads, width).transpose(2, 3)
        length = sum(streams)
        mask = torch.ones(1, 1, length, length, dtype=torch.bool) if masked else None

        def local(q: torch.Tensor, *_: Any) -> torch.Tensor:
            return torch.zeros(q.transpose(1, 2).shape).transpose(1, 2)

        with counted(monkeypatch), _Copies() as copies:
            plan.run(q, k, v, mask, local=local)
    row = heads // ulysses * width
    block = row * sum(sum(layout.local_lengths(0, rank)) for rank in range(ulysses))
    onto_and_from_the_wire = 4 * q.numel() + (2 * ring * block if ring > 1 else 0)
    into_order = 4 * block + (2 * length * row if ring > 1 else 0)
    assert copies.elements == onto_and_from_the_wire + (into_order if masked else 0)


def test_replicated_keys_cause_no_communication(monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = run_layer(monkeypatch, 2, 2, 1, heads=4, kv_heads=4, length=10, keys=6, replicated=True)
    assert not traffic.operations


def count_collectives(ring: int, ulysses: int, gather_kv: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Collectives of a FLUX forward, and of its backward."""
    model, row = build(flux.EVEN), flux.EVEN
    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    meshcp.parallelize(model, mesh, gather_kv=gather_kv)
    model(**make_inputs(row))
    forward, backward = CommDebugMode(), CommDebugMode()
    with forward:
        out = model(**make_inputs(row), return_dict=False)[0]
    with backward, warnings.catch_warnings():
        # Before torch 2.14, of the hooks by which CommDebugMode watches modules.
        warnings.filterwarnings("ignore", "Full backward hook is firing")
        out.sum().backward()
    return tuple({str(op): n for op, n in mode.get_comm_counts().items()} for mode in (forward, backward))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("ring", "ulysses", "gather_kv"), [(1, 2, False), (2, 1, False), (2, 2, False), (2, 1, True), (2, 2, True)]
)
def test_a_flux_forward_is_two_exchanges_a_layer_and_one_gather_an_axis(
    pool: Pool, ring: int, ulysses: int, gather_kv: bool
) -> None:
    layers = 4
    exchanges = ((2 if ulysses > 1 else 0) + gather_kv) * layers
    axes = (ring > 1) + (ulysses > 1)
    for forward, backward in pool.run(ring * ulysses, count_collectives, ring, ulysses, gather_kv):
        assert sum(n for op, n in forward.items() if "all_to_all" in op) == exchanges
        assert sum(n for op, n in forward.items() if "all_gather" in op) == axes
        assert sum(forward.values()) == exchanges + axes
        assert sum(n for op, n in backward.items() if "all_to_all" in op) == exchanges
        assert sum(n for op, n in backward.items() if "reduce_scatter" in op) == axes
        assert sum(backward.values()) == exchanges + axes


def held_at_once(length: int) -> list[int]:
    """For each block of the ring: bytes of KV buffers alive while it computes, beyond this rank's own KV."""
    import weakref

    from meshcp.attention import ring as ring_module

    alive: list[weakref.ref[torch.Tensor]] = []
    peaks = []
    original_forward = ring_module.block_forward
    original_start = collectives.RingExchange.start

    def start(self: collectives.RingExchange, send: torch.Tensor, receive: torch.Tensor) -> list[object]:
        alive.extend(weakref.ref(x.untyped_storage()) for x in (send, receive))  # type: ignore[arg-type, type-var]
        return original_start(self, send, receive)

    def forward(*arguments: object) -> object:
        storages = {id(s): s.nbytes() for s in (ref() for ref in alive) if s is not None}  # type: ignore[attr-defined]
        peaks.append(sum(storages.values()))
        return original_forward(*arguments)  # type: ignore[arg-type]

    ring_module.block_forward, collectives.RingExchange.start = forward, start  # type: ignore[assignment, method-assign]
    try:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("ring",))
        local = torch.randn(1, 2, length // 4, 8)
        q = DTensor.from_local(local, mesh, [Shard(2)])
        with torch.no_grad():
            meshcp.attention(q, q, q)
    finally:
        ring_module.block_forward, collectives.RingExchange.start = original_forward, original_start  # type: ignore[method-assign]
    return peaks


def test_the_ring_holds_two_blocks_in_transit_and_no_more(pool: Pool) -> None:
    length = 64
    block = 2 * 2 * (length // 4) * 8 * 4
    for peaks in pool.run(4, held_at_once, length):
        assert len(peaks) == 4
        assert 0 < max(peaks) <= 2 * block, (peaks, block)
