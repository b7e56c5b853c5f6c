"""Whether a script has hooks of its own inside a block."""

from __future__ import annotations

import functools
from typing import Any

import torch

_OF_LIBRARIES = ("torch", "deepspeed", "accelerate", "transformers", "peft", "training_xpu")


def has_hooks_of_a_script(block: torch.nn.Module) -> bool:
    """Whether a forward hook inside the block is neither torch's nor an engine's.

    It would run again in a recompute, and what it collects, such as activations for a loss, would come twice.
    """
    return any(
        _origin(hook) not in _OF_LIBRARIES
        for module in block.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    )


def _origin(hook: Any) -> str:
    """The package a hook comes from."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return str(module).partition(".")[0]
