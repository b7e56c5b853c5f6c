"""What a feature's `optimize(model)` returns: it waits for the model's first training forward, and can be ended."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic

import torch

from training_xpu import envs, report
from training_xpu.blocks import find_blocks, unwrap
from training_xpu.engines.joint_start import ControllerT
from training_xpu.errors import UserError
from training_xpu.seams import ROOT_FORWARD, STEP, RootForward, Step, Subscription


class Optimizing(ABC, Generic[ControllerT]):
    """What is done to a model, and its end."""

    feature: str

    def __init__(self, model: torch.nn.Module) -> None:
        report.set_up_logging(envs.log_level())
        self._model = unwrap(model)
        self._controller: ControllerT | None = None
        self._step: Subscription[Step] | None = None
        self._waiting: Subscription[RootForward] | None = ROOT_FORWARD.subscribe(self._begin, owner=self.feature)

    @abstractmethod
    def _start(self, root: torch.nn.Module) -> ControllerT | None:
        """Takes the model in hand; None where that cannot be."""

    @abstractmethod
    def _after_step(self, controller: ControllerT, step: Step) -> None: ...

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
            self._waiting = ROOT_FORWARD.subscribe(self._begin, owner=self.feature)
            return
        self._waiting = None
        self._controller = self._start(event.module)
        if self._controller is not None:
            self._step = STEP.subscribe(self._on_step, owner=self.feature)

    def _on_step(self, step: Step) -> None:
        if self._controller is not None:
            self._after_step(self._controller, step)


def check_model(model: Any, purpose: str, example: str) -> None:
    """
    Args:
        purpose: what its blocks are wanted for, such as "recompute".
        example: of a right call.

    Raises:
        UserError: the model is none, or has no repeated blocks.
    """
    if not isinstance(model, torch.nn.Module):
        given = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise UserError(f"optimize takes a torch.nn.Module, not {given}", f"Such as: {example}")
    if not find_blocks(model):
        raise UserError(
            f"{type(unwrap(model)).__name__} has no repeated blocks to {purpose}",
            "Blocks are found where a ModuleList or Sequential holds at least two modules of one class.",
        )
