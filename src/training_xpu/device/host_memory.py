"""Main memory: how much there is, how much this process may use, how much is in use, and peaks per training step."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training_xpu.device import cgroups
from training_xpu.device.files import ROOT, as_int, at, read_fields

ALLOCATOR_PEAK = "allocator peak"
RESIDENT_PEAK = "peak resident set"
LIFETIME_PEAK = "peak resident set since process start"  # cannot be reset here, so it never falls
NO_PEAK = "unknown"


@dataclass(frozen=True)
class Memory:
    """Bytes of main memory."""

    total: int  # of the machine
    limit: int | None  # smallest limit of the control groups
    limit_source: str
    usable: int  # the smaller of both
    used: int  # of what is usable, page cache that can be given back left out
    available: int  # what can still be allocated without swapping


def memory(root: Path = ROOT) -> Memory:
    """Reads main memory: limits of all control groups on the way up are heeded."""
    fields = read_fields(at(root, "/proc/meminfo"))
    total, available = _kibibytes(fields.get("MemTotal")), _kibibytes(fields.get("MemAvailable"))
    if total is None:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if available is None:  # kernels before 3.14
        parts = [_kibibytes(fields.get(name)) or 0 for name in ("MemFree", "Buffers", "Cached")]
        available = min(total, sum(parts))
    limit = cgroups.memory_limit(root)
    usable = total if limit is None else min(total, int(limit.value))
    room = [max(0, bound - use) for bound, use in cgroups.memory_use(root) if bound < total]
    available = min([available, usable, *room])
    return Memory(
        total=total,
        limit=None if limit is None else int(limit.value),
        limit_source="" if limit is None else limit.source,
        usable=usable,
        used=usable - available,
        available=available,
    )


def shared_memory_bytes(root: Path = ROOT) -> int | None:
    """The size of /dev/shm, through which dataloader workers and collectives pass tensors; None when there is none."""
    try:
        filesystem = os.statvfs(at(root, "/dev/shm"))
    except OSError:
        return None
    return filesystem.f_blocks * filesystem.f_frsize


class PeakMemory:
    """The one owner of peak-memory resets: call `reset` at the start of a step and `read` at its end.

    On accelerators the peak of the caching allocator of the current device, on CPU the peak resident set of this
    process, without its children (dataloader workers have their own). Cheap enough for every step: files stay open.
    Another reset in between (`torch.cuda.reset_peak_memory_stats` in the user's script) shortens what `read` covers.

    Args:
        device_type: torch's name, "cpu" or "cuda" ...; None: the accelerator if torch is imported and has one.
        root: where /proc is, for tests.
    """

    def __init__(self, device_type: str | None = None, root: Path = ROOT) -> None:
        self._root = root
        self._files: dict[str, int] = {}
        self._pid = os.getpid()
        self._allocator: Any = None
        if device_type is None:
            device_type = _current_device_type()
        if device_type == "cpu":
            # The first reset finds out whether the kernel lets this process reset its peak.
            self.kind = RESIDENT_PEAK if self._reset_resident() else LIFETIME_PEAK
        else:
            self._allocator = _allocator(device_type)
            self.kind = ALLOCATOR_PEAK if self._allocator is not None else NO_PEAK

    def reset(self) -> None:
        """Starts a new peak. Without effect where the peak cannot be reset (see `kind`)."""
        if self._allocator is not None:
            self._allocator.reset_peak_memory_stats()
        elif self.kind == RESIDENT_PEAK:
            self._reset_resident()

    def read(self) -> int | None:
        """The peak in bytes since the last reset; None where it is unknown."""
        if self._allocator is not None:
            return int(self._allocator.max_memory_allocated())
        if self.kind == NO_PEAK:
            return None
        peak = self._resident_peak()
        if peak is None:
            self.kind = LIFETIME_PEAK
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return peak

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def _reset_resident(self) -> bool:
        try:  # proc(5): writing 5 sets the peak resident set to the present one
            os.write(self._descriptor("clear_refs", os.O_WRONLY), b"5")
        except OSError:
            return False
        return True

    def _resident_peak(self) -> int | None:
        try:
            text = os.pread(self._descriptor("status", os.O_RDONLY), 8192, 0)
        except OSError:
            return None
        found = re.search(rb"^VmHWM:\s*(\d+) kB", text, re.MULTILINE)
        return int(found[1]) * 1024 if found else None

    def _descriptor(self, name: str, flags: int) -> int:
        if self._pid != os.getpid():  # forked: the open files are those of the parent
            self.close()
            self._pid = os.getpid()
        if name not in self._files:
            self._files[name] = os.open(at(self._root, f"/proc/self/{name}"), flags | os.O_CLOEXEC)
        return self._files[name]


def _current_device_type() -> str:
    torch = sys.modules.get("torch")
    if torch is None or not torch.accelerator.is_available():
        return "cpu"
    return str(torch.accelerator.current_accelerator().type)


def _allocator(device_type: str) -> Any:
    """The module with the device's peak counters: torch.accelerator since torch 2.9, torch.<device> before."""
    import torch

    current = torch.accelerator.current_accelerator()
    candidates: list[Any] = [getattr(torch, device_type, None)]
    if current is not None and current.type == device_type:
        candidates.insert(0, torch.accelerator)
    for module in candidates:
        if hasattr(module, "reset_peak_memory_stats") and hasattr(module, "max_memory_allocated"):
            try:
                module.max_memory_allocated()
            except (RuntimeError, NotImplementedError, AssertionError):
                continue  # named, but not implemented for this device's allocator
            return module
    return None


def _kibibytes(field: str | None) -> int | None:
    value = as_int(field.split()[0]) if field else None
    return None if value is None else value * 1024
