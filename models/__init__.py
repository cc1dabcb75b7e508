"""Plans: one small file a model family, and the registry that finds them by class name."""

from __future__ import annotations

if __name__ != "meshcp.models":
    raise ImportError("this folder ships inside the package: import meshcp.models")

from .refused import REFUSED
from .registry import PLANS, plan_for, table

__all__ = ["PLANS", "REFUSED", "plan_for", "table"]
