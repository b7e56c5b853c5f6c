"""What /proc tells of a process."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from training_xpu.device import processes


def wait_for_state(pid: int, expected: str) -> None:
    until = time.monotonic() + 30
    while processes.state(pid) != expected:
        assert time.monotonic() < until, processes.state(pid)
        time.sleep(0.01)


def test_a_process_from_its_start_to_its_zombie() -> None:
    child = subprocess.Popen(["sleep", "600"])
    try:
        wait_for_state(child.pid, "sleeping")
        boot = psutil.boot_time()
        started = processes.started(child.pid)
        assert started is not None
        assert abs(started - (psutil.Process(child.pid).create_time() - boot)) < 1.5
        child.send_signal(signal.SIGSTOP)
        wait_for_state(child.pid, "stopped")
        assert processes.signal_of_zombie(child.pid) is None
        child.kill()
        wait_for_state(child.pid, "ended")
        assert processes.started(child.pid) is None
        assert processes.signal_of_zombie(child.pid) == signal.SIGKILL
    finally:
        child.kill()
        child.wait()
    assert (processes.state(child.pid), processes.signal_of_zombie(child.pid)) == ("gone", None)


def test_an_ordinary_end_is_no_signal() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(7)"])
    wait_for_state(child.pid, "ended")
    assert processes.signal_of_zombie(child.pid) is None
    child.wait()


def test_odd_command_names(tmp_path: Path) -> None:
    (tmp_path / "proc" / "7").mkdir(parents=True)
    fields = ["D", *["0"] * 18, str(5 * os.sysconf("SC_CLK_TCK"))]
    (tmp_path / "proc" / "7" / "stat").write_text(f"7 (a) Z (b c) {' '.join(fields)}\n")
    assert processes.state(7, tmp_path) == "uninterruptible"
    assert processes.started(7, tmp_path) == 5.0


def test_the_host_is_known_and_not_named() -> None:
    assert len(processes.host_id()) == 12
    assert platform.node() not in processes.host_id()
