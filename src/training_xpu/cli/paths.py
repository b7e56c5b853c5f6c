"""One check of every path on a command line or in a `--config` file, whatever the verb."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from training_xpu.errors import UserError

LONGEST_NAME, LONGEST_PATH = 255, 4095  # bytes, linux/limits.h


def check_paths_of(command: Any) -> None:
    """Makes a verb refuse empty and over-long paths: an empty one would silently mean the current folder.

    Args:
        command: of typer.
    """
    for parameter in command.params:
        descriptor = getattr(parameter, "type_descriptor", None)
        if getattr(descriptor, "annotation", None) is Path:
            option = max(parameter.opts, key=len)
            parameter.process_value = functools.partial(_process_checked, option, parameter.process_value)


def check_path(option: str, text: str) -> None:
    """
    Args:
        option: what named the path.
        text: as it was written.

    Raises:
        UserError: it is empty, or longer than the kernel takes.
    """
    if not text.strip():
        raise UserError(f"{option}: the path is empty", f"Name a path, or leave {option} out.")
    longest = max(len(os.fsencode(part)) for part in text.split("/"))
    if longest > LONGEST_NAME:
        raise UserError(f"{option}: a name in the path has {longest} bytes", f"At most {LONGEST_NAME} are possible.")
    if len(os.fsencode(text)) > LONGEST_PATH:
        raise UserError(
            f"{option}: the path has {len(os.fsencode(text))} bytes", f"At most {LONGEST_PATH} are possible."
        )


def _process_checked(option: str, process: Callable[[Any, Any], Any], context: Any, value: Any) -> Any:
    if isinstance(value, str):
        check_path(option, value)
    return process(context, value)
