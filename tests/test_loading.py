"""Loading that fits: what a rank reads, what it holds, and that it is what ``from_pretrained`` gives."""

from __future__ import annotations

import ctypes
import gc
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import ConfigMixin, FluxTransformer2DModel, ModelMixin
from diffusers.configuration_utils import register_to_config
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import meshcp
from meshcp import loading
from tests.harness import Pool, make_mesh

Axes = tuple[tuple[str, int], ...]

# Five rows here and there (proj_out, the heads of x_embedder's input), which four ranks share as 2, 2, 1 and 0.
FLUX = {
    "patch_size": 1,
    "in_channels": 5,
    "num_layers": 2,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 5,
    "joint_attention_dim": 12,
    "pooled_projection_dim": 10,
    "axes_dims_rope": (4, 6, 6),
}
WAN = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 8,
    "freq_dim": 16,
    "ffn_dim": 24,
    "num_layers": 1,
    "rope_max_seq_len": 32,
}
QWEN = {
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 8,
    "axes_dims_rope": (4, 6, 6),
}


class Odd(ModelMixin, ConfigMixin):
    """What a loader can trip over: tied weights, tables that no file holds, scalars, integers, five rows."""

    config_name = "config.json"

    @register_to_config
    def __init__(self, width: int = 6, rows: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(width, rows)
        self.second = nn.Linear(width, rows, bias=False)
        self.second.weight = self.first.weight
        self.out = nn.Linear(rows, width)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.frozen = nn.Parameter(torch.ones(rows), requires_grad=False)
        self.register_buffer("table", torch.arange(12.0).sin(), persistent=False)
        self.register_buffer("running", torch.zeros(3))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.plain_table = torch.arange(4.0).cos()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x) + self.second(x) * self.frozen + self.plain_table[0] + self.table[1]
        out: Tensor = self.out(hidden) * self.scale + self.running[0] + self.steps
        return out


def randomize(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
            else:
                tensor.copy_(torch.tensor(7))
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FLUX in one file, in half precision beside it, and in several files."""
    root = tmp_path_factory.mktemp("saved")
    model = randomize(FluxTransformer2DModel(**FLUX))
    model.save_pretrained(root / "single")
    model.save_pretrained(root / "spread", max_shard_size="100KB")
    model.to(torch.float16).save_pretrained(root / "single", variant="fp16")
    return root


# -- the same as from_pretrained ---------------------------------------------------------------------------------------


def shard_by_hand(mesh: DeviceMesh) -> Callable[[nn.Module], None]:
    """Tensor parallel with torch's own styles, and FSDP over what is left, also where both cut the same dim."""

    def shard(model: nn.Module) -> None:
        names = mesh.mesh_dim_names or ()
        plan: dict[str, Any]
        if isinstance(model, FluxTransformer2DModel):
            plan = {
                "transformer_blocks.*.ff.net.0.proj": ColwiseParallel(),
                "transformer_blocks.*.ff.net.2": RowwiseParallel(),
            }
            blocks = [*model.transformer_blocks, *model.single_transformer_blocks]
        else:
            plan, blocks = {"out": ColwiseParallel()}, []
        if "tp" in names:
            parallelize_module(model, mesh["tp"], plan, src_data_rank=None)
        if "fsdp" in names:
            over = mesh["dp", "fsdp"] if "dp" in names else mesh["fsdp"]
            for block in blocks:
                fully_shard(block, mesh=over)
            # FSDP shards no scalars: this one stays a plain tensor beside DTensors.
            fully_shard(model, mesh=over, ignored_params={p for p in model.parameters() if p.ndim == 0})

    return shard


def difference(found: nn.Module, expected: nn.Module) -> list[str]:
    """Where the parameters and buffers of this rank are not the same to the bit; tied ones as often as they appear."""
    wrong = []
    have = dict([*found.named_parameters(remove_duplicate=False), *found.named_buffers(remove_duplicate=False)])
    want = dict([*expected.named_parameters(remove_duplicate=False), *expected.named_buffers(remove_duplicate=False)])
    if list(have) != list(want):
        wrong.append(f"names: {list(have)}, expected {list(want)}")
    for name in have.keys() & want.keys():
        a, b = have[name], want[name]
        if type(a) is not type(b) or a.dtype != b.dtype or a.requires_grad != b.requires_grad:
            wrong.append(
                f"{name}: {type(a)} {a.dtype} {a.requires_grad}, expected {type(b)} {b.dtype} {b.requires_grad}"
            )
        if isinstance(a, DTensor) and isinstance(b, DTensor):
            if (a.placements, a.device_mesh, a.shape, a.stride()) != (b.placements, b.device_mesh, b.shape, b.stride()):
                wrong.append(f"{name}: {a.placements} {a.shape}, expected {b.placements} {b.shape}")
            a, b = a.to_local(), b.to_local()
        if not torch.equal(a, b):
            wrong.append(f"{name} {tuple(a.shape)}, expected {tuple(b.shape)}: other values")
    return wrong


def load_both(
    kind: type[Any], path: str, axes: Axes, dtype: torch.dtype | None, by_hand: bool, **options: Any
) -> list[str]:
    mesh = make_mesh(axes)
    shard = shard_by_hand(mesh) if by_hand else None
    loaded = meshcp.load_sharded(kind, path, mesh, shard, dtype=dtype, **options)
    expected = kind.from_pretrained(path, torch_dtype=dtype, **options)
    (shard or (lambda model: loading._shard_by_axes(model, mesh)))(expected)
    wrong = difference(loaded, expected)
    if loaded.training or dict(loaded.config) != dict(expected.config):
        wrong.append(f"training {loaded.training}, config {dict(loaded.config)}, expected {dict(expected.config)}")
    return wrong


MESHES: list[tuple[Axes, bool]] = [
    ((("fsdp", 4),), True),
    ((("fsdp", 2), ("tp", 2)), True),
    ((("dp", 2), ("fsdp", 2)), True),
    ((("tp", 4),), True),
    ((("fsdp", 2), ("tp", 2)), False),
    ((("dp", 2), ("fsdp", 2)), False),
    ((("fsdp", 2), ("ulysses", 2)), False),
]


@pytest.mark.parametrize(("axes", "by_hand"), MESHES, ids=str)
def test_shards_are_those_of_from_pretrained(pool: Pool, saved: Path, axes: Axes, by_hand: bool) -> None:
    for folder, dtype, variant in (("spread", None, None), ("single", torch.bfloat16, "fp16")):
        path = str(saved / folder)
        for wrong in pool.run(4, load_both, FluxTransformer2DModel, path, axes, dtype, by_hand, variant=variant):
            assert not wrong


def forward_both(path: str) -> float:
    mesh = make_mesh((("fsdp", 2), ("ulysses", 2)))
    loaded = meshcp.load_sharded(FluxTransformer2DModel, path, mesh)
    generator = torch.Generator().manual_seed(3)
    inputs = {
        "hidden_states": torch.randn(1, 7, 5, generator=generator),
        "encoder_hidden_states": torch.randn(1, 3, 12, generator=generator),
        "pooled_projections": torch.randn(1, 10, generator=generator),
        "timestep": torch.tensor([0.3]),
        "img_ids": torch.randint(0, 5, (7, 3), generator=generator).float(),
        "txt_ids": torch.zeros(3, 3),
    }
    with torch.no_grad():
        found = loaded(**inputs).sample
        expected = FluxTransformer2DModel.from_pretrained(path)(**inputs).sample
    return float((found - expected).abs().max() / expected.abs().max())


def test_loaded_model_computes_the_same(pool: Pool, saved: Path) -> None:
    assert max(pool.run(4, forward_both, str(saved / "single"))) < 1e-5


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "config"), [("WanTransformer3DModel", WAN), ("QwenImageTransformer2DModel", QWEN)])
def test_tables_that_no_file_holds_are_real(
    tmp_path: Path, name: str, config: dict[str, Any], dtype: torch.dtype
) -> None:
    """Rotary tables are non-persistent buffers (Wan) or plain attributes (Qwen); Wan keeps some weights in fp32."""
    kind = getattr(diffusers, name)
    randomize(kind(**config)).save_pretrained(tmp_path)
    loaded, expected = (
        meshcp.load_sharded(kind, tmp_path, dtype=dtype),
        kind.from_pretrained(tmp_path, torch_dtype=dtype),
    )
    assert not difference(loaded, expected)
    if name == "QwenImageTransformer2DModel":
        torch.testing.assert_close(loaded.pos_embed.pos_freqs, expected.pos_embed.pos_freqs, rtol=0, atol=0)
    assert all(tensor.device.type == "cpu" for tensor in loaded.state_dict().values())


# -- odd models --------------------------------------------------------------------------------------------------------


def save_odd(path: Path, **changes: Tensor | None) -> dict[str, Tensor]:
    """An ``Odd`` on disk; ``changes`` replace tensors by name (dots as two underscores), or take them away."""
    model = randomize(Odd())
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, tensor in changes.items():
        state.pop(name.replace("__", "."), None)
        if tensor is not None:
            state[name.replace("__", ".")] = tensor
    path.mkdir(parents=True, exist_ok=True)
    model.save_config(path)
    save_file(state, path / "diffusion_pytorch_model.safetensors")
    return state


def load_odd(path: str, axes: Axes) -> dict[str, Any]:
    mesh = make_mesh(axes)
    model = meshcp.load_sharded(Odd, path, mesh, shard_by_hand(mesh))
    whole = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in model.state_dict().items()
    }
    rows = model.first.weight.to_local().shape[0] if isinstance(model.first.weight, DTensor) else 5
    tied = model.first.weight is model.second.weight
    return {"state": whole, "rows": rows, "tied": tied, "table": model.table, "out": model(torch.ones(2, 6)).detach()}


@pytest.mark.parametrize("named", ["both", "first", "second"])
def test_tied_parameters_stay_tied(tmp_path: Path, named: str) -> None:
    other = {"first": "second__weight", "second": "first__weight"}.get(named)
    state = save_odd(tmp_path, **({other: None} if other else {}))
    model = meshcp.load_sharded(Odd, tmp_path)
    assert model.first.weight is model.second.weight
    assert torch.equal(model.first.weight, state["second.weight" if named == "second" else "first.weight"])
    assert not model.frozen.requires_grad
    assert torch.equal(model.table, Odd().table)
    assert int(model.steps) == 7


def test_five_rows_on_four_ranks(pool: Pool, tmp_path: Path) -> None:
    state = save_odd(tmp_path / "odd", second__weight=None)
    expected = meshcp.load_sharded(Odd, tmp_path / "odd")(torch.ones(2, 6))
    found = pool.run(4, load_odd, str(tmp_path / "odd"), (("fsdp", 4),))
    assert [rank["rows"] for rank in found] == [2, 2, 1, 0]
    for rank in found:
        assert rank["tied"]
        for name, tensor in state.items():
            assert torch.equal(rank["state"][name], tensor), name
        assert torch.equal(rank["state"]["second.weight"], state["first.weight"])
        torch.testing.assert_close(rank["out"], expected)


def both_odd(path: str, axes: Axes) -> list[str]:
    mesh = make_mesh(axes)
    shard = shard_by_hand(mesh)
    loaded = meshcp.load_sharded(Odd, path, mesh, shard)
    expected = meshcp.load_sharded(Odd, path)
    shard(expected)
    return difference(loaded, expected)


@pytest.mark.parametrize("axes", [(("fsdp", 2), ("tp", 2)), (("fsdp", 4),), (("tp", 4),)], ids=str)
def test_cuts_on_one_dim_that_do_not_divide(pool: Pool, tmp_path: Path, axes: Axes) -> None:
    """Six rows, tensor parallel first and FSDP of the three that each keeps."""
    save_odd(tmp_path)
    for wrong in pool.run(4, both_odd, str(tmp_path), axes):
        assert not wrong


# -- refusals ----------------------------------------------------------------------------------------------------------


@contextmanager
def nothing_read() -> Iterator[None]:
    def read(*_: Any) -> int:
        raise AssertionError("a tensor was read")

    before, loading._fill_one = loading._fill_one, read
    try:
        yield
    finally:
        loading._fill_one = before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out__bias": None, "scale": None}, r"2 missing: scale, out.bias"),
        ({"first__weight": None, "second__weight": None}, r"2 missing: first.weight, second.weight"),
        ({"extra__weight": torch.ones(1)}, r"1 unexpected: extra.weight"),
        ({"out__weight": torch.ones(5, 6)}, r"1 of another shape: out.weight \(5, 6\) on disk, \(6, 5\) in the model"),
    ],
)
def test_weights_that_do_not_fit_are_named_before_anything_is_read(
    tmp_path: Path, changes: dict[str, Tensor | None], message: str
) -> None:
    save_odd(tmp_path, **changes)
    with nothing_read(), pytest.raises(meshcp.CheckpointError, match=message):
        meshcp.load_sharded(Odd, tmp_path)


def test_files_that_are_not_there_are_named(tmp_path: Path, saved: Path) -> None:
    with pytest.raises(meshcp.CheckpointError, match=r"has no config\.json"):
        meshcp.load_sharded(Odd, tmp_path)
    save_odd(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(meshcp.CheckpointError, match=r"config\.json cannot be read: .* Download it again"):
        meshcp.load_sharded(Odd, tmp_path)
    save_odd(tmp_path)
    with pytest.raises(
        meshcp.CheckpointError, match=r"model\.fp16\.safetensors.*found diffusion_pytorch_model\.safetensors"
    ):
        meshcp.load_sharded(Odd, tmp_path, variant="fp16")
    weights = tmp_path / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(meshcp.CheckpointError, match="cannot be read as safetensors"):
        meshcp.load_sharded(Odd, tmp_path)
    index = json.loads((saved / "spread" / "diffusion_pytorch_model.safetensors.index.json").read_text())
    (tmp_path / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(meshcp.CheckpointError, match=r"names files that are not there: diffusion_pytorch_model-00001"):
        meshcp.load_sharded(Odd, tmp_path)


def test_what_shard_adds_or_changes_is_named(tmp_path: Path) -> None:
    save_odd(tmp_path)

    def add(model: Odd) -> None:
        model.adapter = nn.Linear(2, 2, device="meta")

    def cut(model: Odd) -> None:
        model.out.weight = nn.Parameter(model.out.weight[:2])

    with (
        nothing_read(),
        pytest.raises(meshcp.CheckpointError, match=r"have no storage: adapter\.weight, adapter\.bias"),
    ):
        meshcp.load_sharded(Odd, tmp_path, shard=add)
    with nothing_read(), pytest.raises(meshcp.CheckpointError, match=r"out\.weight the shape \(2, 5\)"):
        meshcp.load_sharded(Odd, tmp_path, shard=cut)


# -- what fits ---------------------------------------------------------------------------------------------------------

LARGE = {**FLUX, "in_channels": 64, "attention_head_dim": 64, "num_attention_heads": 8, "axes_dims_rope": (16, 24, 24)}


class CountingFile:
    """``safe_open`` that adds up the bytes of what is taken from a file."""

    taken = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.file = safe_open(*args, **kwargs)

    def __enter__(self) -> CountingFile:
        self.file.__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        self.file.__exit__(*args)

    def keys(self) -> list[str]:
        return list(self.file.keys())

    def get_slice(self, name: str) -> CountingSlice:
        return CountingSlice(self.file.get_slice(name))


class CountingSlice:
    def __init__(self, source: Any) -> None:
        self.source = source

    def get_shape(self) -> list[int]:
        shape: list[int] = self.source.get_shape()
        return shape

    def __getitem__(self, where: Any) -> Tensor:
        part: Tensor = self.source[where]
        CountingFile.taken += part.numel() * part.element_size()
        return part


def peak() -> int:
    """The most memory that this process has held since it was asked to forget, by the kernel's count."""
    return 1024 * int(re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[0])


def held() -> int:
    return 1024 * int(re.findall(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[0])


def forget_peak() -> None:
    # A model is a cycle of references: freed later, it would hide as much growth.
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


@contextmanager
def exact() -> Iterator[None]:
    """Freed memory goes back at once; what malloc keeps otherwise depends on earlier tests."""
    libc = ctypes.CDLL(None)
    mmap_threshold, trim_threshold = -3, -1
    libc.mallopt(mmap_threshold, 1 << 16)
    libc.mallopt(trim_threshold, 0)
    libc.malloc_trim(0)
    try:
        yield
    finally:
        libc.mallopt(mmap_threshold, 1 << 25)
        libc.mallopt(trim_threshold, 1 << 26)


@exact()
def measure_load(path: str, world: int) -> dict[str, int]:
    mesh = make_mesh((("fsdp", world),))
    before_open, loading.safe_open = loading.safe_open, CountingFile
    CountingFile.taken = 0
    # Once for what the first use of anything costs.
    meshcp.load_sharded(FluxTransformer2DModel, path, mesh)
    loading.safe_open = before_open
    taken = CountingFile.taken
    forget_peak()
    start = held()
    model = meshcp.load_sharded(FluxTransformer2DModel, path, mesh)
    grown = peak() - start
    parts = [p.to_local() for p in model.parameters() if isinstance(p, DTensor)]
    largest = max(p.numel() * p.element_size() for p in model.parameters())
    own = sum(part.numel() * part.element_size() for part in parts)
    del model, parts
    forget_peak()
    start = held()
    for parameter in FluxTransformer2DModel.from_pretrained(path).parameters():
        parameter.sum()  # until it is used, it lies in the file
    return {"own": own, "taken": taken, "grown": grown, "largest": largest, "whole": peak() - start}


def can_measure() -> bool:
    return os.access("/proc/self/clear_refs", os.W_OK) and hasattr(ctypes.CDLL(None), "mallopt")


@pytest.mark.skipif(not can_measure(), reason="needs /proc/self/clear_refs and glibc")
@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_reads_its_own_part_and_holds_little_else(pool: Pool, tmp_path: Path, world: int) -> None:
    torch.manual_seed(0)
    model = FluxTransformer2DModel(**LARGE)
    total = 4 * sum(p.numel() for p in model.parameters())
    model.save_pretrained(tmp_path, max_shard_size="40MB")
    del model
    ranks = pool.run(world, measure_load, str(tmp_path), world)
    assert sum(rank["own"] for rank in ranks) == total
    for rank in ranks:
        print({name: f"{size / 2**20:.1f} MiB" for name, size in rank.items()})
        assert rank["taken"] == rank["own"]
        # The kernel counts whole pages; a few MB.
        slack = loading._MAPPED_BYTES + 8 * 2**20
        assert rank["grown"] <= rank["own"] + rank["largest"] + slack, f"{world} ranks: {rank}"
        assert rank["whole"] >= 0.9 * total, "this measures nothing"


@exact()
def measure_save(path: str, target: str, world: int) -> dict[str, int]:
    # Not measured the second time: what the allocator keeps from the first would go unseen.
    model = meshcp.load_sharded(FluxTransformer2DModel, path, make_mesh((("fsdp", world),)))
    forget_peak()
    start = held()
    meshcp.save_sharded(model, target, max_shard_size="1GB")
    grown = peak() - start
    forget_peak()
    start = held()
    whole = [p.full_tensor() for p in model.parameters() if isinstance(p, DTensor)]
    sizes = [4 * p.numel() for p in whole]
    return {"grown": grown, "largest": max(sizes), "total": sum(sizes), "gathered": peak() - start}


@pytest.mark.skipif(not can_measure(), reason="needs /proc/self/clear_refs and glibc")
def test_saving_holds_one_tensor_at_a_time(pool: Pool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    FluxTransformer2DModel(**LARGE).save_pretrained(tmp_path / "from")
    for rank in pool.run(2, measure_save, str(tmp_path / "from"), str(tmp_path / "to"), 2):
        print({name: f"{size / 2**20:.1f} MiB" for name, size in rank.items()})
        # A gathered tensor is made of pieces, which are there at the same time, and gloo makes buffers at first use.
        assert rank["grown"] <= 3 * rank["largest"] + 4 * 2**20
        assert rank["gathered"] >= 0.9 * rank["total"], "this measures nothing"


# -- the way back ------------------------------------------------------------------------------------------------------


def save_from(path: str, target: str, axes: Axes, by_hand: bool, kind: type[Any], **options: Any) -> None:
    mesh = make_mesh(axes)
    model = meshcp.load_sharded(kind, path, mesh, shard_by_hand(mesh) if by_hand else None)
    meshcp.save_sharded(model, target, **options)


@pytest.mark.parametrize(("axes", "by_hand"), [MESHES[0], MESHES[2], MESHES[4]], ids=str)
def test_what_is_saved_loads_with_from_pretrained(
    pool: Pool, saved: Path, tmp_path: Path, axes: Axes, by_hand: bool
) -> None:
    expected = FluxTransformer2DModel.from_pretrained(saved / "single")
    pool.run(
        4, save_from, str(saved / "single"), str(tmp_path), axes, by_hand, FluxTransformer2DModel, max_shard_size="90KB"
    )
    sizes = [file.stat().st_size for file in tmp_path.glob("*.safetensors")]
    largest = max(4 * p.numel() for p in expected.parameters())
    assert len(sizes) > 3
    assert max(sizes) < largest + 10_000
    found = FluxTransformer2DModel.from_pretrained(tmp_path)
    assert not difference(found, expected)
    kept = {name: value for name, value in found.config.items() if name != "_name_or_path"}
    assert kept == {name: value for name, value in expected.config.items() if name != "_name_or_path"}
    assert json.loads((tmp_path / "config.json").read_text())["_class_name"] == "FluxTransformer2DModel"
    # A second save over the first, in one file, leaves nothing of it, nor of one that was killed.
    (tmp_path / "diffusion_pytorch_model-00001-of-00004.safetensors.0123abcd.tmp").touch()
    pool.run(
        4, save_from, str(saved / "single"), str(tmp_path), axes, by_hand, FluxTransformer2DModel, dtype=torch.float16
    )
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "diffusion_pytorch_model.safetensors"]
    half = FluxTransformer2DModel.from_pretrained(saved / "single", variant="fp16")
    assert not difference(FluxTransformer2DModel.from_pretrained(tmp_path), half)


@pytest.mark.parametrize("axes", [(("fsdp", 2), ("tp", 2)), (("fsdp", 4),)], ids=str)
def test_odd_models_are_saved_whole(pool: Pool, tmp_path: Path, axes: Axes) -> None:
    state = save_odd(tmp_path / "from", second__weight=None)
    pool.run(4, save_from, str(tmp_path / "from"), str(tmp_path / "to"), axes, True, Odd)
    found = load_file(tmp_path / "to" / "diffusion_pytorch_model.safetensors")
    assert found.keys() == state.keys() | {"second.weight"}
    for name, tensor in found.items():
        assert torch.equal(tensor, state[name.replace("second", "first")]), name
    with safe_open(tmp_path / "to" / "diffusion_pytorch_model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def fail_to_save(path: str, target: str) -> str:
    """Nothing can be written; and before, what the writer is told when another rank is gone."""
    model = meshcp.load_sharded(FluxTransformer2DModel, path, make_mesh((("fsdp", 2),)))
    append, count, full_tensor = loading._Writer.append, 0, DTensor.full_tensor

    def gone(self: Any) -> Any:
        raise RuntimeError("Connection closed by peer")

    DTensor.full_tensor = gone  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="Connection closed"):
        meshcp.save_sharded(model, target)
    DTensor.full_tensor = full_tensor  # type: ignore[method-assign]

    def fail(self: Any, *args: Any) -> None:
        nonlocal count
        count += 1
        if count == 20:
            raise OSError(28, "No space left on device")
        append(self, *args)

    loading._Writer.append = fail  # type: ignore[method-assign]
    try:
        meshcp.save_sharded(model, target, max_shard_size=90_000)
    except meshcp.CheckpointError as error:
        return str(error)
    finally:
        loading._Writer.append = append  # type: ignore[method-assign]
    return ""


def test_a_save_that_fails_says_so_on_every_rank_and_leaves_what_was_there(
    pool: Pool, saved: Path, tmp_path: Path
) -> None:
    FluxTransformer2DModel.from_pretrained(saved / "single").save_pretrained(tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    for message in pool.run(2, fail_to_save, str(saved / "single"), str(tmp_path)):
        assert "No space left on device" in message
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_one_process_needs_no_mesh(tmp_path: Path) -> None:
    save_odd(tmp_path / "from", second__weight=None)
    model = meshcp.load_sharded(Odd, tmp_path / "from", dtype=torch.float16)
    meshcp.save_sharded(model, tmp_path / "to", variant="fp16", max_shard_size=40)
    assert (tmp_path / "to" / "diffusion_pytorch_model.safetensors.index.fp16.json").is_file()
    assert not difference(meshcp.load_sharded(Odd, tmp_path / "to", dtype=torch.float16, variant="fp16"), model)
    with pytest.raises(meshcp.CheckpointError, match="max_shard_size is 'huge'"):
        meshcp.save_sharded(model, tmp_path / "to", max_shard_size="huge")
    assert math.isclose(loading._bytes_of("1.5GB"), 1.5e9)
    assert loading._bytes_of("2MiB") == 2 * 2**20
