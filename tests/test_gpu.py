"""The CUDA paths: what can be checked of them without a GPU, and, marked ``gpu``, all else."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import meshcp
from meshcp import _compat, collectives
from meshcp.attention import kernels
from meshcp.attention.kernels import KERNELS, Kernel, KernelCall, block_backward, block_forward, choose_kernel
from tests.attention_cases import softmax_attention
from tests.harness import Pool, assert_close_to
from tests.model_cases import build, make_inputs
from tests.rows import flux

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
CUDA_KERNELS = tuple(kernel for kernel in KERNELS.values() if kernel.devices == ("cuda",))
HOPPER, TURING = (9, 0), (7, 5)


# -- which kernel ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (KernelCall("cuda", BF16, False, 128, False, HOPPER), "_native_flash"),
        (KernelCall("cuda", FP16, False, 64, False, HOPPER), "_native_flash"),
        (KernelCall("cuda", BF16, True, 128, False, HOPPER), "_native_efficient"),
        (KernelCall("cuda", FP32, False, 128, False, HOPPER), "_native_efficient"),
        (KernelCall("cuda", FP32, True, 128, False, HOPPER), "_native_efficient"),
        (KernelCall("cuda", FP64, False, 128, False, HOPPER), "_native_math"),
        (KernelCall("cuda", BF16, False, 128, True, HOPPER), "_native_math"),
        (KernelCall("cuda", BF16, False, 20, False, HOPPER), "_native_flash"),
        (KernelCall("cuda", BF16, False, 288, False, HOPPER), "_native_efficient"),
        (KernelCall("cuda", FP16, False, 128, False, TURING), "_native_efficient"),
        (KernelCall("cuda", FP16, True, 128, False, TURING), "_native_efficient"),
        (KernelCall("cuda", BF16, False, 128, False, TURING), "_native_math"),
        (KernelCall("cuda", BF16, False), "_native_flash"),
        (KernelCall("cpu", BF16, False, 128), "cpu_flash"),
        (KernelCall("cpu", FP64, True, 128), "cpu_flash"),
        (KernelCall("cpu", FP32, False, 128, True), "_native_math"),
        (KernelCall("mps", FP32, True, 128), "_native_math"),
    ],
    ids=str,
)
def test_the_fastest_kernel_that_fits_is_chosen(call: KernelCall, name: str) -> None:
    assert {choose_kernel(said, call).name for said in ("", "native")} == {name}


@pytest.mark.parametrize(
    ("name", "call", "reason"),
    [
        ("_native_flash", KernelCall("cpu", BF16), "it runs on cuda, not on cpu"),
        ("_native_flash", KernelCall("cuda", FP32), "it takes bfloat16, float16, not float32"),
        ("_native_flash", KernelCall("cuda", BF16, mask=True), "it takes no attention mask"),
        ("_native_flash", KernelCall("cuda", BF16, width=264), "it takes head widths up to 256, not 264"),
        ("_native_flash", KernelCall("cuda", FP16, capability=TURING), "of compute capability 8.0 or newer, found 7.5"),
        ("_native_efficient", KernelCall("cuda", FP64), "it takes bfloat16, float16, float32, not float64"),
        ("_native_efficient", KernelCall("cuda", BF16, capability=TURING), "in bfloat16 it needs a device"),
        ("_native_cudnn", KernelCall("cuda", FP32), "it takes bfloat16, float16, not float32"),
        ("_native_cudnn", KernelCall("cuda", FP16, widths=True), "no values of another width than the keys"),
        ("flash_hub", KernelCall("cuda", BF16), "use one of native, _native_flash, _native_efficient"),
    ],
)
def test_a_kernel_that_does_not_fit_is_refused(name: str, call: KernelCall, reason: str) -> None:
    with pytest.raises(meshcp.AttentionError) as raised:
        choose_kernel(name, call)
    assert reason in str(raised.value)
    assert repr(name) in str(raised.value)


# -- how kernels are called --------------------------------------------------------------------------------------------


# On the meta device: not every build of torch makes fake tensors of CUDA devices.


@pytest.mark.parametrize("kernel", CUDA_KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("width", [16, 20])
def test_operators_take_the_calls_and_give_the_shapes(kernel: Kernel, masked: bool, width: int) -> None:
    if masked and not kernel.masks:
        return
    batch, heads, kv_heads, queries, keys = 2, 6, 2, 37, 45

    # [B, S, H, D] memory, as it is after the exchange.
    q, grad = (torch.empty(batch, queries, heads, width, device="meta", dtype=FP16).transpose(1, 2) for _ in "qg")
    k, v = (torch.empty(batch, keys, kv_heads, width, device="meta", dtype=FP16).transpose(1, 2) for _ in "kv")
    mask = torch.empty(batch, 1, 1, keys, device="meta", dtype=torch.bool) if masked else None
    out, lse = block_forward(kernel, q, k, v, mask, False, 0.3)
    dq, dk, dv = block_backward(kernel, grad, q, k, v, out, lse, mask, False, 0.3)
    assert (out.shape, lse.shape) == ((batch, heads, queries, width), (batch, heads, queries))
    assert (out.dtype, lse.dtype) == (FP16, FP32)
    assert dq.shape == out.shape
    assert dk.shape == dv.shape == (batch, kv_heads, keys, width)


class Recorder:
    """Stands for ``_compat.fused_attention``: notes what an operator is given, by the names of its schema."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, kernel: str) -> Callable[..., Any]:
        operator = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}")

        def call(*args: Any, **kwargs: Any) -> Any:
            names = [argument.name for argument in operator.default._schema.arguments]
            self.calls.append({**dict(zip(names, args, strict=False)), **kwargs})
            return operator(*args, **kwargs)

        return call


def recorded(monkeypatch: pytest.MonkeyPatch, kernel: Kernel, mask_shape: tuple[int, ...] | None = None) -> list[dict]:
    recorder = Recorder()
    monkeypatch.setattr(_compat, "fused_attention", recorder)
    q, k, v, grad = (torch.empty(2, 5, 3, 12, device="meta", dtype=FP16).transpose(1, 2) for _ in range(4))
    mask = None if mask_shape is None else torch.empty(mask_shape, device="meta", dtype=torch.bool)
    out, lse = block_forward(kernel, q, k, v, mask, mask is None, 0.3)
    block_backward(kernel, grad, q, k, v, out, lse, mask, mask is None, 0.3)
    return recorder.calls


@pytest.mark.parametrize("kernel", CUDA_KERNELS, ids=lambda kernel: kernel.name)
def test_every_argument_reaches_the_place_that_the_schema_has_for_it(
    monkeypatch: pytest.MonkeyPatch, kernel: Kernel
) -> None:
    forward, backward = recorded(monkeypatch, kernel)
    for call in (forward, backward):
        assert call["dropout_p"] == 0.0
        assert call["is_causal"] is True
        assert call["scale"] == 0.3
        assert call["query"].shape == call["key"].shape == call["value"].shape == (2, 3, 5, 16)
        assert all(call[name].stride(-1) == 1 for name in ("query", "key", "value"))
    assert not forward.get("return_debug_mask", False)
    assert forward.get("compute_log_sumexp", True)
    assert backward.get("grad_out", backward.get("grad_out_")).shape == (2, 3, 5, 16)
    assert backward["out"].shape == (2, 3, 5, 16)
    for name, size in (("max_q", 5), ("max_k", 5)):
        assert backward.get(name, size) == size
    assert backward.get("cum_seq_q") is backward.get("cum_seq_k") is None


def test_the_efficient_kernel_gets_what_it_does_not_check(monkeypatch: pytest.MonkeyPatch) -> None:
    _, backward = recorded(monkeypatch, KERNELS["_native_efficient"])
    # Rows of out at heads x width, lse filled up to 32 rows.
    assert backward["out"].transpose(1, 2).is_contiguous()
    assert backward["logsumexp"].shape == (2, 3, 32)
    assert backward["grad_input_mask"] == [True, True, True, False]


@pytest.mark.parametrize("shape", [(2, 1, 1, 5), (1, 1, 5, 5), (2, 3, 5, 5)], ids=str)
def test_the_bias_of_the_efficient_kernel_is_aligned_and_no_larger_than_the_mask(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    forward, backward = recorded(monkeypatch, KERNELS["_native_efficient"], shape)
    for call in (forward, backward):
        bias = call["attn_bias"]
        assert bias.shape == (2, 3, 5, 5)
        assert bias.stride(-1) == 1
        assert all(stride % 16 == 0 for stride in bias.stride()[:-1])
        assert bias.untyped_storage().nbytes() == shape[0] * shape[1] * shape[2] * 16 * 2


def test_the_cudnn_kernel_gets_contiguous_tensors_and_the_lse_as_it_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, backward = recorded(monkeypatch, KERNELS["_native_cudnn"])
    for call, names in ((forward, ()), (backward, ("out", "grad_out"))):
        assert all(call[name].is_contiguous() for name in ("query", "key", "value", *names))
    x = torch.empty(2, 3, 5, 16, device="meta", dtype=FP16)
    given = torch.ops.aten._scaled_dot_product_cudnn_attention(x, x, x, None, True)
    assert backward["logsumexp"].shape == given[1].shape


def strided(*shape: int) -> Tensor:
    """``[B, H, S, D]`` whose last dimension is not dense."""
    return torch.randn(*shape[:2], shape[3], shape[2], dtype=FP64).mT.requires_grad_()


@pytest.mark.parametrize("masked", [False, True])
def test_tensors_whose_rows_are_not_dense(masked: bool) -> None:
    # Kernels assume dense rows: CPU flash read other elements, and said nothing.
    q, k, v = strided(2, 3, 5, 8), strided(2, 3, 7, 8), strided(2, 3, 7, 8)
    mask = torch.randn(2, 1, 7, 5, dtype=FP64).mT if masked else None
    out, _ = torch.ops.meshcp.attention(q, k, v, mask)
    expected = softmax_attention(q, k, v, mask, False, None)
    weights = strided(2, 3, 5, 8).detach()
    assert_close_to(out.detach(), expected.detach())
    for found, want in zip(
        torch.autograd.grad(out, (q, k, v), weights), torch.autograd.grad(expected, (q, k, v), weights), strict=True
    ):
        assert_close_to(found, want)


# -- the ring on NCCL --------------------------------------------------------------------------------------------------


def connections() -> list[int]:
    """All-reduces before the first transfer of a device's tensors, and before the second."""
    counts, posted = [], []

    class OnDevice(torch.Tensor):
        device = torch.device("meta")

    def exchange() -> None:
        ring = collectives.RingExchange(dist.group.WORLD.group_name)  # type: ignore[union-attr]
        ring.start(*(torch.empty(0).as_subclass(OnDevice) for _ in range(2)))
        counts.append(len(posted))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", lambda x, group: posted.append(x))
        exchange()
        exchange()
    return counts


def test_a_ring_connects_its_group_once_although_nothing_is_sent(pool: Pool) -> None:
    assert pool.run(2, connections) == [[1, 1], [1, 1]]


# -- on GPUs -----------------------------------------------------------------------------------------------------------

MASKS = ("none", "causal", "keys", "heads", "additive", "dead_rows")


def make_mask(kind: str, shape: tuple[int, int, int, int]) -> Tensor | None:
    batch, heads, queries, keys = shape
    if kind in ("none", "causal"):
        return None
    if kind == "keys":
        return (torch.arange(keys) < torch.tensor([[keys - 3], [keys]]))[:, None, None]
    if kind == "heads":
        return (torch.rand(shape) < 0.6) | (torch.arange(keys) == 0)
    if kind == "additive":
        return torch.randn(1, heads, queries, keys)
    return (torch.rand(batch, 1, queries, keys) < 0.5) & (torch.arange(queries)[:, None] % 3 > 0)


def gpu_cases() -> list[tuple[Kernel, torch.dtype, str, int, bool]]:
    cases = []
    for kernel, mask, width in itertools.product((*CUDA_KERNELS, KERNELS["_native_math"]), MASKS, (64, 36)):
        for dtype in kernel.dtypes or (FP64, FP32, BF16):
            if mask in ("none", "causal") or kernel.masks:
                cases.append((kernel, dtype, mask, width, width == 36))
    return cases


def reference(
    tensors: list[Tensor], mask: Tensor | None, causal: bool, scale: float, weights: Tensor
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Output, log-sum-exp and gradients in fp64 on the CPU."""
    q, k, v = (x.detach().double().cpu().requires_grad_() for x in tensors)
    keep = None if mask is None else mask if mask.dtype == torch.bool else mask.double()
    out = softmax_attention(q, k, v, keep, causal, scale)
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
    if keep is not None:
        scores = scores.masked_fill(~keep, float("-inf")) if keep.dtype == torch.bool else scores + keep
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    gradients = torch.autograd.grad(out, (q, k, v), weights.double().cpu())
    return out.detach(), scores.logsumexp(-1).detach(), gradients


# Of the largest value; half precision is rounded on the way in, between the two products, and on the way out.
GPU_TOLERANCE = {FP64: 1e-10, FP32: 1e-4, FP16: 1e-2, BF16: 6e-2}


def assert_near(found: Tensor, want: Tensor, tolerance: float, what: str) -> None:
    infinite = want.isinf()
    assert torch.equal(found.cpu().isinf(), infinite), what
    difference = (found.double().cpu() - want).masked_fill(infinite, 0).abs().max()
    allowed = tolerance * float(want.masked_fill(infinite, 0).abs().max())
    assert difference <= allowed, f"{what}: {difference:.2e}, allowed {allowed:.2e}"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "dtype", "kind", "width", "grouped"), gpu_cases(), ids=lambda x: getattr(x, "name", str(x))
)
def test_kernel_against_the_formula(kernel: Kernel, dtype: torch.dtype, kind: str, width: int, grouped: bool) -> None:
    capability = torch.cuda.get_device_capability()
    reason = kernel.misfit(KernelCall("cuda", dtype, False, width, False, capability))
    if reason is not None:
        pytest.skip(reason)
    torch.manual_seed(0)
    batch, heads, queries = 2, 4, 77
    keys = queries if kind == "causal" else 93
    kv_heads = 2 if grouped else heads
    q, weights = (torch.randn(batch, queries, heads, width, device="cuda", dtype=dtype).transpose(1, 2) for _ in "qg")
    k, v = (torch.randn(batch, keys, kv_heads, width, device="cuda", dtype=dtype).transpose(1, 2) for _ in "kv")
    mask, causal, scale = make_mask(kind, (batch, heads, queries, keys)), kind == "causal", 0.2
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(dtype)
    out, lse, gradients = reference([q, k, v], mask, causal, scale, weights)
    on_device = None if mask is None else mask.cuda()
    found, found_lse = block_forward(kernel, q, k, v, on_device, causal, scale)
    assert found.dtype == dtype
    tolerance = GPU_TOLERANCE[dtype]
    assert_near(found, out, tolerance, "out")
    assert_near(found_lse, lse, tolerance, "lse")
    finite = kernels.finite_lse(found_lse)
    back = block_backward(kernel, weights, q, k, v, found, finite, on_device, causal, scale)
    for name, grad, want in zip(("dq", "dk", "dv"), back, gradients, strict=True):
        assert_near(grad, want, 2 * tolerance, name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["", "_native_efficient", "_native_cudnn", "_native_math"])
def test_two_blocks_on_a_gpu_are_as_good_as_one(name: str) -> None:
    # What a ring does, without the ring: each block forward and, given the merged result, backward.
    from meshcp.attention.merge import Merger

    torch.manual_seed(0)
    q, k, v, weights = (torch.randn(2, 4, 120, 64, device="cuda", dtype=BF16) for _ in range(4))
    kernel = choose_kernel(name, KernelCall.of(q, v, False))
    out, lse, gradients = reference([q, k, v], None, False, 0.125, weights)
    merger = Merger()
    parts = [slice(0, 50), slice(50, 120)]
    for part in parts:
        merger.add(*block_forward(kernel, q, k[:, :, part], v[:, :, part], None, False, 0.125))
    merged = merger.result()
    assert merged is not None
    assert_near(merged[0], out, 6e-2, "out")
    assert_near(merged[1], lse, 1e-2, "lse")
    found = [
        block_backward(
            kernel, weights, q, k[:, :, part], v[:, :, part], merged[0].to(BF16), merged[1], None, False, 0.125
        )
        for part in parts
    ]
    assert_near(sum(part.query.double() for part in found), gradients[0], 0.12, "dq")  # type: ignore[arg-type]
    assert_near(torch.cat([part.key for part in found], 2), gradients[1], 0.12, "dk")
    assert_near(torch.cat([part.value for part in found], 2), gradients[2], 0.12, "dv")


def on_gpus(rank: int, world: int, store: str, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    """One process of a world of GPUs, started by ``run_on_gpus``."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    limit = timedelta(seconds=90)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=world, timeout=limit)
    try:
        function(*args)
    finally:
        dist.destroy_process_group()


def run_on_gpus(world: int, function: Callable[..., None], *args: Any) -> None:
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        torch.multiprocessing.spawn(on_gpus, (world, store, function, args), nprocs=world)


MESHES = [{"ulysses": 1}, {"ulysses": 2}, {"ring": 2}, {"ring": 3}, {"ring": 2, "ulysses": 2}]


def cuda_mesh(degrees: dict[str, int]) -> DeviceMesh:
    return meshcp.init_mesh(**degrees, device_type="cuda")


def operator_on_gpus(degrees: dict[str, int], gather_kv: bool) -> None:
    mesh = cuda_mesh(degrees)
    for length, dtype, masked in itertools.product((2, 61), (BF16, FP32), (False, True)):
        torch.manual_seed(0)
        whole = [torch.randn(2, 5, length, 40, device="cuda", dtype=dtype) for _ in range(4)]
        mask = torch.rand(2, 1, length, length) < 0.7 if masked else None
        out, _, gradients = reference(whole[:3], mask, False, 40**-0.5, whole[3])
        placements = [Shard(2)] * mesh.ndim
        leaves = [distribute_tensor(x, mesh, placements).requires_grad_() for x in whole[:3]]
        found = meshcp.attention(*leaves, None if mask is None else mask.cuda(), gather_kv=gather_kv)
        assert isinstance(found, DTensor)
        found.backward(distribute_tensor(whole[3], mesh, placements))
        assert_near(found.full_tensor().detach(), out, GPU_TOLERANCE[dtype], "out")
        for name, leaf, want in zip("qkv", leaves, gradients, strict=True):
            assert leaf.grad is not None
            assert_near(leaf.grad.full_tensor(), want, 2 * GPU_TOLERANCE[dtype], f"d{name}")  # type: ignore[attr-defined]


def model_on_gpus(degrees: dict[str, int], gather_kv: bool) -> None:
    model, inputs = build(flux.EVEN).cuda(), on_gpu(make_inputs(flux.EVEN))
    report = meshcp.verify(model, cuda_mesh(degrees), inputs, gradients=True, tolerance=3e-6, gather_kv=gather_kv)
    assert report.ok, report
    handle = meshcp.parallelize(model.bfloat16(), cuda_mesh(degrees), gather_kv=gather_kv)
    out = model(**on_gpu(make_inputs(flux.EVEN), BF16)).sample
    assert out.isfinite().all()
    handle.remove()


def on_gpu(value: Any, dtype: torch.dtype | None = None) -> Any:
    if isinstance(value, Tensor):
        return value.to("cuda", dtype if value.is_floating_point() else None)
    if isinstance(value, dict):
        return {name: on_gpu(part, dtype) for name, part in value.items()}
    return [on_gpu(part, dtype) for part in value] if isinstance(value, list) else value


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("degrees", "gather_kv"), [*((d, False) for d in MESHES), *((d, True) for d in MESHES if "ring" in d)], ids=str
)
@pytest.mark.parametrize("function", [operator_on_gpus, model_on_gpus])
def test_on_nccl(degrees: dict[str, int], gather_kv: bool, function: Callable[..., None]) -> None:
    world = 1
    for degree in degrees.values():
        world *= degree
    run_on_gpus(world, function, degrees, gather_kv)
