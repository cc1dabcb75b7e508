"""The training example: its losses are those of a plain loop in one process, on any mesh, whatever happens."""

from __future__ import annotations

import faulthandler
import io
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers import FluxTransformer2DModel
from torch import Tensor
from torch.distributed.tensor import DTensor

import meshcp
from tests.harness import Pool

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "examples"))

import train_fsdp  # noqa: E402
from digits_pipeline import PATCH, POOLED_DIM, TEXT_DIM  # noqa: E402
from train import DigitBatches, flow_loss, learning_rate  # noqa: E402

STEPS = 200
Degrees = tuple[int, int, int]

# As the digits model, but so small that 200 steps take seconds. Three heads, which two ranks cannot halve.
TINY = {
    "in_channels": PATCH * PATCH,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 3,
    "joint_attention_dim": TEXT_DIM,
    "pooled_projection_dim": POOLED_DIM,
    "axes_dims_rope": (4, 6, 6),
}


def options(path: Path | str, out: Path | str, degrees: Degrees, *more: str, steps: int = STEPS) -> list[str]:
    names = ("--fsdp", "--ring", "--ulysses")
    mesh = [text for name, degree in zip(names, degrees, strict=True) for text in (name, str(degree))]
    given = [
        "--out",
        str(out),
        "--steps",
        str(steps),
        "--batch",
        "4",
        "--rate",
        "1e-3",
        "--timeout",
        "110",
        "--device",
        "cpu",
    ]
    return [*given, *([] if path == "" else ["--model", str(path)]), *mesh, *more]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    FluxTransformer2DModel(**TINY).save_pretrained(folder)
    return folder


def plain_loop(path: str, steps: int, batch: int, rate: float, decay: float) -> tuple[list[float], dict[str, Tensor]]:
    """What a user without meshcp and FSDP would write: the losses, and the averaged weights after 18 steps."""
    arguments = train_fsdp.parse_arguments([])
    model = FluxTransformer2DModel.from_pretrained(path).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=0.01)
    batches = DigitBatches(batch, arguments.seed)
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses, early = [], {}
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = learning_rate(step, steps, rate, arguments.warmup)
        loss = flow_loss(model, *batches.draw())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), arguments.clip)
        optimizer.step()
        losses.append(loss.item())
        if step < 18:
            for name, p in model.named_parameters():
                average[name].lerp_(p.detach(), 1 - min(decay, (1 + step) / (10 + step)))
            early = {name: tensor.clone() for name, tensor in average.items()}
    return losses, early


@pytest.fixture(scope="module")
def expected(pool: Pool, tiny: Path) -> tuple[list[float], dict[str, Tensor]]:
    losses, average = pool.run(1, plain_loop, str(tiny), STEPS, 4, 1e-3, 0.99, timeout=90)[0]
    print(f"largest loss {max(losses):.3f}, smallest {min(losses):.3f}")
    assert sum(losses[-20:]) < 0.8 * sum(losses[:20]), "nothing was learnt, so nothing is compared"
    return losses, average


def run_steps(given: list[str], steps: int, save: bool = False) -> dict[str, Any]:
    """Take so many steps, from a checkpoint if there is one."""
    arguments = train_fsdp.parse_arguments(given)
    mesh = meshcp.init_mesh(fsdp=arguments.fsdp, ring=arguments.ring, ulysses=arguments.ulysses, device_type="cpu")
    training = train_fsdp.Training(arguments, mesh, torch.device("cpu"))
    resumed = training.resume()
    start = len(training.losses)
    for _ in range(steps):
        training.step()
    if save:
        training.save()
    whole = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in training.average.items()}
    return {"losses": training.losses, "average": whole, "start": start if resumed else None}


def furthest(found: list[float], expected: list[float]) -> float:
    """The largest difference between two curves, relative to the loss at that step."""
    assert all(map(math.isfinite, found)), found
    return max(abs(a - b) / b for a, b in zip(found, expected[: len(found)], strict=True))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("degrees", "steps"),
    [((2, 1, 2), STEPS), ((1, 2, 2), 30), ((3, 1, 1), 30), ((1, 3, 1), 30)],
    ids=str,
)
def test_loss_curve_is_that_of_a_plain_loop(
    pool: Pool, tiny: Path, tmp_path: Path, expected: tuple[list[float], Any], degrees: Degrees, steps: int
) -> None:
    """Three data ranks share a batch of four as 1, 1 and 2: the mean is over samples, not over ranks."""
    world = degrees[0] * degrees[1] * degrees[2]
    given = options(tiny, tmp_path, degrees, "--fp32")
    for rank in pool.run(world, run_steps, given, steps, timeout=200):
        assert len(rank["losses"]) == steps
        print(f"{degrees}: {furthest(rank['losses'], expected[0]):.1e}")
        assert furthest(rank["losses"], expected[0]) < 1e-5


def test_resumes_on_other_meshes(
    pool: Pool, tiny: Path, tmp_path: Path, expected: tuple[list[float], dict[str, Tensor]]
) -> None:
    """4 ranks, then 2, then 1, each from the checkpoint of the one before; losses and averaged weights are the same."""
    found: dict[str, Any] = {}
    for start, degrees in ((None, (2, 2, 1)), (6, (1, 1, 2)), (12, (1, 1, 1))):
        given = options(tiny, tmp_path, degrees, "--fp32", "--ema", "0.99")
        for found in pool.run(degrees[0] * degrees[1] * degrees[2], run_steps, given, 6, save=True, timeout=110):
            assert found["start"] == start
        # What a crash in the middle of saving leaves.
        (tmp_path / "checkpoints" / "step-000099.part").mkdir(exist_ok=True)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step-000012",
        "step-000018",
        "step-000099.part",
    ]
    assert furthest(found["losses"], expected[0]) < 1e-5
    assert len(found["losses"]) == 18
    for name, tensor in expected[1].items():
        torch.testing.assert_close(found["average"][name], tensor, rtol=1e-3, atol=1e-5)


def refuse_other_settings(given: list[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        run_steps(given, 1)
    return str(caught.value)


def test_a_checkpoint_of_other_settings_is_refused(pool: Pool, tiny: Path, tmp_path: Path) -> None:
    pool.run(2, run_steps, options(tiny, tmp_path, (2, 1, 1), "--fp32"), 1, save=True)
    message = pool.run(2, refuse_other_settings, options(tiny, tmp_path, (2, 1, 1), "--fp32", "--seed", "3"))[0]
    assert "--seed 0, now 3: give the same, or another --out" in message
    message = pool.run(2, refuse_other_settings, options(tiny, tmp_path, (2, 1, 1), "--fp32", "--batch", "1"))[0]
    assert "--batch 1 is less than one sample for each of 2 FSDP ranks" in message


def test_bf16_with_fp32_master_weights_learns_alike(pool: Pool, tmp_path: Path) -> None:
    """The shipped digits model: bf16 moves the curve by per cents, not more."""
    full = pool.run(1, run_steps, options("", tmp_path / "fp32", (1, 1, 1), "--fp32"), 8, timeout=110)[0]
    half = pool.run(4, run_steps, options("", tmp_path / "bf16", (2, 1, 2)), 8, timeout=110)[0]
    assert half["losses"] != full["losses"]
    assert furthest(half["losses"], full["losses"]) < 0.05


def watched(port: int) -> str:
    """What the watchdog says on ranks 0 and 1, which wait for rank 2, which does not show that it lives."""
    if dist.get_rank() == 2:
        time.sleep(4)
        dist.barrier()
        return ""
    ended = threading.Event()

    def end(code: int) -> None:
        # Like the real one it never returns: a watchdog that went on would end this worker in a later test.
        ended.set()
        raise SystemExit(code)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "_exit", end)
        for name in ("dump_traceback", "dump_traceback_later", "cancel_dump_traceback_later"):
            patch.setattr(faulthandler, name, lambda *args, **kwargs: None)
        for name, value in (("TORCHELASTIC_RUN_ID", ""), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", str(port))):
            patch.setenv(name, value)
        patch.setattr(sys, "stderr", io.StringIO())
        watchdog = train_fsdp.Watchdog(1, listen=1)
        dist.barrier()
        watchdog.stop()
        assert ended.wait(20)
        return str(sys.stderr.getvalue())


def test_the_watchdog_names_the_rank_and_the_collective(pool: Pool) -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    for rank, said in enumerate(pool.run(3, watched, store.port)[:2]):
        assert said.startswith(f"rank {rank}: no step in 1 s. It waits in barrier (")
        assert "Ranks that do not answer: [2]" in said


def start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1")
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, *command], cwd=log.parent, env=environment, stdout=file, stderr=subprocess.STDOUT
        )


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the ranks in /proc")
@pytest.mark.timeout(300)
def test_a_killed_rank_ends_the_job_and_nothing_is_lost(pool: Pool, tiny: Path, tmp_path: Path) -> None:
    """kill -9 of one of two ranks; then plain `python` goes on from the last checkpoint, to the very same losses."""
    script = str(ROOT / "examples" / "train_fsdp.py")
    out, log = tmp_path / "out", tmp_path / "log"
    given = options(tiny, out, (1, 1, 2), "--fp32", "--checkpoint-every", "10", steps=60)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, *given]
    job = start(torchrun, log)
    try:
        deadline = time.monotonic() + 120
        while not (out / "checkpoints" / "step-000010").exists():
            assert job.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.01)
        ranks = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        assert len(ranks) == 2
        os.kill(int(ranks[1]), signal.SIGKILL)
        assert job.wait(timeout=60) != 0
    finally:
        job.kill()
        job.wait()
    assert not (out / "losses.json").exists()
    last = sorted((out / "checkpoints").glob("step-??????"))[-1].name
    log = tmp_path / "log-of-one"
    alone = start([script, *options(tiny, out, (1, 1, 1), "--fp32", steps=60)], log)
    try:
        assert alone.wait(timeout=150) == 0, log.read_text()
    finally:
        alone.kill()
        alone.wait()
    assert f"from step {int(last[5:])} of 60" in log.read_text()
    losses = json.loads((out / "losses.json").read_text())
    assert len(losses) == 60
    assert furthest(losses, pool.run(1, plain_loop, str(tiny), 60, 4, 1e-3, 0.99)[0][0]) < 1e-5
    assert (out / "loss.png").stat().st_size > 5000
    trained = FluxTransformer2DModel.from_pretrained(out / "model")
    assert trained.config.num_attention_heads == 3
