"""Which rank keeps a job from moving, and how that is shown."""

from __future__ import annotations

import io
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from training_xpu.device import processes
from training_xpu.perf.progress import ProgressDisplay, ProgressFollower, describe, state_of_rank
from training_xpu.perf.stalls import stalled
from training_xpu.records import append_line
from training_xpu.workloads.config import EVENTS_FILE, STEPS_FILE
from training_xpu.workloads.records import PROCESS_NOTE, EventRecord, RankProcess, StepRecord

START = 1000.0


def say(folder: Path, event: str, name: str = "", rank: int = 0, detail: str = "", at: float = START) -> None:
    record = EventRecord.model_validate({"rank": rank, "time": at, "event": event, "name": name, "detail": detail})
    append_line(folder / EVENTS_FILE, record)


def begin(folder: Path, *pids: int) -> None:
    for rank, pid in enumerate(pids):
        process = RankProcess(host=processes.host_id(), pid=pid, started=processes.started(pid))
        say(folder, "note", PROCESS_NOTE, rank, process.to_json())


def train(folder: Path, rank: int, step: int, seconds: float = 2.0) -> None:
    unknown = dict.fromkeys(("gradient_norm", "data_s", "forward_s", "backward_s", "optimizer_s", "communication_s"))
    counts = dict.fromkeys(("real_tokens", "padded_tokens", "loss_tokens", "model_flops", "hardware_flops"), 1)
    record = {"rank": rank, "step": step, "time": START + seconds * step, "loss": 1.0, "learning_rate": 1e-3}
    append_line(
        folder / STEPS_FILE,
        StepRecord.model_validate({**record, "step_s": seconds, "peak_memory_bytes": None, **unknown, **counts}),
    )


@pytest.fixture
def stopped() -> Iterator[int]:
    child = subprocess.Popen(["sleep", "600"])
    child.send_signal(signal.SIGSTOP)
    until = time.monotonic() + 30
    while processes.state(child.pid) != "stopped":
        assert time.monotonic() < until
        time.sleep(0.01)
    yield child.pid
    child.kill()
    child.wait()


def test_a_stopped_rank_is_named_with_the_way_to_let_it_go_on(tmp_path: Path, stopped: int) -> None:
    follower = ProgressFollower(tmp_path, 40, 2)
    begin(tmp_path, 1, stopped)
    say(tmp_path, "phase", "training")
    for step in (1, 2, 3):
        train(tmp_path, 0, step)
        train(tmp_path, 1, step)
    assert follower.poll(now=START + 6 + 60).stalled == ()
    state = follower.poll(now=START + 6 + 61)
    assert [(rank.rank, rank.pid, rank.state) for rank in state.stalled] == [(1, stopped, "stopped")]
    assert describe(state).endswith("no step for 1:01  rank 1 stopped")

    stream = io.StringIO()
    display = ProgressDisplay(stream, interactive=False, label="base")
    display.update(state, now=0.0)
    display.update(follower.poll(now=START + 6 + 62), now=1.0)
    warning = f"base: warning: rank 1 (process {stopped}) has not moved for 1:01: stopped (by a signal; "
    assert stream.getvalue().splitlines()[0] == f"{warning}kill -CONT {stopped} lets it go on)"
    assert stream.getvalue().count("warning") == 1

    train(tmp_path, 0, 4)  # it goes on, and is stopped again later
    train(tmp_path, 1, 4)
    display.update(follower.poll(now=START + 9), now=2.0)
    display.update(follower.poll(now=START + 8 + 61), now=3.0)
    assert stream.getvalue().count("warning") == 2


def test_a_terminal_keeps_the_warning_above_the_moving_line(tmp_path: Path, stopped: int) -> None:
    begin(tmp_path, stopped)
    say(tmp_path, "phase", "building")
    stream = io.StringIO()
    display = ProgressDisplay(stream, interactive=True)
    follower = ProgressFollower(tmp_path, 40, 1)
    display.update(follower.poll(now=START + 1))
    display.update(follower.poll(now=START + 61))
    lines = stream.getvalue().split("\n")
    assert lines[0].startswith("\r\x1b[2Kbuilding the model  0:01\r\x1b[2Kwarning: rank 0 (process ")
    assert lines[1].startswith("\r\x1b[2Kbuilding the model  1:01  rank 0 stopped")


def test_a_rank_that_waits_for_its_disk_now_and_then_is_told_of_once(tmp_path: Path) -> None:
    states = iter(["uninterruptible", "running", "uninterruptible"])
    follower = ProgressFollower(tmp_path, 40, 1, lambda process: next(states))
    begin(tmp_path, 1)
    say(tmp_path, "phase", "saving")
    stream = io.StringIO()
    display = ProgressDisplay(stream, interactive=False)
    for second in (61, 62, 63):
        display.update(follower.poll(now=START + second))
    assert stream.getvalue().count("uninterruptible (it waits for a disk, a network file system or a driver)") == 1


def test_slow_steps_are_waited_for(tmp_path: Path) -> None:
    follower = ProgressFollower(tmp_path, 40, 1, lambda process: "stopped")
    begin(tmp_path, 1)
    say(tmp_path, "phase", "training")
    for step in (1, 2):
        train(tmp_path, 0, step, seconds=100.0)
    assert follower.poll(now=START + 200 + 499).stalled == ()
    assert follower.poll(now=START + 200 + 501).stalled


def test_a_rank_that_works_quietly_is_left_alone_outside_steps(tmp_path: Path) -> None:
    follower = ProgressFollower(tmp_path, 40, 1, lambda process: "running")
    begin(tmp_path, 1)
    say(tmp_path, "phase", "building")
    assert follower.poll(now=START + 600).stalled == ()
    say(tmp_path, "finished", at=START + 700)
    assert follower.poll(now=START + 2000).stalled == ()


def test_whom_the_others_wait_for() -> None:
    asleep = {rank: (100 + rank, "sleeping") for rank in range(3)}
    assert [r.rank for r in stalled(asleep, {0: 5, 1: 4, 2: 5}, True, 61.0)] == [1]
    assert [r.rank for r in stalled(asleep, {0: 5, 1: 5}, True, 61.0)] == [2]
    assert [r.rank for r in stalled(asleep, {0: 5, 1: 5, 2: 5}, True, 61.0)] == [0, 1, 2]
    assert stalled(asleep, {}, False, 61.0) == ()
    assert [r.state for r in stalled({**asleep, 2: (102, "uninterruptible")}, {0: 5, 1: 4, 2: 5}, True, 61.0)] == [
        "uninterruptible"
    ]


def test_a_process_number_that_another_process_has_now(stopped: int) -> None:
    here = processes.host_id()
    started = processes.started(stopped)
    assert state_of_rank(RankProcess(host=here, pid=stopped, started=started)) == "stopped"
    assert state_of_rank(RankProcess(host=here, pid=stopped, started=0.01)) == "gone"
    assert state_of_rank(RankProcess(host="elsewhere", pid=stopped, started=started)) == "on another host"
