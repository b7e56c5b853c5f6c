"""What is put on a model's instance, so that copies and pickles of the model know nothing of it."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

ABSENT = object()


class Hook:
    """A module hook that does nothing in copies."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing_of, ()


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _nothing_of() -> Callable[..., None]:
    return _nothing


class HeadForward:
    """A forward in front of the head's own. Copied and pickled as what stood there before."""

    def __init__(self, head: torch.nn.Module, compute: Callable[..., Any]) -> None:
        """
        Args:
            head: not kept alive by this.
            compute: of the module, its own forward and the forward's arguments.
        """
        self._head = weakref.ref(head)
        self._compute = compute
        self.before = head.__dict__.get("forward", ABSENT)
        self.gone = False
        with contextlib.suppress(TypeError, ValueError):
            self.__signature__ = inspect.signature(head.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = running.__dict__.pop("head", None) or self._head()
        assert module is not None
        own = self.before
        if own is ABSENT:
            own = functools.partial(type(module).forward, module)  # asked for each time, for FSDP2 changes the class
        if self.gone:
            return own(*args, **kwargs)
        return self._compute(module, own, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self.before is not ABSENT:
            return copy.deepcopy(self.before, memo)
        head = self._head()
        return getattr(memo.get(id(head), head), "forward")  # noqa: B009 - the class's, bound to the copy

    def __reduce__(self) -> tuple[Any, ...]:
        if self.before is not ABSENT:
            return functools.partial, (self.before,)
        return getattr, (self._head(), "forward")


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
    """Counts the steps of all optimizers while anybody is interested."""

    def __init__(self) -> None:
        self.done = 0
        self._users = 0
        self._handle: Any = None

    def watch(self) -> None:
        self._users += 1
        if self._handle is None:
            self._handle = register_optimizer_step_post_hook(self._after_step)

    def leave(self) -> None:
        self._users -= 1
        if not self._users and self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _after_step(self, *_: Any) -> None:
        self.done += 1


steps = Steps()
