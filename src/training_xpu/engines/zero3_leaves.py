"""Makes blocks the unit in which ZeRO-3 gathers, prefetches and releases weights.

DeepSpeed hooks every module below a block, and each hook ends a compiled graph. A leaf is gathered whole, before its
forward and before its backward, from outside; the gather of the next one overlaps as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from training_xpu.engines.joint_start import NothingToDo

_NEEDED = ("_remove_module_hooks", "setup_zero_stage3_hooks", "forward_hooks", "backward_hooks")


class CannotMakeLeaves(NothingToDo):
    """This DeepSpeed has no way to do it after `deepspeed.initialize`."""


class Leaves:
    """Blocks that were made leaves; `undo` gives them back."""

    def __init__(self, offload: Any, modules: Sequence[torch.nn.Module]) -> None:
        self._offload = offload
        self._modules = list(modules)

    def undo(self) -> None:
        """Between steps only: what a forward under way has gathered is given back by the hooks that it met."""
        for module in self._modules:
            module._z3_leaf = False  # type: ignore[assignment]
            for parameter in module.parameters():
                if hasattr(parameter, "ds_z3_leaf_module"):
                    del parameter.ds_z3_leaf_module
        _lay_hooks_anew(self._offload)


def make_leaves(root: torch.nn.Module, modules: Sequence[torch.nn.Module]) -> Leaves | None:
    """Makes leaves of those modules that are none, before a forward of the engine; None where nothing is partitioned.

    All ranks must do it, or none: leaves are gathered in one piece.

    Args:
        root: the DeepSpeed engine.

    Raises:
        CannotMakeLeaves: the engine is not there, or its private calls are not those known.
    """
    if not any(hasattr(p, "ds_id") for module in modules for p in module.parameters()):
        return None
    offload = getattr(getattr(root, "optimizer", None), "parameter_offload", None)
    if offload is None or any(not hasattr(offload, name) for name in _NEEDED):
        raise CannotMakeLeaves("this DeepSpeed offers no way to gather blocks whole")
    inside = {id(inner) for module in modules for inner in module.modules() if inner is not module}
    if any(id(module) in inside for module in modules):
        raise CannotMakeLeaves("blocks lie inside blocks")
    new = [module for module in modules if not getattr(module, "_z3_leaf", False)]
    if not new:
        return None
    for module in new:
        module._z3_leaf = True  # type: ignore[assignment]
    _lay_hooks_anew(offload)
    return Leaves(offload, new)


def _lay_hooks_anew(offload: Any) -> None:
    offload._remove_module_hooks()
    offload.forward_hooks.clear()
    offload.backward_hooks.clear()
    offload.setup_zero_stage3_hooks()
