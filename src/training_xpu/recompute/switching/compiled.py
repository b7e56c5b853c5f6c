"""Blocks under torch.compile: full recompute goes around the compiled block, selective recompute into it.

Around it, a change of mode compiles nothing anew, and the compiled block is the same in forward and recompute. A
selective policy around it would see a compiled region's operators, under other names, and keep nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

from training_xpu.blocks import class_names, unwrap
from training_xpu.recompute.switching.handles import BlockHandle, FlagHandle, ForwardHandle, WrapperHandle, has_flag
from training_xpu.recompute.switching.policies import Mode
from training_xpu.recompute.switching.runner import Shared


def is_compiled_function(function: Any) -> bool:
    """Whether a callable comes from torch.compile."""
    while isinstance(function, functools.partial):
        function = function.func
    return hasattr(function, "_torchdynamo_orig_callable")


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether a module is compiled by itself: by its `compile`, a compiled forward, or torch.compile around it."""
    return (
        module._compiled_call_impl is not None
        or "OptimizedModule" in class_names(module)
        or is_compiled_function(module.__dict__.get("forward"))
    )


def inside_compiled(model: torch.nn.Module, blocks: set[int]) -> set[int]:
    """ids of the blocks that are part of a larger compiled region."""
    inside: set[int] = set()
    for module in model.modules():
        if is_compiled(module) and id(unwrap(module)) not in blocks:
            inside |= {id(m) for m in module.modules()} & blocks
    return inside


def compiled_attribute(module: torch.nn.Module) -> str:
    """Where a compiled module has what is called: the name of the attribute."""
    return "_compiled_call_impl" if module._compiled_call_impl is not None else "forward"


class CompiledHandle(BlockHandle):
    """A switch around the compiled block, and one inside it for the selective mode."""

    how = "compiled"

    def __init__(
        self,
        block: torch.nn.Module,
        shared: Shared,
        host: torch.nn.Module,
        requested: Mode,
        wrapper: torch.nn.Module | None = None,
    ) -> None:
        """
        Args:
            host: what is compiled: the block, or a module around it alone.
            requested: what the script asks for by other means than a switch of the block's own.
            wrapper: torch's `CheckpointWrapper`, where it is part of what is compiled.
        """
        super().__init__(block, shared)
        name = compiled_attribute(host)
        self.outer = ForwardHandle(block, shared, host, name, requested)
        self.runner = self.outer.runner
        self.runner.again = self._plain_inside
        self.inner: BlockHandle | None = None
        if wrapper is not None:
            self.inner = WrapperHandle(block, shared, wrapper)
        elif has_flag(block):
            self.inner = FlagHandle(block, shared)
        elif host is not block or name != "forward":
            self.inner = ForwardHandle(block, shared)
        if self.inner is None:  # what is compiled is a function, in which there is no place for a switch
            self.possible = self.possible - {Mode.SELECTIVE}

    @contextlib.contextmanager
    def _plain_inside(self) -> Iterator[None]:
        """For a recompute after the modes have been changed: the block is as it was in its forward."""
        mode = self.inner.mode if self.inner is not None and self.inner.installed else Mode.KEEP
        if self.inner is None or mode is Mode.KEEP:
            yield
            return
        self.inner.set(Mode.KEEP)
        try:
            yield
        finally:
            self.inner.set(mode)

    def number(self, index: int) -> None:
        self.outer.number(index)
        if self.inner is not None:
            self.inner.number(index)

    @property
    def requested(self) -> Mode:
        inner = self.inner.requested if self.inner is not None else Mode.KEEP
        return inner if inner is not Mode.KEEP else self.outer.requested

    @property
    def mode(self) -> Mode:
        if not self.installed:
            return self.requested
        inner = self.inner.mode if self.inner is not None else Mode.KEEP
        return inner if inner is not Mode.KEEP else self.outer.mode

    @property
    def overruled(self) -> bool:
        if self.inner is None or not self.installed:
            return False
        return self.inner.overruled if self.inner.installed else self.inner.requested is not Mode.KEEP

    @property
    def selective_matched(self) -> bool | None:
        return self.inner.selective_matched if self.inner is not None else None

    def set(self, mode: Mode) -> None:
        self.installed = True
        if mode is Mode.SELECTIVE and self.inner is not None:
            self.outer.set(Mode.KEEP)
            self.inner.set(mode)
            return
        if self.inner is not None:
            self.inner.restore()  # to be the block again that was compiled first
            if self.inner.requested is not Mode.KEEP:
                self.inner.set(Mode.KEEP)
        self.outer.set(mode)

    def restore(self) -> None:
        if self.inner is not None:
            self.inner.restore()
        self.outer.restore()
        self.installed = False
