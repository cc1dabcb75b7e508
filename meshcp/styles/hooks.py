"""How a style gets hold of a module: before its forward, after it, or around it; and the arguments of a call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from .. import _compat
from ..errors import InputError
from .base import Runtime, Undo

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


class Arguments:
    """The arguments of one call of a ``forward``, by name, however they were passed."""

    def __init__(self, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.names, self.args, self.kwargs = names, list(args), dict(kwargs)

    def get(self, name: str) -> Any:
        """The argument, or None if it was not passed."""
        if name in self.kwargs:
            return self.kwargs[name]
        position = self.names.index(name)
        return self.args[position] if position < len(self.args) else None

    def set(self, name: str, value: Any) -> None:
        """Pass ``value``, by position if the argument was passed so."""
        position = self.names.index(name)
        if position < len(self.args):
            self.args[position] = value
        else:
            self.kwargs[name] = value

    @property
    def call(self) -> Call:
        return tuple(self.args), self.kwargs


def before_forward(module: nn.Module, path: str, runtime: Runtime, hook: Callable[..., Any]) -> Undo:
    """Call ``hook(module, args, kwargs)`` before the module's forward, while the model runs that it is a part of."""
    if not path:
        # torch.compile runs the hooks of the module that it is given outside of its graph, as graphs of their own.
        def run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not runtime.running:
                raise InputError(
                    f"{type(module).__name__}.forward was called by itself, without the hooks that make it parallel; "
                    "call the model: model(...), not model.forward(...)"
                )
            changed = hook(module, args, kwargs)
            if changed is not None:
                args, kwargs = changed
            return original(*args, **kwargs)

        return wrap_forward(module, run)

    def guarded(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return None if runtime.idle else hook(module, args, kwargs)

    return module.register_forward_pre_hook(_compat.left_to_python(guarded), with_kwargs=True).remove


def after_forward(module: nn.Module, path: str, runtime: Runtime, hook: Callable[..., Any]) -> Undo:
    """Call ``hook(module, args, output)`` after the module's forward, while the model runs that it is a part of."""
    if not path:

        def run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            changed = hook(module, args, output)
            return output if changed is None else changed

        return wrap_forward(module, run)

    def guarded(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return None if runtime.idle else hook(module, args, output)

    return module.register_forward_hook(_compat.left_to_python(guarded)).remove


class _WrappedForward:
    """``run(forward, ...)`` in the place of a module's forward; call it to undo that.

    It goes beneath the wrappers that offloading and caching put around a forward, so that what happens does not depend
    on who came first: a cache that skips the module skips this with it, and taking any of them off leaves the others.
    Two parallel models that share a module each have one there, the later around the earlier.
    """

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        original, put = _compat.innermost_forward(module)
        self.module, self.original, self.own = module, original, module.__dict__.get("forward")
        self.active = True

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return run(self.original, *args, **kwargs) if self.active else self.original(*args, **kwargs)

        forward.__dict__["meshcp_wrapper"] = self
        self.forward = forward
        put(forward)

    @property
    def attached(self) -> bool:
        """Whether a call of the module still comes here."""
        return any(self in _wrappers(value) for value, _ in _compat.forward_slots(self.module))

    def __call__(self) -> None:
        # Whoever holds on to it in another way (a wrapper that we do not know) finds it turned off.
        self.active = False
        for value, put in _compat.forward_slots(self.module):
            if value is self.forward:
                put(self.original)
            for outer in _wrappers(value):
                if outer.original is self.forward:
                    outer.original = self.original
        own = self.module.__dict__
        if own.get("forward") is self.original and self.own is not self.original:
            del own["forward"]


def _wrappers(forward: Any) -> Iterator[_WrappedForward]:
    """Those of which ``forward`` is the outermost."""
    while True:
        wrapper = getattr(forward, "__dict__", {}).get("meshcp_wrapper")
        # functools.wraps copies the attribute to whatever someone else puts around.
        if wrapper is None or wrapper.forward is not forward:
            return
        yield wrapper
        forward = wrapper.original


def wrap_forward(module: nn.Module, run: Callable[..., Any]) -> Undo:
    return _WrappedForward(module, run)
