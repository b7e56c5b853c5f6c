"""The recompute feature as the list of features knows it: may it run here, and what it does at each seam."""

from __future__ import annotations

import weakref
from typing import Any

from training_xpu import envs
from training_xpu.errors import UserError
from training_xpu.recompute.budget import VARIABLE, Budget, memory_budget, read_budget
from training_xpu.seams import ROOT_FORWARD, RootForward, Step

_controller: weakref.ref[Any] | None = None  # of this process's model


def available() -> str | None:
    """Why it cannot run here; None where it can."""
    text = envs.get(VARIABLE)
    if text is not None and envs.distributed().world_size == 1:  # several ranks step aside together, at their start
        try:
            read_budget(text, Budget(2**62, ""))
        except UserError as error:
            return f"{error.problem}. {error.remedy}"
    return None


def on_root_forward(event: RootForward) -> None:
    """Takes the model in hand, before its first training forward."""
    global _controller
    from training_xpu.recompute.online.start import start

    place = envs.distributed()
    device = next(p.device for p in event.module.parameters())
    controller = start(event.module, lambda: memory_budget(place.local_world_size, device.type))
    if controller is None:
        return
    _controller = weakref.ref(controller)  # the model's hooks hold it, so that it goes with its model
    weakref.finalize(controller, _next_model).atexit = False


def _next_model() -> None:
    """The model in hand is gone; the next one that trains is taken."""
    ROOT_FORWARD.subscribe(on_root_forward, owner="recompute")


def on_step(event: Step) -> None:
    """After each optimizer step."""
    controller = None if _controller is None else _controller()
    if controller is not None:
        controller.after_step()
