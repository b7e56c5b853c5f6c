"""What a rank is as a process: its log, its end with its parent, and words for why it failed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from training_xpu.errors import UserError
from training_xpu.workloads.saving import GIVEN_UP

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent: int) -> None:
    """Asks the kernel to kill this process when its parent ends, however the parent ends.

    Args:
        parent: the expected parent's process id; if it is gone already, this process ends at once.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def log_to(file: Path) -> None:
    """Sends stdout and stderr, those of native code too, to the end of a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def leave(code: int) -> NoReturn:
    """Ends this process without the interpreter's own clean-up, in which Gloo's threads abort now and then."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def failure_reason(error: BaseException) -> str:
    """One line that names what went wrong; the ways in which memory runs out are recognised."""
    if isinstance(error, UserError):
        return f"{error.problem}. {error.remedy}" if error.remedy else error.problem
    text = str(error).strip().splitlines()
    first = text[0] if text else ""
    if is_out_of_memory(error):
        return f"out of memory: {first}" if first else "out of memory"
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def is_out_of_memory(error: BaseException) -> bool:
    """True for an accelerator's out-of-memory error and for the plain RuntimeError of torch's CPU allocator."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("can't allocate memory" in text or "out of memory" in text)


def is_lost_peer(reason: str) -> bool:
    """True for the errors a healthy rank raises because another one is gone."""
    lowered = reason.lower()
    return any(
        words in lowered
        for words in (
            *("connection closed by peer", "connection reset by peer", "broken pipe", "nccl error", "timed out"),
            GIVEN_UP,
        )
    )
