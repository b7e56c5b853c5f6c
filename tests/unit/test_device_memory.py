"""Main memory on fake trees, and the peak of a step in this process."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Mapping
from pathlib import Path

import pytest

from training_xpu import device

MIB = 1 << 20


def tree(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    return root


MEMINFO = "MemTotal:       16000 kB\nMemFree:         1000 kB\nMemAvailable:   12000 kB\nBuffers: 5 kB"


def test_machine_without_limits(tmp_path: Path) -> None:
    memory = device.memory(tree(tmp_path, {"/proc/meminfo": MEMINFO}))
    assert memory.total == memory.usable == 16000 * 1024
    assert memory.limit is None
    assert memory.available == 12000 * 1024
    assert memory.used == 4000 * 1024


def test_limited_group(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "/proc/meminfo": MEMINFO,
            "/proc/self/cgroup": "0::/job",
            "/proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw",
            "/sys/fs/cgroup/job/memory.max": str(8000 * 1024),
            "/sys/fs/cgroup/job/memory.current": str(3000 * 1024),
            "/sys/fs/cgroup/job/memory.stat": f"inactive_file {1000 * 1024}",
        },
    )
    memory = device.memory(root)
    assert memory.usable == memory.limit == 8000 * 1024
    assert memory.used == 2000 * 1024
    assert memory.available == 6000 * 1024
    assert memory.limit_source == "/sys/fs/cgroup/job/memory.max"
    assert device.usable_memory(root) == 8000 * 1024


def test_limit_above_the_machines_memory_changes_nothing(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "/proc/meminfo": MEMINFO,
            "/proc/self/cgroup": "0::/",
            "/proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw",
            "/sys/fs/cgroup/memory.max": str(1 << 40),
            "/sys/fs/cgroup/memory.current": "1000",
        },
    )
    assert device.memory(root).usable == 16000 * 1024
    assert device.memory(root).available == 12000 * 1024


def test_empty_tree_asks_the_c_library(tmp_path: Path) -> None:
    assert device.memory(tmp_path).total == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_shared_memory(tmp_path: Path) -> None:
    assert device.shared_memory_bytes(tmp_path) is None
    (tmp_path / "dev/shm").mkdir(parents=True)
    found = os.statvfs(tmp_path)
    assert device.shared_memory_bytes(tmp_path) == found.f_blocks * found.f_frsize


def touch(megabytes: int) -> None:
    """Makes that much memory resident and gives it back to the kernel."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    place = libc.mmap(None, megabytes * MIB, 3, 0x22, -1, 0)  # readable and writable, private and anonymous
    ctypes.memset(place, 1, megabytes * MIB)
    assert libc.munmap(place, megabytes * MIB) == 0


def test_peak_resident_set_covers_one_step_only() -> None:
    peak = device.PeakMemory("cpu")
    if peak.kind != "peak resident set":
        pytest.skip("the kernel does not let this process reset its peak")
    peak.reset()
    before = peak.read()
    touch(200)
    during = peak.read()
    peak.reset()
    after = peak.read()
    peak.close()
    assert before is not None
    assert during is not None
    assert after is not None
    assert 190 * MIB < during - before < 260 * MIB
    assert after < before + 60 * MIB


def test_peak_falls_back_to_the_lifetime_and_says_so(tmp_path: Path) -> None:
    peak = device.PeakMemory("cpu", root=tmp_path)  # no clear_refs there
    assert peak.kind == "peak resident set since process start"
    peak.reset()
    read = peak.read()
    lifetime = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert read is not None
    assert abs(read - lifetime) <= MIB


def test_unreadable_reset_but_readable_peak(tmp_path: Path) -> None:
    root = tree(tmp_path, {"/proc/self/status": "Name:\tpython\nVmPeak:\t 9 kB\nVmHWM:\t    2048 kB\nVmRSS:\t 7 kB"})
    peak = device.PeakMemory("cpu", root=root)
    assert peak.kind == "peak resident set since process start"
    assert peak.read() == 2 * MIB


def test_reset_writes_what_the_kernel_wants(tmp_path: Path) -> None:
    root = tree(tmp_path, {"/proc/self/status": "VmHWM:\t 4 kB"})
    (root / "proc/self/clear_refs").write_text("")
    peak = device.PeakMemory("cpu", root=root)
    peak.reset()
    assert (root / "proc/self/clear_refs").read_text() == "55"
    assert peak.kind == "peak resident set"
    assert peak.read() == 4096


def test_a_forked_child_reads_its_own_peak() -> None:
    peak = device.PeakMemory("cpu")
    touch(150)
    parent = peak.read()
    assert parent is not None
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            peak.reset()
            os.write(write_end, str(peak.read()).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    answer = int(os.read(read_end, 64))
    os.close(read_end)
    os.close(write_end)
    assert answer < parent
    assert peak.read() == parent  # the child's reset did not touch it


def test_unknown_allocator() -> None:
    peak = device.PeakMemory("meta")
    assert peak.kind == "unknown"
    peak.reset()
    assert peak.read() is None


def test_accelerators_report_their_allocators_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    resets: list[int] = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda: 7 * MIB)
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", lambda: resets.append(1))
    peak = device.PeakMemory()
    assert peak.kind == "allocator peak"
    peak.reset()
    assert peak.read() == 7 * MIB
    assert resets == [1]
