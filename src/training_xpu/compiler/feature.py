"""The compile feature as the list of features knows it: may it run here, and what it does at each seam."""

from __future__ import annotations

import weakref
from typing import Any

from training_xpu.seams import ROOT_FORWARD, CompileCall, ModuleCompileCall, RootForward, Step

_controller: weakref.ref[Any] | None = None  # of this process's model


def available() -> str | None:
    """Why it cannot run here; None where it can."""
    from training_xpu.compiler.toolchain import why_not

    return why_not()


def on_compile(event: CompileCall) -> object | None:
    from training_xpu.compiler.requests import take_compile

    return take_compile(event)


def on_module_compile(event: ModuleCompileCall) -> bool:
    from training_xpu.compiler.requests import take_module_compile

    return take_module_compile(event)


def on_root_forward(event: RootForward) -> None:
    """Takes the model in hand, before its first training forward."""
    global _controller
    from training_xpu.compiler.start import start

    controller = start(event.module)
    if controller is None:
        return
    _controller = weakref.ref(controller)
    weakref.finalize(controller, _next_model).atexit = False


def _next_model() -> None:
    """The model in hand is gone; the next one that trains is taken."""
    ROOT_FORWARD.subscribe(on_root_forward, owner="compile")


def on_step(event: Step) -> None:
    """After each optimizer step."""
    controller = None if _controller is None else _controller()
    if controller is not None:
        controller.after_step(event.optimizer)
