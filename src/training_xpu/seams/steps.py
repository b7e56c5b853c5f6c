"""The seam at the optimizer step."""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from training_xpu.seams.base import Patch, Seam, in_subscriber


@dataclass(frozen=True)
class Step:
    """One optimizer step, just taken."""

    index: int  # 1 for the first since the seam was installed
    time: float  # seconds, time.monotonic()
    optimizer: Optimizer | None = None  # that has taken it, the first of several


@dataclass
class _Call:
    """A call of an optimizer's step under way."""

    optimizer: weakref.ref[Optimizer]
    inner_updated: bool = False  # an optimizer called inside has updated and was counted


class StepSeam(Seam[Step]):
    """Each optimizer step, once, right after its first update.

    A step is all updates between one backward and the next. An update is one call of an optimizer's `step` that found a
    gradient. So these are one step: the sub-groups of ZeRO-3 one after the other, two optimizers for parts of one model
    after a common backward, one optimizer per parameter inside backward, and all evaluations of LBFGS's closure. Two
    optimizers that take turns, each after a backward of its own as in a GAN, take two steps. None are: a micro batch
    that only accumulates gradients, a step that a gradient scaler or DeepSpeed skips after an overflow, and an
    optimizer that is called again after its gradients were cleared. An optimizer that calls another one inside counts
    once. Where gradients are made without torch.autograd.backward, an update of a parameter that was updated in the
    step under way begins the next one.

    What cannot be told: whether a fused optimizer on an accelerator skipped the update, since that is decided on the
    device and reading it would wait for it (it counts as a step); and the steps of an optimizer whose `step` is itself
    compiled by torch.compile, which are not seen.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._handles: tuple[RemovableHandle, ...] = ()
        self._state_lock = threading.Lock()
        self._index = 0
        self._updated: set[int] = set()  # ids of the parameters updated in the step under way
        self._backwards = 0  # under way; a recomputing layer starts another one inside the first
        self._after_backward = False  # one has begun since the last update
        self._calls = threading.local()  # .stack: optimizer calls under way on this thread
        self.backward_faults: list[Callable[[BaseException], None]] = []  # called with what leaves a backward

    def _install(self) -> None:
        self._index, self._updated, self._after_backward = 0, set(), False
        _BACKWARD_PATCH.install()
        self._handles = (
            register_optimizer_step_pre_hook(_before_update),
            register_optimizer_step_post_hook(_after_update),
        )

    def _uninstall(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = ()
        _BACKWARD_PATCH.uninstall()

    def begin_backward(self) -> None:
        with self._state_lock:
            self._after_backward = self._after_backward or self._backwards == 0
            self._backwards += 1

    def end_backward(self) -> None:
        with self._state_lock:
            self._backwards -= 1

    def begin_call(self, optimizer: Optimizer) -> None:
        stack = self._stack()
        # An optimizer that is still here was left by an exception: nothing above it is under way any more.
        depth = next((i for i, call in enumerate(stack) if call.optimizer() is optimizer), len(stack))
        del stack[depth:]
        stack.append(_Call(weakref.ref(optimizer)))

    def end_call(self, optimizer: Optimizer, kwargs: dict[str, Any]) -> None:
        stack = self._stack()
        depth = next((i for i, call in enumerate(stack) if call.optimizer() is optimizer), None)
        inner_updated = False
        if depth is not None:
            inner_updated = stack[depth].inner_updated
            del stack[depth:]
        if inner_updated or _has_updated(optimizer, kwargs):
            if stack:
                stack[-1].inner_updated = True
            if not inner_updated:
                self._count(optimizer)

    def _stack(self) -> list[_Call]:
        stack: list[_Call] = self._calls.__dict__.setdefault("stack", [])
        return stack

    def _count(self, optimizer: Optimizer) -> None:
        parameters = [id(p) for group in optimizer.param_groups for p in group["params"]]
        with self._state_lock:
            if self._index and not self._after_backward and self._updated.isdisjoint(parameters):
                self._updated.update(parameters)
                return
            self._updated, self._after_backward = set(parameters), False
            self._index += 1
            step = Step(self._index, time.monotonic(), optimizer)
        for subscription in self.subscriptions:
            self.call(subscription, step)


STEP = StepSeam("step")


def _before_update(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    # Dynamo may trace these hooks: it understands the first line, and stops there.
    if not torch.compiler.is_compiling():
        STEP.begin_call(optimizer)


def _after_update(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_compiling() and not in_subscriber():
        STEP.end_call(optimizer, kwargs)


def _wrap_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        STEP.begin_backward()
        try:
            return original(*args, **kwargs)
        except BaseException as error:
            for hear in list(STEP.backward_faults):
                hear(error)
            raise
        finally:
            STEP.end_backward()

    return backward


_BACKWARD_PATCH = Patch(lambda: [(torch.autograd, "backward")], _wrap_backward)


def _has_updated(optimizer: Optimizer, kwargs: dict[str, Any]) -> bool:
    found_inf = getattr(optimizer, "found_inf", None)  # set by GradScaler for optimizers that skip by themselves
    if isinstance(found_inf, torch.Tensor) and found_inf.device.type == "cpu" and bool(found_inf.item()):
        return False
    if kwargs.get("grads") is not None:
        return True  # some optimizers are handed their gradients
    return any(
        p.grad is not None or getattr(p, "decoupled_grad", None) is not None
        for group in optimizer.param_groups
        for p in group["params"]
    )
