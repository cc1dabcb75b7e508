"""What meshcp refuses: each with an error that says what was found, what is needed and what to do, and the model as it
was.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import meshcp
from meshcp import ContextParallelAttention, GatherOutputs, LocalAttention, Plan, PlanError, ShardInputs, seq
from meshcp.styles import MeshcpStyle
from tests import model_cases
from tests.harness import Pool
from tests.model_cases import Row

JOINT = ContextParallelAttention(streams=("text", "image"))
INPUTS = {
    "hidden_states": seq(1, "image", ndim=3),
    "encoder_hidden_states": seq(1, "text", ndim=3),
    "img_ids": seq(0, "image"),
    "txt_ids": seq(0, "text"),
}
ENTRIES: dict[str, Any] = {
    "": ShardInputs(**INPUTS),
    "transformer_blocks.*.attn": JOINT,
    "single_transformer_blocks.*.attn": JOINT,
    "proj_out": GatherOutputs(seq(1, "image")),
}


def _row() -> Row:
    return next(row for row in model_cases.rows() if str(row) == "FluxTransformer2DModel-odd")


def _plan(changes: dict[str, Any] | None = None, **inputs: Any) -> Plan:
    return Plan({**ENTRIES, "": ShardInputs(**{**INPUTS, **inputs}), **(changes or {})})


def _state(model: Any) -> Any:
    """Everything about a model that a half-done change could leave behind."""
    if not isinstance(model, nn.Module):
        return dict(vars(model))
    modules = {
        name: (
            {key: id(value) for key, value in vars(module).items()},
            *(
                list(getattr(module, hooks).items())
                for hooks in (
                    "_forward_hooks",
                    "_forward_pre_hooks",
                    "_forward_hooks_with_kwargs",
                    "_forward_pre_hooks_with_kwargs",
                )
            ),
            module.forward if "forward" in vars(module) else None,
            {key: id(value) for key, value in vars(getattr(module, "processor", None) or module).items()},
        )
        for name, module in model.named_modules()
    }
    return modules, list(model.state_dict())


def _refused(model: Any, mesh: Any, plan: Any = None, **options: Any) -> str:
    """What `parallelize` says; the model must be as it was."""
    before = _state(model)
    try:
        meshcp.parallelize(model, mesh, plan, **options)
    except meshcp.MeshcpError as error:
        assert _state(model) == before, "the model is not as it was"
        return f"{type(error).__name__}: {error}"
    return "not refused"


# -- before anything runs ------------------------------------------------------------------------------------------


def _pipeline() -> Any:
    class FluxPipeline:
        transformer = None

    return FluxPipeline()


def _without_plan() -> nn.Module:
    class FluxTransformer3DModel(nn.Module):
        pass

    return FluxTransformer3DModel()


def _parallel_already(mesh: DeviceMesh) -> nn.Module:
    model = model_cases.build(_row())
    meshcp.parallelize(model, mesh)
    return model


def _with_backend(name: str) -> nn.Module:
    model: Any = model_cases.build(_row())
    for module in model.modules():
        if hasattr(module, "processor"):
            module.processor._attention_backend = name
    return model


CASES: dict[str, tuple[Callable[[DeviceMesh], str], str]] = {
    "a class without a plan": (
        lambda mesh: _refused(_without_plan(), mesh),
        "PlanError: meshcp has no plan for FluxTransformer3DModel. The closest is the plan of Flux",
    ),
    "a misspelt input": (
        lambda mesh: _refused(model_cases.build(_row()), mesh, _plan(hidden_state=seq(1, "image"))),
        "did you mean 'hidden_states'",
    ),
    "a missed attention module": (
        lambda mesh: _refused(model_cases.build(_row()), mesh, _plan().without("single_transformer_blocks.*.attn")),
        "single_transformer_blocks.0.attn, single_transformer_blocks.1.attn of FluxTransformer2DModel",
    ),
    "twice": (
        lambda mesh: _refused(_parallel_already(mesh), mesh),
        "this FluxTransformer2DModel is parallel already",
    ),
    "wrapped in DDP": (
        lambda mesh: _refused(nn.parallel.DistributedDataParallel(model_cases.build(_row())), mesh),
        "wrapped in DistributedDataParallel; parallelize it first",
    ),
    "compiled": (
        lambda mesh: _refused(torch.compile(model_cases.build(_row())), mesh),
        "parallelize the model itself, then compile it",
    ),
    "a pipeline": (lambda mesh: _refused(_pipeline(), mesh), "pass its transformer, pipe.transformer"),
    "a dict for a plan": (
        lambda mesh: _refused(model_cases.build(_row()), mesh, dict(ENTRIES)),
        "the plan is dict; needed: meshcp.Plan",
    ),
    "a path that matches nothing": (
        lambda mesh: _refused(model_cases.build(_row()), mesh, _plan({"transformer_block.*.attn": JOINT})),
        "plan entry 'transformer_block.*.attn' matches no module of FluxTransformer2DModel. the model has",
    ),
    "a tensor parallel style": (
        lambda mesh: _refused(model_cases.build(_row()), mesh, _plan({"x_embedder": ColwiseParallel()})),
        "a style of torch's parallelize_module; apply tensor parallelism before",
    ),
    "a mesh without names": (
        lambda mesh: _refused(model_cases.build(_row()), init_device_mesh("cpu", (2,))),
        "MeshError: the mesh of shape (2,) has no axis names",
    ),
    "a mesh without the axes": (
        lambda mesh: _refused(model_cases.build(_row()), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))),
        "context parallelism needs an axis named",
    ),
    "a mesh of descending ranks": (
        lambda mesh: _refused(
            model_cases.build(_row()), DeviceMesh("cpu", [[1], [0]], mesh_dim_names=("ring", "ulysses"))
        ),
        "MeshError: along mesh axis 'ring' are the ranks [1, 0], which do not ascend",
    ),
    "an option that is no bool": (
        lambda mesh: _refused(model_cases.build(_row()), mesh, gather_kv="no"),
        "PlanError: gather_kv='no' is of type str; needed: gather_kv=True or gather_kv=False",
    ),
    "an option that is None": (
        lambda mesh: _refused(model_cases.build(_row()), mesh, gather=None),
        "PlanError: gather=None is of type NoneType",
    ),
    "no mesh": (lambda mesh: _refused(model_cases.build(_row()), 2), "a DeviceMesh is needed, found int"),
    "ring with a backend that gives no LSE": (
        lambda mesh: _refused(_with_backend("flex"), mesh),
        "AttentionError: 'transformer_blocks.0.attn'",
    ),
}


def _case(name: str) -> str:
    # torch.compile and DDP announce changes of their own.
    warnings.simplefilter("ignore")
    return CASES[name][0](init_device_mesh("cpu", (2,), mesh_dim_names=("ring",)))


@pytest.mark.parametrize("name", CASES)
def test_parallelize_refuses(pool: Pool, name: str) -> None:
    for said in pool.run(2, _case, name):
        assert CASES[name][1] in said


def rank_outside() -> str:
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("ulysses",))
    if dist.get_rank() == 2:
        return _refused(model_cases.build(_row()), mesh)
    return "inside"


def test_a_rank_outside_of_the_mesh(pool: Pool) -> None:
    said = pool.run(3, rank_outside)
    assert said[:2] == ["inside", "inside"]
    assert "MeshError: rank 2 is not in the mesh of ranks [0, 1]" in said[2]


# -- in a forward pass ---------------------------------------------------------------------------------------------

_rank = dist.get_rank


def _drop(name: str) -> Callable[[dict[str, Any]], None]:
    def change(inputs: dict[str, Any]) -> None:
        del inputs[name]

    return change


def _replace(name: str, value: Callable[[torch.Tensor], Any]) -> Callable[[dict[str, Any]], None]:
    def change(inputs: dict[str, Any]) -> None:
        inputs[name] = value(inputs[name])

    return change


def _nothing(_: Any) -> None:
    pass


def _dropout(model: Any) -> None:
    from diffusers.models.attention_dispatch import dispatch_attention_fn
    from diffusers.models.transformers import transformer_flux

    class Dropping(transformer_flux.FluxAttnProcessor):
        def __call__(self, attn: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            x = hidden_states[:, :, None]
            return dispatch_attention_fn(
                x, x, x, dropout_p=0.1, backend=self._attention_backend, parallel_config=self._parallel_config
            )

    model.single_transformer_blocks[0].attn.set_processor(Dropping())


def _blind(model: Any) -> None:
    class Blind:
        def __call__(self, attn: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return hidden_states.softmax(-1) @ hidden_states.mT @ hidden_states

    model.single_transformer_blocks[1].attn.processor = Blind()


def _longer_inside(model: Any) -> None:
    """A model that adds a token of its own between the input and the attention."""
    model.context_embedder.register_forward_hook(lambda _, args, out: torch.cat([out[:, :1], out], 1))
    model.pos_embed.register_forward_hook(lambda _, args, out: tuple(torch.cat([x[:1], x]) for x in out))


RUNS: dict[str, tuple[Callable[[dict[str, Any]], None], Callable[[Any], None], Plan | None, str]] = {
    "a missing input": (
        _drop("txt_ids"),
        _nothing,
        None,
        "InputError: input 'txt_ids' of the model is missing or None, and the plan shards it as",
    ),
    "an input of another rank": (
        _replace("hidden_states", lambda x: x[0]),
        _nothing,
        None,
        "InputError: input 'hidden_states' of the model has shape (15, 8); the plan needs 3 dimensions",
    ),
    "inputs of one stream with other lengths": (
        _replace("img_ids", lambda x: x[:-1]),
        _nothing,
        None,
        "LayoutError: stream 'image': input 'img_ids' of the model has length 14, but input 'hidden_states' of the "
        "model has 15",
    ),
    "inputs that differ between ranks": (
        _replace("hidden_states", lambda x: x + _rank()),
        _nothing,
        None,
        "InputError: the inputs differ between context-parallel ranks: hidden_states on ranks [1] (compared with "
        "rank 0)",
    ),
    "inputs whose shapes differ between ranks": (
        _replace("encoder_hidden_states", lambda x: x[:, : 7 - _rank()]),
        _nothing,
        None,
        "encoder_hidden_states on ranks [1]",
    ),
    "inner lengths that are not the layout's": (
        _nothing,
        _longer_inside,
        None,
        "LayoutError: the queries of attention in 'transformer_blocks.0.attn'",
    ),
    "attention dropout": (_nothing, _dropout, None, "dropout_p=0.1: dropout inside distributed attention"),
    "a processor that computes attention by hand": (
        _nothing,
        _blind,
        None,
        "'single_transformer_blocks.1.attn' ran without an attention call that meshcp can see: its processor Blind",
    ),
    "a stream that no input told": (
        _nothing,
        _nothing,
        _plan({"transformer_blocks.*.attn": ContextParallelAttention(streams=("words", "image"))}),
        "needs the length of stream 'words', which no input told; known: {'image': 15, 'text': 7}",
    ),
    "an output that nobody gathers": (
        _nothing,
        _nothing,
        _plan().without("proj_out"),
        "LayoutError: the outputs of FluxTransformer2DModel differ between context-parallel ranks",
    ),
    "an output gathered by the wrong stream": (
        _nothing,
        _nothing,
        _plan({"proj_out": GatherOutputs(seq(1, "text"))}),
        "LayoutError: output of 'proj_out' has",
    ),
}


def run(name: str, axis: str) -> str:
    warnings.simplefilter("ignore")
    change_inputs, change_model, plan, _ = RUNS[name]
    model = model_cases.build(_row())
    change_model(model)
    before = _state(model)
    handle = meshcp.parallelize(model, init_device_mesh("cpu", (2,), mesh_dim_names=(axis,)), plan)
    inputs = model_cases.make_inputs(_row())
    change_inputs(inputs)
    said = "not refused"
    try:
        with torch.no_grad():
            model(**inputs)
    except meshcp.MeshcpError as error:
        said = f"{type(error).__name__}: {error}"
    handle.remove()
    assert _state(model) == before, "the model is not as it was"
    return said


@pytest.mark.parametrize("name", RUNS)
def test_a_forward_pass_refuses(pool: Pool, name: str) -> None:
    for said in pool.run(2, run, name, "ulysses"):
        assert RUNS[name][3] in said


def forward_error_then_right() -> float:
    """A forward that was refused leaves nothing behind that the next one stumbles over."""
    model = model_cases.build(_row())
    inputs = model_cases.make_inputs(_row())
    with torch.no_grad():
        expected = model_cases.tensors_of(model(**inputs))[0]
        meshcp.parallelize(model, init_device_mesh("cpu", (2,), mesh_dim_names=("ring",)))
        for _ in range(2):
            with pytest.raises(meshcp.InputError):
                model(**{**inputs, "hidden_states": None})
        return model_cases._difference(model_cases.tensors_of(model(**inputs))[0], expected)


def test_a_refused_forward_is_forgotten(pool: Pool) -> None:
    assert max(pool.run(2, forward_error_then_right)) < 1e-10


def test_a_plan_that_is_no_plan() -> None:
    with pytest.raises(PlanError, match="needed: a style such as ShardInputs"):
        Plan({"proj_out": seq(1, "image")})  # type: ignore[dict-item]
    with pytest.raises(PlanError, match="are not among the plan's entries"):
        Plan(ENTRIES, optional=["proj_in"])
    with pytest.raises(PlanError, match="needed: seq"):
        ShardInputs(hidden_states=1)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="names no output"):
        GatherOutputs(None)
    with pytest.raises(PlanError, match="a tuple of names"):
        ContextParallelAttention(streams="image")
    with pytest.raises(PlanError, match=r"pass the plan to meshcp\.parallelize"):
        JOINT._apply(nn.Linear(1, 1), None)  # type: ignore[arg-type]


def _styles(of: type[MeshcpStyle] = MeshcpStyle) -> list[type[MeshcpStyle]]:
    return [found for cls in of.__subclasses__() for found in (cls, *_styles(cls))]


def given_to_torch() -> list[str]:
    mesh, said = init_device_mesh("cpu", (2,), mesh_dim_names=("ulysses",)), []
    for style in (ENTRIES[""], JOINT, GatherOutputs(seq(1, "image")), LocalAttention()):
        model = nn.ModuleDict({"x": nn.Linear(1, 1)})
        for plan in (style, {"x": style}):
            with pytest.raises(PlanError) as error:
                parallelize_module(model, mesh, plan)
            said.append(str(error.value))
    return said


def test_styles_in_torch_parallelize_module_are_refused(pool: Pool) -> None:
    for said in pool.run(2, given_to_torch):
        assert all("pass the plan to meshcp.parallelize(model, mesh, plan)" in message for message in said), said


@pytest.mark.parametrize("style", _styles(), ids=lambda style: style.__name__)
def test_styles_are_frozen_but_for_what_torch_sets(style: type[MeshcpStyle]) -> None:
    made = object.__new__(style)
    made.src_data_rank = 0
    for name in ("src_data_ranks", *style.__dataclass_fields__):  # type: ignore[attr-defined]
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, name, None)
    assert not vars(made)
