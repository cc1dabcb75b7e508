"""Every private torch or diffusers name that meshcp uses, and what differs between their versions.

Held for torch 2.11 to 2.14 and diffusers 0.42. Nothing else in the package may reach behind an underscore.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from types import FunctionType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from .errors import AttentionError

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._op_schema import OpSchema as OpSchema
    from torch.distributed.tensor._op_schema import OpStrategy

Hook = TypeVar("Hook", bound=Callable[..., Any])
SubTensor = TypeVar("SubTensor", bound=torch.Tensor)

# -- functional collectives --------------------------------------------------------------------------------------
# The public wrappers in torch.distributed._functional_collectives (a private module too) end in these operators.


def start_all_to_all(x: torch.Tensor, receive: Sequence[int], send: Sequence[int], group: str) -> torch.Tensor:
    """``all_to_all_single`` of a 1-D tensor with explicit splits; wait with :func:`wait`."""
    out: torch.Tensor = torch.ops._c10d_functional.all_to_all_single(x, list(receive), list(send), group)
    return out


def start_all_gather(x: torch.Tensor, degree: int, group: str) -> torch.Tensor:
    """Concatenation over ranks along dim 0; equal shapes on every rank."""
    out: torch.Tensor = torch.ops._c10d_functional.all_gather_into_tensor(x, degree, group)
    return out


def start_reduce_scatter(x: torch.Tensor, degree: int, group: str) -> torch.Tensor:
    """Sum over ranks, cut into ``degree`` equal parts along dim 0; this rank's part."""
    out: torch.Tensor = torch.ops._c10d_functional.reduce_scatter_tensor(x, "sum", degree, group)
    return out


def start_all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    """Sum over ranks, out of place."""
    out: torch.Tensor = torch.ops._c10d_functional.all_reduce(x, "sum", group)
    return out


def wait(x: torch.Tensor) -> torch.Tensor:
    """Wait for a functional collective (``AsyncCollectiveTensor.wait`` loses autograd in some gathers)."""
    out: torch.Tensor = torch.ops._c10d_functional.wait_tensor(x)
    return out


def resolve_group(name: str) -> dist.ProcessGroup:
    """The process group of this name."""
    from torch._C._distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)  # type: ignore[arg-type, unused-ignore]


_GROUPS_MADE: Counter[tuple[int, ...]] = Counter()


def new_group(ranks: Sequence[int], timeout: timedelta, backend: str | None = None) -> dist.ProcessGroup:
    """A process group that only its members make; the same ranks may make, destroy and make theirs again.

    torch derives its name from counts of groups (2.11: of those alive, later: of those made), which also name what it
    leaves in the store. A count of groups alive leads the second group of the same ranks to the addresses of the first;
    a count of groups made differs from then on between members and others, whose next common group finds no partner.
    Hence a count for each set of ranks.
    """
    from torch.distributed import distributed_c10d

    key = tuple(ranks)
    _GROUPS_MADE[key] += 1
    name: Any = f"meshcp_{'_'.join(map(str, key))}_{_GROUPS_MADE[key]}"
    original = distributed_c10d._process_group_name
    distributed_c10d._process_group_name = lambda ranks, use_hashed_name: name
    try:
        group = dist.new_group(list(ranks), timeout=timeout, backend=backend, use_local_synchronization=True)
    finally:
        distributed_c10d._process_group_name = original
    assert isinstance(group, dist.ProcessGroup)
    return group


# -- modules and kernels -------------------------------------------------------------------------------------------


def own_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """The parameters that a module itself holds, to put plain tensors in their place for a while."""
    return module._parameters


def fused_attention(kernel: str) -> Any:
    """aten's operator ``_scaled_dot_product_<kernel>``; no public one gives the LSE, or takes it for the backward."""
    return getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}")


# -- DTensor operator strategies -----------------------------------------------------------------------------------
# register_op_strategy with a hand-built OpSpec holds from 2.11 to 2.14 and sees the axis names of the mesh.
# register_sharding and the single-dim strategies see neither names nor degrees.


def register_strategy(
    ops: Sequence[torch._ops.OpOverload], choose: Callable[[OpSchema], list[list[Sequence[Placement] | None]]]
) -> None:
    """Register a DTensor strategy for ``ops``.

    Args:
        ops: overloads that share the strategy.
        choose: given the schema of a call, a list of candidates; each names the placements of the outputs and then
            of the tensor inputs in order (None for an input that is absent).
    """
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._op_schema import OpSpec, OpStrategy, RuntimeSchemaInfo
    from torch.distributed.tensor._ops.utils import generate_redistribute_costs, register_op_strategy

    def strategy(schema: OpSchema) -> OpStrategy:
        inputs = [argument for argument in schema.args_schema if isinstance(argument, OpStrategy)]
        mesh = inputs[0].mesh
        outputs = len(schema.op._schema.returns)
        specs = []
        for candidate in choose(schema):
            out_specs = tuple(DTensorSpec(mesh, tuple(p)) for p in candidate[:outputs] if p is not None)
            in_specs = [
                DTensorSpec(mesh, tuple(placements), tensor_meta=source.strategies[0].output_spec.tensor_meta)
                for placements, source in zip((p for p in candidate[outputs:] if p is not None), inputs, strict=True)
            ]
            costs = [generate_redistribute_costs(source, spec) for source, spec in zip(inputs, in_specs, strict=True)]
            output_specs = out_specs if outputs > 1 else out_specs[0]
            specs.append(OpSpec(output_specs=output_specs, input_specs=in_specs, redistribute_cost=costs))
        return OpStrategy(specs)

    info = RuntimeSchemaInfo(static_argnum=4, static_kwargkey=["causal", "ring"])
    register_op_strategy(list(ops), schema_info=info)(strategy)


def input_specs(schema: OpSchema) -> list[DTensorSpec | None]:
    """The spec of each positional argument of a call, None for those that are no DTensor."""
    from torch.distributed.tensor._op_schema import OpStrategy

    return [
        argument.strategies[0].output_spec if isinstance(argument, OpStrategy) else None
        for argument in schema.args_schema
    ]


def in_backward() -> bool:
    """Whether the autograd engine runs now, which then computes checkpointed parts of a forward pass anew."""
    return torch._C._current_graph_task_id() != -1


def separate_compile_caches(*groups: str) -> None:
    """Keep this rank's compiled graphs apart from those of ranks with other process groups.

    Names of process groups are constants of a compiled graph but no part of its cache key. Ranks that share a cache
    directory would load each other's graphs ("Could not resolve the process group", torch 2.13 and 2.14). The tag stays
    when a model is parallel no more: another one may need it, and it costs nothing.
    """
    config, tag = torch.compiler.config, f"[meshcp:{','.join(groups)}]"
    if tag not in config.cache_key_tag:
        config.cache_key_tag += tag


def runs_compiled(model: torch.nn.Module) -> bool:
    """Whether what runs now is compiled: the call of ``model`` (``torch.compile(model)``), or those of modules in it
    (``module.compile()``, ``compile_repeated_blocks``)."""
    return runs_in_compiled_module() or any(is_compiled(module) for module in model.modules())


def runs_in_compiled_module() -> bool:
    """Whether what runs now was called by what ``torch.compile(module)`` returned."""
    from torch._dynamo.eval_frame import _is_in_optimized_module

    return _is_in_optimized_module()


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether ``module`` compiles its own calls."""
    return module._compiled_call_impl is not None


def left_to_python(hook: Hook) -> Hook:
    """A hook, such that Dynamo compiles neither it nor what it calls; in a graph that it is called from, it is traced.

    Dynamo does not trace ``nn.Module.__call__`` of the module that it compiles, but goes on into each hook that this
    calls: a graph for every hook, at worst for every block. ``torch.compiler.disable`` would break the graphs of models
    that are compiled as a whole.
    """
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    code = cast(FunctionType, hook).__code__
    set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return hook


def is_compiled_module(module: torch.nn.Module) -> bool:
    """Whether ``module`` is what ``torch.compile(module)`` returns."""
    from torch._dynamo.eval_frame import OptimizedModule

    return isinstance(module, OptimizedModule)


# -- diffusers: where a processor hands an attention call to a backend ------------------------------------------------
# dispatch_attention_fn(..., backend=processor._attention_backend, parallel_config=processor._parallel_config) looks the
# backend up in a registry. meshcp is one more entry of that registry; the parallel_config of a call is the attention
# site that it belongs to. A processor carries both only while its module runs.


class AttentionCall(Protocol):
    """What meshcp does with an attention call. Tensors are ``[B, S, H, D]``."""

    def dispatched(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        dropout_p: float,
        causal: bool,
        scale: float | None,
    ) -> torch.Tensor: ...


# Some processors hand over the backend alone (Flux2's with a cache of keys and values): such a call belongs to the
# attention site that runs.
_IN_CHARGE: list[AttentionCall] = []


def _meshcp_backend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    _parallel_config: AttentionCall | None = None,
) -> torch.Tensor:
    if _parallel_config is None and _IN_CHARGE:
        _parallel_config = _IN_CHARGE[-1]
    if _parallel_config is None:
        raise AttentionError(
            "an attention call reached the meshcp backend without a module that it belongs to; leave the attention "
            "backend as Diffusers sets it (model.reset_attention_backend()): meshcp takes calls over by itself"
        )
    return _parallel_config.dispatched(query, key, value, attn_mask, dropout_p, is_causal, scale)


def register_attention_backend() -> Any:
    """Enter meshcp into the registry of Diffusers' attention backends; returns the name to hand to a processor."""
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    for known in _AttentionBackendRegistry._backends:
        if known.value == "meshcp":
            return known
    # An enum with members cannot be extended by subclassing, and the registry is keyed by members.
    member = str.__new__(AttentionBackendName, "meshcp")
    member._name_, member._value_ = "MESHCP", "meshcp"
    _AttentionBackendRegistry.register(member)(_meshcp_backend)
    return member


def has_attention_seam(owner: object) -> bool:
    """Whether a processor (or module) passes its own backend and parallel config to ``dispatch_attention_fn``."""
    return hasattr(owner, "_attention_backend") and hasattr(owner, "_parallel_config")


@contextlib.contextmanager
def taken_over(owner: Any, member: Any, call: AttentionCall, everywhere: bool = False) -> Iterator[None]:
    """Let the attention calls of ``owner`` come to ``call``, and leave ``owner`` as it was afterwards.

    ``everywhere``: also those for which it leaves the choice of a backend to Diffusers (``backend=None``).
    """
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    active = _AttentionBackendRegistry._active_backend
    # Not taken off again where it had none of its own: Dynamo of torch 2.11 then deletes what it has never set.
    before = owner._attention_backend, owner._parallel_config
    owner._attention_backend, owner._parallel_config = member, call
    _IN_CHARGE.append(call)
    if everywhere:
        _AttentionBackendRegistry._active_backend = member
    try:
        yield
    finally:
        _IN_CHARGE.pop()
        if everywhere:
            _AttentionBackendRegistry._active_backend = active
        owner._attention_backend, owner._parallel_config = before


def own_attention_seam(owner: object) -> Callable[[], None]:
    """Give ``owner`` backend and parallel config of its own, as its class says; returns how to undo that.

    That way nothing appears on it while it runs, on which a compiled graph would depend.
    """
    if not has_attention_seam(owner):
        return lambda: None
    names = [name for name in ("_attention_backend", "_parallel_config") if name not in owner.__dict__]
    for name in names:
        setattr(owner, name, getattr(owner, name))

    def undo() -> None:
        for name in names:
            # What the user has set since then stays.
            if name in owner.__dict__ and getattr(owner, name) is getattr(type(owner), name, None):
                delattr(owner, name)

    return undo


def chosen_backend(owner: object) -> str:
    """Name of the attention backend that the user chose for ``owner``, ``""`` where it is Diffusers' own choice."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    backend = getattr(owner, "_attention_backend", None)
    if backend is None:
        backend = _AttentionBackendRegistry._active_backend
    return str(getattr(backend, "value", backend))


def dispatch(
    backend: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None,
    grouped: bool,
) -> torch.Tensor:
    """A call of one of Diffusers' backends on local ``[B, S, H, D]`` tensors."""
    from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn

    out: torch.Tensor = dispatch_attention_fn(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped,
        backend=AttentionBackendName(backend),
    )  # fmt: skip
    return out


def is_attention(module: torch.nn.Module) -> bool:
    """Whether ``module`` computes attention: it has a processor, or Diffusers says so."""
    from diffusers.models.attention import AttentionModuleMixin
    from diffusers.models.attention_processor import Attention, MochiAttention

    return isinstance(module, AttentionModuleMixin | Attention | MochiAttention)


# -- diffusers: what from_pretrained reads off a model class -----------------------------------------------------------


def kept_in_fp32(model_class: type) -> tuple[str, ...]:
    """Names of submodules whose parameters stay in fp32 when the model is loaded in another dtype."""
    names = getattr(model_class, "_keep_in_fp32_modules", None) or ()
    return (names,) if isinstance(names, str) else tuple(names)


def keys_to_ignore(model_class: type) -> tuple[str, ...]:
    """Regular expressions for the keys that a checkpoint may hold although the model lacks them."""
    return tuple(getattr(model_class, "_keys_to_ignore_on_load_unexpected", None) or ())


# -- device meshes -----------------------------------------------------------------------------------------------------
# Flattening axes and putting meshes side by side have no public name yet. Both keep the root mesh, without which FSDP2
# refuses parameters that tensor parallel has sharded on another axis of it.


def flatten_axes(mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh:
    """One axis made of several of ``mesh``."""
    part = mesh[tuple(names)]
    return part if len(names) == 1 else part._flatten("_".join(names))


def join_meshes(outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
    """The mesh of two axes that are given as meshes of one."""
    return DeviceMesh._concatenate([outer, inner])


# -- diffusers: hooks that caches, offloading and casting put around the forward of a module --------------------------
# module._diffusers_hook is a HookRegistry; each hook swaps module.forward for a function that calls the one before,
# which it keeps in fn_ref.original_forward (hooks with a new_forward) or fn_ref.forward. Accelerate keeps the one
# before in module._old_forward. A forward that is put in the place of the innermost one works in either order with
# them.


def hooks(modules: Iterable[torch.nn.Module]) -> list[tuple[torch.nn.Module, str, Any]]:
    """(module, name, hook) of every Diffusers hook on ``modules``."""
    return [
        (module, name, hook)
        for module in modules
        if (registry := module.__dict__.get("_diffusers_hook")) is not None
        for name, hook in registry.hooks.items()
    ]


def cache_hooks(modules: Iterable[torch.nn.Module]) -> list[tuple[torch.nn.Module, str, Any]]:
    """(module, name, hook) of every Diffusers hook on ``modules`` that keeps state between forward passes."""
    return [found for found in hooks(modules) if is_stateful(found[2])]


def is_stateful(hook: Any) -> bool:
    """Whether a Diffusers hook keeps state between forward passes."""
    return bool(hook._is_stateful)


def forward_slots(module: torch.nn.Module) -> list[tuple[Any, Callable[[Any], None]]]:
    """Every place that keeps a forward of ``module``, the outermost first: what is there, and how to put another."""
    slots: list[tuple[Any, Callable[[Any], None]]] = [(module.forward, functools.partial(setattr, module, "forward"))]
    registry = module.__dict__.get("_diffusers_hook")
    for reference in reversed(registry._fn_refs if registry is not None else ()):
        name = "forward" if reference.original_forward is None else "original_forward"
        slots.append((getattr(reference, name), functools.partial(setattr, reference, name)))
    if "_old_forward" in module.__dict__:
        slots.append((module.__dict__["_old_forward"], functools.partial(setattr, module, "_old_forward")))
    return slots


def innermost_forward(module: torch.nn.Module) -> tuple[Any, Callable[[Any], None]]:
    """The forward beneath every wrapper of Diffusers and Accelerate, and how to put another in its place."""
    # Their wrappers are partial objects; what they wrap is a bound method, or a function.
    return [slot for slot in forward_slots(module) if not isinstance(slot[0], functools.partial)][-1]


FIRST_BLOCK_DECISION = "_should_compute_remaining_blocks"
"""Name of the method by which FBCHeadBlockHook decides, from the residual of the first block."""


def first_block_residual(hook: Any) -> torch.Tensor | None:
    """The residual that FirstBlockCache compares with."""
    residual: torch.Tensor | None = hook.state_manager.get_state().head_block_residual
    return residual


def returns_text_apart(hook: Any) -> bool:
    """Whether the block of a FirstBlockCache hook returns the text as a tensor of its own."""
    return hook._metadata.return_encoder_hidden_states_index is not None


# -- DistributedDataParallel -------------------------------------------------------------------------------------------

DDP_IGNORES = "_ddp_params_and_buffers_to_ignore"
"""Attribute of a module: names of its parameters that DDP, made around it, must leave alone."""


def active_ddp() -> torch.nn.parallel.DistributedDataParallel | None:
    """The wrapper whose forward runs now."""
    active: torch.nn.parallel.DistributedDataParallel | None = (
        torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()
    )
    return active


def taken_apart(parameter: torch.Tensor) -> bool:
    """Whether ``DistributedDataParallel(device_mesh=)`` has put the local part of a DTensor in its place."""
    return hasattr(parameter, "_st_info")


def at_the_end_of_backward(function: Callable[[], None]) -> None:
    """Call ``function`` when the backward pass that runs now has computed all gradients."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


# -- modules and tensors -----------------------------------------------------------------------------------------------

WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod"})
"""What wrappers put into module paths: activation checkpointing, FSDP1, torch.compile."""


def children_of(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """The children by name as the module keeps them: also None, and one that has two names under both."""
    return module._modules


def placeholder(kind: type[SubTensor]) -> SubTensor:
    """An empty tensor of a subclass; on ``meta``, so that code which goes behind ``__torch_function__`` fails."""
    made: SubTensor = torch.Tensor._make_subclass(kind, torch.empty(0, device="meta"))
    return made


# -- calling a module --------------------------------------------------------------------------------------------------


def wrap_call(
    module: torch.nn.Module, run: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
) -> Callable[[], None]:
    """Let every call of ``module``, hooks and all, be ``run(call, args, kwargs)``; returns how to undo that.

    ``nn.Module.__call__`` asks the instance for ``_call_impl``, or for what ``module.compile()`` put in its place.
    Called afterwards, that compiles what lies beneath ``run``.
    """
    return _WrappedCall(module, run)


class _WrappedCall:
    def __init__(self, module: torch.nn.Module, run: Callable[..., Any]) -> None:
        self.module, self.run = module, run
        self._wrap()
        module.__dict__["compile"] = self._compile

    def __call__(self) -> None:
        self._unwrap()
        self.module.__dict__.pop("compile", None)

    def _wrap(self) -> None:
        self.name = "_compiled_call_impl" if is_compiled(self.module) else "_call_impl"
        self.own, original = self.module.__dict__.get(self.name), getattr(self.module, self.name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return self.run(original, args, kwargs)

        self.module.__dict__[self.name] = left_to_python(call)

    def _unwrap(self) -> None:
        if self.own is None:
            self.module.__dict__.pop(self.name, None)
        else:
            self.module.__dict__[self.name] = self.own

    def _compile(self, *args: Any, **kwargs: Any) -> None:
        self._unwrap()
        try:
            type(self.module).compile(self.module, *args, **kwargs)
        finally:
            self._wrap()
