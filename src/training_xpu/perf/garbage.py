"""The garbage collector while many objects are made that stay to the end of the process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def objects_that_stay() -> Iterator[None]:
    """Around imports and the building of a model: the garbage collector leaves what they make alone.

    That is several hundred thousand objects, and going through them again and again takes a quarter of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()
