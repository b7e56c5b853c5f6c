"""The forward of a compiled region, on each of its modules in front of the class's own.

Inside the module's hooks: those of ZeRO-3, FSDP2, PEFT and of the script run around it as before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from training_xpu.compiler.compiled_region import CompiledRegion
from training_xpu.instances import ForwardInFront


class Forward(ForwardInFront):
    """Gives a module's calls in training to its region."""

    def __init__(self, module: torch.nn.Module, region: CompiledRegion) -> None:
        super().__init__(module)
        self._region: CompiledRegion | None = region
        # How torch marks what it has compiled: other features recognise a compiled block by it.
        self._torchdynamo_orig_callable = type(module).forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module()
        own: Callable[..., Any] = type(module).forward  # asked for each time, for FSDP2 changes the class
        region = self._region
        if region is None or not region.active or not _in_training(module):
            return own(module, *args, **kwargs)
        return region.call(module, own, args, kwargs)

    def install(self) -> None:
        self.module().__dict__["forward"] = self

    def remove(self) -> None:
        """Gives the class's forward back; calls through where somebody has put theirs in front and holds this one."""
        self._region = None
        module = self._module()
        if module is not None and module.__dict__.get("forward") is self:
            del module.__dict__["forward"]


def _in_training(module: torch.nn.Module) -> bool:
    return (
        module.training
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and torch._C._functorch.peek_interpreter_stack() is None
        and not torch._C._is_tracing()
    )
