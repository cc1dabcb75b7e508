from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests import harness
from tests.harness import MAX_GROUPS, HangError, Pool, WorkerError, assert_close_to, bf16_no_worse, fake_world


def rank_and_argument(argument: str, suffix: str = "") -> tuple[int, int, str]:
    return dist.get_rank(), dist.get_world_size(), argument + suffix


def sum_of_ranks() -> torch.Tensor:
    x = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(x)
    return x


def process() -> int:
    return os.getpid()


def round_trip(x: torch.Tensor) -> torch.Tensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(x, mesh, [Shard(0)]).full_tensor()


def random_numbers() -> tuple[torch.Tensor, torch.dtype]:
    x = torch.rand(3)
    torch.set_default_dtype(torch.float64)
    return x, x.dtype


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        print("about to fail")
        raise ValueError("no such luck")


def fail_before_all_reduce() -> None:
    fail_on(1)
    dist.all_reduce(torch.ones(1))


def skip_all_reduce_on_0() -> None:
    if dist.get_rank() != 0:
        dist.all_reduce(torch.ones(1))


def forget_to_wait_on_0() -> None:
    if dist.get_rank() != 0:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        work.wait()


def sleep_forever() -> None:
    time.sleep(1000)


def kill_rank_1() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGABRT)
    dist.barrier()


def leave_rank_1_a_thread_that_ends_it() -> None:
    def end() -> None:
        print("it was me", flush=True)
        os._exit(7)

    if dist.get_rank() == 1:
        threading.Timer(0.2, end).start()


def warn() -> None:
    warnings.warn("beware", UserWarning, stacklevel=1)


def return_dtensor() -> DTensor:
    return DTensor.from_local(torch.ones(1), init_device_mesh("cpu", (dist.get_world_size(),)), [Replicate()])


def make_groups(count: int) -> None:
    for _ in range(count):
        dist.new_group([0, 1])


def test_results_by_rank(pool: Pool) -> None:
    assert pool.run(3, rank_and_argument, "a", suffix="b") == [(0, 3, "ab"), (1, 3, "ab"), (2, 3, "ab")]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6])
def test_every_world_communicates(pool: Pool, world: int) -> None:
    assert pool.run(world, sum_of_ranks) == [world * (world + 1) / 2] * world


def test_workers_are_kept(pool: Pool) -> None:
    before = pool.run(2, process)
    pool.run(3, process)
    assert pool.run(2, process) == before
    assert os.getpid() not in before


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool])
def test_tensors_travel(pool: Pool, dtype: torch.dtype) -> None:
    x = torch.arange(10.0).to(dtype).view(5, 2)
    for result in pool.run(2, round_trip, x):
        torch.testing.assert_close(result, x, rtol=0, atol=0)


def test_large_tensors_travel(pool: Pool) -> None:
    x = torch.rand(1 << 21)
    assert all(torch.equal(x, result) for result in pool.run(2, round_trip, x))


def test_every_call_starts_alike(pool: Pool) -> None:
    first, second = pool.run(2, random_numbers), pool.run(2, random_numbers)
    for x, dtype in first + second:
        assert dtype == torch.float32
        assert torch.equal(x, first[0][0])


def test_exception_has_rank_and_traceback(pool: Pool) -> None:
    with pytest.raises(
        WorkerError, match=r"rank 2 of 4 failed in tests.test_harness.fail_on: ValueError: no such luck"
    ) as caught:
        pool.run(4, fail_on, 2)
    assert (caught.value.rank, caught.value.others) == (2, {})
    assert 'raise ValueError("no such luck")' in caught.value.remote
    assert "output of rank 2:\nabout to fail" in str(caught.value)


def test_exception_names_ranks_left_in_a_collective(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "GRACE", 1.0)
    with pytest.raises(WorkerError, match="rank 1 of 3 failed") as caught:
        pool.run(3, fail_before_all_reduce, timeout=1000)
    assert sorted(caught.value.others) == [0, 2]
    assert all(what.startswith("stuck in all_reduce (torch/distributed/") for what in caught.value.others.values())
    assert pool.run(3, sum_of_ranks) == [6, 6, 6]


@pytest.mark.parametrize("fn", [skip_all_reduce_on_0, forget_to_wait_on_0])
def test_hang_names_rank_and_collective(pool: Pool, fn: object) -> None:
    with pytest.raises(HangError, match=f"1 of 2 ranks hang in tests.test_harness.{fn.__name__} after 1 s") as caught:
        pool.run(2, fn, timeout=1)
    assert list(caught.value.others) == [1]
    assert "all_reduce" in caught.value.others[1] or "work.wait()" in caught.value.others[1]
    assert f"in {fn.__name__}" in str(caught.value)
    assert pool.run(2, sum_of_ranks) == [3, 3]


def test_hang_outside_a_collective_names_the_line(pool: Pool) -> None:
    with pytest.raises(
        HangError, match=r"rank 0 stuck in sleep_forever \(tests/test_harness.py:\d+: time.sleep\(1000\)\)"
    ):
        pool.run(2, sleep_forever, timeout=0.5)


def test_death_of_a_worker(pool: Pool) -> None:
    with pytest.raises(WorkerError, match=r"rank \d of 2 failed") as caught:
        pool.run(2, kill_rank_1)
    assert "the process died (killed by SIGABRT)" in str(caught.value)
    assert "in kill_rank_1" in str(caught.value)
    assert pool.run(2, sum_of_ranks) == [3, 3]


def test_death_of_a_worker_between_two_calls(pool: Pool) -> None:
    pool.run(2, leave_rank_1_a_thread_that_ends_it)
    time.sleep(0.5)
    with pytest.raises(WorkerError, match=r"rank 1 of 2 failed in tests\.test_harness\.sum_of_ranks") as caught:
        pool.run(2, sum_of_ranks, timeout=1000)
    said = str(caught.value)
    assert "the process died (exit code 7) before it was called" in said
    assert "since tests.test_harness.leave_rank_1_a_thread_that_ends_it returned there" in said
    assert "it was me" in said
    assert pool.run(2, sum_of_ranks) == [3, 3]


def test_warnings_are_errors_in_workers(pool: Pool) -> None:
    with pytest.raises(WorkerError, match="UserWarning: beware"):
        pool.run(2, warn)


def test_dtensors_do_not_travel(pool: Pool) -> None:
    with pytest.raises(WorkerError, match="full_tensor"):
        pool.run(2, return_dtensor)


def test_workers_with_many_groups_are_replaced(pool: Pool) -> None:
    before = pool.run(2, process)
    pool.run(2, make_groups, MAX_GROUPS)
    assert not set(pool.run(2, process)) & set(before)


ABANDON = """
import os, signal
from tests.harness import Pool
from tests.test_harness import process
print(*Pool(preload=["torch"]).run(2, process), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_die_with_the_session(tmp_path: Path) -> None:
    # A session that is killed leaves its folder behind.
    environment = dict(os.environ, TMPDIR=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", ABANDON], env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, pids))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_close_to(dtype: torch.dtype, tolerance: float) -> None:
    expected = torch.tensor([[1.0, 100.0], [2.0, 3.0]], dtype=torch.float64)
    off = torch.tensor([[0.0, 0.0], [1.0, 0.0]], dtype=torch.float64) * 100 * tolerance
    assert_close_to((expected + 0.9 * off).to(dtype), expected, dtype)
    with pytest.raises(AssertionError, match=r"largest difference .* at \(1, 0\)"):
        assert_close_to((expected + 1.2 * off).to(dtype), expected, dtype)


def test_close_to_rejects() -> None:
    ones = torch.ones(2, 2)
    with pytest.raises(AssertionError, match="shape"):
        assert_close_to(torch.ones(2), ones)
    with pytest.raises(AssertionError, match=r"NaN in the found tensor: 1 of 4 values, first at \(1, 0\)"):
        assert_close_to(torch.tensor([[1, 1], [torch.nan, 1]]), ones)
    with pytest.raises(AssertionError, match="NaN in the expected"):
        assert_close_to(ones, ones * torch.nan)
    with pytest.raises(AssertionError, match="inf"):
        assert_close_to(torch.tensor([torch.inf, 1]), torch.tensor([2.0, 1]))
    with pytest.raises(AssertionError, match="largest difference"):
        assert_close_to(torch.tensor([-torch.inf, 1]), torch.tensor([torch.inf, 1]))
    with pytest.raises(AssertionError, match="float32"):
        assert_close_to(ones, ones.double(), torch.float64)
    with pytest.raises(AssertionError, match="largest difference"):
        assert_close_to(ones * 1e-30, ones * 0)
    with pytest.raises(ValueError, match="bf16_no_worse"):
        assert_close_to(ones.bfloat16(), ones)
    assert_close_to(torch.tensor([-torch.inf, 1]), torch.tensor([-torch.inf, 1]))
    assert_close_to(torch.ones(0, 3), torch.ones(0, 3))
    assert_close_to(torch.tensor(1.0), torch.tensor(1.0))


def test_bf16_no_worse() -> None:
    reference = torch.tensor([1.0, 2.0])
    single = torch.tensor([1.0, 2.0625], dtype=torch.bfloat16)
    bf16_no_worse(torch.tensor([1.0625, 2.0], dtype=torch.bfloat16), single, reference)
    with pytest.raises(AssertionError, match=r"largest error 1.250e-01 at \(0,\)"):
        bf16_no_worse(torch.tensor([1.125, 2.0], dtype=torch.bfloat16), single, reference)
    with pytest.raises(AssertionError, match="NaN"):
        bf16_no_worse(torch.tensor([torch.nan, 2.0], dtype=torch.bfloat16), single, reference)
    with pytest.raises(AssertionError, match="shape"):
        bf16_no_worse(single[:1], single, reference)


@pytest.mark.parametrize("size", [6, 128])
def test_fake_world(size: int) -> None:
    with fake_world(size, rank=1):
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("ring", "ulysses"))
        x = DTensor.from_local(torch.ones(1, 4), mesh, [Shard(0), Shard(0)])
        assert x.shape == (size, 4)
        assert x.redistribute(mesh, [Replicate(), Replicate()]).to_local().shape == (size, 4)
        assert dist.get_rank() == 1
    assert not dist.is_initialized()
