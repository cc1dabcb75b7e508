"""Loading that fits: safetensors straight into the shards of a parallel model, and back.

``from_pretrained`` needs room for the whole model on every rank. Here a rank never holds more than its own part and
one tensor besides: the model is built without storage, parallelized, and filled with the slices that the rank owns.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.modules.module import register_module_parameter_registration_hook

from . import _compat
from .errors import CheckpointError
from .gradients import fsdp_mesh
from .mesh import RING, ULYSSES, local_device
from .models.tensor_parallel import tp_plan
from .parallelize import parallelize
from .placements import Interval, local_interval
from .plan import clean_path

Model = TypeVar("Model", bound=nn.Module)

_CONFIG = "config.json"
_WEIGHTS = "diffusion_pytorch_model"

# The pages of a mapped file count as this process's memory from the first read until the file is closed, so it is
# closed and opened again after so many bytes. Opening costs less than a millisecond.
_MAPPED_BYTES = 16 * 2**20

_FORMATS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def load_sharded(
    model_class: type[Model],
    path: str | os.PathLike[str],
    mesh: DeviceMesh | None = None,
    shard: Callable[[Model], object] | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    variant: str | None = None,
    subfolder: str | None = None,
) -> Model:
    """Load a Diffusers model of which each rank reads and holds only its own part.

    ::

        def shard(model):
            parallelize_module(model, mesh["tp"], meshcp.tp_plan(model, mesh))     # any of these, in this order
            meshcp.parallelize(model, mesh)
            for block in model.transformer_blocks:
                fully_shard(block, mesh=meshcp.fsdp_mesh(mesh))
            fully_shard(model, mesh=meshcp.fsdp_mesh(mesh))

        model = meshcp.load_sharded(FluxTransformer2DModel, "FLUX.1-dev/transformer", mesh, shard, dtype=torch.bfloat16)

    The result is what ``model_class.from_pretrained(path, torch_dtype=dtype)`` gives after the same ``shard``, to the
    bit, in evaluation mode. Beside its part of the model a rank holds at most one tensor, or 16 MiB of small ones.

    Args:
        model_class: a model class of Diffusers.
        path: a local directory with ``config.json`` and safetensors, one file or several with an index.
        mesh: where the model goes. Says which device, and what ``shard`` is if that is not given.
        shard: called with the model while its parameters have no storage yet (they are on the ``meta`` device), to
            cut them: tensor parallel, :func:`meshcp.parallelize`, ``fully_shard``. By default, as the axes of the mesh
            say: the plans that meshcp ships for ``tp``; :func:`meshcp.parallelize` for ``ring`` and ``ulysses``; with
            an axis ``fsdp``, ``fully_shard`` of each block and of the rest over ``meshcp.fsdp_mesh(mesh)``, replicated
            over ``dp``. Without a mesh, nothing is cut.
        dtype: of the parameters, but for those that the class keeps in fp32; the class's own (fp32) if None. Converted
            tensor by tensor.
        device: where the parameters go; by default the device of the mesh, else the CPU.
        variant: as in ``from_pretrained``, such as ``"fp16"``.
        subfolder: of ``path``.

    Raises:
        CheckpointError: no such files, files that cannot be read, or parameters that are missing, unexpected or of
            another shape, which is raised before any weight is read; or what ``shard`` did to a parameter does not fit.
    """
    directory = Path(path, subfolder or "")
    device = _default_device(mesh) if device is None else torch.device(device)
    checkpoint = _Checkpoint.open(directory, variant)
    try:
        config = model_class.load_config(os.fspath(directory))  # type: ignore[attr-defined]
    except OSError as error:
        raise CheckpointError(f"{directory / _CONFIG} cannot be read: {error} Download it again") from error
    with _parameters_on_meta(), _default_dtype(dtype):
        model: Any = model_class.from_config(config)  # type: ignore[attr-defined]
    dtypes = _check(model, model_class, checkpoint, dtype)
    # fully_shard notes the dtype of a parameter when it cuts it.
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, nn.Parameter):
            tensor.data = tensor.data.to(dtypes[name])
    if shard is not None:
        shard(model)
    elif mesh is not None:
        _shard_by_axes(model, mesh)
    _fill(model, checkpoint, dtypes, device)
    model.register_to_config(_name_or_path=os.fspath(path))
    loaded: Model = model.eval()
    return loaded


# -- building without storage ------------------------------------------------------------------------------------------


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules built in here have their parameters on ``meta``; all else is real.

    Not ``with torch.device("meta")``: rotary tables are buffers that no checkpoint holds, or plain attributes, and
    nothing could fill them afterwards.
    """
    thread = threading.get_ident()

    def without_storage(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        # A parameter that is on meta already is tied to another module, and stays the same object.
        if parameter is None or parameter.device.type == "meta" or threading.get_ident() != thread:
            return None
        empty = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        empty.__dict__.update(parameter.__dict__)
        return empty

    handle = register_module_parameter_registration_hook(without_storage)  # type: ignore[arg-type, unused-ignore]
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """``dtype`` as torch's default, as ``from_pretrained`` has it while it builds a model, if it can be one."""
    before = torch.get_default_dtype()
    if dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _default_device(mesh: DeviceMesh | None) -> torch.device:
    return local_device("cpu" if mesh is None else mesh.device_type)


def _shard_by_axes(model: nn.Module, mesh: DeviceMesh) -> None:
    names = mesh.mesh_dim_names or ()
    if "tp" in names and mesh["tp"].size() > 1:
        parallelize_module(model, mesh["tp"], tp_plan(model, mesh))
    if RING in names or ULYSSES in names:
        parallelize(model, mesh)
    if "fsdp" in names:
        over = fsdp_mesh(mesh, replicate=("dp",) if "dp" in names else ())
        for block in _blocks(model):
            fully_shard(block, mesh=over)
        fully_shard(model, mesh=over)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The members of the outermost module lists."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _blocks(child)


# -- reading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Checkpoint:
    """What a directory of safetensors holds, as its headers say.

    Attributes:
        directory: where.
        files: the file of each tensor, by name.
        shapes: the shape of each tensor, by name.
    """

    directory: Path
    files: Mapping[str, Path]
    shapes: Mapping[str, tuple[int, ...]]

    @staticmethod
    def open(directory: Path, variant: str | None) -> _Checkpoint:
        if not (directory / _CONFIG).is_file():
            raise CheckpointError(
                f"{directory} has no {_CONFIG}; needed: a local directory that save_pretrained or save_sharded wrote "
                "(of a model on the Hub, what huggingface_hub.snapshot_download returns, with its subfolder)"
            )
        dotted = f".{variant}" if variant else ""
        for index in (f"{_WEIGHTS}.safetensors.index{dotted}.json", f"{_WEIGHTS}{dotted}.safetensors.index.json"):
            if (directory / index).is_file():
                return _Checkpoint._from_index(directory, directory / index)
        single = directory / f"{_WEIGHTS}{dotted}.safetensors"
        if not single.is_file():
            present = sorted(file.name for file in directory.iterdir() if _WEIGHTS in file.name)
            raise CheckpointError(
                f"{directory} has neither {single.name} nor an index of it; found {', '.join(present) or 'none'}. "
                "Give the variant that is there, or convert to safetensors: save_pretrained(safe_serialization=True)"
            )
        shapes = _header(single)
        return _Checkpoint(directory, dict.fromkeys(shapes, single), shapes)

    @staticmethod
    def _from_index(directory: Path, index: Path) -> _Checkpoint:
        try:
            weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"{index} is no index of safetensors: {error!r}; download it again") from error
        absent = sorted({name for name in weight_map.values() if not (directory / name).is_file()})
        if absent:
            raise CheckpointError(f"{index} names files that are not there: {_listed(absent)}; download them again")
        headers = {name: _header(directory / name) for name in sorted(set(weight_map.values()))}
        lost = sorted(name for name, file in weight_map.items() if name not in headers[file])
        if lost:
            raise CheckpointError(f"{index} names tensors that are not in their files: {_listed(lost)}")
        shapes = {name: headers[file][name] for name, file in weight_map.items()}
        return _Checkpoint(directory, {name: directory / file for name, file in weight_map.items()}, shapes)


def _header(file: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor in ``file``."""
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read as safetensors: {error}; download it again") from error


def _check(
    model: nn.Module, model_class: type, checkpoint: _Checkpoint, dtype: torch.dtype | None
) -> dict[str, torch.dtype]:
    """Compare the names and shapes of model and checkpoint; the dtype that each tensor is to have, by name."""
    wanted: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    # Any name of a tied parameter will do.
    found = {id(tensor) for name, tensor in wanted.items() if name in checkpoint.files}
    missing = [name for name, tensor in wanted.items() if id(tensor) not in found]
    ignored = [re.compile(pattern) for pattern in _compat.keys_to_ignore(model_class)]
    unexpected = [
        name for name in checkpoint.files if name not in wanted and not any(pattern.search(name) for pattern in ignored)
    ]
    shapes = checkpoint.shapes
    misshaped = [
        f"{name} {shapes[name]} on disk, {tuple(tensor.shape)} in the model"
        for name, tensor in wanted.items()
        if name in shapes and shapes[name] != tuple(tensor.shape)
    ]
    problems = {"missing": missing, "unexpected": unexpected, "of another shape": misshaped}
    if any(problems.values()):
        told = "; ".join(f"{len(names)} {what}: {_listed(names)}" for what, names in problems.items() if names)
        raise CheckpointError(
            f"the weights in {checkpoint.directory} do not fit {type(model).__name__} as its {_CONFIG} describes it: "
            f"{told}. Use the class and the config that the weights were saved with"
        )
    fp32 = _compat.kept_in_fp32(model_class)

    def target(name: str, own: torch.dtype) -> torch.dtype:
        if dtype is None or not own.is_floating_point:
            return own
        return torch.float32 if any(part in fp32 for part in name.split(".")) else dtype

    return {name: target(name, tensor.dtype) for name, tensor in wanted.items()}


@dataclass
class _Slot:
    """A tensor of the model.

    Attributes:
        tensor: as it is now.
        path: its name in the model, the first of several if it is tied.
        owners: every module and attribute that hold it.
        name: the name under which the checkpoint has it, ``""`` if it has not.
    """

    tensor: torch.Tensor
    path: str
    owners: list[tuple[nn.Module, str]]
    name: str = ""


def _slots(model: nn.Module, names: Mapping[str, Any]) -> list[_Slot]:
    """Every parameter and buffer of ``model``, tied ones once, with its name in ``names`` if it has one there."""
    slots: dict[int, _Slot] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        own = [*module.named_parameters(recurse=False, remove_duplicate=False)]
        for attribute, tensor in [*own, *module.named_buffers(recurse=False, remove_duplicate=False)]:
            name = clean_path(f"{prefix}.{attribute}" if prefix else attribute)
            slot = slots.setdefault(id(tensor), _Slot(tensor, name, []))
            slot.owners.append((module, attribute))
            if not slot.name and name in names:
                slot.name = name
    return list(slots.values())


def _fill(model: nn.Module, checkpoint: _Checkpoint, dtypes: Mapping[str, torch.dtype], device: torch.device) -> None:
    slots = _slots(model, {name: None for name in checkpoint.files if name in dtypes})
    empty = [slot.path for slot in slots if slot.tensor.device.type == "meta" and not slot.name]
    if empty:
        raise CheckpointError(
            f"after shard(model), parameters that the weights lack have no storage: {_listed(empty)}. Add adapters "
            "after load_sharded, or give them storage in shard"
        )
    for slot in slots:
        if slot.name and tuple(slot.tensor.shape) != checkpoint.shapes[slot.name]:
            raise CheckpointError(
                f"shard(model) gave {slot.name} the shape {tuple(slot.tensor.shape)}, the weights have "
                f"{checkpoint.shapes[slot.name]}; cut parameters as DTensors, which keep their global shape"
            )
    todo: dict[Path, list[_Slot]] = {}
    for slot in slots:
        if slot.name:
            todo.setdefault(checkpoint.files[slot.name], []).append(slot)
        elif slot.tensor.device != device and not isinstance(slot.tensor, DTensor):
            _replace(slot, slot.tensor.detach().to(device))
    for file, of_file in todo.items():
        while of_file:
            mapped = 0
            with safe_open(file, framework="pt") as opened:
                while of_file and mapped < _MAPPED_BYTES:
                    slot = of_file.pop()
                    mapped += _fill_one(slot, opened.get_slice(slot.name), dtypes[slot.name], device)


def _fill_one(slot: _Slot, source: Any, dtype: torch.dtype, device: torch.device) -> int:
    """Read this rank's part of a tensor; returns its size in bytes."""
    new = torch.empty_like(slot.tensor, dtype=dtype, device=device, requires_grad=False)
    local, intervals = new, _intervals(new)
    if isinstance(new, DTensor):
        local = new.to_local()
    expected = tuple(stop - start for start, stop in intervals)
    if tuple(local.shape) != expected:
        raise CheckpointError(
            f"shard(model) left {tuple(local.shape)} of {slot.name} on this rank, {expected} by its placements "
            f"{getattr(new, 'placements', ())}; cut it with distribute_tensor, parallelize_module or fully_shard"
        )
    size = 0
    if local.numel():
        # A view of the mapped file: only what is copied is ever read.
        part = source[tuple(slice(start, stop) for start, stop in intervals)] if intervals else source[...]
        size = part.numel() * part.element_size()
        local.copy_(part)
    _replace(slot, new)
    return size


def _intervals(x: torch.Tensor) -> list[Interval]:
    if isinstance(x, DTensor):
        return [local_interval(x, dim) for dim in range(x.ndim)]
    return [(0, length) for length in x.shape]


def _replace(slot: _Slot, new: torch.Tensor) -> None:
    """Put ``new`` in the place of a tensor, in every module that holds it."""
    if isinstance(slot.tensor, nn.Parameter):
        parameter = nn.Parameter(new, requires_grad=slot.tensor.requires_grad)
        parameter.__dict__.update(slot.tensor.__dict__)
        new = parameter
    for module, attribute in slot.owners:
        setattr(module, attribute, new)
    slot.tensor = new


def _listed(names: Sequence[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


# -- writing -----------------------------------------------------------------------------------------------------------


def save_sharded(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "10GB",
    variant: str | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Save a sharded model as Diffusers does, for ``from_pretrained`` and :func:`load_sharded`.

    Every rank that holds a part calls this. Tensors are gathered one at a time and go straight into the file, so a
    rank holds its own part and one whole tensor (and its pieces, while it is gathered), never the model. Files are
    written under temporary names beside their places; only when all are complete do they replace what was there.

    Args:
        model: with parameters that are DTensors (FSDP2, tensor parallel), plain, or both.
        path: a directory, made if need be.
        dtype: of the floating-point tensors on disk; as they are if None.
        max_shard_size: of a file, in bytes or as ``"5GB"``; above it the weights are spread over several files and an
            index.
        variant: as in ``save_pretrained``.
        group: the ranks that call this; by default all. Its first rank writes.

    Raises:
        CheckpointError: on every rank: the writing rank could not write, a dtype that safetensors has no name for, or a
            ``max_shard_size`` that is no size.
    """
    directory = Path(path)
    state: dict[str, torch.Tensor] = {clean_path(name): tensor for name, tensor in model.state_dict().items()}
    files = _spread(state, dtype, _bytes_of(max_shard_size), f".{variant}" if variant else "")
    writes = not dist.is_initialized() or dist.get_rank(group) == 0
    writer = _Writer(directory, f".{secrets.token_hex(4)}.tmp") if writes else None
    problem: str | None = None
    try:
        for file, entries in files.items():
            if writer is not None and problem is None:
                problem = _attempt(writer.begin, file, entries)
            for entry in entries:
                tensor = state[entry.name].detach()
                # The writer takes part to the end even if it cannot write: the others wait for it.
                whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                if writer is not None and problem is None:
                    problem = _attempt(writer.append, whole, entry.dtype)
                del tensor, whole
    except BaseException:
        # Another rank is gone.
        if writer is not None:
            writer.discard()
        raise
    if writer is not None:
        if problem is None:
            problem = _attempt(writer.finish, model, files, variant)
        if problem is not None:
            writer.discard()
    if dist.is_initialized():
        told = [problem]
        dist.broadcast_object_list(told, group=group, group_src=0)
        problem = told[0]
    if problem is not None:
        raise CheckpointError(f"the model could not be saved to {directory}: {problem}; what was there is as it was")


@dataclass(frozen=True)
class _Entry:
    """A tensor as it is to stand in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _spread(
    state: Mapping[str, torch.Tensor], dtype: torch.dtype | None, most: int, dotted: str
) -> dict[str, list[_Entry]]:
    """Which tensor goes into which file, in the order of the model."""
    parts: list[list[_Entry]] = [[]]
    for name, tensor in state.items():
        converted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        if converted not in _FORMATS:
            raise CheckpointError(f"{name} is {converted}, which safetensors has no name for; save it in another dtype")
        entry = _Entry(name, converted, tuple(tensor.shape))
        if parts[-1] and sum(other.size for other in parts[-1]) + entry.size > most:
            parts.append([])
        parts[-1].append(entry)
    if len(parts) == 1:
        return {f"{_WEIGHTS}{dotted}.safetensors": parts[0]}
    return {
        f"{_WEIGHTS}{dotted}-{number:05d}-of-{len(parts):05d}.safetensors": part
        for number, part in enumerate(parts, start=1)
    }


def _bytes_of(size: int | str) -> int:
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B", size.strip(), re.IGNORECASE)
    if match is None:
        raise CheckpointError(f'max_shard_size is {size!r}; needed: a number of bytes, or a size such as "5GB"')
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix.upper() or " "))


class _Writer:
    """Writes files under temporary names and gives them their own at the end."""

    def __init__(self, directory: Path, suffix: str) -> None:
        self.directory, self.suffix = directory, suffix
        self.written: list[str] = []
        self.file: BinaryIO | None = None

    def begin(self, name: str, entries: Sequence[_Entry]) -> None:
        """The next file: its header, to which the bytes of the entries are appended in order."""
        self.end()
        self.directory.mkdir(parents=True, exist_ok=True)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for entry in entries:
            header[entry.name] = {
                "dtype": _FORMATS[entry.dtype],
                "shape": entry.shape,
                "data_offsets": (offset, offset + entry.size),
            }
            offset += entry.size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # so that the data is aligned
        self.file = self.create(name)
        self.file.write(len(text).to_bytes(8, "little") + text)

    def create(self, name: str) -> BinaryIO:
        self.written.append(name)
        return open(self.directory / (name + self.suffix), "wb")

    def append(self, whole: torch.Tensor, dtype: torch.dtype) -> None:
        assert self.file is not None
        flat = whole.to("cpu", dtype).contiguous().reshape(-1)
        self.file.write(flat.view(torch.uint8).numpy().data)

    def end(self) -> None:
        if self.file is not None:
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()
            self.file = None

    def finish(self, model: nn.Module, files: Mapping[str, Sequence[_Entry]], variant: str | None) -> None:
        """Write config and index, and put everything in its place."""
        self.end()
        dotted = f".{variant}" if variant else ""
        index = f"{_WEIGHTS}.safetensors.index{dotted}.json"
        if len(files) > 1:
            entries = [(entry, file) for file, of_file in files.items() for entry in of_file]
            content = {
                "metadata": {"total_size": sum(entry.size for entry, _ in entries)},
                "weight_map": {entry.name: file for entry, file in entries},
            }
            self.file = self.create(index)
            self.file.write((json.dumps(content, indent=2, sort_keys=True) + "\n").encode())
            self.end()
        config = json.loads(model.to_json_string())  # type: ignore[operator]
        # fully_shard makes a class of its own.
        config["_class_name"] = next(c.__name__ for c in type(model).__mro__ if not issubclass(c, FSDPModule))
        self.file = self.create(_CONFIG)
        self.file.write((json.dumps(config, indent=2, sort_keys=True) + "\n").encode())
        self.end()
        # Without its index an older checkpoint is none: a crash between the renames leaves one that is refused, never
        # a mixture of old and new. The new index comes last.
        pattern = re.compile(rf"{re.escape(_WEIGHTS + dotted)}(-\d{{5}}-of-\d{{5}})?\.safetensors")
        # What a save left that was killed.
        partial = re.compile(rf"({re.escape(_WEIGHTS)}.*|{re.escape(_CONFIG)})\.[0-9a-f]{{8}}\.tmp")
        for old in sorted(self.directory.iterdir()):
            left_over = partial.fullmatch(old.name) and not old.name.endswith(self.suffix)
            if left_over or old.name == index or (pattern.fullmatch(old.name) and old.name not in files):
                old.unlink()
        order = sorted(self.written, key=lambda name: (name == index, name != _CONFIG))
        for name in order:
            os.replace(self.directory / (name + self.suffix), self.directory / name)
        self.written = []
        _sync(self.directory)

    def discard(self) -> None:
        with suppress(OSError):
            if self.file is not None:
                self.file.close()
        for name in self.written:
            with suppress(OSError):
                (self.directory / (name + self.suffix)).unlink(missing_ok=True)


def _attempt(action: Callable[..., None], *args: Any) -> str | None:
    """Why it failed, if it did."""
    try:
        action(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _sync(directory: Path) -> None:
    """Make renames last; not every system can."""
    with suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
