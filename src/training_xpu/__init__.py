"""Open training stack: faster training on any accelerator and on CPUs, and the tools that measure it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training_xpu.blocks import BlockGroup, find_blocks, published, recomputed_blocks
    from training_xpu.engines.identify import identify, unwrap

__version__ = "0.1.0.dev0"

__all__ = ["BlockGroup", "__version__", "find_blocks", "identify", "published", "recomputed_blocks", "unwrap"]

_HOMES = {
    "BlockGroup": "training_xpu.blocks",
    "find_blocks": "training_xpu.blocks",
    "published": "training_xpu.blocks",
    "recomputed_blocks": "training_xpu.blocks",
    "identify": "training_xpu.engines.identify",
    "unwrap": "training_xpu.engines.identify",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
