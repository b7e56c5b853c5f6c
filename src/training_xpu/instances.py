"""What features put on the instances of a user's modules; copies and saved files of a model know nothing of it."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

ABSENT = object()  # in the place of an attribute that an instance did not have


class Hook:
    """A callable that copies and pickles as one that does nothing."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # Does nothing, and whoever loads the file needs nothing of this project.
        return getattr, (contextlib.nullcontext(), "__exit__")


class ForwardInFront(ABC):
    """A forward in front of a module's own, set on the instance. Copied and pickled as what stood there before."""

    def __init__(self, module: torch.nn.Module, before: Any = ABSENT) -> None:
        """
        Args:
            module: whose forward this is; not kept alive by it.
            before: what the instance had in its place, or `ABSENT`.
        """
        self._module = weakref.ref(module)
        self.before = before
        with contextlib.suppress(TypeError, ValueError):
            self.__signature__ = inspect.signature(before if before is not ABSENT else module.forward)

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def module(self) -> torch.nn.Module:
        module = self._module()
        assert module is not None  # it is what is being called
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self.before is not ABSENT:
            return copy.deepcopy(self.before, memo)
        module = self._module()
        return getattr(memo.get(id(module), module), "forward")  # noqa: B009 - the class's, bound to the copy

    def __reduce__(self) -> tuple[Any, ...]:
        if self.before is not ABSENT:
            return functools.partial, (self.before,)
        return getattr, (self._module(), "forward")
