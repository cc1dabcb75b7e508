"""The one exception family of meshcp.

Every message says what was found, what is needed and what to do. All are ``ValueError``, so that a caller who
knows nothing of meshcp can still catch them.
"""

from __future__ import annotations


class MeshcpError(ValueError):
    """Base class of everything that meshcp refuses."""


class MeshError(MeshcpError):
    """A device mesh that cannot carry context parallelism."""


class LayoutError(MeshcpError):
    """Lengths, shapes or placements that contradict the layout."""


class PlanError(MeshcpError):
    """A plan that does not fit the model: a path, an input or an attention module that it misses."""


class InputError(MeshcpError):
    """A tensor given to a parallel model that the plan cannot place, or that differs between ranks."""


class AttentionError(MeshcpError):
    """An attention call that cannot be computed rightly: mask, dtype, kernel or option."""


class CheckpointError(MeshcpError):
    """Weights on disk that do not fit the model, or that cannot be read or written."""


def check_switches(error: type[MeshcpError], **switches: object) -> None:
    """Raise ``error`` unless each of the options is True or False: ``"no"`` would pass for True."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise error(f"{name}={value!r} is of type {type(value).__name__}; needed: {name}=True or {name}=False")
