"""A plan: which style goes to which module of a model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from . import _compat
from .errors import PlanError

Styles = ParallelStyle | tuple[ParallelStyle, ...]


@dataclass(frozen=True, init=False)
class Plan:
    """Module paths and the styles that they get, as data.

    Attributes:
        entries: ``(path, styles)`` pairs. A path is made of names joined by dots; ``*`` matches one name, ``""`` is
            the model itself, a negative index counts from the end of a list (``"blocks.-1"``), and a slice takes a part
            of it; its bounds may be entries of the model's config (``"blocks.[:-num_decoder_layers]"``).
        classes: names of the model classes that the plan is for.
        optional: paths that may match nothing (modules that only some configurations have).
        notes: what the plan does not cover, in a sentence, for the table of models.

    Raises:
        PlanError: an entry that is no style, or an optional path that is no entry.
    """

    entries: tuple[tuple[str, tuple[ParallelStyle, ...]], ...]
    classes: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    notes: str = field(default="", compare=False)

    def __init__(
        self,
        entries: Mapping[str, Styles],
        *,
        classes: str | Iterable[str] = (),
        optional: Iterable[str] = (),
        notes: str = "",
    ) -> None:
        normal = tuple(
            (path, styles if isinstance(styles, tuple) else (styles,)) for path, styles in dict(entries).items()
        )
        for path, styles in normal:
            for style in styles:
                if not isinstance(style, ParallelStyle):
                    raise PlanError(
                        f"plan entry {path!r} is {style!r} ({type(style).__name__}); needed: a style such as "
                        'ShardInputs(hidden_states=seq(1, "image")), or a tuple of styles'
                    )
        unknown = set(optional) - {path for path, _ in normal}
        if unknown:
            raise PlanError(
                f"optional paths {sorted(unknown)} are not among the plan's entries {[p for p, _ in normal]}"
            )
        object.__setattr__(self, "entries", normal)
        object.__setattr__(self, "classes", (classes,) if isinstance(classes, str) else tuple(classes))
        object.__setattr__(self, "optional", tuple(optional))
        object.__setattr__(self, "notes", notes)

    def __repr__(self) -> str:
        lines = [f"    {path!r}: {styles[0] if len(styles) == 1 else styles!r}," for path, styles in self.entries]
        name = f", classes={self.classes}" if self.classes else ""
        return "\n".join(["Plan({", *lines, "}" + name + ")"])

    @property
    def streams(self) -> tuple[str, ...]:
        """Names of the streams that the plan shards, in the order in which it names them."""
        found: dict[str, None] = {}
        for _, styles in self.entries:
            for style in styles:
                found.update(dict.fromkeys(getattr(style, "named_streams", ())))
        return tuple(found)

    def without(self, path: str) -> Plan:
        """The same plan less one entry."""
        entries = {p: styles for p, styles in self.entries if p != path}
        optional = [p for p in self.optional if p != path]
        return Plan(entries, classes=self.classes, optional=optional, notes=self.notes)

    def match(self, model: nn.Module) -> list[tuple[str, nn.Module, ParallelStyle]]:
        """Every (module path, module, style) of the plan on ``model``, in the order of the plan.

        Raises:
            PlanError: a path that matches no module.
        """
        modules = {clean_path(name): module for name, module in model.named_modules()}
        config = getattr(model, "config", {})
        found = []
        for entry, styles in self.entries:
            pattern = _fill(entry, config)
            paths = list(_matching(pattern, modules))
            if not paths and entry not in self.optional and not _empty_list(pattern, modules):
                raise PlanError(
                    f"plan entry {entry!r} matches no module of {type(model).__name__}. "
                    f"{_nearest(pattern, modules)} Correct the path, or list it as optional if only some "
                    "configurations of the model have it"
                )
            found += [(path, modules[path], style) for path in paths for style in styles]
        return found


def clean_path(path: str) -> str:
    """A module path without the names that checkpointing, FSDP and compile wrappers add."""
    return ".".join(atom for atom in path.split(".") if atom not in _compat.WRAPPERS)


def _fill(pattern: str, config: Mapping[str, Any]) -> str:
    """The pattern with the entries of the config that its slices name as numbers."""

    def number(match: re.Match[str]) -> str:
        value = config.get(match[0]) if hasattr(config, "get") else None
        if not isinstance(value, int):
            raise PlanError(f"plan entry {pattern!r} needs {match[0]!r} of the model's config, which is {value!r}")
        return str(value)

    return re.sub(r"\[[^].]*\]", lambda slice_: re.sub(r"[a-z_]\w*", number, slice_[0]), pattern)


def _matching(pattern: str, modules: Mapping[str, nn.Module]) -> Iterator[str]:
    atoms = pattern.split(".")
    for path in modules:
        names = path.split(".")
        if len(names) == len(atoms) and all(
            _fits(name, atom, ".".join(names[:position]), modules)
            for position, (name, atom) in enumerate(zip(names, atoms, strict=True))
        ):
            yield path


def _fits(name: str, atom: str, parent: str, modules: Mapping[str, nn.Module]) -> bool:
    if not (atom.startswith("[") and atom.endswith("]")):
        return fnmatchcase(name, _resolve(atom, parent, modules))
    if not name.isdigit() or parent not in modules:
        return False
    length = len(list(modules[parent].children()))
    start, colon, stop = atom[1:-1].partition(":")

    def bound(text: str, default: int) -> int:
        # "-0" is the end of the list, as a config may say that there are none of the last ones.
        return default if not text else length - int(text[1:]) if text.startswith("-") else int(text)

    first = bound(start, 0)
    return first <= int(name) < (bound(stop, length) if colon else first + 1)


def _resolve(atom: str, parent: str, modules: Mapping[str, nn.Module]) -> str:
    """A negative index as the positive one."""
    if atom.startswith("-") and atom[1:].isdigit() and parent in modules:
        return str(len(list(modules[parent].children())) + int(atom))
    return atom


def _empty_list(pattern: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether the pattern leads through a module list that this configuration leaves empty."""
    atoms = pattern.split(".")
    for end in range(1, len(atoms)):
        for path in _matching(".".join(atoms[:end]), modules):
            module = modules[path]
            if isinstance(module, nn.ModuleList | nn.ModuleDict) and not len(module):
                return True
    return False


def _nearest(pattern: str, modules: Mapping[str, nn.Module]) -> str:
    atoms = pattern.split(".")
    for end in range(len(atoms) - 1, -1, -1):
        parents = list(_matching(".".join(atoms[:end]), modules)) if end else [""]
        if parents:
            names = sorted({name for parent in parents for name, _ in modules[parent].named_children()})
            where = f"{'.'.join(atoms[:end])!r} has" if end else "the model has"
            return f"{where} {', '.join(names) if names else 'no children'}; {atoms[end]!r} is not among them."
    return ""
