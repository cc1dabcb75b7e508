"""Fine-tune the digit-drawing FLUX with its weights sharded by FSDP2 and its sequences by ring and ulysses.

    torchrun --nproc-per-node 4 examples/train_fsdp.py --fsdp 2 --ring 1 --ulysses 2
    python examples/train_fsdp.py

Weights and optimizer are kept in fp32 and computed with in bf16. Every `--checkpoint-every` steps all that is needed to
go on is saved under `--out`; the same command goes on from there, on any number of processes, along the same losses.
The batch is drawn alike by every rank, which then works on its part: what is learnt does not depend on the mesh.
"""

import argparse
import faulthandler
import json
import math
import os
import shutil
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from diffusers import FluxTransformer2DModel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import meshcp

sys.path.append(str(Path(__file__).parent / "digits"))  # data, model and loss are those of the digits example

from digits_pipeline import MODEL_DIR
from train import DigitBatches, flow_loss, learning_rate

# A checkpoint goes on only with the settings that decide what is learnt; all others may change in between.
DECISIVE = ("model", "steps", "batch", "rate", "warmup", "clip", "seed", "fp32", "ema")


@contextmanager
def processes(kind: str, timeout: float) -> Iterator[torch.device]:
    """Join the processes that torchrun started, or be alone; yield this one's device."""
    local_rank, local_world = (
        int(os.environ.get(name, value)) for name, value in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1))
    )
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_world))
    device = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    backend = "nccl" if kind == "cuda" else "gloo"
    # FSDP wants a process group also where there is one process.
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout), **alone)
    try:
        yield device
    finally:
        dist.destroy_process_group()


class Watchdog:
    """Ends the process if no step ends in time, whatever it waits for, and says which ranks do not answer.

    Each of the many process groups has a time-out of its own, and tells nothing of ranks outside of it.
    """

    def __init__(self, timeout: float, listen: float = 3) -> None:
        self.listen = listen  # so many seconds for sign of life
        self.timeout, self.main, self.stopped = timeout, threading.get_ident(), threading.Event()
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        # A connection of its own to the store that torchrun keeps, which outlives any rank.
        self.store = None
        if "TORCHELASTIC_RUN_ID" in os.environ:
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            self.store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
        self.feed()
        threading.Thread(target=self.watch, daemon=True).start()

    def feed(self) -> None:
        """There is progress."""
        self.deadline = time.monotonic() + self.timeout
        # Should Python itself be stuck.
        faulthandler.dump_traceback_later(self.timeout + 30, exit=True)

    def stop(self) -> None:
        self.stopped.set()
        faulthandler.cancel_dump_traceback_later()

    def watch(self) -> None:
        while not self.stopped.wait(0.5):
            self.count(self.rank, 1)
            if time.monotonic() > self.deadline:
                self.give_up()

    def count(self, rank: int, more: int = 0) -> int:
        """How often a rank has shown that it lives."""
        return self.store.add(f"alive/{self.attempt}/{rank}", more) if self.store is not None else 0

    def give_up(self) -> None:
        try:
            stack = traceback.extract_stack(sys._current_frames()[self.main])
            places = [frame for frame in stack if "distributed" in frame.filename or "collectives" in frame.filename]
            at = (places or stack)[-1]
            before = [self.count(rank) for rank in range(self.world)]
            self.live()
            silent = [rank for rank in range(self.world) if self.count(rank) == before[rank]]
            print(
                f"rank {self.rank}: no step in {self.timeout:g} s. It waits in {at.name} ({at.filename}:{at.lineno}). "
                f"Ranks that do not answer: {silent if self.store is not None else 'unknown'}",
                file=sys.stderr,
            )
            faulthandler.dump_traceback(all_threads=True)
            self.live()  # for those that listen a moment later
        finally:
            os._exit(1)

    def live(self) -> None:
        for _ in range(10):
            self.count(self.rank, 1)
            time.sleep(self.listen / 10)


def default_degrees(world: int, fsdp: int | None, ring: int | None, ulysses: int | None) -> dict[str, int]:
    """Two for ulysses and two for ring as far as they divide, the rest for FSDP."""
    left = world // math.prod(degree or 1 for degree in (fsdp, ring, ulysses))
    if ulysses is None:
        ulysses = 2 if left % 2 == 0 else 1
        left //= ulysses
    if ring is None:
        ring = 2 if left % 2 == 0 else 1
        left //= ring
    return {"fsdp": fsdp or left, "ring": ring, "ulysses": ulysses}


def load_model(path: Path, mesh: DeviceMesh, fp32: bool) -> FluxTransformer2DModel:
    """The model in fp32, each rank reading and holding its own part of the weights."""
    compute = torch.float32 if fp32 else torch.bfloat16
    blocks = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    whole = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, output_dtype=torch.float32)

    # FLUX's blocks return views, and nothing writes into them.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")

    def shard(model: FluxTransformer2DModel) -> None:
        meshcp.parallelize(model, mesh)
        over = meshcp.fsdp_mesh(mesh)
        for block in (*model.transformer_blocks, *model.single_transformer_blocks):
            fully_shard(block, mesh=over, mp_policy=blocks)
        fully_shard(model, mesh=over, mp_policy=whole)

    model = meshcp.load_sharded(FluxTransformer2DModel, path, mesh, shard, dtype=torch.float32)
    for module in model.modules():
        if isinstance(module, FSDPModule) and mesh.device_type == "cpu":
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot average
    return model.train()


class Training:
    """A model in training: everything that a checkpoint holds, and the step."""

    def __init__(self, arguments: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> None:
        self.arguments, self.mesh, self.device = arguments, mesh, device
        self.degree = mesh["fsdp"].size()
        if arguments.batch < self.degree:
            raise SystemExit(f"--batch {arguments.batch} is less than one sample for each of {self.degree} FSDP ranks")
        self.model = load_model(arguments.model, mesh, arguments.fp32)
        # All parameters in one call: DTensors take their time to dispatch.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.99), weight_decay=0.01, foreach=True)
        self.average = {name: p.detach().clone() for name, p in self.model.named_parameters()} if arguments.ema else {}
        # All randomness there is: every rank draws the same from it. Models with dropout need meshcp.seed_everything.
        self.batches = DigitBatches(arguments.batch, arguments.seed)
        self.losses: list[float] = []

    def step(self) -> None:
        """One step on this rank's samples of the next batch."""
        arguments, step = self.arguments, len(self.losses)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, arguments.steps, arguments.rate, arguments.warmup)
        data, labels, noise, sigmas = self.batches.draw()
        place = self.mesh.get_local_rank("fsdp")
        own = slice(len(data) * place // self.degree, len(data) * (place + 1) // self.degree)
        data, noise, sigmas = (x[own].to(self.device) for x in (data, noise, sigmas))
        # FSDP takes the mean over ranks; this makes it the mean over samples, of which ranks may have unequal numbers.
        loss = flow_loss(self.model, data, labels[own], noise, sigmas) * (len(data) * self.degree / arguments.batch)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), arguments.clip)
        self.optimizer.step()
        self.update_average(step)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        self.losses.append(mean.item() / dist.get_world_size())

    @torch.no_grad()
    def update_average(self, step: int) -> None:
        """Move the averaged weights towards the model's; faster in the first steps, to forget the initial ones."""
        weight = 1 - min(self.arguments.ema, (1 + step) / (10 + step))
        for name, parameter in self.model.named_parameters():
            if self.average:
                self.average[name].lerp_(parameter, weight)

    @torch.no_grad()
    def take_average(self) -> None:
        """Put the averaged weights, if there are any, into the model."""
        for name, parameter in self.model.named_parameters():
            if self.average:
                parameter.copy_(self.average[name])

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds. Weights are DTensors, which any mesh can read."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        settings = {name: str(getattr(self.arguments, name)) for name in DECISIVE}
        return {
            "model": model,
            "optimizer": optimizer,
            "average": self.average,
            "generator": self.batches.generator.get_state(),
            "course": json.dumps({"losses": self.losses, "settings": settings}),
        }

    def save(self) -> None:
        """Save a checkpoint. It gets its name when it is complete, so that a crash never leaves a broken one."""
        name = f"step-{len(self.losses):06d}"
        folder = self.arguments.out / "checkpoints"
        part = folder / f"{name}.part"
        on_first_rank(lambda: shutil.rmtree(part, ignore_errors=True))
        dcp.save(self.state(), checkpoint_id=part)

        def finish() -> None:
            part.rename(folder / name)
            for old in checkpoints(folder)[: -self.arguments.keep]:
                shutil.rmtree(old.rename(old.with_name(f"{old.name}.part")), ignore_errors=True)

        on_first_rank(finish)

    def resume(self) -> bool:
        """Go on from the latest checkpoint, if there is one."""
        found = checkpoints(self.arguments.out / "checkpoints")
        if not found:
            return False
        state = self.state()
        ours = json.loads(state["course"])["settings"]
        dcp.load(state, checkpoint_id=found[-1])
        course = json.loads(state["course"])
        changed = [
            f"--{name} {value}, now {ours[name]}" for name, value in course["settings"].items() if value != ours[name]
        ]
        if changed:
            raise SystemExit(f"{found[-1]} was made with {'; '.join(changed)}: give the same, or another --out")
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.average = state["average"]
        self.batches.generator.set_state(state["generator"])
        self.losses = course["losses"]
        return True


def checkpoints(folder: Path) -> list[Path]:
    """The complete ones, oldest first."""
    return sorted(folder.glob("step-" + "[0-9]" * 6))


def on_first_rank(action: Callable[[], object]) -> None:
    """The others wait until it is done."""
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def train(arguments: argparse.Namespace, device: torch.device) -> Training:
    """Train to the end, from the latest checkpoint if there is one."""
    degrees = default_degrees(dist.get_world_size(), arguments.fsdp, arguments.ring, arguments.ulysses)
    mesh = meshcp.init_mesh(**degrees, device_type=device.type)
    first = dist.get_rank() == 0
    watchdog = Watchdog(arguments.timeout)
    training = Training(arguments, mesh, device)
    resumed = training.resume()
    if first:
        print(f"{mesh}, {'from step' if resumed else 'step'} {len(training.losses)} of {arguments.steps}", flush=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, disable=not first) as progress:
        bar = progress.add_task("training", total=arguments.steps, completed=len(training.losses))
        while len(training.losses) < arguments.steps:
            watchdog.feed()
            training.step()
            done = len(training.losses)
            progress.update(bar, advance=1, description=f"training, loss {training.losses[-1]:.4f}")
            if done % arguments.checkpoint_every == 0 or done == arguments.steps:
                training.save()
    watchdog.stop()
    return training


def save_results(training: Training) -> None:
    """The model for `from_pretrained`, the losses as numbers and as a picture."""
    out = training.arguments.out
    training.take_average()
    meshcp.save_sharded(training.model, out / "model")
    if dist.get_rank() == 0:
        (out / "losses.json").write_text(json.dumps(training.losses))
        plot(training.losses, out / "loss.png")
        print(f"loss {training.losses[-1]:.4f} after {len(training.losses)} steps; model and plot are in {out}")


def plot(losses: list[float], path: Path) -> None:
    """Every loss, and the mean of the last twenty."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    smooth = torch.tensor(losses).unfold(0, min(20, len(losses)), 1).mean(1)
    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses, color="0.8", label="each step")
    axes.plot(range(len(losses) - len(smooth) + 1, len(losses) + 1), smooth, label="mean of 20 steps")
    axes.set(xlabel="step", ylabel="loss", yscale="log")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL_DIR, help="directory of the weights to start from")
    parser.add_argument("--out", type=Path, default=Path("fine-tuned"), help="directory for checkpoints and results")
    parser.add_argument("--fsdp", type=int, help="ranks that work on different samples; by default the rest")
    parser.add_argument("--ring", type=int, help="ring degree; by default 2 if the number of processes allows")
    parser.add_argument("--ulysses", type=int, help="ulysses degree; by default 2 if the number of processes allows")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=32, help="samples a step, over all ranks")
    parser.add_argument("--rate", type=float, default=2e-4, help="peak learning rate")
    parser.add_argument("--warmup", type=int, default=20, help="steps")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient")
    parser.add_argument("--ema", type=float, default=0.0, help="decay of averaged weights; 0 for none, 0.99 is usual")
    parser.add_argument("--fp32", action="store_true", help="compute in fp32, not in bf16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint-every", type=int, default=50, help="steps")
    parser.add_argument("--keep", type=int, default=2, help="checkpoints")
    parser.add_argument("--timeout", type=float, default=300, help="seconds without a step after which a rank gives up")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(given)


def main() -> None:
    arguments = parse_arguments()
    # More than the watchdog's, which says more.
    with processes(arguments.device, arguments.timeout + 30) as device:
        save_results(train(arguments, device))


if __name__ == "__main__":
    main()
