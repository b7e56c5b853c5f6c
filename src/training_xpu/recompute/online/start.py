"""Takes a model in hand before its first training forward, or says why not; under ZeRO-3 on every rank or on none."""

from __future__ import annotations

from collections.abc import Callable

import torch

from training_xpu.engines.joint_start import start_together
from training_xpu.recompute.budget import Budget
from training_xpu.recompute.online import said
from training_xpu.recompute.online.controller import Controller


def start(root: torch.nn.Module, budget: Callable[[], Budget]) -> Controller | None:
    """The controller of a model; None where recompute steps aside, which is then said.

    Args:
        root: the model with its wrappers, about to run its first training forward.
        budget: of this rank; may raise UserError.
    """
    made = start_together("recompute", "CHECKPOINT_OPTIMIZATION", root, lambda: Controller(root, budget()))
    if isinstance(made, str):
        said.stepped_aside(made)
        return None
    return made
