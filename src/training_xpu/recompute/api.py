"""`training_xpu.recompute.optimize`: what the environment variable does, for those who prefer code."""

from __future__ import annotations

from typing import Any

import torch

from training_xpu import envs, report
from training_xpu.blocks import find_blocks, unwrap
from training_xpu.errors import UserError
from training_xpu.recompute.budget import Budget, memory_budget, memory_limit, read_budget
from training_xpu.recompute.online.controller import Controller
from training_xpu.recompute.online.start import start
from training_xpu.recompute.switching.policies import Mode
from training_xpu.seams import ROOT_FORWARD, STEP, RootForward, Step, Subscription


class Optimizing:
    """What `optimize` returns: what is done to a model, and its end."""

    def __init__(self, model: torch.nn.Module, budget: str | int | None) -> None:
        self._model = unwrap(model)
        self._asked = budget
        self._controller: Controller | None = None
        self._step: Subscription[Step] | None = None
        self._waiting: Subscription[RootForward] | None = ROOT_FORWARD.subscribe(self._begin, owner="recompute")

    @property
    def modes(self) -> tuple[Mode, ...] | None:
        """What each block does with its activations; None before the first training forward."""
        return None if self._controller is None else self._controller.switch.modes

    @property
    def layers_recomputed(self) -> int | None:
        """Blocks that do not keep all their activations; None before the first training forward."""
        return None if self.modes is None else sum(mode is not Mode.KEEP for mode in self.modes)

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
            self._waiting = ROOT_FORWARD.subscribe(self._begin, owner="recompute")
            return
        self._waiting = None
        place = envs.distributed()
        device = next(p.device for p in event.module.parameters()).type

        def budget() -> Budget:
            if self._asked is None:
                return memory_budget(place.local_world_size, device)
            return read_budget(_written(self._asked), memory_limit(place.local_world_size, device), "budget")

        self._controller = start(event.module, budget)
        if self._controller is not None:
            self._step = STEP.subscribe(self._after_step, owner="recompute")

    def _after_step(self, step: Step) -> None:
        if self._controller is not None:
            self._controller.after_step()


def _written(budget: str | int) -> str:
    return f"{budget}B" if isinstance(budget, int) and not isinstance(budget, bool) else str(budget)


def optimize(model: Any, budget: str | int | None = None) -> Optimizing:
    """Recomputes the fewest blocks of a model that fit a memory budget, from its next training forward on.

    The first two optimizer steps run with every block recomputed, the second one measured; from the third on the plan
    holds. Losses, gradients and state-dict keys are those of the model without recompute.

    Args:
        model: a torch.nn.Module, wrapped by an engine (DDP, DeepSpeed, FSDP) or to be wrapped later.
        budget: of this rank: bytes, a size such as "6GiB" or "live:6GiB", or a share such as "80%"; None: what
            TRAINING_XPU_MEMORY_BUDGET says, or all that the device or the machine's limits leave this rank.

    Raises:
        UserError: the budget is no amount of memory, or the model is none or has no repeated blocks.
    """
    if not isinstance(model, torch.nn.Module):
        given = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise UserError(f"optimize takes a torch.nn.Module, not {given}", "Such as: optimize(model, budget='6GiB')")
    if budget is not None:
        read_budget(_written(budget), Budget(2**62, ""), "budget")
    if not find_blocks(model):
        raise UserError(
            f"{type(unwrap(model)).__name__} has no repeated blocks to recompute",
            "Blocks are found where a ModuleList or Sequential holds at least two modules of one class.",
        )
    report.set_up_logging(envs.log_level())
    return Optimizing(model, budget)
