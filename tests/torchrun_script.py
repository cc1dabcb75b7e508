"""What the smoke tests start by torchrun: a parallel FLUX against itself on one process, on the whole world."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

import meshcp
from tests.model_cases import build, make_inputs
from tests.rows import flux


def main(ring: int) -> None:
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    model = build(flux.EVEN)
    with torch.no_grad():
        expected = model(**make_inputs(flux.EVEN)).sample
        mesh = meshcp.init_mesh(ring=ring, ulysses=world // ring, device_type="cpu")
        handle = meshcp.parallelize(model, mesh)
        difference = float((model(**make_inputs(flux.EVEN)).sample - expected).abs().max())
    print(f"rank {dist.get_rank()} of {world}: difference {difference:.1e}; {handle.describe()}", flush=True)
    assert difference < 1e-9
    dist.destroy_process_group()
    sys.stdout.flush()
    # The interpreter's end aborts now and then where gloo has been used, also without meshcp (seen in torch 2.11).
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
