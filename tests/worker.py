"""The processes behind `tests.harness.Pool`: a zygote that imports torch once, and the workers that it forks.

Importing torch and diffusers takes seconds, forking a process that has done so takes milliseconds. The zygote therefore
never runs an operator, starts no thread and holds no process group: a fork of it is as good as a new interpreter.

A set of workers that is in an unknown state is thrown away rather than mended, and a set never changes its size: torch
caches by mesh, and a mesh compares equal to one of an earlier process group whose communicators are gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import gc
import importlib
import io
import json
import os
import pickle
import random
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NoReturn

PRELOAD = (
    "numpy",
    "torch",
    "torch.distributed.device_mesh",
    "torch.distributed.tensor.parallel",
    "torch.distributed.tensor.debug",
    "torch.distributed.fsdp",
    "_pytest.config",
    "diffusers.models.transformers.transformer_flux",
    "meshcp",
    "meshcp.models",
)

# Longer than any test may take: the harness reports a hang, with stacks, before gloo gives up.
COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)


def stack_path(directory: str, rank: int) -> str:
    return os.path.join(directory, f"rank{rank}.stack")


def log_path(directory: str, rank: int) -> str:
    return os.path.join(directory, f"rank{rank}.log")


class _Pickler(pickle.Pickler):
    """Plain pickle: torch's multiprocessing passes file descriptors of shared memory, and a long session runs out."""

    def reducer_override(self, obj: Any) -> Any:
        cls = type(obj)
        if cls.__module__ == "torch.distributed.tensor" and cls.__name__ == "DTensor":
            raise TypeError("a DTensor cannot leave its process group: pass to_local() or full_tensor()")
        return NotImplemented


def dumps(obj: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(obj)
    return buffer.getvalue()


def _die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends, however it ends. On other systems than Linux the closed
    socket does that.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


def zygote(fd: int, parent: int, preload: Sequence[str]) -> None:
    """Serve requests to fork a worker or to reap one, until the other end of `fd` closes."""
    _die_with_parent(parent)
    # Ctrl-C reaches the whole terminal; the pytest process alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in preload:
            # A module that does not import fails in the worker that needs it, where the test can be told.
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    gc.collect()
    gc.freeze()
    control = socket.socket(fileno=fd)
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1 << 20, 1)
        if not data:
            return
        request = json.loads(data)
        if request["do"] == "fork":
            zygote_pid = os.getpid()
            pid = os.fork()
            if pid == 0:
                control.close()
                _run_worker(Connection(descriptors[0]), zygote_pid, **request["worker"])
            os.close(descriptors[0])
            reply = pid
        else:
            reply = os.waitstatus_to_exitcode(os.waitpid(request["pid"], 0)[1])
        control.sendall(json.dumps(reply).encode())


def _run_worker(
    connection: Connection, parent: int, rank: int, world: int, directory: str, sys_path: list[str], filters: list[str]
) -> NoReturn:
    try:
        _die_with_parent(parent)
        log = os.open(log_path(directory, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        stacks = open(stack_path(directory, rank), "w")  # noqa: SIM115  faulthandler needs it open for as long as the process lives
        print(f"{threading.main_thread().ident:#018x}", file=stacks, flush=True)
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
        sys.path[:] = sys_path
        _serve(connection, rank, world, directory, filters)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    finally:
        # Not sys.exit: the destructors of a process group may wait for ranks that are gone.
        sys.stdout.flush()
        os._exit(0)


def _serve(connection: Connection, rank: int, world: int, directory: str, filters: list[str]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    initialised = False
    while True:
        try:
            call = connection.recv_bytes()
        except EOFError:
            return
        groups = 0
        answer: tuple[Any, ...]
        try:
            _reset(filters)
            if not initialised:
                dist.init_process_group(
                    "gloo",
                    init_method=f"file://{os.path.join(directory, 'store')}",
                    rank=rank,
                    world_size=world,
                    timeout=COLLECTIVE_TIMEOUT,
                )
                initialised = True
            fn, args, kwargs = pickle.loads(call)
            answer = ("result", dumps(fn(*args, **kwargs)))
            groups = len(dist.distributed_c10d._world.pg_map)
        except BaseException as error:
            summary = traceback.format_exception_only(error)[-1].strip()
            answer = ("error", (summary, "".join(traceback.format_exception(error))))
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send_bytes(pickle.dumps((*answer, groups)))
        # A worker that waits for the next call holds nothing of the last one.
        del answer, call
        fn = args = kwargs = None


def _reset(filters: list[str]) -> None:
    """Give every call the same start, whatever the one before it left behind."""
    import numpy
    import torch
    from _pytest.config import parse_warning_filter

    warnings.resetwarnings()
    for line in filters:
        warnings.filterwarnings(*parse_warning_filter(line, escape=False))
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
