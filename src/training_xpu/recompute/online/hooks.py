"""Hooks on a user's model that neither a copy nor a saved file of the model takes along."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any


class Hook:
    """A callable that copies and pickles as one that does nothing."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # Does nothing, and whoever loads the file needs nothing of this project.
        return getattr, (contextlib.nullcontext(), "__exit__")
