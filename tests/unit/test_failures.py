"""Whom a failed job blames, and in which words."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
import torch

from training_xpu.device import OomKills
from training_xpu.perf.failures import collect_failures
from training_xpu.records import append_line
from training_xpu.workloads.config import EVENTS_FILE
from training_xpu.workloads.launch import LAUNCH_FILE, EndedRank, LaunchRecord
from training_xpu.workloads.process import failure_reason, is_lost_peer, is_out_of_memory
from training_xpu.workloads.records import EventRecord

LOST = "RuntimeError: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234"


def kills(count: int, scope: Literal["cgroup", "machine"]) -> OomKills:
    return OomKills(count, scope, "counter")


def ended(folder: Path, *ranks: tuple[int, int]) -> None:
    """Ranks with their exit codes, in the order in which the launcher saw them."""
    failed = [EndedRank(rank=r, pid=100 + r, exit_code=code, timestamp=i) for i, (r, code) in enumerate(ranks)]
    LaunchRecord(failed=failed).write(folder / LAUNCH_FILE)


def told(folder: Path, rank: int, reason: str) -> None:
    event = EventRecord(rank=rank, time=time.time(), event="failure", name=reason, detail=f"Traceback of {rank}")
    append_line(folder / EVENTS_FILE, event)


def test_a_rank_s_own_error_comes_before_those_of_its_peers(tmp_path: Path) -> None:
    told(tmp_path, 0, LOST)
    told(tmp_path, 1, "ValueError: no")
    ended(tmp_path, (0, 1))  # the launcher saw the peer first, and ended rank 1 before it saw it fail
    reason, failures = collect_failures(tmp_path, None, None)
    assert reason == "rank 1: ValueError: no"
    assert [(f.rank, f.exit_code) for f in failures] == [(1, None), (0, 1)]
    assert failures[0].traceback == "Traceback of 1"


def test_a_signal_comes_before_any_error_and_the_launcher_s_sigterm_after_all(tmp_path: Path) -> None:
    told(tmp_path, 0, LOST)
    told(tmp_path, 2, "ValueError: no")
    ended(tmp_path, (3, -15), (0, 1), (1, -11))
    reason, failures = collect_failures(tmp_path, None, None)
    assert reason == "rank 1: killed by signal 11 (SIGSEGV)"
    assert [f.rank for f in failures] == [1, 2, 0, 3]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (kills(4, "cgroup"), kills(5, "cgroup"), ", by the kernel's out-of-memory killer"),
        (kills(4, "machine"), kills(5, "machine"), ", probably by the kernel's out-of-memory killer"),
        (kills(5, "cgroup"), kills(5, "cgroup"), ""),
        (None, None, ""),
    ],
)
def test_the_kernel_s_killing_is_known_from_its_counter(
    tmp_path: Path, before: OomKills | None, after: OomKills | None, expected: str
) -> None:
    ended(tmp_path, (1, -9))
    assert collect_failures(tmp_path, before, after)[0] == "rank 1: killed by signal 9 (SIGKILL)" + expected


def test_a_launcher_that_ends_itself_says_why_or_is_quoted(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "launcher.log").write_text("starting\nlibfoo.so: cannot open\n\n")
    assert collect_failures(tmp_path, None, None)[0].endswith("without a word: libfoo.so: cannot open")
    reason, failures = collect_failures(tmp_path, kills(0, "cgroup"), kills(1, "cgroup"), launcher_exit=-9)
    assert (reason, failures) == (
        "the launcher of the ranks was killed by signal 9 (SIGKILL), by the kernel's out-of-memory killer",
        [],
    )
    LaunchRecord(error="RendezvousTimeoutError: nobody came\nmore").write(tmp_path / LAUNCH_FILE)
    assert collect_failures(tmp_path, None, None)[0] == "RendezvousTimeoutError: nobody came"


def test_a_rank_that_said_nothing_is_quoted_from_its_log(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-1.log").write_text("...\nterminate called without an active exception\n")
    ended(tmp_path, (1, 3))
    reason = collect_failures(tmp_path, None, None)[0]
    assert reason == "rank 1: ended with exit code 3: terminate called without an active exception"


def test_a_full_disk_is_added_to_a_reason_that_does_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=4096))
    told(tmp_path, 0, "OSError: [Errno 28] No space left on device")
    assert collect_failures(tmp_path, None, None)[0] == "rank 0: OSError: [Errno 28] No space left on device"
    ended(tmp_path, (1, 1))
    (tmp_path / EVENTS_FILE).unlink()
    assert collect_failures(tmp_path, None, None)[0] == (
        f"rank 1: ended with exit code 1 (the disk of {tmp_path} is full: "
        "free space, or choose another folder with --output)"
    )


def test_the_ways_in_which_memory_runs_out() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)  # torch's own words
    assert failure_reason(caught.value).startswith("out of memory: ")
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert failure_reason(MemoryError()) == "out of memory"
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert failure_reason(KeyError("x\ny")) == "KeyError: 'x\\ny'"
    assert failure_reason(RuntimeError()) == "RuntimeError"


def test_the_errors_of_a_rank_that_lost_a_peer() -> None:
    assert is_lost_peer(LOST)
    assert is_lost_peer("DistBackendError: NCCL error in: ...")
    assert is_lost_peer("RuntimeError: Timed out waiting 1800000ms for recv operation to complete")
    assert not is_lost_peer("ValueError: no")
