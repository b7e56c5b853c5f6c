"""Counts live bytes of CPU tensors exactly, through an allocator of its own (`counting_allocator.cpp`).

torch has no such counter for CPUs, and its profiler does not see what other threads release. To be installed before
the first tensor that is to be counted; a process keeps it to its end.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any


@functools.cache
def _extension() -> Any:
    from torch.utils.cpp_extension import load

    return load("counting_allocator", [str(Path(__file__).with_suffix(".cpp"))], extra_cflags=["-O2"])


def build() -> None:
    """Compiles it, once per machine, before processes that need it start side by side."""
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
