"""What /proc tells of single processes, and the name under which records know a host. Imports little."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from pathlib import Path

from training_xpu.device.files import ROOT, at, read_text

# proc(5), /proc/PID/stat: fields counted from the one behind the command's name.
_STATE, _START_TIME, _EXIT_CODE = 0, 19, 49

_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "uninterruptible",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "ended",
    "X": "ended",
}


@functools.cache
def host_id() -> str:
    """Tells hosts apart without carrying their names into records that people pass on.

    A hash of the host's name, keyed with the machine's random id, so that names cannot be tried out.
    """
    key = read_text(at(ROOT, "/etc/machine-id")) or ""
    return hashlib.sha256(f"{key}\0{platform.node()}".encode()).hexdigest()[:12]


def started(pid: int, root: Path = ROOT) -> float | None:
    """When a process started, in seconds after boot; None when there is none, or only its zombie.

    Counted from boot and not from the epoch, as the latter moves when the clock is set.
    """
    fields = _stat(pid, root)
    if fields is None or fields[_STATE] in "ZX":
        return None
    return int(fields[_START_TIME]) / os.sysconf("SC_CLK_TCK")


def state(pid: int, root: Path = ROOT) -> str:
    """A word for what a process does: running, sleeping, uninterruptible, stopped, ...; "gone" where there is none."""
    fields = _stat(pid, root)
    return "gone" if fields is None else _STATES.get(fields[_STATE], "in an unknown state")


def signal_of_zombie(pid: int, root: Path = ROOT) -> int | None:
    """The signal that ended a process whose parent has not looked at it yet; None where that cannot be told."""
    fields = _stat(pid, root)
    if fields is None or fields[_STATE] != "Z" or len(fields) <= _EXIT_CODE:
        return None
    return int(fields[_EXIT_CODE]) & 0x7F or None  # as in wait(2); 0 also where the kernel hides it from this user


def _stat(pid: int, root: Path) -> list[str] | None:
    text = read_text(at(root, f"/proc/{pid}/stat"))
    if not text:
        return None
    return text.rpartition(")")[2].split()  # a command's name may hold spaces and brackets
