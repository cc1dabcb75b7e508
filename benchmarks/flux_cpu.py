"""Time a FLUX forward on CPU processes: one process, meshcp in every mode, Diffusers' own ulysses, in one run.

    python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/flux_cpu.py --image 256

Everything is timed alternating, several times; a time is that of the slowest rank, since a step ends when all have
ended. Printed are medians in milliseconds and ratios. ``own compute`` is what the ranks compute without any
communication: the same parallel forward with every exchange replaced by a copy of the right size. ``above`` is the
time over that. With more ranks than cores all of this measures the system's scheduler too.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig, FluxTransformer2DModel
from torch.distributed.device_mesh import init_device_mesh

import meshcp
from meshcp import _compat, collectives


def build(options: argparse.Namespace) -> tuple[FluxTransformer2DModel, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        in_channels=16, num_layers=options.layers // 2, num_single_layers=options.layers - options.layers // 2,
        attention_head_dim=options.width, num_attention_heads=options.heads, joint_attention_dim=64,
        pooled_projection_dim=32, axes_dims_rope=(options.width // 4, 3 * options.width // 8, 3 * options.width // 8),
    ).eval()  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, options.image, 16),
        "encoder_hidden_states": torch.randn(1, options.text, 64),
        "pooled_projections": torch.randn(1, 32),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.randn(options.image, 3),
        "txt_ids": torch.zeros(options.text, 3),
    }
    return model, inputs


@contextlib.contextmanager
def without_communication() -> Iterator[None]:
    """Exchanges that move nothing: what is received has the right size, not the right values."""

    def all_to_all(x: torch.Tensor, receive: list[int], send: list[int], group: str) -> torch.Tensor:
        return x.new_zeros(sum(receive))

    def all_gather(x: torch.Tensor, degree: int, group: str) -> torch.Tensor:
        return x.new_zeros(x.shape[0] * degree, *x.shape[1:])

    with (
        mock.patch.object(_compat, "start_all_to_all", all_to_all),
        mock.patch.object(_compat, "start_all_gather", all_gather),
        mock.patch.object(_compat, "wait", lambda x: x),
        mock.patch.object(collectives.RingExchange, "start", lambda self, send, receive: (receive.zero_(), [])[1]),
    ):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("image", 256), ("text", 32), ("heads", 8), ("width", 32), ("layers", 6), ("repeat", 9)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.set_num_threads(1)
    one, inputs = build(options)
    models = {name: build(options)[0] for name in ("ulysses", "ring", "gathered KV")}
    for name, model in models.items():
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ulysses" if name == "ulysses" else "ring",))
        meshcp.parallelize(model, mesh, gather_kv=name == "gathered KV")
    peer = build(options)[0]
    flat = init_device_mesh("cpu", (1, world), mesh_dim_names=("ring", "ulysses"))
    # Diffusers asks how many devices there are, which is none on a CPU.
    with mock.patch("torch.get_device_module", return_value=mock.Mock(device_count=lambda: 1), create=True):
        peer.enable_parallelism(config=ContextParallelConfig(ulysses_degree=world, mesh=flat))
    runs: dict[str, Callable[[], torch.Tensor]] = {
        "one process": lambda: one(**inputs, return_dict=False)[0],
        "ulysses": lambda: models["ulysses"](**inputs, return_dict=False)[0],
        "ring": lambda: models["ring"](**inputs, return_dict=False)[0],
        "gathered KV": lambda: models["gathered KV"](**inputs, return_dict=False)[0],
        "diffusers ulysses": lambda: peer(**inputs, return_dict=False)[0],
    }

    def own_compute() -> torch.Tensor:
        with without_communication():
            return models["ulysses"](**inputs, return_dict=False)[0]

    with torch.no_grad():
        expected = runs["one process"]()
        for name, run in runs.items():
            difference = float((run() - expected).abs().max())
            assert difference < 1e-4, f"{name} differs by {difference}"
        runs["own compute"] = own_compute
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(options.repeat):
            for name, run in runs.items():
                dist.barrier()
                start = time.perf_counter()
                run()
                slowest = torch.tensor(1e3 * (time.perf_counter() - start))
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                times[name].append(float(slowest))
    if dist.get_rank() == 0:
        median = {name: statistics.median(values) for name, values in times.items()}
        base = median["own compute"]
        print(
            f"{world} ranks, {options.image} + {options.text} tokens, {options.layers} layers, "
            f"median of {options.repeat}"
        )
        for name, value in median.items():
            above, best = value - base, min(times[name])
            print(f"  {name:18} {value:9.1f} ms   above own compute {above:8.1f} ms   best {best:9.1f}")
        theirs = median["diffusers ulysses"] - base
        ratios = ", ".join(f"{name} {(median[name] - base) / theirs:.2f}" for name in models)
        ratio = median["ring"] / median["ulysses"]
        print(f"  above own compute, meshcp / diffusers: {ratios}   ring / ulysses: {ratio:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
