"""What people hang on a model, before `parallelize` and after it, against one process with the same hung on."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshcp
from tests import model_cases
from tests.harness import Pool, fake_world, make_mesh, world_mean
from tests.model_cases import Mesh, Row

MESHES: dict[int, Mesh] = {2: (("ulysses", 2),), 3: (("ring", 3),), 4: (("ring", 2), ("ulysses", 2))}


@functools.cache
def _row(name: str) -> Row:
    return next(row for row in model_cases.rows() if str(row) == name)


FLUX, WAN = "FluxTransformer2DModel-odd", "WanTransformer3DModel-odd"


@dataclass(frozen=True)
class Thing:
    """Something to hang on a model.

    Attributes:
        put, take: on and off; `take` None where it cannot be taken off.
        row: the model.
        steps: how many denoising steps are compared; more than one for what keeps state.
        tolerance: for what rounds by itself.
        gradients: compare those as well.
    """

    put: Callable[[nn.Module], Any]
    take: Callable[[nn.Module], Any] | None = None
    row: str = FLUX
    steps: int = 1
    tolerance: float = 1e-10
    gradients: bool = False


# -- the things ----------------------------------------------------------------------------------------------------

# On the layers of attention and feed forward, on those before the blocks, and on the one whose output is gathered.
LORA_TARGETS = [
    "to_q",
    "to_v",
    "to_out.0",
    "add_k_proj",
    "net.2",
    "x_embedder",
    "context_embedder",
    "proj_out",
    "proj_mlp",
]


def _randomise_lora(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "lora_" in name:
                parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2


def put_adapter(model: Any) -> None:
    from peft import LoraConfig

    model.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=LORA_TARGETS), "style")
    _randomise_lora(model)


def take_adapter(model: Any) -> None:
    model.delete_adapters("style")
    model.unload_lora()


def put_fused_adapter(model: Any) -> None:
    put_adapter(model)
    model.fuse_lora(lora_scale=0.7)


def take_fused_adapter(model: Any) -> None:
    model.unfuse_lora()
    take_adapter(model)


@functools.cache
def _lora_weights() -> dict[str, torch.Tensor]:
    """What a LoRA file for the transformer holds."""
    generator = torch.Generator().manual_seed(5)
    found = {}
    for name, module in model_cases.build(_row(FLUX)).named_modules():
        if isinstance(module, nn.Linear) and name.endswith(("to_k", "proj_out", "linear_1", "ff.net.2")):
            for part, shape in (("A", (2, module.in_features)), ("B", (module.out_features, 2))):
                found[f"transformer.{name}.lora_{part}.weight"] = (
                    torch.randn(*shape, generator=generator).double() * 0.2
                )
    return found


def put_lora_file(model: Any) -> None:
    model.load_lora_adapter(dict(_lora_weights()), adapter_name="file", prefix="transformer")
    for name, parameter in model.named_parameters():
        assert "lora_" not in name or parameter.dtype == torch.float64


def set_processors(model: Any) -> None:
    from diffusers.models.transformers.transformer_flux import FluxAttnProcessor

    model.set_attn_processor(FluxAttnProcessor())


def put_backend(name: str, model: Any) -> None:
    model.set_attention_backend(name)


def take_backend(model: Any) -> None:
    model.reset_attention_backend()
    _reset_active_backend()


def _reset_active_backend() -> None:
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    _AttentionBackendRegistry.set_active_backend(AttentionBackendName.NATIVE)


def put_cache(name: str, options: dict[str, Any], model: Any) -> None:
    import diffusers

    if name in ("PyramidAttentionBroadcastConfig", "FasterCacheConfig"):
        options = {**options, "current_timestep_callback": _timestep}
    model.enable_cache(getattr(diffusers.hooks, name)(**options))


def _timestep() -> int:
    return 500


def _weight(_: nn.Module) -> float:
    return 0.3


def take_cache(model: Any) -> None:
    model.disable_cache()


def put_checkpointing(model: Any) -> None:
    model.enable_gradient_checkpointing()
    model.train()


def take_checkpointing(model: Any) -> None:
    model.disable_gradient_checkpointing()
    model.eval()


def put_group_offloading(kind: str, model: Any) -> None:
    from diffusers.hooks import apply_group_offloading

    cpu = torch.device("cpu")
    apply_group_offloading(model, onload_device=cpu, offload_device=cpu, offload_type=kind, num_blocks_per_group=1)


def put_model_offload(model: nn.Module) -> None:
    """What `enable_model_cpu_offload` does to each model of a pipeline."""
    from accelerate import cpu_offload_with_hook

    _, hook = cpu_offload_with_hook(model, torch.device("cpu"))
    model.__dict__["_user_hook"] = hook


def take_model_offload(model: nn.Module) -> None:
    model.__dict__.pop("_user_hook").remove()


def put_sequential_offload(model: nn.Module) -> None:
    """What `enable_sequential_cpu_offload` does: a hook around the forward of every module that has parameters."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    for module in model.modules():
        if not isinstance(module, nn.ModuleList):
            add_hook_to_module(module, AlignDevicesHook(execution_device="cpu"))


def take_accelerate_hooks(model: nn.Module) -> None:
    from accelerate.hooks import remove_hook_from_module

    remove_hook_from_module(model, recurse=True)


class Int8Linear(nn.Module):
    """A linear layer with int8 weights, as quantisers put in the place of nn.Linear."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


def put_int8_modules(model: nn.Module) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, Int8Linear(child))


def put_torchao(model: nn.Module) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model.float(), Int8WeightOnlyConfig())
    model.double()


# The last tokens change most, so each rank by itself would decide otherwise.
FIRST_BLOCK = {FLUX: {"threshold": 0.12}, WAN: {"threshold": 0.05}}
THINGS = {
    "add_adapter": Thing(put_adapter, take_adapter, gradients=True),
    "fused adapter": Thing(put_fused_adapter, take_fused_adapter, tolerance=1e-9),
    "LoRA file": Thing(put_lora_file, lambda model: model.unload_lora()),
    "fuse_qkv_projections": Thing(
        lambda model: model.fuse_qkv_projections(), lambda model: model.unfuse_qkv_projections()
    ),
    "set_attn_processor": Thing(set_processors),
    "backend native": Thing(functools.partial(put_backend, "native"), take_backend),
    "backend math": Thing(functools.partial(put_backend, "_native_math"), take_backend),
    "gradient checkpointing": Thing(put_checkpointing, take_checkpointing, gradients=True),
    "group offloading by block": Thing(functools.partial(put_group_offloading, "block_level")),
    "group offloading by leaf": Thing(functools.partial(put_group_offloading, "leaf_level")),
    "model offload": Thing(put_model_offload, take_model_offload),
    "sequential offload": Thing(put_sequential_offload, take_accelerate_hooks),
    "int8 modules": Thing(put_int8_modules),
    "torchao": Thing(put_torchao, tolerance=1e-5),
    "FirstBlockCache": Thing(
        functools.partial(put_cache, "FirstBlockCacheConfig", FIRST_BLOCK[FLUX]), take_cache, steps=6
    ),
    "FirstBlockCache on Wan": Thing(
        functools.partial(put_cache, "FirstBlockCacheConfig", FIRST_BLOCK[WAN]), take_cache, row=WAN, steps=6
    ),
    "MagCache": Thing(
        functools.partial(
            put_cache,
            "MagCacheConfig",
            {"mag_ratios": [1.0, 0.99, 0.98, 0.97, 0.9, 0.9], "num_inference_steps": 6, "retention_ratio": 0.2},
        ),
        take_cache,
        steps=6,
    ),
    "pyramid attention broadcast": Thing(
        functools.partial(
            put_cache,
            "PyramidAttentionBroadcastConfig",
            {"spatial_attention_block_skip_range": 2, "spatial_attention_block_identifiers": ("transformer_blocks",)},
        ),
        take_cache,
        steps=4,
    ),
    "FasterCache": Thing(
        functools.partial(
            put_cache,
            "FasterCacheConfig",
            {
                "spatial_attention_timestep_skip_range": (-1, 901),
                "unconditional_batch_timestep_skip_range": (-1, 901),
                "unconditional_batch_skip_range": 3,
                "spatial_attention_block_identifiers": ("transformer_blocks",),
                "attention_weight_callback": _weight,
                "tensor_format": "BFCHW",
            },
        ),
        take_cache,
        row="CogVideoXTransformer3DModel-odd",
        steps=6,
    ),
    "TaylorSeer": Thing(
        functools.partial(
            put_cache,
            "TaylorSeerCacheConfig",
            {"cache_interval": 2, "disable_cache_before_step": 2, "taylor_factors_dtype": torch.float64},
        ),
        take_cache,
        steps=5,
    ),
    "TaylorSeer lite": Thing(
        functools.partial(
            put_cache,
            "TaylorSeerCacheConfig",
            {
                "cache_interval": 2,
                "disable_cache_before_step": 2,
                "taylor_factors_dtype": torch.float64,
                "use_lite_mode": True,
            },
        ),
        take_cache,
        steps=5,
    ),
}
ORDERS = {
    3: ("put parallelize take remove", "put parallelize remove take"),
    4: ("parallelize put take remove", "parallelize put remove take"),
}


# -- on a rank -----------------------------------------------------------------------------------------------------


def _outputs(model: Any, thing: Thing) -> list[torch.Tensor]:
    """The output of each step. Later steps differ by less, as in denoising, so that a cache has something to do."""
    found = []
    context = model.cache_context("cond") if hasattr(model, "cache_context") else contextlib.nullcontext()
    with context:
        for step in range(thing.steps):
            inputs = model_cases.make_inputs(_row(thing.row))
            generator = torch.Generator().manual_seed(step)
            x = inputs["hidden_states"]
            noise = torch.randn(x.shape, generator=generator, dtype=x.dtype)
            # The last tokens, which only the last rank holds, change most: each rank by itself would decide otherwise.
            noise = noise * torch.linspace(0, 2, x.shape[1 if x.ndim == 3 else 2], dtype=x.dtype).view(
                (1, -1, 1) if x.ndim == 3 else (1, 1, -1, 1, 1)
            )
            inputs["hidden_states"] = x + noise * (0.5 * 0.4**step if step else 0.0)
            found.append(model_cases.tensors_of(model(**inputs))[0])
    return found


def _loss(outputs: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([(x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)).sum() for x in outputs]).sum()


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def _apart(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(model_cases._difference(a.detach(), e.detach()) for a, e in zip(actual, expected, strict=True))


def _what(module: nn.Module) -> str:
    forward = module.__dict__.get("forward")
    # Diffusers and Accelerate leave the class's own forward there.
    if forward is None or getattr(forward, "__func__", None) is type(module).forward:
        return "its own"
    return getattr(forward, "__qualname__", type(forward).__name__)


def _forwards(model: nn.Module) -> dict[str, Any]:
    """What each module carries that could be left behind."""
    return {
        name: (
            _what(module),
            len(module._forward_hooks),
            len(module._forward_pre_hooks),
            "_meshcp" in module.__dict__,
        )
        for name, module in model.named_modules()
    }


def hang(thing: Thing, mesh: Mesh, orders: tuple[str, ...]) -> list[str]:
    """Put the thing on and run, in each of the orders; what is wrong afterwards."""
    wrong: list[str] = []
    try:
        single = model_cases.build(_row(thing.row))
        with torch.no_grad():
            plain = _outputs(single, thing)
        thing.put(single)
        with torch.set_grad_enabled(thing.gradients):
            expected = _outputs(single, thing)
        if thing.gradients:
            _loss(expected).backward()
        expected_gradients = _gradients(single)
        if thing.take is not None:
            thing.take(single)
        _reset_active_backend()
        left_alone = _forwards(single)
        device_mesh = make_mesh(mesh)

        for order in orders:
            model: Any = model_cases.build(_row(thing.row))
            handle: meshcp.Handle | None = None
            on = False
            for what in order.split():
                if what == "put":
                    thing.put(model)
                    on = True
                elif what == "take" and thing.take is not None:
                    thing.take(model)
                    on = False
                elif what == "parallelize":
                    handle = meshcp.parallelize(model, device_mesh)
                elif what == "remove":
                    assert handle is not None
                    handle.remove()
                gradients = thing.gradients and on and what != "remove"
                if on and thing.steps > 1:
                    model._reset_stateful_cache()
                with torch.set_grad_enabled(gradients):
                    actual = _outputs(model, thing)
                if (apart := _apart(actual, expected if on else plain)) > thing.tolerance:
                    wrong.append(f"{order}: {apart:.1e} apart after {what}")
                if gradients:
                    _loss(actual).backward()
                    parallel = handle is not None
                    wrong += [
                        f"{order}: {w}" for w in _compare_gradients(_gradients(model), expected_gradients, parallel)
                    ]
            after = _forwards(model)
            if after != left_alone:
                different = {k: (v, left_alone.get(k)) for k, v in after.items() if v != left_alone.get(k)}
                wrong.append(f"{order}: left behind (found, needed): {different}")
    finally:
        _reset_active_backend()
    return wrong


def _compare_gradients(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], parallel: bool) -> list[str]:
    wrong = [] if actual.keys() == expected.keys() else [f"gradients of {sorted(actual.keys() ^ expected.keys())}"]
    largest = max(float(g.abs().max()) for g in expected.values())
    names = sorted(actual.keys() & expected.keys())
    means = [actual[name] for name in names]
    for name, mean in zip(names, world_mean(means) if parallel else means, strict=True):
        # Flux applies its rotary embedding in fp32.
        allowed = 3e-6 * max(float(expected[name].abs().max()), 1e-6 * largest)
        if not float((mean - expected[name]).abs().max()) <= allowed:
            wrong.append(f"gradient of {name}")
    return wrong


@pytest.mark.parametrize("world", ORDERS)
@pytest.mark.parametrize("name", THINGS)
def test_what_is_hung_on_a_model_works_in_every_order(pool: Pool, name: str, world: int) -> None:
    if name == "torchao" and importlib.util.find_spec("torchao") is None:
        pytest.skip("torchao is not installed; the int8 modules stand in for its layers")
    for rank, wrong in enumerate(pool.run(world, _hang, name, MESHES[world], ORDERS[world], timeout=100)):
        assert not wrong, f"rank {rank}: " + "; ".join(wrong)


def _hang(name: str, mesh: Mesh, orders: tuple[str, ...]) -> list[str]:
    import warnings

    # Diffusers, PEFT and Accelerate announce their own changes to come.
    warnings.simplefilter("ignore")
    return hang(THINGS[name], mesh, orders if THINGS[name].take is not None else orders[:1])


# -- what decides on every rank alike ------------------------------------------------------------------------------


def first_block_decisions(row: str, mesh: Mesh) -> tuple[list[bool], list[bool], list[bool]]:
    """FirstBlockCache's decisions in one process, on this rank, and what this rank's own tokens say."""
    from meshcp import _compat

    thing = THINGS["FirstBlockCache" if row == FLUX else "FirstBlockCache on Wan"]
    device_mesh = make_mesh(mesh)
    said: list[list[bool]] = []
    for parallel in (False, True):
        model = model_cases.build(_row(row))
        thing.put(model)
        if parallel:
            meshcp.parallelize(model, device_mesh)
        hook = next(hook for _, _, hook in _compat.hooks(model.modules()) if type(hook).__name__ == "FBCHeadBlockHook")
        decide, decisions, alone = getattr(hook, _compat.FIRST_BLOCK_DECISION), [], []

        def watch(residual: torch.Tensor, hook: Any = hook, decide: Any = decide, to: Any = (decisions, alone)) -> bool:
            to[1].append(bool(getattr(type(hook), _compat.FIRST_BLOCK_DECISION)(hook, residual)))
            to[0].append(bool(decide(residual)))
            return to[0][-1]

        setattr(hook, _compat.FIRST_BLOCK_DECISION, watch)
        with torch.no_grad():
            _outputs(model, thing)
        said.append(decisions)
        if parallel:
            said.append(alone)
    return said[0], said[1], said[2]


@pytest.mark.parametrize("row", [FLUX, WAN])
def test_first_block_cache_decides_as_one_process_does(pool: Pool, row: str) -> None:
    said = pool.run(4, first_block_decisions, row, (("ulysses", 4),))
    single = said[0][0]
    assert set(single[1:]) == {True, False}, "a case in which nothing is decided"
    for rank, (_, decided, _) in enumerate(said):
        assert decided == single, f"rank {rank}"
    assert any(alone != single for _, _, alone in said), "a case in which ranks agree by themselves"


def refused_cache(name: str, options: dict[str, Any], before: bool) -> str:
    model = model_cases.build(_row(FLUX))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ring",))
    if not before:
        meshcp.parallelize(model, mesh)
    put_cache(name, options, model)
    untouched = _forwards(model)
    try:
        if before:
            meshcp.parallelize(model, mesh)
        else:
            _outputs(model, Thing(set_processors))
    except meshcp.PlanError as error:
        assert not before or _forwards(model) == untouched
        return str(error)
    return "not refused"


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize(
    ("name", "options", "remedy"),
    [
        ("MagCacheConfig", {"calibrate": True, "num_inference_steps": 4}, "calibrate without parallelism"),
        ("TextKVCacheConfig", {}, "FirstBlockCache"),
    ],
)
def test_a_cache_that_cannot_agree_is_refused(
    pool: Pool, name: str, options: dict[str, Any], remedy: str, before: bool
) -> None:
    for said in pool.run(2, refused_cache, name, options, before):
        assert remedy in said


def backend_without_lse(before: bool, gather_kv: bool = False) -> str:
    import warnings

    warnings.simplefilter("ignore")
    model = model_cases.build(_row(FLUX))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ring",))
    with torch.no_grad():
        expected = _outputs(model, Thing(set_processors))
    try:
        if before:
            put_backend("flex", model)
            meshcp.parallelize(model, mesh, gather_kv=gather_kv)
        else:
            meshcp.parallelize(model, mesh, gather_kv=gather_kv)
            put_backend("flex", model)
        # Flex attention has no backward pass on the CPU.
        with torch.no_grad():
            found = _outputs(model, Thing(set_processors))
    except meshcp.AttentionError as error:
        return str(error)
    finally:
        _reset_active_backend()
    errors = [float((a - e).abs().max() / e.abs().max()) for a, e in zip(found, expected, strict=True)]
    return "right" if max(errors) < 1e-10 else f"wrong by {errors}"


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_backend_without_log_sum_exp_is_refused_for_ring(pool: Pool, before: bool) -> None:
    for said in pool.run(2, backend_without_lse, before):
        assert "flex" in said, said
        assert "native" in said, said
        assert "gather_kv=True" in said, said


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_gathered_keys_need_no_log_sum_exp(pool: Pool, before: bool) -> None:
    for said in pool.run(2, backend_without_lse, before, gather_kv=True):
        assert said == "right"


def test_processors_come_back_as_they_were_and_keep_what_was_chosen_meanwhile() -> None:
    with fake_world(2):
        model: Any = model_cases.build(_row(FLUX))
        processors = [module.processor for module in model.modules() if hasattr(module, "processor")]
        before = [dict(vars(processor)) for processor in processors]
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ulysses",))
        meshcp.parallelize(model, mesh).remove()
        assert [vars(processor) for processor in processors] == before
        handle = meshcp.parallelize(model, mesh)
        try:
            model.set_attention_backend("_native_math")
        finally:
            _reset_active_backend()
        handle.remove()
        assert {processor._attention_backend.value for processor in processors} == {"_native_math"}
        assert not any("_parallel_config" in vars(processor) for processor in processors)
