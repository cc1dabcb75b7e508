"""Start and end of a script that runs alone under `python` and on several processes under `torchrun`."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


def launched_by_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@contextmanager
def processes(device: str = "auto") -> Iterator[torch.device]:
    """Join the other processes, if there are any; yield this one's device; leave them at the end.

    `device` is "cpu", "cuda" or "auto": a GPU each if this machine has enough of them, else the CPU.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    kind = ("cuda" if torch.cuda.device_count() >= local_world else "cpu") if device == "auto" else device
    # Each process would otherwise start a thread for every core, and they would wait for each other.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_world))
    own = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
    if own.type == "cuda":
        torch.cuda.set_device(own)
    if launched_by_torchrun():
        dist.init_process_group("nccl" if own.type == "cuda" else "gloo")
    try:
        yield own
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def default_ring(world: int) -> int:
    """Two, so that both axes are in use on four processes."""
    return 2 if world % 2 == 0 else 1
