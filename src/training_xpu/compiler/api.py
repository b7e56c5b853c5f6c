"""`training_xpu.compiler.optimize`: what the environment variable does, for those who prefer code."""

from __future__ import annotations

from typing import Any

import torch

from training_xpu.compiler.controller import Controller
from training_xpu.compiler.start import start
from training_xpu.engines import optimizing
from training_xpu.seams import Step


class Optimizing(optimizing.Optimizing[Controller]):
    """What is done to a model, and its end."""

    feature = "compile"

    @property
    def compiled(self) -> dict[str, bool] | None:
        """Which regions run compiled; None before the first training forward."""
        if self._controller is None:
            return None
        return {region.name: bool(region.row(None)["compiled"]) for region in self._controller.regions}

    def _start(self, root: torch.nn.Module) -> Controller | None:
        return start(root)

    def _after_step(self, controller: Controller, step: Step) -> None:
        controller.after_step(step.optimizer)


def optimize(model: Any) -> Optimizing:
    """Compiles a model's blocks and what stands beside them, from its next training forward on, where that gains.

    The first steps compile; then compiled and plain steps take turns until it is known what gains. Losses and gradients
    agree within the rounding of the dtype, and state-dict keys are those of the model without it.

    Args:
        model: a torch.nn.Module, wrapped by an engine (DDP, DeepSpeed, FSDP) or to be wrapped later.

    Raises:
        UserError: the model is none or has no repeated blocks.
    """
    optimizing.check_model(model, "compile", "optimize(model)")
    return Optimizing(model)
