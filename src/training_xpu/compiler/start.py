"""Takes a model in hand before its first training forward, or says why not; under ZeRO-3 on every rank or on none."""

from __future__ import annotations

import torch

from training_xpu.compiler import said
from training_xpu.compiler.controller import Controller
from training_xpu.compiler.requests import request_of
from training_xpu.compiler.toolchain import why_not
from training_xpu.engines.joint_start import NothingToDo, start_together


def start(root: torch.nn.Module) -> Controller | None:
    """The controller of a model; None where compile steps aside, which is then said.

    Args:
        root: the model with its wrappers, about to run its first training forward.
    """

    def take() -> Controller:
        missing = why_not()
        if missing is not None:
            raise NothingToDo(missing)
        return Controller(root, request_of(root))

    made = start_together("compile", "TRAINING_XPU_COMPILE", root, take)
    if isinstance(made, str):
        said.stepped_aside(made)
        return None
    return made
