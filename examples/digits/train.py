"""Train the digit-drawing FLUX model, alone or with every sequence spread over several processes.

    python examples/digits/train.py
    torchrun --nproc-per-node 4 examples/digits/train.py --ring 2 --ulysses 2

Both learn the same model from the same draws: data, noise and times are seeded alike on every rank, and averaging the
gradients over the context-parallel ranks gives those of a single process.
"""

import argparse
import copy
import math
from pathlib import Path

import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from digits_data import real_digits, recognised, resized, train_classifier
from digits_pipeline import MODEL_DIR, PATCH, build_pipeline, embed_labels, generate, model_config, pack
from launch import default_ring, launched_by_torchrun, processes, rank, world_size
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

MAIN_SIZE = (8, 8)  # tokens: pictures of 16 x 16 pixels
# One step in four trains on another size, so that the model also draws at token counts that no mesh divides.
OTHER_SIZES = ((7, 9), (9, 7), (7, 7), (9, 9), (6, 8), (8, 6), (8, 10), (10, 8))
OTHER_SIZE_SHARE = 0.25


class DigitBatches:
    """Endless training batches, the same on every rank that is given the same seed."""

    def __init__(self, batch: int, seed: int) -> None:
        self.batch = batch
        self.generator = torch.Generator().manual_seed(seed)
        images, self.labels = real_digits()
        self.images = {
            size: resized(images, PATCH * size[0], PATCH * size[1]) * 2 - 1 for size in (MAIN_SIZE, *OTHER_SIZES)
        }

    def size(self) -> tuple[int, int]:
        if torch.rand((), generator=self.generator).item() >= OTHER_SIZE_SHARE:
            return MAIN_SIZE
        return OTHER_SIZES[int(torch.randint(len(OTHER_SIZES), (), generator=self.generator))]

    def draw(self) -> tuple[Tensor, list[int], Tensor, Tensor]:
        """Pictures `[B, 1, H, W]` in [-1, 1], their labels, noise `[B, 1, H, W]` and noise levels `[B]` in [0, 1)."""
        images = self.images[self.size()]
        chosen = torch.randint(len(images), (self.batch,), generator=self.generator)
        data = images[chosen]
        noise = torch.randn(data.shape, generator=self.generator)
        # One noise level from each of B equal intervals: every batch covers them all, and the loss is less noisy.
        sigmas = (torch.arange(self.batch) + torch.rand(self.batch, generator=self.generator)) / self.batch
        return data, self.labels[chosen].tolist(), noise, sigmas


def flow_loss(model: FluxTransformer2DModel, data: Tensor, labels: list[int], noise: Tensor, sigmas: Tensor) -> Tensor:
    """Rectified flow: on the straight line from data to noise the model predicts the velocity, noise - data."""
    level = sigmas.view(-1, 1, 1, 1)
    noisy = (1 - level) * data + level * noise
    height_tokens, width_tokens = (side // PATCH for side in data.shape[-2:])
    text, pooled = embed_labels(labels, data.device)
    (velocity,) = model(
        hidden_states=pack(noisy),
        encoder_hidden_states=text,
        pooled_projections=pooled,
        timestep=sigmas,
        img_ids=FluxPipeline._prepare_latent_image_ids(1, height_tokens, width_tokens, data.device, data.dtype),
        txt_ids=torch.zeros(text.shape[1], 3, device=data.device),
        return_dict=False,
    )
    return (velocity - pack(noise - data)).square().mean()


def learning_rate(step: int, steps: int, peak: float, warmup: int = 100) -> float:
    """A straight rise to the peak, then half a cosine down to zero."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


@torch.no_grad()
def update_average(average: FluxTransformer2DModel, model: FluxTransformer2DModel, step: int, decay: float) -> None:
    """Move the averaged weights towards the model's; faster in the first steps, to forget the initial ones."""
    weight = 1 - min(decay, (1 + step) / (10 + step))
    for kept, new in zip(average.parameters(), model.parameters(), strict=True):
        kept.lerp_(new, weight)


def train(arguments: argparse.Namespace, device: torch.device) -> FluxTransformer2DModel:
    """Train and return the model with averaged weights, the same on every rank."""
    torch.manual_seed(arguments.seed)
    model = FluxTransformer2DModel(**model_config()).to(device)
    average = copy.deepcopy(model).eval().requires_grad_(False)

    mesh: DeviceMesh | None = None
    if launched_by_torchrun():
        import meshcp

        mesh = meshcp.init_mesh(ring=arguments.ring, ulysses=arguments.ulysses, device_type=device.type)
        meshcp.parallelize(model, mesh)

    batches = DigitBatches(arguments.batch, arguments.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.rate, betas=(0.9, 0.99), weight_decay=0.01)
    smooth_loss = math.nan
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, disable=rank() != 0) as progress:
        bar = progress.add_task("training", total=arguments.steps)
        for step in range(arguments.steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, arguments.steps, arguments.rate)
            data, labels, noise, sigmas = batches.draw()
            loss = flow_loss(model, data.to(device), labels, noise.to(device), sigmas.to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            if mesh is not None:
                meshcp.average_gradients(model, mesh)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            update_average(average, model, step, arguments.decay)
            smooth_loss = loss.item() if math.isnan(smooth_loss) else 0.98 * smooth_loss + 0.02 * loss.item()
            if (step + 1) % 100 == 0:
                progress.print(f"step {step + 1}: loss {smooth_loss:.4f}")  # stays readable where the output is a file
            progress.update(bar, advance=1, description=f"training, loss {smooth_loss:.4f}")
    return average


def report_quality(pipe: FluxPipeline) -> None:
    """Print how many of 200 generated digits a classifier of real ones recognises."""
    labels = [index % 10 for index in range(200)]
    images = generate(pipe, labels, *MAIN_SIZE, steps=15)
    print(f"recognised: {recognised(train_classifier(), images, labels):.1%} of {len(labels)}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--decay", type=float, default=0.995, help="of the averaged weights, which are saved")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ring", type=int, help="by default 2 if the number of processes is even, else 1")
    parser.add_argument("--ulysses", type=int, help="by default the rest of the processes")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--out", type=Path, default=MODEL_DIR, help="directory for config and weights")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    with processes(arguments.device) as device:
        arguments.ring = arguments.ring or default_ring(world_size())
        arguments.ulysses = arguments.ulysses or world_size() // arguments.ring
        model = train(arguments, device)
        if rank() == 0:
            model.cpu().half().save_pretrained(arguments.out)
            print(f"saved to {arguments.out}")
            report_quality(build_pipeline(arguments.out))


if __name__ == "__main__":
    main()
