"""`training_xpu.recompute.optimize`: what the environment variable does, for those who prefer code."""

from __future__ import annotations

from typing import Any

import torch

from training_xpu import envs
from training_xpu.engines import optimizing
from training_xpu.recompute.budget import Budget, memory_budget, memory_limit, read_budget
from training_xpu.recompute.online.controller import Controller
from training_xpu.recompute.online.start import start
from training_xpu.recompute.switching.policies import Mode
from training_xpu.seams import Step


class Optimizing(optimizing.Optimizing[Controller]):
    """What is done to a model, and its end."""

    feature = "recompute"

    def __init__(self, model: torch.nn.Module, budget: str | int | None) -> None:
        self._asked = budget
        super().__init__(model)

    @property
    def modes(self) -> tuple[Mode, ...] | None:
        """What each block does with its activations; None before the first training forward."""
        return None if self._controller is None else self._controller.switch.modes

    @property
    def layers_recomputed(self) -> int | None:
        """Blocks that do not keep all their activations; None before the first training forward."""
        return None if self.modes is None else sum(mode is not Mode.KEEP for mode in self.modes)

    def _start(self, root: torch.nn.Module) -> Controller | None:
        place = envs.distributed()
        device = next(p.device for p in root.parameters()).type

        def budget() -> Budget:
            if self._asked is None:
                return memory_budget(place.local_world_size, device)
            return read_budget(_written(self._asked), memory_limit(place.local_world_size, device), "budget")

        return start(root, budget)

    def _after_step(self, controller: Controller, step: Step) -> None:
        controller.after_step()


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
    if budget is not None and isinstance(model, torch.nn.Module):
        read_budget(_written(budget), Budget(2**62, ""), "budget")
    optimizing.check_model(model, "recompute", "optimize(model, budget='6GiB')")
    return Optimizing(model, budget)
