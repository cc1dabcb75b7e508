"""Draw all ten digits on several processes and show that one process draws the same.

    torchrun --nproc-per-node 4 examples/digits/demo.py
    python examples/digits/demo.py

Saves one picture, the parallel grid beside the single-process grid and their difference, and ends with exit code 1
if they differ.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

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
# Image tokens, rows by columns. Four ranks share 63 as unevenly as the 5 text tokens.
SIZES = ((8, 8), (7, 9))
ZOOM = 3
HEADING_HEIGHT = 24
GAP = 12


def draw_sizes(pipe: FluxPipeline, title: str, arguments: argparse.Namespace, show: bool) -> list[Tensor]:
    """All digits `[10 * rows, 1, H, W]`, once in each size, with a progress bar on the rank that is to show one."""
    labels = [index % 10 for index in range(10 * arguments.rows)]
    columns = (TextColumn("{task.description:<40}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    pictures: list[Tensor] = []
    with Progress(*columns, disable=not show) as progress:
        for height, width in SIZES:
            bar = progress.add_task(f"{title}, {height} x {width} image tokens", total=arguments.steps)
            advance = partial(progress.advance, bar)
            pictures.append(generate(pipe, labels, height, width, arguments.steps, arguments.seed, advance))
    return pictures


def grid(pictures: Tensor) -> Tensor:
    """Ten digits a row, `[N, 1, H, W]` to one enlarged picture `[3, H', W']`."""
    return make_grid(interpolate(pictures, scale_factor=ZOOM, mode="nearest"), nrow=10, padding=ZOOM, pad_value=0.3)


def comparison(parallel: Tensor, single: Tensor, heading: str) -> Image.Image:
    """Three grids side by side under their headings. In the third a pixel that differs by the tolerance is white."""
    panels = {
        f"{world_size()} processes, {heading}": parallel,
        f"1 process, {heading}": single,
        f"difference x {1 / TOLERANCE:,.0f} (white: too much)": (parallel - single).abs() / TOLERANCE,
    }
    grids = [grid(panel) for panel in panels.values()]
    height, width = grids[0].shape[1:]
    page = Image.new("RGB", (len(grids) * (width + GAP) - GAP, HEADING_HEIGHT + height), "white")
    pen = ImageDraw.Draw(page)
    for index, (title, panel) in enumerate(zip(panels, grids, strict=True)):
        left = index * (width + GAP)
        pen.text((left + ZOOM, 4), title, fill="black", font_size=14)
        page.paste(to_pil_image(panel.clamp(0, 1)), (left, HEADING_HEIGHT))
    return page


def stacked(pages: list[Image.Image]) -> Image.Image:
    """The pages one below the other."""
    whole = Image.new("RGB", (max(page.width for page in pages), sum(page.height for page in pages)), "white")
    top = 0
    for page in pages:
        whole.paste(page, (0, top))
        top += page.height
    return whole


def draw_in_parallel(
    pipe: FluxPipeline, mesh: DeviceMesh, arguments: argparse.Namespace
) -> tuple[list[Tensor], list[str]]:
    """The pictures of `draw_sizes`, and what each rank held of the last size."""
    import meshcp

    handle = meshcp.parallelize(pipe.transformer, mesh)
    pictures = draw_sizes(pipe, f"{world_size()} processes", arguments, show=rank() == 0)
    held = [""] * world_size()
    dist.all_gather_object(held, handle.describe())
    handle.remove()
    return pictures, held


def report(parallel: list[Tensor], single: list[Tensor], out: Path) -> bool:
    """Save the comparison and print the largest difference in each size; whether all are within the tolerance."""
    within = True
    pages = []
    for (height, width), ours, theirs in zip(SIZES, parallel, single, strict=True):
        size = f"{height} x {width} = {height * width} image tokens"
        largest = (ours - theirs).abs().max().item()
        within &= largest <= TOLERANCE  # False for NaN as well
        print(f"largest difference at {size}: {largest:.2e}")
        pages.append(comparison(ours, theirs, size))
    stacked(pages).save(out)
    print(f"saved {out}: {world_size()} processes | 1 process | difference")
    if not within:
        print(f"FAILED: the largest difference exceeds {TOLERANCE}")
    return within


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ring", type=int, help="by default 2 if the number of processes is even, else 1")
    parser.add_argument("--ulysses", type=int, help="by default the rest of the processes")
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
        parallel = single
        held: list[str] = []
        layout = "none, one process"
        if launched_by_torchrun():
            import meshcp

            ring = arguments.ring or default_ring(world_size())
            ulysses = arguments.ulysses or world_size() // ring
            mesh = meshcp.init_mesh(ring=ring, ulysses=ulysses, device_type=device.type)
            dist.barrier()  # the others wait here for the single-process pictures
            parallel, held = draw_in_parallel(pipe, mesh, arguments)
            layout = str(mesh)
        if rank() == 0:
            print(f"mesh: {layout}")
            for index, description in enumerate(held):
                print(f"rank {index} held, at {description}")
            within = report(parallel, single, arguments.out)
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
