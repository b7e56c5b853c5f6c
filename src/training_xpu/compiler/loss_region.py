"""The head and the loss: in chunks, without ever holding the full logits, or plain, whichever is faster."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from training_xpu.blocks import unwrap
from training_xpu.compiler.loss.standard_loss import Installed, install
from training_xpu.compiler.trial import RegionClock
from training_xpu.instances import Hook

NAME = "head and loss"
_PLAIN = "plain is faster or on trial"


class LossRegion:
    """On trial as a compiled region is: from the head's input to the loss, and from the loss's gradient back to it."""

    name = NAME
    is_block = False
    made_graphs = False
    sizes_changed = False

    def __init__(self, model: torch.nn.Module) -> None:
        """
        Args:
            model: with or without its wrappers.
        """
        self.clock: RegionClock | None = None
        inner = unwrap(model)
        made = install(inner)
        self.installed: Installed | None = None if isinstance(made, str) else made
        self.reason = made if isinstance(made, str) else ""
        self._handles: list[Any] = []
        self._entered: tuple[Any, torch.Tensor] | None = None
        if self.installed is not None:
            head: torch.nn.Module = inner.get_output_embeddings()  # type: ignore[operator]
            own = weakref.ref(self)
            self._handles = [
                head.register_forward_pre_hook(_of(own, "before"), prepend=True),
                inner.register_forward_hook(_of(own, "after")),
            ]

    @property
    def compiled(self) -> bool:
        """Whether the loss is computed in chunks."""
        return self.installed is not None and self.installed.off is None

    def look_again(self) -> None:
        """Nothing is made for certain weights here."""

    def use(self, compiled: bool) -> None:
        """From the next forward on; what speaks against it for good stays so."""
        if self.installed is None:
            return
        habit = self.installed.habits[True]
        if habit.off in (None, _PLAIN):
            habit.off = None if compiled else _PLAIN

    def row(self, gain: float | None) -> dict[str, Any]:
        """For the report: as of a compiled region, without graphs, for its chunks are plain kernels."""
        off = self.installed.off if self.installed is not None else self.reason
        reason = "" if off in (None, _PLAIN) else str(off)
        nothing: dict[str, Any] = {"graphs": 0, "breaks": 0, "break_reasons": [], "failures": [], "recompiles": 0}
        told = {"name": self.name, "count": 1, **nothing, "compiled": self.compiled, "gain": gain, "reason": reason}
        return {**told, "chunked": self.compiled, "compile_seconds": 0.0}

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        if self.installed is not None:
            self.installed.uninstall()
        self.installed = None

    def before(self, head: torch.nn.Module, args: tuple[Any, ...], output: Any = None) -> None:
        clock = self.clock
        if clock is not None and torch.is_grad_enabled() and args and isinstance(args[0], torch.Tensor):
            self._entered = clock.moment(args[0]), args[0]

    def after(self, model: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        clock, entered = self.clock, self._entered
        self._entered = None
        if clock is None or entered is None or not torch.is_grad_enabled():
            return
        loss = getattr(output, "loss", None)
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            clock.passed(entered[0], entered[1], loss)


def _of(region: weakref.ref[LossRegion], name: str) -> Hook:
    """A hook that does not keep the region alive."""

    def call(module: torch.nn.Module, args: Any, output: Any = None) -> None:
        alive = region()
        if alive is not None and not torch.compiler.is_compiling():
            getattr(alive, name)(module, args, output)

    return Hook(call)
