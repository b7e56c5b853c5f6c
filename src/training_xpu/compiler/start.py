"""Takes a model in hand before its first training forward, or says why not; under ZeRO-3 on every rank or on none."""

from __future__ import annotations

import torch

from training_xpu.compiler import said
from training_xpu.compiler.controller import Controller, NothingToDo
from training_xpu.compiler.requests import request_of
from training_xpu.compiler.toolchain import why_not
from training_xpu.engines.joint_start import must_agree, why_not_all_start
from training_xpu.engines.zero3_leaves import CannotMakeLeaves


def start(root: torch.nn.Module) -> Controller | None:
    """The controller of a model; None where compile steps aside, which is then said.

    Args:
        root: the model with its wrappers, about to run its first training forward.
    """
    controller, reason = None, why_not()
    try:
        if reason is None:
            controller = Controller(root, request_of(root))
    except (NothingToDo, CannotMakeLeaves) as nothing:
        reason = str(nothing)
    except Exception as error:  # the other ranks must hear of it, whatever it is
        reason = f"{type(error).__name__}: {error}"
    if must_agree(root):
        try:
            reason = why_not_all_start("compile", "TRAINING_XPU_COMPILE", reason)
        except Exception as error:
            reason = f"the ranks could not tell each other that they can begin: {type(error).__name__}: {error}"
    if reason is None:
        return controller
    if controller is not None:
        controller.close()
    said.stepped_aside(reason)
    return None
