"""`training_xpu.compiler.optimize`: what the environment variable does, for those who prefer code."""

from __future__ import annotations

from typing import Any

import torch

from training_xpu import envs, report
from training_xpu.blocks import find_blocks, unwrap
from training_xpu.compiler.controller import Controller
from training_xpu.compiler.start import start
from training_xpu.errors import UserError
from training_xpu.seams import ROOT_FORWARD, STEP, RootForward, Step, Subscription


class Optimizing:
    """What `optimize` returns: what is done to a model, and its end."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = unwrap(model)
        self._controller: Controller | None = None
        self._step: Subscription[Step] | None = None
        self._waiting: Subscription[RootForward] | None = ROOT_FORWARD.subscribe(self._begin, owner="compile")

    @property
    def compiled(self) -> dict[str, bool] | None:
        """Which regions run compiled; None before the first training forward."""
        if self._controller is None:
            return None
        return {region.name: bool(region.row(None)["compiled"]) for region in self._controller.regions}

    def close(self) -> None:
        """Gives the model back as it was."""
        for subscription in (self._waiting, self._step):
            if subscription is not None:
                subscription.cancel()
        self._waiting = self._step = None
        if self._controller is not None:
            self._controller.close()
            self._controller = None

    def _begin(self, event: RootForward) -> None:
        if unwrap(event.module) is not self._model:  # another model trains first
            self._waiting = ROOT_FORWARD.subscribe(self._begin, owner="compile")
            return
        self._waiting = None
        self._controller = start(event.module)
        if self._controller is not None:
            self._step = STEP.subscribe(self._after_step, owner="compile")

    def _after_step(self, step: Step) -> None:
        if self._controller is not None:
            self._controller.after_step(step.optimizer)


def optimize(model: Any) -> Optimizing:
    """Compiles a model's blocks and what stands beside them, from its next training forward on, where that gains.

    The first steps compile; then compiled and plain steps take turns until it is known what gains. Losses and gradients
    agree within the rounding of the dtype, and state-dict keys are those of the model without it.

    Args:
        model: a torch.nn.Module, wrapped by an engine (DDP, DeepSpeed, FSDP) or to be wrapped later.

    Raises:
        UserError: the model is none or has no repeated blocks.
    """
    if not isinstance(model, torch.nn.Module):
        given = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise UserError(f"optimize takes a torch.nn.Module, not {given}", "Such as: optimize(model)")
    if not find_blocks(model):
        raise UserError(
            f"{type(unwrap(model)).__name__} has no repeated blocks to compile",
            "Blocks are found where a ModuleList or Sequential holds at least two modules of one class.",
        )
    report.set_up_logging(envs.log_level())
    return Optimizing(model)
