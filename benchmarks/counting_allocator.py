"""Counts live bytes of CPU tensors exactly, through an allocator of its own (`counting_allocator.cpp`).

torch has no such counter for CPUs, and its profiler does not see what other threads release. To be installed before
the first tensor that is to be counted; a process keeps it to its end.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

FOLDER = "COUNTING_ALLOCATOR_FOLDER"  # variable with the folder it was compiled in


@functools.cache
def _extension() -> Any:
    from torch.utils.cpp_extension import load

    source = str(Path(__file__).with_suffix(".cpp"))
    return load("counting_allocator", [source], extra_cflags=["-O2"], build_directory=os.environ[FOLDER])


def build(folder: Path) -> None:
    """Compiles it into a folder of the run's own: torch's common one keeps the lock of a build that was killed.

    Processes started afterwards find it there.
    """
    folder.mkdir()
    os.environ[FOLDER] = str(folder)
    _extension()


def install() -> None:
    _extension().install()


def live_bytes() -> int:
    return int(_extension().live_bytes())


def restart_peak() -> None:
    """The peak counts from what is alive now."""
    _extension().restart_peak()


def peak_bytes() -> int:
    return int(_extension().peak_bytes())
