"""Compile: torch.compile by the block, which survives breaks, changing shapes and sharded weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training_xpu.compiler.api import Optimizing, optimize

__all__ = ["Optimizing", "optimize"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from training_xpu.compiler import api

    return getattr(api, name)
