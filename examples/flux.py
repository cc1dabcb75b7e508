"""FLUX.1 across several GPUs: one picture, any mesh.

    torchrun --nproc-per-node 8 examples/flux.py --ulysses 8 --prompt "a lighthouse in fog"
    torchrun --nproc-per-node 8 examples/flux.py --ring 2 --ulysses 4 --height 2048 --width 2048

On several nodes, the same with torchrun's own options on each node:

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        examples/flux.py --ring 2 --ulysses 8

Put ulysses on the ranks of one node (it is the inner axis) and ring across nodes.

Every rank loads the whole pipeline into its GPU: in bf16 some 32 GiB of weights, and in host memory about as much for
each rank of a node while it loads. --offload keeps only the model that runs on the GPU.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from diffusers import FluxPipeline
from PIL.Image import Image

import meshcp


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="black-forest-labs/FLUX.1-dev", help="hub name or folder")
    parser.add_argument("--prompt", default="a lighthouse in fog, oil on canvas")
    parser.add_argument("--height", type=int, default=1024)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--guidance", type=float, default=3.5)
    parser.add_argument("--text-length", type=int, default=512, help="tokens that the prompt is filled up to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ring", type=int, default=1, help="degree of the ring axis")
    parser.add_argument("--ulysses", type=int, help="degree of the ulysses axis; by default all ranks that ring leaves")
    parser.add_argument("--gather-kv", action="store_true", help="gather KV over ring, for latency or any --backend")
    parser.add_argument("--backend", help="attention backend of Diffusers, such as _native_cudnn")
    parser.add_argument("--compile", action="store_true", help="compile the repeated blocks")
    parser.add_argument("--offload", action="store_true", help="keep idle models of the pipeline on the CPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("flux.png"))
    options = parser.parse_args(given)
    world = int(os.environ.get("WORLD_SIZE", 1))
    if options.ring < 1 or world % options.ring:
        parser.error(f"--ring {options.ring} does not divide the {world} ranks that torchrun started")
    options.ulysses = options.ulysses or world // options.ring
    if options.ring * options.ulysses != world:
        parser.error(f"--ring {options.ring} x --ulysses {options.ulysses} is not the {world} ranks of torchrun")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device is available; --device cpu runs on the CPU, for which the real model is too large")
    if options.offload and options.device == "cpu":
        parser.error("--offload is for GPUs")
    return options


@contextmanager
def processes(kind: str) -> Iterator[torch.device]:
    """Join the processes that torchrun started, or be alone; yield this one's device."""
    device = torch.device(kind)
    if kind == "cuda":
        # Before anything communicates: NCCL and the mesh go by the current device.
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        if kind == "cuda":
            dist.init_process_group("nccl", device_id=device)
        else:
            dist.init_process_group("gloo")
    else:
        dist.init_process_group("nccl" if kind == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def load(options: argparse.Namespace, device: torch.device) -> FluxPipeline:
    """The pipeline; what the hub has is downloaded by one process of each node."""
    if not Path(options.model).is_dir():
        # Not NCCL's barrier, which ends the job after ten minutes.
        waiting = dist.new_group(backend="gloo", timeout=timedelta(hours=6))
        if int(os.environ.get("LOCAL_RANK", 0)) == 0:
            FluxPipeline.download(options.model)
        dist.barrier(group=waiting)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    pipe = FluxPipeline.from_pretrained(options.model, dtype=dtype)
    if options.offload:
        pipe.enable_model_cpu_offload(gpu_id=device.index)
    else:
        pipe.to(device)
    pipe.set_progress_bar_config(disable=dist.get_rank() != 0)
    return pipe


def finish(device: torch.device) -> float:
    """The time at which the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(given)
    with processes(options.device) as device:
        pipe = load(options, device)
        mesh = meshcp.init_mesh(ring=options.ring, ulysses=options.ulysses, device_type=device.type)
        if options.backend:
            pipe.transformer.set_attention_backend(options.backend)
        handle = meshcp.parallelize(pipe.transformer, mesh, gather_kv=options.gather_kv)
        if options.compile:
            pipe.transformer.compile_repeated_blocks(fullgraph=True)

        def draw(steps: int) -> Image:
            # Every rank draws the same noise: the generator is seeded alike.
            generator = torch.Generator("cpu").manual_seed(options.seed)
            image: Image = pipe(
                options.prompt, height=options.height, width=options.width, num_inference_steps=steps,
                guidance_scale=options.guidance, max_sequence_length=options.text_length, generator=generator,
            ).images[0]  # fmt: skip
            return image

        draw(1)  # Warms up kernels and communicators, and compiles.
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        start = finish(device)
        image = draw(options.steps)
        seconds = finish(device) - start
        if dist.get_rank() == 0:
            image.save(options.out)
            print(f"{options.out}: {seconds:.2f} s on ring {options.ring} x ulysses {options.ulysses}")
            if device.type == "cuda":
                print(f"peak of rank 0: {torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB")
            print(handle.describe())


if __name__ == "__main__":
    main()
