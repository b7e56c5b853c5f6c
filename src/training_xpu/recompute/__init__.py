"""Recompute: how many blocks give up their activations, chosen from a memory model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training_xpu.recompute.api import Optimizing, optimize

__all__ = ["Optimizing", "optimize"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from training_xpu.recompute import api

    return getattr(api, name)
