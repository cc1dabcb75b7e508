"""Draw all ten digits on several processes and show that one process draws the same.

    torchrun --nproc-per-node 4 examples/digits/demo.py
    python examples/digits/demo.py

Saves one picture, the parallel grid beside the single-process grid and their difference, and ends with exit code 1 if they differ.
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from diffusers import FluxPipeline
from digits_pipeline import build_pipeline, generate
from launch import default_ring, launched_by_torchrun, processes, rank, world_size
from PIL import Image, ImageDraw
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import interpolate
from torchvision.transforms.functional import to_pil_image
from torchvision.utils import make_grid

TOLERANCE = 1e-4  # of pixels in [0, 1]: a fortieth of one of 256 grey levels
SIZES = ((8, 8), (7, 9))  # image tokens, rows by columns; 7 x 9 = 63 divides over no even mesh, nor do the 5 text tokens
ZOOM = 3
HEADING_HEIGHT = 24


def draw_sizes(pipe: FluxPipeline, title: str, arguments: argparse.Namespace, show: bool) -> list[Tensor]:
    """All digits `[10 * rows, 1, H, W]`, once in each size, with a progress bar on the rank that is to show one."""
    labels = [index % 10 for index in range(10 * arguments.rows)]
    columns = (TextColumn("{task.description:<40}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    pictures = []
    with Progress(*columns, disable=not show) as progress:
        for height, width in SIZES:
            bar = progress.add_task(f"{title}, {height} x {width} image tokens", total=arguments.steps)
            pictures.append(
                generate(pipe, labels, height, width, arguments.steps, arguments.seed, lambda bar=bar: progress.advance(bar))
            )
    return pictures


def grid(pictures: Tensor) -> Tensor:
    """Ten digits a row, `[N, 1, H, W]` to one enlarged picture `[3, H', W']`."""
    return make_grid(interpolate(pictures, scale_factor=ZOOM, mode="nearest"), nrow=10, padding=ZOOM, pad_value=0.3)


def comparison(parallel: Tensor, single: Tensor, world: int) -> Image.Image:
    """Three grids side by side under their headings; the difference is enlarged until its greatest pixel is white."""
    difference = (parallel - single).abs()
    largest = difference.max().item()
    panels = {
        f"{world} processes": parallel,
        "1 process": single,
        f"difference x {1 / largest:,.0f}" if largest > 0 else "difference: none at all": difference / max(largest, 1e-12),
    }
    grids = [grid(panel) for panel in panels.values()]
    gap = torch.ones(3, grids[0].shape[1], 4 * ZOOM)
    row = to_pil_image(torch.cat([piece for panel in grids for piece in (panel, gap)][:-1], dim=2))
    page = Image.new("RGB", (row.width, row.height + HEADING_HEIGHT), "white")
    page.paste(row, (0, HEADING_HEIGHT))
    pen = ImageDraw.Draw(page)
    for index, heading in enumerate(panels):
        pen.text((index * (grids[0].shape[2] + gap.shape[2]) + ZOOM, 4), heading, fill="black", font_size=14)
    return page


def draw_in_parallel(pipe: FluxPipeline, mesh: DeviceMesh, arguments: argparse.Namespace) -> tuple[list[Tensor], list[str]]:
    """The pictures of `draw_sizes`, and what each rank held of the last size."""
    import meshcp

    handle = meshcp.parallelize(pipe.transformer, mesh)
    pictures = draw_sizes(pipe, f"{world_size()} processes", arguments, show=rank() == 0)
    held = [""] * world_size()
    dist.all_gather_object(held, handle.describe())
    handle.remove()
    return pictures, held


def report(parallel: list[Tensor], single: list[Tensor], out: Path) -> bool:
    """Save the comparison of the first size, print the largest difference in each; whether all are within the tolerance."""
    within = True
    for (height, width), ours, theirs in zip(SIZES, parallel, single, strict=True):
        largest = (ours - theirs).abs().max().item()
        within &= largest <= TOLERANCE  # False for NaN as well
        print(f"largest difference at {height} x {width} = {height * width} image tokens: {largest:.2e}")
    comparison(parallel[0], single[0], world_size()).save(out)
    print(f"saved {out}: {world_size()} processes | 1 process | difference")
    if not within:
        print(f"FAILED: the largest difference exceeds {TOLERANCE}")
    return within


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ring", type=int, help="ring degree; by default 2 if the number of processes is even, else 1")
    parser.add_argument("--ulysses", type=int, help="ulysses degree; by default what the ring degree leaves")
    parser.add_argument("--rows", type=int, default=4, help="of ten digits each")
    parser.add_argument("--steps", type=int, default=15, help="of the sampler")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--out", type=Path, default=Path("demo.png"))
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    within = True
    with processes(arguments.device) as device:
        pipe = build_pipeline(device=device)
        # Before `parallelize` touches the model, and on one rank only: this is the reference.
        single = draw_sizes(pipe, "1 process", arguments, show=True) if rank() == 0 else []
        parallel, held, layout = single, [], "one process, no mesh"
        if launched_by_torchrun():
            import meshcp

            ring = arguments.ring or default_ring(world_size())
            mesh = meshcp.init_mesh(ring=ring, ulysses=arguments.ulysses or world_size() // ring, device_type=device.type)
            dist.barrier()  # the others wait here for the single-process pictures
            parallel, held = draw_in_parallel(pipe, mesh, arguments)
            layout = str(mesh)
        if rank() == 0:
            print(f"mesh: {layout}")
            for index, description in enumerate(held):
                print(f"rank {index} held:\n{description}")
            within = report(parallel, single, arguments.out)
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
