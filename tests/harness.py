"""What the tests run on: worker processes that outlive a test, tolerances, and a process group that only pretends.

def sum_of_ranks(start):                       # a module-level function, found by name in the worker
    x = torch.tensor(start + dist.get_rank())
    dist.all_reduce(x)
    return x

def test_sum(pool):
    assert pool.run(3, sum_of_ranks, 10) == [33, 33, 33]
"""

from __future__ import annotations

import contextlib
import json
import linecache
import multiprocessing.connection
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from tests import worker

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}

# What a rank that is left may still need to finish after another one has failed.
GRACE = 5.0
# An idle worker costs about 25 MB, starting a set of them some tenths of a second: worlds 2, 3, 4 and 6 stay alive
# side by side.
MAX_WORKERS = 16
# Every process group holds sockets and a thread, and a test may make several. New workers are the cheap way to be rid
# of them.
MAX_GROUPS = 64


class WorkerError(Exception):
    """A call failed in a worker: first on `rank`, with `summary` and the traceback `remote`.

    `others` says of each further rank that did not return what it did instead: failed as well, or stood in which
    collective.
    """

    def __init__(
        self, message: str, rank: int, summary: str = "", remote: str = "", others: dict[int, str] | None = None
    ):
        super().__init__(message)
        self.rank = rank
        self.summary = summary
        self.remote = remote
        self.others = others or {}


class HangError(WorkerError):
    """Ranks did not return in time. `others` says of each of them where it stood."""


@dataclass
class _Crew:
    """The workers of one world size."""

    world: int
    directory: str
    pids: list[int] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)
    log_starts: list[int] = field(default_factory=list)
    last_call: str = ""

    def log(self, rank: int) -> str:
        """What `rank` has printed since the call began."""
        with contextlib.suppress(OSError), open(worker.log_path(self.directory, rank), errors="replace") as file:
            file.seek(self.log_starts[rank])
            return file.read()[-4000:].strip()
        return ""


class Pool:
    """Runs functions on several ranks.

    There is one set of workers for each world size, made when first used. It lives as long as the pool, unless a call
    fails in it.
    """

    def __init__(self, filters: Sequence[str] = ("error",), preload: Sequence[str] = worker.PRELOAD):
        self._filters = list(filters)
        self._directory = tempfile.mkdtemp(prefix="meshcp-tests-")
        self._crews: OrderedDict[int, _Crew] = OrderedDict()
        self._made = 0
        self._control, theirs = socket.socketpair()
        # One thread a worker: with more of them than cores, threads that spin for work slow everything down.
        # Gloo on the loopback interface: it otherwise looks up the host's name, which not every machine can do.
        environment = dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
        environment["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
        arguments = f"{theirs.fileno()}, {os.getpid()}, {tuple(preload)!r}"
        start = f"import sys; sys.path[:] = {sys.path!r}; import tests.worker; tests.worker.zygote({arguments})"
        self._zygote = subprocess.Popen(
            [sys.executable, "-c", start], env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        )
        theirs.close()

    def run(self, world: int, fn: Callable[..., Any], *args: Any, timeout: float = 60, **kwargs: Any) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank of a gloo world of `world` processes and return the results by rank.

        `fn` is a function of a module, found there by name in the workers. Raises `WorkerError` when a rank raises or
        dies, and `HangError` when ranks have not returned after `timeout` seconds.
        """
        __tracebackhide__ = True
        call = worker.dumps((fn, args, kwargs))
        crew = self._crew(world)
        try:
            results, failed, stuck, groups = self._call(crew, call, timeout)
            if failed or stuck:
                self._raise(crew, fn, timeout, failed, stuck)
            crew.last_call = _name(fn)
        except BaseException:
            # Includes the interruption by pytest-timeout: the workers may be anywhere.
            self._discard(world)
            raise
        if groups > MAX_GROUPS:
            self._discard(world)
        return [pickle.loads(result) for result in results]

    def close(self) -> None:
        for world in list(self._crews):
            self._discard(world)
        self._control.close()
        try:
            self._zygote.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._zygote.kill()
            self._zygote.wait()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _call(
        self, crew: _Crew, call: bytes, timeout: float
    ) -> tuple[list[bytes], dict[int, tuple[str, str]], dict[int, str], int]:
        """The pickled results by rank; (summary, traceback) of the ranks that failed, the first one first; the stacks
        of those that are stuck; the largest number of process groups on a rank.
        """
        deadline = time.monotonic() + timeout
        waiting: dict[Connection, int] = {}
        failed: dict[int, tuple[str, str]] = {}
        for rank, connection in enumerate(crew.connections):
            try:
                size = _size(worker.log_path(crew.directory, rank))
                connection.send_bytes(call)
                waiting[connection] = rank
                crew.log_starts[rank] = size
            except OSError:
                # What an earlier call left behind ended it: a thread, a signal. Its output is from then.
                summary, stack = self._cause_of_death(crew, rank)
                failed[rank] = (f"{summary} before it was called, since {crew.last_call} returned there", stack)
                deadline = min(deadline, time.monotonic() + GRACE)
        results = [b""] * crew.world
        groups = 0
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in sorted(waiting.keys() & ready, key=waiting.__getitem__):
                rank = waiting.pop(connection)
                try:
                    kind, payload, rank_groups = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    kind, payload, rank_groups = "error", self._cause_of_death(crew, rank), 0
                groups = max(groups, rank_groups)
                if kind == "result":
                    results[rank] = payload
                else:
                    failed[rank] = payload
                    deadline = min(deadline, time.monotonic() + GRACE)
        return results, failed, _stacks(crew, sorted(waiting.values())), groups

    def _raise(
        self,
        crew: _Crew,
        fn: Callable[..., Any],
        timeout: float,
        failed: dict[int, tuple[str, str]],
        stuck: dict[int, str],
    ) -> None:
        __tracebackhide__ = True
        name = _name(fn)
        others = {rank: f"stuck in {_where(stack)}" for rank, stack in stuck.items()}
        others.update({rank: f"failed too: {summary}" for rank, (summary, _) in failed.items()})
        if failed:
            rank, (summary, remote) = next(iter(failed.items()))
            del others[rank]
            lines = [f"rank {rank} of {crew.world} failed in {name}: {summary}"]
        else:
            rank, summary, remote = min(stuck), "", ""
            lines = [f"{len(stuck)} of {crew.world} ranks hang in {name} after {timeout:g} s"]
        lines += [f"  rank {other} {what}" for other, what in sorted(others.items())]
        if remote:
            lines += ["", f"traceback of rank {rank}:", remote.rstrip()]
        for other, stack in stuck.items():
            lines += ["", f"stack of rank {other}, innermost call first:", stack.rstrip()]
        for other in range(crew.world):
            if log := crew.log(other):
                lines += ["", f"output of rank {other}:", log]
        kind = WorkerError if failed else HangError
        raise kind("\n".join(lines), rank, summary, remote, others)

    def _crew(self, world: int) -> _Crew:
        if world not in self._crews:
            while self._crews and sum(self._crews) + world > MAX_WORKERS:
                self._discard(next(iter(self._crews)))
            self._made += 1
            crew = _Crew(world, os.path.join(self._directory, f"{self._made}-world{world}"))
            os.mkdir(crew.directory)
            # Listed before it is complete, so that an interrupted start is cleaned up like any other.
            self._crews[world] = crew
            for rank in range(world):
                self._fork(crew, rank)
        self._crews.move_to_end(world)
        return self._crews[world]

    def _fork(self, crew: _Crew, rank: int) -> None:
        ours, theirs = multiprocessing.connection.Pipe()
        arguments = {"rank": rank, "world": crew.world, "directory": crew.directory}
        arguments |= {"sys_path": sys.path, "filters": self._filters}
        crew.pids.append(self._ask({"do": "fork", "worker": arguments}, theirs))
        theirs.close()
        crew.connections.append(ours)
        crew.log_starts.append(0)

    def _ask(self, request: dict[str, Any], *connections: Connection) -> int:
        socket.send_fds(self._control, [json.dumps(request).encode()], [c.fileno() for c in connections])
        reply = self._control.recv(64)
        if not reply:
            raise RuntimeError(
                f"the process that starts the workers ended with exit code {self._zygote.wait()}; see its output above"
            )
        return int(reply)

    def _discard(self, world: int) -> None:
        crew = self._crews.pop(world, None)
        if crew is None:
            return
        for pid in crew.pids:
            _signal(pid, signal.SIGKILL)
        for pid in crew.pids:
            # Zero stands for a worker that has been reaped.
            if pid and self._zygote.poll() is None:
                self._ask({"do": "wait", "pid": pid})
        for connection in crew.connections:
            connection.close()
        shutil.rmtree(crew.directory, ignore_errors=True)

    def _cause_of_death(self, crew: _Crew, rank: int) -> tuple[str, str]:
        _signal(crew.pids[rank], signal.SIGKILL)
        code = self._ask({"do": "wait", "pid": crew.pids[rank]})
        crew.pids[rank] = 0
        # Killed here, or by itself before: a worker closes its connection only by ending, so the exit code is its own.
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"the process died ({how})", _read_stack(crew, rank)


def _signal(pid: int, number: int) -> None:
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _name(fn: Callable[..., Any]) -> str:
    return f"{fn.__module__}.{fn.__qualname__}"


def _size(path: str) -> int:
    return os.stat(path).st_size if os.path.exists(path) else 0


def _stacks(crew: _Crew, ranks: list[int]) -> dict[int, str]:
    """Make each rank write its Python stack, and read them. Works wherever it stands, also inside C++."""
    for rank in ranks:
        _signal(crew.pids[rank], signal.SIGUSR1)
    deadline = time.monotonic() + 3
    texts: dict[int, str] = {}
    while ranks and time.monotonic() < deadline:
        time.sleep(0.1)
        previous, texts = texts, {rank: _read_stack(crew, rank) for rank in ranks}
        # Written in pieces, and complete when it no longer grows.
        if all(texts.values()) and texts == previous:
            break
    return texts


def _read_stack(crew: _Crew, rank: int) -> str:
    """The stack of the worker's main thread, which is the one that runs the call."""
    with contextlib.suppress(OSError), open(worker.stack_path(crew.directory, rank)) as file:
        header, _, text = file.read().partition("\n")
        head, *threads = re.split(r"(?m)^(?=(?:Current thread|Thread) 0x)", text)
        main = [thread for thread in threads if header.strip() in thread.partition("\n")[0]]
        return head + "".join(main or threads)
    return ""


_FRAME = re.compile(r'File "(?P<path>.+)", line (?P<line>\d+) in (?P<name>.+)')
_COLLECTIVES = re.compile(r"(torch/distributed/(?!c10d_logger|elastic|run)|meshcp/(collectives|attention))")


def _where(stack: str) -> str:
    """The innermost frame that says which collective a rank stands in, else the innermost one."""
    frames = [match.groupdict() for match in _FRAME.finditer(stack)]
    if not frames:
        return "an unknown place: it gave no stack"
    collective = next((frame for frame in frames if _COLLECTIVES.search(frame["path"])), None)
    frame = collective or frames[0]
    if collective is None:
        return _describe(frame)
    # Which of the callers it is says more than the name of a library function does.
    outer = frames[frames.index(frame) + 1 :]
    caller = next((f for f in outer if not _COLLECTIVES.search(f["path"]) and "/torch/" not in f["path"]), None)
    return _describe(frame) + (f", called from {_describe(caller)}" if caller else "")


def _describe(frame: dict[str, str]) -> str:
    path = os.path.relpath(frame["path"])
    if "site-packages/" in path:
        path = path.rsplit("site-packages/", 1)[1]
    source = linecache.getline(frame["path"], int(frame["line"])).strip()
    return f"{frame['name']} ({path}:{frame['line']}: {source})"


def make_mesh(axes: Sequence[tuple[str, int]]) -> DeviceMesh:
    """A mesh of names and degrees, on CPUs. Called in workers."""
    return init_device_mesh("cpu", tuple(degree for _, degree in axes), mesh_dim_names=tuple(name for name, _ in axes))


def whole(x: Tensor) -> Tensor:
    """A DTensor gathered, any other tensor as it is. Called in workers."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def world_mean(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The mean of each over all ranks, in one collective a dtype: one each takes longer than the model whose gradients
    they are. Called in workers.
    """
    means: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [index for index, tensor in enumerate(tensors) if tensor.dtype == dtype]
        flat = torch.cat([tensors[index].flatten() for index in alike])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for index, part in zip(alike, flat.split([tensors[index].numel() for index in alike]), strict=True):
            means[index] = part.view(tensors[index].shape)
    return [means[index] for index in range(len(tensors))]


def assert_close_to(actual: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> None:
    """The project's tolerances: 1e-10 in fp64 and 1e-5 in fp32, times the largest finite absolute value expected.

    `dtype` is the precision that the computation ran in, and that `actual` must have; by default `actual`'s own.
    `expected` may be finer. Infinities must agree exactly, NaN is never right, and where everything expected is zero
    only zero passes.
    """
    __tracebackhide__ = True
    dtype = dtype or actual.dtype
    if dtype not in TOLERANCE:
        raise ValueError(f"no tolerance for {dtype}: compare bf16 and fp16 with bf16_no_worse")
    assert actual.dtype == dtype, f"found {actual.dtype}, expected {dtype}"
    error, where = _largest_difference(actual, expected)
    finite = expected[torch.isfinite(expected)]
    scale = finite.abs().max().item() if finite.numel() else 0.0
    assert error <= TOLERANCE[dtype] * scale, (
        f"largest difference {error:.3e} at {where}: found {actual[where].item()!r}, "
        f"expected {expected[where].item()!r}; "
        f"allowed {TOLERANCE[dtype] * scale:.3e} = {TOLERANCE[dtype]:g} x the largest expected value {scale:.3e}"
    )


def bf16_no_worse(actual_bf16: Tensor, single_bf16: Tensor, ref_fp32: Tensor) -> None:
    """The largest error of the parallel result is at most 1.5 times that of one process in the same precision."""
    __tracebackhide__ = True
    assert actual_bf16.dtype == single_bf16.dtype, (
        f"found {actual_bf16.dtype}, the single process has {single_bf16.dtype}"
    )
    error, where = _largest_difference(actual_bf16, ref_fp32)
    allowed, single_where = _largest_difference(single_bf16, ref_fp32)
    assert error <= 1.5 * allowed, (
        f"largest error {error:.3e} at {where}: "
        f"found {actual_bf16[where].item()!r}, reference {ref_fp32[where].item()!r}; "
        f"the single process's largest is {allowed:.3e} at {single_where}, and 1.5 times that is allowed"
    )


def _largest_difference(actual: Tensor, expected: Tensor) -> tuple[float, tuple[int, ...]]:
    __tracebackhide__ = True
    assert actual.shape == expected.shape, f"found shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if not actual.numel():
        return 0.0, ()
    found, wanted = actual.detach().double(), expected.detach().double()
    for name, tensor in (("found", found), ("expected", wanted)):
        missing = tensor.isnan()
        assert not missing.any(), (
            f"NaN in the {name} tensor: {int(missing.sum())} of {tensor.numel()} values, "
            f"first at {_index(missing.int().argmax(), actual)}"
        )
    difference = torch.where(found == wanted, 0.0, (found - wanted).abs())
    at = difference.argmax()
    return difference.flatten()[at].item(), _index(at, actual)


def _index(flat: Tensor, like: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(flat, like.shape))


@contextlib.contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[None]:
    """A default process group of `size` ranks of which only this one exists.

    Collectives return at once, with meaningless values: this is for counting what would be sent. It is set up in the
    process that calls, so no other process group may exist there at the same time.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        # DTensor caches by mesh, and the mesh of the next world may compare equal to one of this.
        _clear_sharding_prop_cache()
