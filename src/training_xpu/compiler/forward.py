"""The forward of a compiled region, on each of its modules in front of the class's own.

Inside the module's hooks: those of ZeRO-3, FSDP2, PEFT and of the script run around it as before.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch

from training_xpu.compiler.compiled_region import CompiledRegion


class Forward:
    """What stands on the instance. Copied and pickled as if it were not there."""

    def __init__(self, module: torch.nn.Module, region: CompiledRegion) -> None:
        """
        Args:
            module: whose forward this is; not kept alive by it.
        """
        self._module = weakref.ref(module)
        self._region: CompiledRegion | None = region
        # How torch marks what it has compiled: other features recognise a compiled block by it.
        self._torchdynamo_orig_callable = type(module).forward
        with contextlib.suppress(TypeError, ValueError):
            self.__signature__ = inspect.signature(module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None
        own: Callable[..., Any] = type(module).forward  # asked for each time, for FSDP2 changes the class
        region = self._region
        if region is None or not region.active or not _in_training(module):
            return own(module, *args, **kwargs)
        return region.call(module, own, args, kwargs)

    def install(self) -> None:
        module = self._module()
        assert module is not None
        module.__dict__["forward"] = self

    def remove(self) -> None:
        """Gives the class's forward back; calls through where somebody has put theirs in front and holds this one."""
        self._region = None
        module = self._module()
        if module is not None and module.__dict__.get("forward") is self:
            del module.__dict__["forward"]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module = self._module()
        return getattr(memo.get(id(module), module), "forward")  # noqa: B009 - the class's, bound to the copy

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module(), "forward")


def _in_training(module: torch.nn.Module) -> bool:
    return (
        module.training
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and torch._C._functorch.peek_interpreter_stack() is None
        and not torch._C._is_tracing()
    )
