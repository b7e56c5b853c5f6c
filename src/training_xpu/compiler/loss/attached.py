"""What is put on a model's instance, so that copies and pickles of the model know nothing of it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from training_xpu.instances import ABSENT, ForwardInFront
from training_xpu.seams import STEP, Step, Subscription


class HeadForward(ForwardInFront):
    """Gives the head's calls to what computes the loss."""

    def __init__(self, head: torch.nn.Module, compute: Callable[..., Any]) -> None:
        """
        Args:
            compute: of the module, its own forward and the forward's arguments.
        """
        super().__init__(head, head.__dict__.get("forward", ABSENT))
        self._compute = compute
        self.gone = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = running.__dict__.pop("head", None) or self.module()
        own = self.before
        if own is ABSENT:
            own = functools.partial(type(module).forward, module)  # asked for each time, for FSDP2 changes the class
        if self.gone:
            return own(*args, **kwargs)
        return self._compute(module, own, *args, **kwargs)


class LossFunction:
    """A loss function in front of the model's own. Copied and pickled as that one."""

    def __init__(self, original: Callable[..., torch.Tensor], compute: Callable[..., torch.Tensor]) -> None:
        self.original = original
        self._compute = compute
        functools.update_wrapper(self, original)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._compute(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.original

    def __reduce__(self) -> Any:
        return _same, (self.original,)


def _same(function: Any) -> Any:
    return function


class Running(threading.local):
    """The forward this thread is in; nn.DataParallel runs copies of a model in several."""

    head: torch.nn.Module | None
    forward: Any = None
    pending: Any = None


running = Running()


class Steps:
    """Counts optimizer steps while anybody is interested."""

    def __init__(self) -> None:
        self.done = 0
        self._users = 0
        self._subscription: Subscription[Step] | None = None

    def watch(self) -> None:
        self._users += 1
        if self._subscription is None:
            self._subscription = STEP.subscribe(self._after_step, owner="compile")

    def leave(self) -> None:
        self._users -= 1
        if not self._users and self._subscription is not None:
            self._subscription.cancel()
            self._subscription = None

    def _after_step(self, step: Step) -> None:
        self.done += 1


steps = Steps()
