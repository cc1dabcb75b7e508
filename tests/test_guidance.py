"""Classifier-free guidance over a cfg axis: the same pictures, each half computed on its own ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import meshcp
from tests import model_cases
from tests.harness import Pool
from tests.rows import flux
from tests.test_composition import FLUX, QWEN, WAN, shard_fsdp


@contextlib.contextmanager
def counting(model: nn.Module) -> Iterator[list[int]]:
    """The batch size of every forward pass that really happens on this rank."""
    seen: list[int] = []
    block = next(child for child in model.children() if isinstance(child, nn.ModuleList))[0]

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        seen.append(x.shape[0])

    hook = block.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield seen
    finally:
        hook.remove()


def difference(actual: Tensor, expected: Tensor) -> float:
    return model_cases._difference(actual, expected)


# -- one call with both halves in its batch ----------------------------------------------------------------------------


def batched(names: tuple[str, ...], shape: tuple[int, ...]) -> list[Any]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    found = []
    # Four image tokens and a batch of four: img_ids begins with 4 as well, and is not one entry a sample.
    for image, batch in ((13, 2), (4, 4)):
        model = model_cases.build(FLUX)
        inputs = flux.inputs(torch.Generator().manual_seed(3), image=image, text=5, batch=batch)
        with torch.no_grad():
            expected = model(**inputs, return_dict=False)[0]
            meshcp.parallelize(model, mesh)
            handle = meshcp.parallelize_guidance(model, mesh)
            with counting(model) as seen:
                actual = model(**inputs).sample
                again = model(**inputs, return_dict=False)[0]
            handle.remove()
            assert "_call_impl" not in model.__dict__
        found.append((difference(actual, expected), difference(again, expected), seen, handle.cut))
    return found


@pytest.mark.parametrize(("names", "shape"), [(("cfg", "ulysses"), (2, 2)), (("ring", "cfg"), (3, 2))])
def test_a_batch_of_both_halves_is_cut(pool: Pool, names: tuple[str, ...], shape: tuple[int, ...]) -> None:
    for (first, again, seen, cut), batch in zip(
        (case for cases in pool.run(shape[0] * shape[1], batched, names, shape) for case in cases),
        [2, 4] * (shape[0] * shape[1]),
        strict=True,
    ):
        assert max(first, again) < 1e-10
        assert seen == [batch // 2] * 2
        assert cut == 2


# -- two calls, in the pipelines of Diffusers --------------------------------------------------------------------------


def qwen_pipeline(transformer: nn.Module) -> Tensor:
    from diffusers import FlowMatchEulerDiscreteScheduler, QwenImagePipeline

    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    pipe = QwenImagePipeline(scheduler, None, None, None, transformer)
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(5)
    embeds = [torch.randn(1, length, 12, generator=generator, dtype=torch.float64) for length in (7, 4)]
    return pipe(
        prompt_embeds=embeds[0], prompt_embeds_mask=torch.ones(1, 7, dtype=torch.int64),
        negative_prompt_embeds=embeds[1], negative_prompt_embeds_mask=torch.ones(1, 4, dtype=torch.int64),
        true_cfg_scale=4.0, height=80, width=48, num_inference_steps=3, generator=torch.Generator().manual_seed(1),
        output_type="latent",
    ).images  # fmt: skip


def wan_pipeline(transformer: nn.Module) -> Tensor:
    from diffusers import UniPCMultistepScheduler, WanPipeline

    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    pipe = WanPipeline(None, None, None, scheduler, transformer)
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(5)
    embeds = [torch.randn(1, 5, 12, generator=generator, dtype=torch.float64) for _ in range(2)]
    return pipe(
        prompt_embeds=embeds[0], negative_prompt_embeds=embeds[1], height=48, width=80, num_frames=9,
        guidance_scale=4.0, num_inference_steps=3, generator=torch.Generator().manual_seed(1), output_type="latent",
    ).frames  # fmt: skip


def two_calls(which: str, names: tuple[str, ...], shape: tuple[int, ...], fsdp: bool) -> tuple[float, list[int], str]:
    row, pipeline = {"qwen": (QWEN, qwen_pipeline), "wan": (WAN, wan_pipeline)}[which]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = model_cases.build(row)
    expected = pipeline(model)
    handle = meshcp.parallelize_guidance(model, mesh)
    meshcp.parallelize(model, mesh)
    if fsdp:
        shard_fsdp(model, meshcp.fsdp_mesh(mesh, shard=names))
    with counting(model) as seen:
        actual = pipeline(model)
    return difference(actual, expected), seen, handle.describe().partition(": ")[2]


@pytest.mark.parametrize(
    ("which", "names", "shape", "fsdp"),
    [("qwen", ("ulysses", "cfg"), (2, 2), False), ("wan", ("cfg", "ring"), (2, 2), True)],
)
def test_each_half_of_two_calls_is_computed_by_its_ranks(
    pool: Pool, which: str, names: tuple[str, ...], shape: tuple[int, ...], fsdp: bool
) -> None:
    for off, seen, described in pool.run(4, two_calls, which, names, shape, fsdp):
        assert off < 1e-9
        assert seen == [1] * 3
        assert described == "0 calls cut, 6 paired, 0 alone"


# -- scripts of other kinds --------------------------------------------------------------------------------------------


class Echo(nn.Module):
    """A model that notes when it runs; its output has two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(3.0), requires_grad=False)
        self.ran: list[float] = []

    def forward(self, hidden_states: Tensor, shift: Tensor, return_dict: bool = False) -> Any:
        self.ran.append(float(shift))
        first, second = hidden_states * self.weight + shift, hidden_states - shift
        return {"sample": first, "other": second} if return_dict else (first, second)


def scripts() -> list[str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cfg",))
    rank = mesh.get_local_rank()
    model = Echo()
    handle = meshcp.parallelize_guidance(model, mesh)
    wrong = []

    def check(what: str, actual: Tensor, expected: Tensor, ran: list[float], alone: int) -> None:
        if type(actual) is not Tensor:
            wrong.append(f"{what}: a {type(actual).__name__} is left")
        if actual.shape != expected.shape or not torch.equal(actual, expected):
            wrong.append(f"{what}: {actual} != {expected}")
        if model.ran != ran or handle.alone != alone:
            wrong.append(f"{what}: ran {model.ran}, not {ran}; {handle.alone} alone, not {alone}")
        model.ran.clear()

    x, one, two = torch.arange(6.0).view(1, 6), torch.tensor(1.0), torch.tensor(2.0)
    a, b = 3 * x + 1, 3 * x + 2
    mine = [2.0 if rank else 1.0]
    cond = model(x, one)[0]
    uncond = model(x, two)[0]
    check("combined", uncond + 4 * (cond - uncond), b + 4 * (a - b), mine, 0)
    cond = model(x, one)[0][:, :3].float()
    uncond = model(x, two)[0][:, :3]
    check("cut before the second call", torch.norm(cond - uncond, dim=-1), torch.norm((a - b)[:, :3], dim=-1), mine, 0)
    cond, other = model(x, one)
    uncond, _ = model(x, two)
    check("two outputs", cond + other, a + x - 1, mine, 0)
    y = x.clone()
    cond = model(y, one)[0]
    y.zero_()
    uncond = model(x, two)[0]
    check("an input changed in place", cond + uncond, a + b, mine, 0)
    cond = model(x, one)[0]
    size = cond.shape
    check("looked at too early", cond + size[1], a + 6, [1.0], 1)
    uncond = model(x, two)[0]
    check("the second after that", 1 * uncond, b, [2.0], 2)
    check("depends on the first", model(model(x, one)[0], one)[1] + 0, a - 1, [1.0, 1.0], 4)
    cond = model(x, one, return_dict=True)["sample"]
    uncond = model(x, two, return_dict=True)["sample"]
    check("dict", cond - uncond, a - b, mine, 4)
    three = [model(x, shift)[0] for shift in (one, two, one)]
    check("three calls", three[0] + three[1] + three[2], a + b + a, [*mine, 1.0], 5)
    many = model(x.view(2, 3), one)[0]
    check("a batch of two", many, a.view(2, 3), [1.0], 5)
    open_one = model(x, one)[0]
    handle.remove()
    check("open when removed", open_one * 1, a, [1.0], 6)
    check("after remove", model(x, one)[0], a, [1.0], 6)
    return wrong


def test_scripts_that_use_results_in_other_orders(pool: Pool) -> None:
    for wrong in pool.run(2, scripts):
        assert not wrong, "\n".join(wrong)


def refusals() -> list[str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cfg",))
    said = []

    def refused(function: Any, *args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except meshcp.MeshcpError as error:
            said.append(f"{type(error).__name__}: {error}")
        else:
            said.append("nothing")

    x, one = torch.ones(1, 2), torch.tensor(1.0)
    model = Echo()
    handle = meshcp.parallelize_guidance(model, mesh)
    refused(meshcp.parallelize_guidance, model, mesh)
    refused(model, x + mesh.get_local_rank(), one)
    model.weight.requires_grad_(True)
    refused(model, x, one)
    model.weight.requires_grad_(False)
    model.is_cache_enabled = True
    refused(model, x, one)
    del model.is_cache_enabled
    handle.remove()
    model = Echo()
    model.forward = lambda hidden_states, shift: (hidden_states[:, : int(shift)],)  # type: ignore[method-assign]
    meshcp.parallelize_guidance(model, mesh)
    model(x, one)
    refused(model, x, torch.tensor(2.0))
    model = Echo()
    model.weight.data += mesh.get_local_rank()
    meshcp.parallelize_guidance(model, mesh)
    refused(model, x, one)
    lone = meshcp.parallelize_guidance(Echo(), init_device_mesh("cpu", (2,), mesh_dim_names=("ring",)))
    said.append(f"{lone.degree} {'_call_impl' in lone.model.__dict__}")
    refused(meshcp.parallelize_guidance, Echo(), DeviceMesh("cpu", [1, 0], mesh_dim_names=("cfg",)))
    return said


def test_what_cannot_be_right_is_refused(pool: Pool) -> None:
    for said in pool.run(2, refusals):
        twice, differ, grads, cache, shapes, weights, absent, order = said
        assert twice.startswith("PlanError: the guidance of Echo is parallel already")
        assert differ.startswith("InputError: the inputs hidden_states of Echo differ between ranks of 'cfg'")
        assert grads.startswith("InputError: Echo is called with gradients enabled")
        assert cache.startswith("InputError: Echo has a cache")
        assert shapes.startswith("InputError: the outputs of Echo differ in shape between ranks of 'cfg'")
        assert weights.startswith("InputError: weight weight of Echo differ between ranks of 'cfg'. Load the same")
        assert absent == "1 False"
        assert order.startswith("MeshError: along mesh axis 'cfg' are the ranks [1, 0], which do not ascend")
