"""Takes a model in hand before its first training forward, or says why not; under ZeRO-3 on every rank or on none."""

from __future__ import annotations

from collections.abc import Callable

import torch

from training_xpu.engines.joint_start import must_agree, why_not_all_start
from training_xpu.errors import UserError
from training_xpu.recompute.budget import Budget
from training_xpu.recompute.online import said
from training_xpu.recompute.online.controller import Controller, NothingToDo


def start(root: torch.nn.Module, budget: Callable[[], Budget]) -> Controller | None:
    """The controller of a model; None where recompute steps aside, which is then said.

    Args:
        root: the model with its wrappers, about to run its first training forward.
        budget: of this rank; may raise UserError.
    """
    controller, reason = None, None
    try:
        controller = Controller(root, budget())
    except NothingToDo as nothing:
        reason = str(nothing)
    except UserError as error:
        reason = f"{error.problem}. {error.remedy}"
    except Exception as error:  # the other ranks must hear of it, whatever it is
        reason = f"{type(error).__name__}: {error}"
    if must_agree(root):
        try:
            reason = why_not_all_start("recompute", "CHECKPOINT_OPTIMIZATION", reason)
        except Exception as error:
            reason = f"the ranks could not tell each other that they can begin: {type(error).__name__}: {error}"
    if reason is None:
        return controller
    if controller is not None:
        controller.close()
    said.stepped_aside(reason)
    return None
