"""Ends a child process with everything it started, however deep."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator
from types import FrameType

import psutil


def end_tree(child: subprocess.Popen[bytes], grace_seconds: float = 8.0) -> None:
    """Asks the child to end, then kills it and all its descendants that are still there."""
    try:
        family = psutil.Process(child.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    if child.poll() is None:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(grace_seconds)
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    if child.poll() is None:
        child.kill()
    child.wait()
    psutil.wait_procs(family, timeout=5)


class Interrupted(KeyboardInterrupt):
    """A signal that asks this program to end."""


@contextlib.contextmanager
def interrupt_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the work as Ctrl-C does, so that records are closed and children ended."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted(signal.Signals(number).name)

    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]  # nohup
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def deaf_to_interrupts() -> Iterator[None]:
    """While the work is being closed, a second Ctrl-C must not leave it half closed."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
