"""FLUX.1 across several GPUs: one picture, any mesh.

    torchrun --nproc-per-node 8 examples/flux.py --ulysses 8 --prompt "a lighthouse in fog"
    torchrun --nproc-per-node 8 examples/flux.py --ring 2 --ulysses 4 --height 2048 --width 2048

On several nodes, the same with torchrun's own options on each node:

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        examples/flux.py --ring 2 --ulysses 8

Put ulysses on the ranks of one node (it is the inner axis) and ring across nodes.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from diffusers import FluxPipeline

import meshcp


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="black-forest-labs/FLUX.1-dev", help="hub name or folder")
    parser.add_argument("--prompt", default="a lighthouse in fog, oil on canvas")
    parser.add_argument("--height", type=int, default=1024)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--guidance", type=float, default=3.5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ring", type=int, default=1, help="degree of the ring axis")
    parser.add_argument("--ulysses", type=int, help="degree of the ulysses axis; by default all ranks that ring leaves")
    parser.add_argument("--backend", help="attention backend of Diffusers, such as _native_cudnn")
    parser.add_argument("--compile", action="store_true", help="compile the repeated blocks")
    parser.add_argument("--offload", action="store_true", help="keep idle models of the pipeline on the CPU")
    parser.add_argument("--out", default="flux.png")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    local_rank, world = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world % options.ring:
        raise SystemExit(f"--ring {options.ring} does not divide the {world} ranks that torchrun started")
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    dist.init_process_group("nccl", device_id=device)
    ulysses = options.ulysses or world // options.ring
    mesh = meshcp.init_mesh(ring=options.ring, ulysses=ulysses, device_type="cuda")

    pipe = FluxPipeline.from_pretrained(options.model, torch_dtype=torch.bfloat16)
    if options.offload:
        pipe.enable_model_cpu_offload(gpu_id=local_rank)
    else:
        pipe.to(device)
    if options.backend:
        pipe.transformer.set_attention_backend(options.backend)
    handle = meshcp.parallelize(pipe.transformer, mesh)
    if options.compile:
        pipe.transformer.compile_repeated_blocks(fullgraph=True)
    pipe.set_progress_bar_config(disable=dist.get_rank() != 0)

    def draw(steps: int) -> object:
        # Every rank draws the same noise: the generator is seeded alike.
        generator = torch.Generator("cpu").manual_seed(options.seed)
        return pipe(
            options.prompt, height=options.height, width=options.width, num_inference_steps=steps,
            guidance_scale=options.guidance, generator=generator,
        ).images[0]  # fmt: skip

    draw(1)  # Warms up kernels and communicators, and compiles.
    torch.cuda.synchronize()
    start = time.perf_counter()
    image = draw(options.steps)
    torch.cuda.synchronize()
    if dist.get_rank() == 0:
        image.save(options.out)  # type: ignore[attr-defined]
        peak = torch.cuda.max_memory_allocated() / 2**30
        print(f"{options.out}: {time.perf_counter() - start:.2f} s on {mesh}, peak {peak:.1f} GiB a rank")
        print(handle.describe())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
