"""Started as users start it: by torchrun, on one node and on two."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def start(*options: str, ring: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "tests.torchrun_script", str(ring)]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(agents: list[subprocess.Popen[str]]) -> str:
    try:
        output = "".join(agent.communicate(timeout=150)[0] for agent in agents)
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0] * len(agents), output
    return output


@pytest.mark.timeout(180)
def test_one_node() -> None:
    output = finish([start("--standalone", "--nproc-per-node", "2", ring=1)])
    assert all(f"rank {rank} of 2: difference" in output for rank in range(2)), output


@pytest.mark.timeout(180)
def test_two_nodes() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "smoke")
    agents = [
        start("--nnodes", "2", "--nproc-per-node", "1", "--local-addr", "127.0.0.1", *rendezvous, ring=2)
        for _ in range(2)
    ]
    output = finish(agents)
    assert all(f"rank {rank} of 2: difference" in output for rank in range(2)), output
    assert "ring 0/2" in output
    assert "ring 1/2" in output
