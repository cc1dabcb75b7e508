"""Classifier-free guidance over a ``cfg`` axis: the conditional and the unconditional half on different ranks.

Two kinds of pipelines do it, and one line serves both::

    meshcp.parallelize_guidance(pipe.transformer, mesh)

*Batched* (SD3, CogVideoX, HunyuanDiT ...): the transformer is called once, on a batch that contains both halves. The
batch is cut over the axis and the outputs are gathered. Samples of a batch do not see each other, so this is right
whatever they mean.

*Two calls* (Wan, Qwen-Image, FLUX with true CFG ...): the first call returns at once, with a tensor that is not yet
computed. The second call finds it open: each rank computes one of the two, and both are exchanged. A script that looks
at the first result before it makes the second call gets it as well; then every rank computes that call for itself.

Ranks along the axis run the same script with the same inputs, and hold the same outputs after every call.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from . import _compat
from .agreement import digest, fingerprints
from .collectives import all_gather
from .errors import InputError, MeshError, PlanError
from .layout import map_tensors
from .mesh import check_order, local_device
from .models.registry import PLANS
from .placements import StreamDim
from .styles import ShardInputs
from .styles.base import forward_parameters

_MARK = "_meshcp_guidance"

# Methods of a tensor that look at no value: an open result stays open, and they are done once it is there.
_LATER = frozenset({"__getitem__", "bfloat16", "contiguous", "double", "float", "half", "to"})

Original = Callable[..., Any]


class GuidanceHandle:
    """A model whose guidance is parallel.

    Attributes:
        degree: degree of the axis.
        cut: number of calls whose batch was cut over the axis.
        paired: number of calls that were computed side by side with others.
        alone: number of calls that every rank computed for itself, because the script used their result before it made
            another call. Right, but the axis gains nothing in them.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, axis: str, whole: Sequence[str]) -> None:
        names = mesh.mesh_dim_names or ()
        coordinate = mesh.get_coordinate()
        if coordinate is None or not names:
            raise MeshError(f"{mesh} has no axis names or does not contain this rank; needed: an axis {axis!r}")
        check_order(mesh, (axis,))
        self.model, self.axis = model, axis
        self.degree = mesh.size(names.index(axis)) if axis in names else 1
        self.cut = self.paired = self.alone = 0
        self._rank = coordinate[names.index(axis)] if axis in names else 0
        self._group = mesh.get_group(axis) if self.degree > 1 else None
        self._device_type = mesh.device_type
        self._names = forward_parameters(model)
        self._whole, self._sequences = frozenset(whole), _sequence_dims(model)
        self._open: list[_Call] = []
        self._like: dict[Any, Any] = {}
        self._agreed: set[Any] = set()
        self._undo: Callable[[], None] | None = None

    def __repr__(self) -> str:
        return f"<meshcp.GuidanceHandle of {type(self.model).__name__}: {self.describe()}>"

    def describe(self) -> str:
        """How the calls have been computed so far, in a line."""
        return f"{self.axis} {self._rank}/{self.degree}: {self.cut} calls cut, {self.paired} paired, {self.alone} alone"

    def remove(self) -> None:
        """Restore the model as it was. Results that are still open are computed first."""
        if self._undo is not None:
            self.compute()
            self._undo()
            self._undo = None
        self.model.__dict__.pop(_MARK, None)

    def run(self, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of the model."""
        name = type(self.model).__name__
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.model.parameters()):
            raise InputError(
                f"{name} is called with gradients enabled, and its guidance is parallel over {self.axis!r}, which is "
                "for inference. Call it under torch.no_grad(), as pipelines do, or call handle.remove() to train"
            )
        if _compat.runs_in_compiled_module():
            raise InputError(
                f"{name} is called by what torch.compile(model) returned, and its guidance is parallel over "
                f"{self.axis!r}: calls of the model come together outside of any graph. Compile the model itself, with "
                "model.compile() or model.compile_repeated_blocks()"
            )
        args, kwargs = _filled(args), _filled(kwargs)
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        if not self._agreed:
            self._check_inputs(given)
        batch = _batch_size(given.get(self._names[0]))
        if batch and batch % self.degree == 0:
            self.cut += 1
            return self._run_cut(original, given, batch)
        if getattr(self.model, "is_cache_enabled", False):
            raise InputError(
                f"{name} has a cache (enable_cache); with its calls shared out over {self.axis!r} each rank would "
                f"cache only some of them. Call disable_cache(), or use a mesh without {self.axis!r}"
            )
        call = _Call(original, given)
        self._open.append(call)
        if len(self._open) == self.degree:
            self.compute()
            return call.output
        like = self._like.get(given.get("return_dict"))
        return _Promise(self, call) if like is None else _map_output(like, lambda _, key: _later(self, call, key))

    def compute(self) -> None:
        """Compute the calls that are still open, each on one rank of the axis. All ranks of it call this together."""
        calls, self._open = self._open, []
        if not calls:
            return
        mine = calls[min(self._rank, len(calls) - 1)]
        output = mine.run()
        self._like[mine.given.get("return_dict")] = _map_output(output, lambda x, _: _Leaf())
        if len(calls) == 1:
            self.alone += 1
            mine.finish(output)
            return
        self.paired += len(calls)
        self._check_outputs(output, tuple(call.signature for call in calls))
        gathered: dict[Any, tuple[torch.Tensor, ...]] = {}
        for key, x in _leaves(output):
            gathered[key] = self._all_gather(x.unsqueeze(0), 1).unbind(0)
        for index, call in enumerate(calls):
            call.finish(_map_output(output, functools.partial(_entry, gathered, index)))

    def _run_cut(self, original: Original, given: dict[str, Any], batch: int) -> Any:
        part = batch // self.degree
        rows = slice(self._rank * part, (self._rank + 1) * part)
        output = original(**{name: self._cut(value, batch, rows, name, name) for name, value in given.items()})
        self._check_outputs(output, ("cut", _signature(given)))

        def gather(x: torch.Tensor, key: Any) -> torch.Tensor:
            if x.ndim == 0 or x.shape[0] != part:
                raise InputError(
                    f"output {key} of {type(self.model).__name__} has shape {tuple(x.shape)} for {part} samples; only "
                    f"outputs with one entry a sample can be put together over {self.axis!r}"
                )
            return self._all_gather(x, part)

        def gather_list(values: list[torch.Tensor], key: Any) -> list[torch.Tensor]:
            if len(values) != part or len({x.shape for x in values}) != 1:
                raise InputError(
                    f"output {key} of {type(self.model).__name__} is a list of tensors of shapes "
                    f"{[tuple(x.shape) for x in values]} for {part} samples; only one tensor a sample, all of one "
                    f"shape, can be put together over {self.axis!r}"
                )
            return list(self._all_gather(torch.stack(values), part).unbind(0))

        return _map_output(output, gather, gather_list)

    def _cut(self, value: Any, batch: int, rows: slice, name: str, path: str) -> Any:
        """This rank's samples of an argument; what does not have one entry a sample stays whole."""
        if name in self._whole:
            return value
        if isinstance(value, torch.Tensor):
            dim = self._sequences.get(name)
            is_sequence = dim is not None and dim % max(value.ndim, 1) == 0
            return value[rows] if value.ndim and value.shape[0] == batch and not is_sequence else value
        if isinstance(value, list | tuple):
            samples = [isinstance(x, torch.Tensor) and x.ndim > 0 and x.shape[0] == batch for x in value]
            if len(value) == batch and any(samples) and name not in self._sequences:
                raise InputError(
                    f"input {path} of {type(self.model).__name__} has {len(value)} entries, and so has the batch, but "
                    f"its tensors begin with {batch} too; say that it is not one entry a sample with "
                    f"parallelize_guidance(..., whole=({name!r},)), or pass tensors"
                )
            if len(value) == batch and not any(samples):
                return value[rows]
            return type(value)(self._cut(x, batch, rows, name, f"{path}[{i}]") for i, x in enumerate(value))
        if type(value) is dict:
            return {key: self._cut(x, batch, rows, name, f"{path}[{key!r}]") for key, x in value.items()}
        return value

    def _all_gather(self, x: torch.Tensor, part: int) -> torch.Tensor:
        assert self._group is not None
        return all_gather(x, 0, (part,) * self.degree, self._rank, self._group.group_name)

    def _check_inputs(self, given: dict[str, Any]) -> None:
        """Raise on every rank unless all were given the same: in the first call."""
        self._agreed.add("inputs")
        values: dict[str, int] = {}

        def note(x: torch.Tensor, path: str) -> torch.Tensor:
            values[path] = digest(x)
            return x

        for name, value in given.items():
            map_tensors(value, note, name)
        assert self._group is not None
        group = tuple(dist.get_process_group_ranks(self._group))
        weights = {f"weight {name}": value for name, value in fingerprints(self.model, group).items()}
        values.update(weights)
        if self._is_same(sum((index + 1) * (value % 2**40) for index, value in enumerate(values.values())) % 2**60):
            return
        everyone: list[dict[str, int]] = [{} for _ in range(self.degree)]
        dist.all_gather_object(everyone, values, group=self._group)
        names = {name for other in everyone for name in other}
        differing = sorted(name for name in names if len({other.get(name) for other in everyone}) > 1)
        if not set(differing) - set(weights):
            shown = ", ".join(differing[:4]) + (f" and {len(differing) - 4} more" if len(differing) > 4 else "")
            raise InputError(
                f"{shown} of {type(self.model).__name__} differ between ranks of {self.axis!r}. Load the same "
                "checkpoint and the same adapters on every rank, or seed alike before the model is made"
            )
        differing = [name for name in differing if name not in weights]
        raise InputError(
            f"the inputs {', '.join(differing)} of {type(self.model).__name__} differ between ranks of {self.axis!r}. "
            "Every rank must be given the same tensors, those of both halves: seed the generator alike "
            "(meshcp.seed_everything)"
        )

    def _check_outputs(self, output: Any, signature: Any) -> None:
        """Raise on every rank unless all made tensors of the same shapes: once for each kind of call."""
        if signature in self._agreed:
            return
        self._agreed.add(signature)
        shapes = [(str(key), tuple(x.shape), str(x.dtype)) for key, x in _leaves(output)]
        if not self._is_same(sum(ord(c) * (index + 1) for index, c in enumerate(repr(shapes)))):
            raise InputError(
                f"the outputs of {type(self.model).__name__} differ in shape between ranks of {self.axis!r} (here: "
                f"{shapes}); needed: halves of guidance with outputs of the same shape. Pad the inputs that decide it"
            )

    def _is_same(self, value: int) -> bool:
        device = local_device(self._device_type)
        extremes = torch.tensor([value, -value], dtype=torch.int64, device=device)
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self._group)
        return int(extremes.sum().item()) == 0


def parallelize_guidance(
    model: nn.Module, mesh: DeviceMesh, *, axis: str = "cfg", whole: Sequence[str] = ()
) -> GuidanceHandle:
    """Share the calls of classifier-free guidance out over an axis of the mesh. The pipeline stays as it is.

    A batch that the degree divides is cut over the axis; other calls wait for each other, as many as the degree, and
    each rank computes one (see :mod:`meshcp.guidance`). Works on a model with or without :func:`meshcp.parallelize`,
    before or after it, and under FSDP.

    Args:
        model: the transformer. Between two calls that are computed side by side it must not change (an adapter that is
            switched off for one half, say); their inputs may, for they are copied.
        mesh: a mesh with the axis; without it, or with degree 1, nothing is changed.
        axis: its name.
        whole: names of arguments that do not have one entry a sample although their first dimension looks like it.

    Returns:
        A handle; ``handle.remove()`` restores the model, ``handle.describe()`` says how calls were computed.

    Raises:
        PlanError: something that is not a plain model, or one whose guidance is parallel already.
        MeshError: a mesh without axis names, without this rank, or whose ranks do not ascend along the axis.
        InputError: in a call: with gradients, with a cache, through ``torch.compile(model)``, or with inputs or output
            shapes that differ between ranks.
    """
    given: object = model
    if not isinstance(given, nn.Module):
        hint = ": pass its transformer, pipe.transformer" if hasattr(given, "transformer") else ""
        raise PlanError(f"a model (torch.nn.Module) is needed, found {type(given).__name__}{hint}")
    if isinstance(model, DistributedDataParallel) or _compat.is_compiled_module(model):
        raise PlanError(
            f"{type(model).__name__} wraps the model; parallelize the guidance of the model itself, and compile it "
            "with model.compile_repeated_blocks() or model.compile()"
        )
    if _MARK in model.__dict__:
        raise PlanError(f"the guidance of {type(model).__name__} is parallel already; call handle.remove() before")
    handle = GuidanceHandle(model, mesh, axis, whole)
    if handle.degree > 1:
        handle._undo = _compat.wrap_call(model, handle.run)
        model.__dict__[_MARK] = handle
    return handle


class _Call:
    """A call of the model: made, and perhaps not computed yet. Inputs are copied, for the script goes on."""

    def __init__(self, original: Original, given: dict[str, Any]) -> None:
        self._original = original
        self.given = {name: _map_nested(value, torch.clone) for name, value in given.items()}
        self.signature = _signature(given)
        self.output: Any = None
        self.done = False
        kind = next((x.device.type for x in _nested(given)), "cpu")
        self._autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        self._inference = torch.is_inference_mode_enabled()

    def run(self) -> Any:
        kind, dtype, enabled = self._autocast
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode() if self._inference else torch.no_grad())
            if enabled:
                stack.enter_context(torch.autocast(kind, dtype))
            return self._original(**self.given)

    def finish(self, output: Any) -> None:
        self.output, self.done, self.given = output, True, {}


class _Later(torch.Tensor):
    """A tensor that is computed when anything but :data:`_LATER` is done with it."""

    _handle: GuidanceHandle
    _call: _Call
    _steps: tuple[Callable[[Any], Any], ...]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first, rest = args[0] if args else None, args[1:]
        if (
            getattr(func, "__name__", "") in _LATER
            and isinstance(first, _Later)
            and not first._call.done
            and not any(True for _ in _nested((rest, kwargs)))
        ):
            return _extend(first, lambda x: func(x, *rest, **kwargs))
        return func(*_filled(args), **_filled(kwargs))

    def fill(self) -> Any:
        """The value."""
        if not self._call.done:
            self._handle.compute()
        if not self._call.done:
            raise InputError("this result of a call with parallel guidance was never computed: the call failed")
        value = self._call.output
        for step in self._steps:
            value = step(value)
        # Once, so that a change in place is seen by the next reader.
        self._steps = (lambda _: value,)
        return value


def _later(handle: GuidanceHandle, call: _Call, key: Any) -> _Later:
    later = _compat.placeholder(_Later)
    later._handle, later._call, later._steps = handle, call, (lambda output: _at(output, key),)
    return later


def _extend(later: _Later, step: Callable[[Any], Any]) -> _Later:
    new = _later(later._handle, later._call, None)
    new._steps = (*later._steps, step)
    return new


class _Leaf:
    """Stands for a tensor in the structure of an output."""


class _Promise:
    """The output of the first call of its kind, of which it is not known yet what it is made of."""

    def __init__(self, handle: GuidanceHandle, call: _Call) -> None:
        self._handle, self._call = handle, call

    def _value(self) -> Any:
        if not self._call.done:
            self._handle.compute()
        return self._call.output

    def __getitem__(self, key: Any) -> Any:
        if self._call.done or not isinstance(key, int | str):
            return self._value()[key]
        return _later(self._handle, self._call, key)

    def __getattr__(self, name: str) -> Any:
        if name == "sample" and not self._call.done:
            return _later(self._handle, self._call, name)
        return getattr(self._value(), name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._value())

    def __len__(self) -> int:
        return len(self._value())


def _at(output: Any, key: Any) -> Any:
    if isinstance(key, tuple):
        for part in key:
            output = _at(output, part)
        return output
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, dict) and isinstance(key, int):
        return list(output.values())[key]
    return output[key]


def _map_output(
    output: Any,
    function: Callable[[torch.Tensor, Any], Any],
    on_list: Callable[[list[torch.Tensor], Any], Any] | None = None,
    key: tuple[Any, ...] = (),
) -> Any:
    """The same output with ``function(tensor, key)`` in the place of every tensor, or of what stands for one."""
    if isinstance(output, torch.Tensor | _Leaf):
        return function(output, key)  # type: ignore[arg-type]
    if isinstance(output, dict):
        return type(output)(**{k: _map_output(x, function, on_list, (*key, k)) for k, x in output.items()})
    if isinstance(output, list) and on_list is not None and output and all(isinstance(x, torch.Tensor) for x in output):
        return on_list(output, key)
    if isinstance(output, list | tuple):
        parts = [_map_output(x, function, on_list, (*key, i)) for i, x in enumerate(output)]
        return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)
    return output


def _entry(gathered: dict[Any, tuple[torch.Tensor, ...]], index: int, _: torch.Tensor, key: Any) -> torch.Tensor:
    return gathered[key][index]


def _leaves(output: Any) -> list[tuple[Any, torch.Tensor]]:
    found: list[tuple[Any, torch.Tensor]] = []

    def note(x: torch.Tensor, key: Any) -> torch.Tensor:
        found.append((key, x))
        return x

    _map_output(output, note)
    return found


def _filled(value: Any) -> Any:
    """The same arguments with values in the place of what was to be computed later."""
    if isinstance(value, _Later):
        return value.fill()
    if isinstance(value, _Promise):
        return value._value()
    if isinstance(value, list | tuple):
        parts = [_filled(x) for x in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return {key: _filled(x) for key, x in value.items()} if type(value) is dict else value


def _map_nested(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return map_tensors(value, lambda x, _: function(x), "")


def _nested(value: Any) -> list[torch.Tensor]:
    """Every tensor in nested arguments."""
    found: list[torch.Tensor] = []

    def note(x: torch.Tensor, path: str) -> torch.Tensor:
        found.append(x)
        return x

    map_tensors(value, note, "")
    return found


def _signature(given: dict[str, Any]) -> tuple[Any, ...]:
    """What decides the shapes of the outputs, the same on all ranks."""
    return tuple((name, tuple((tuple(x.shape), x.dtype) for x in _nested(value))) for name, value in given.items())


def _batch_size(value: Any) -> int:
    """The number of samples, by the first argument of the model; 0 where it does not say."""
    if isinstance(value, torch.Tensor):
        return value.shape[0] if value.ndim else 0
    return len(value) if isinstance(value, list | tuple) else 0


def _sequence_dims(model: nn.Module) -> dict[str, int]:
    """Inputs of which the plan says that a dimension is a sequence, and which."""
    plan = next((PLANS[cls.__name__] for cls in type(model).__mro__ if cls.__name__ in PLANS), None)
    found: dict[str, int] = {}
    for path, styles in plan.entries if plan is not None else ():
        for style in styles:
            if path == "" and isinstance(style, ShardInputs):
                found.update({name: where.dim for name, where in style.inputs if isinstance(where, StreamDim)})
    return found
