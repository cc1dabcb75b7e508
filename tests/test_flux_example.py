"""examples/flux.py, all but the GPU: its arguments, and a tiny pipeline of every part that FLUX has."""

from __future__ import annotations

import contextlib
import importlib.util
import string
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.harness import Pool

SCRIPT = Path(__file__).parents[1] / "examples" / "flux.py"


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("flux_example", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("world", "given", "message"),
    [
        (4, ["--ring", "3"], "--ring 3 does not divide the 4 ranks"),
        (4, ["--ring", "2", "--ulysses", "4"], "--ring 2 x --ulysses 4 is not the 4 ranks"),
        (1, ["--device", "cpu", "--offload"], "--offload is for GPUs"),
        pytest.param(
            1, [], "no CUDA device is available; --device cpu",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_are_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], world: int, given: list[str], message: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world))
    with pytest.raises(SystemExit):
        load_example().main(given)
    assert message in capsys.readouterr().err


def test_ulysses_takes_the_ranks_that_ring_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert load_example().arguments(["--device", "cpu", "--ring", "2"]).ulysses == 3


def save_tiny_pipeline(folder: Path) -> None:
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5TokenizerFast

    letters = string.ascii_lowercase
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *[f"{letter}</w>" for letter in letters]]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -1.0), *[(letter, -2.0) for letter in letters]]
    torch.manual_seed(0)
    pipe = FluxPipeline(
        FlowMatchEulerDiscreteScheduler(),
        AutoencoderKL(
            in_channels=3, out_channels=3, block_out_channels=(8, 8), latent_channels=4, norm_num_groups=1,
            down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
            use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.1, scaling_factor=0.9,
        ),
        CLIPTextModel(
            CLIPTextConfig(
                vocab_size=len(words), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
                projection_dim=8, bos_token_id=0, eos_token_id=1, pad_token_id=1,
            )
        ),
        CLIPTokenizer(vocab={word: index for index, word in enumerate(words)}, merges=[], model_max_length=77),
        T5EncoderModel(T5Config(vocab_size=len(pieces), d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)),
        T5TokenizerFast(vocab=pieces, extra_ids=0),
        FluxTransformer2DModel(
            in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=3,
            joint_attention_dim=8, pooled_projection_dim=8, axes_dims_rope=(2, 2, 4), guidance_embeds=True,
        ),
    )  # fmt: skip
    pipe.save_pretrained(folder)


def draw(folder: Path, out: Path, ring: int, *more: str) -> list[str]:
    """The script in a process that has its group already; returns what it printed."""
    import io

    import torch.distributed as dist

    example: Any = load_example()

    @contextlib.contextmanager
    def joined(kind: str) -> Iterator[torch.device]:
        yield torch.device(kind)

    example.processes = joined
    with contextlib.redirect_stdout(io.StringIO()) as said, pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", str(dist.get_world_size()))
        example.main([*options(folder, out, ring), *more])
    return said.getvalue().splitlines()


def options(folder: Path, out: Path, ring: int = 1) -> list[str]:
    given = {"model": folder, "prompt": "a lighthouse", "height": 24, "width": 40, "steps": 2, "text-length": 5}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return [*words, "--device", "cpu", "--ring", str(ring), "--out", str(out)]


def test_the_picture_is_that_of_a_single_process(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import numpy
    from PIL import Image

    save_tiny_pipeline(tmp_path / "model")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    load_example().main(options(tmp_path / "model", tmp_path / "alone.png"))
    assert "on ring 1 x ulysses 1" in capsys.readouterr().out
    printed = pool.run(3, draw, tmp_path / "model", tmp_path / "parallel.png", 3, "--gather-kv", timeout=100)
    assert "on ring 3 x ulysses 1" in printed[0][0]
    assert "ring 0/3 (KV gathered)" in printed[0][1]
    assert not printed[1]
    alone, parallel = (numpy.asarray(Image.open(tmp_path / f"{n}.png")).astype(int) for n in ("alone", "parallel"))
    assert alone.shape == (24, 40, 3)
    assert alone.std() > 1
    # A rounding more or less of a colour.
    assert abs(alone - parallel).max() <= 1
