"""What rank 0 finds out about the other ranks of a launcher that is not ours."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from training_xpu.device import OomKills, processes
from training_xpu.perf import under_launcher
from training_xpu.perf.under_launcher import failures_of_others
from training_xpu.records import append_line
from training_xpu.workloads.config import EVENTS_FILE
from training_xpu.workloads.records import INTERRUPTED_NOTE, PROCESS_NOTE, EventRecord, RankProcess


def say(
    folder: Path, rank: int, event: Literal["note", "failure", "finished"], name: str = "", detail: str = ""
) -> None:
    append_line(folder / EVENTS_FILE, EventRecord(rank=rank, time=1.0, event=event, name=name, detail=detail))


def begin(folder: Path, rank: int, pid: int, host: str | None = None) -> None:
    process = RankProcess(host=host or processes.host_id(), pid=pid, started=processes.started(pid))
    say(folder, rank, "note", PROCESS_NOTE, process.to_json())


def killed(child: subprocess.Popen[bytes]) -> None:
    """Killed, and not collected yet: a zombie."""
    child.kill()
    until = time.monotonic() + 30
    while processes.state(child.pid) != "ended":
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[bytes]]]:
    started = [subprocess.Popen(["sleep", "600"]) for _ in range(5)]
    yield started
    for child in started:
        child.kill()
        child.wait()


def test_a_killed_rank_is_told_from_those_that_have_spoken(
    tmp_path: Path, children: list[subprocess.Popen[bytes]]
) -> None:
    for rank, child in enumerate(children, start=1):
        begin(tmp_path, rank, child.pid)
    begin(tmp_path, 9, children[0].pid, host="another")
    assert failures_of_others(tmp_path, None) == []
    say(tmp_path, 2, "note", INTERRUPTED_NOTE)
    say(tmp_path, 3, "finished")
    say(tmp_path, 4, "failure", "ValueError: no", "Traceback")
    for child in children[:4]:
        killed(child)
    found = {failure.rank: failure for failure in failures_of_others(tmp_path, None)}
    assert sorted(found) == [1, 4]
    assert (found[1].reason, found[1].exit_code) == ("killed by signal 9 (SIGKILL)", -signal.SIGKILL)
    assert (found[4].reason, found[4].traceback) == ("ValueError: no", "Traceback")
    children[0].wait()  # the launcher has collected it: its signal is gone with it
    (gone,) = (failure for failure in failures_of_others(tmp_path, None) if failure.rank == 1)
    assert (gone.reason, gone.exit_code) == ("gone without a word, probably killed by a signal", None)


def test_the_kernel_s_killing_for_memory_is_named(
    tmp_path: Path, children: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(under_launcher, "oom_kills", lambda: OomKills(3, "cgroup", "counter"))
    begin(tmp_path, 1, children[0].pid)
    killed(children[0])
    (failure,) = failures_of_others(tmp_path, OomKills(2, "cgroup", "counter"))
    assert failure.reason == "killed by signal 9 (SIGKILL), by the kernel's out-of-memory killer"
