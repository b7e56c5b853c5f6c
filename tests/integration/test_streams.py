"""Closed and full standard streams: a job is not worth failing for a remark that nobody can read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LJPERF = str(Path(sys.executable).with_name("ljperf"))


def shell(redirection: str, *, home: bool = True) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ)
    if not home:
        environment.pop("HOME")
    return subprocess.run(
        ["sh", "-c", f"{LJPERF} models {redirection}"], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("redirection", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_closed_streams_are_no_fault(redirection: str) -> None:
    done = shell(redirection)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert ("llama3-8b" in done.stdout) == (">&-" not in redirection.replace("2>&-", ""))


def test_a_full_stdout_is_named() -> None:
    done = shell(">/dev/full")
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == "ljperf: cannot write to stdout: No space left on device"


def test_a_full_stderr_is_no_fault() -> None:
    assert shell("2>/dev/full").returncode == 0


def test_a_user_without_home_folder_is_served() -> None:
    assert shell("", home=False).returncode == 0
