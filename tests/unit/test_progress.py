"""Following a job through its line files, and what is shown of it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from training_xpu.perf.progress import ProgressDisplay, ProgressFollower, ProgressState, describe
from training_xpu.records import append_line
from training_xpu.workloads.config import EVENTS_FILE, STEPS_FILE
from training_xpu.workloads.records import EventRecord, StepRecord


def step(number: int, rank: int = 0, **changes: Any) -> StepRecord:
    values: dict[str, Any] = {
        "rank": rank,
        "step": number,
        "time": 1000.0 + 2 * number,
        "loss": 6.1234,
        "gradient_norm": None,
        "learning_rate": 1e-3,
        "step_s": 2.0,
        "data_s": 0.0,
        "forward_s": 0.5,
        "backward_s": 1.0,
        "optimizer_s": 0.5,
        "communication_s": None,
        "real_tokens": 1024,
        "padded_tokens": 0,
        "loss_tokens": 1000,
        "model_flops": 1.0,
        "hardware_flops": 1.0,
        "peak_memory_bytes": None,
    }
    return StepRecord(**{**values, **changes})


def say(folder: Path, event: Any, name: str = "", rank: int = 0, **changes: Any) -> None:
    append_line(folder / EVENTS_FILE, EventRecord(rank=rank, time=1000.0, event=event, name=name, **changes))


def train(folder: Path, numbers: range, ranks: int = 2, **of_last_rank: Any) -> None:
    for number in numbers:
        for rank in range(ranks):
            append_line(folder / STEPS_FILE, step(number, rank, **(of_last_rank if rank == ranks - 1 else {})))


def test_before_anything_is_written(tmp_path: Path) -> None:
    state = ProgressFollower(tmp_path, 40, 2).poll()
    assert (state.phase, state.step, state.loss, state.seconds_left) == ("", 0, None, None)
    assert describe(state).startswith("starting  0:0")


def test_phases_and_their_words(tmp_path: Path) -> None:
    follower = ProgressFollower(tmp_path, 40, 1)
    for phase, words in (
        ("building", "building the model  0:03"),
        ("evaluation", "evaluating  0:03"),
        ("training", "step 0/40  0:03"),
        ("saving", "saving  0:03"),
    ):
        say(tmp_path, "phase", phase)
        assert describe(follower.poll(now=1003.0)) == words


def test_in_the_middle_of_training(tmp_path: Path) -> None:
    follower = ProgressFollower(tmp_path, 40, 2)
    say(tmp_path, "phase", "training")
    train(tmp_path, range(1, 6))
    state = follower.poll(now=1010.0)
    assert (state.phase, state.step) == ("training", 5)
    assert state.tokens_per_second == 1024.0  # 2 ranks x 1024 tokens / 2 s
    assert state.seconds_left == 70.0
    assert state.slowest_rank is None
    assert describe(state) == "step 5/40  loss 6.123  512 tokens/s/device  2 ranks  1:10 left"
    assert follower.poll(now=1011.0).seconds_left == 69.0
    train(tmp_path, range(6, 13))
    assert follower.poll(now=1024.0).step == 12


def test_a_step_counts_when_every_rank_has_finished_it(tmp_path: Path) -> None:
    follower = ProgressFollower(tmp_path, 40, 2)
    train(tmp_path, range(1, 3))
    append_line(tmp_path / STEPS_FILE, step(3, 0))
    assert follower.poll().step == 2
    append_line(tmp_path / STEPS_FILE, step(3, 1))
    assert follower.poll().step == 3


def test_the_slowest_rank_is_the_one_that_works_longest(tmp_path: Path) -> None:
    follower = ProgressFollower(tmp_path, 40, 2)
    say(tmp_path, "phase", "training")
    train(tmp_path, range(1, 4), forward_s=0.9, backward_s=0.6)
    state = follower.poll(now=1006.0)
    assert state.slowest_rank == 1
    assert state.lag_s == {0: 0.0, 1: pytest.approx(0.4)}
    assert "rank 1 slowest (+400 ms)" in describe(state)


def test_waiting_in_communication_is_no_work(tmp_path: Path) -> None:
    follower = ProgressFollower(tmp_path, 40, 2)
    for rank, waits in ((0, 0.1), (1, 0.7)):
        append_line(tmp_path / STEPS_FILE, step(1, rank, communication_s=waits))
    assert follower.poll().slowest_rank == 0


def test_half_lines_wait_and_broken_lines_are_passed_over(tmp_path: Path) -> None:
    follower = ProgressFollower(tmp_path, 40, 1)
    line = step(1).to_json().encode() + b"\n"
    path = tmp_path / STEPS_FILE
    path.write_bytes(line[:50])
    assert follower.poll().step == 0
    with path.open("ab") as stream:
        stream.write(line[50:] + b"{broken\n" + step(2).to_json().encode() + b"\n" + line[:20])
    assert follower.poll().step == 2


def test_a_restart_goes_back_to_its_checkpoint(tmp_path: Path) -> None:
    follower = ProgressFollower(tmp_path, 40, 1)
    train(tmp_path, range(1, 9), ranks=1)
    assert follower.poll().step == 8
    train(tmp_path, range(6, 7), ranks=1)
    assert follower.poll().step == 6


def test_a_resumed_job_counts_on(tmp_path: Path) -> None:
    follower = ProgressFollower(tmp_path, 40, 1)
    say(tmp_path, "phase", "training")
    train(tmp_path, range(31, 33), ranks=1)
    state = follower.poll(now=1064.0)
    assert (state.step, state.seconds_left) == (32, 16.0)


def test_silence_is_told(tmp_path: Path) -> None:
    follower = ProgressFollower(tmp_path, 40, 1)
    say(tmp_path, "phase", "training")
    train(tmp_path, range(1, 4), ranks=1)
    assert follower.poll(now=1016.0).silent_s is None
    assert describe(follower.poll(now=1051.0)).endswith("no step for 0:45")


def test_a_late_word_of_another_rank_does_not_turn_the_phase_back(tmp_path: Path) -> None:
    follower = ProgressFollower(tmp_path, 40, 2)
    say(tmp_path, "phase", "building", rank=1)
    assert follower.poll().phase == "building"
    say(tmp_path, "phase", "training", rank=0)
    say(tmp_path, "phase", "evaluation", rank=1)
    assert follower.poll().phase == "training"


def test_the_first_failure_stays(tmp_path: Path) -> None:
    follower = ProgressFollower(tmp_path, 40, 2)
    say(tmp_path, "failure", "ValueError: no", rank=1, detail="Traceback ...\n  a line\nValueError: no")
    say(tmp_path, "failure", "RuntimeError: connection closed", rank=0)
    say(tmp_path, "finished")
    assert describe(follower.poll()) == "failed  rank 1: ValueError: no"


def test_evaluation_and_end(tmp_path: Path) -> None:
    follower = ProgressFollower(tmp_path, 2, 1)
    train(tmp_path, range(1, 3), ranks=1)
    say(tmp_path, "evaluation", "after", value=5.5)
    say(tmp_path, "finished")
    state = follower.poll()
    assert (state.phase, state.evaluation_loss, state.seconds_left) == ("finished", 5.5, None)
    assert describe(state) == "finished  2/2 steps"


def state(number: int, phase: str = "training") -> ProgressState:
    return ProgressState(phase=phase, phase_s=1.0, step=number, total_steps=40, world_size=1)


def test_plain_lines_come_now_and_then() -> None:
    stream = io.StringIO()
    display = ProgressDisplay(stream, interactive=False, label="base", every_s=5.0, heartbeat_s=20.0)
    display.update(state(0, "building"), now=0.0)
    display.update(state(0, "building"), now=10.0)
    display.update(state(0, "building"), now=21.0)  # a sign of life
    display.update(state(1), now=22.0)  # a new phase
    display.update(state(2), now=23.0)
    display.update(state(3), now=27.5)  # five seconds on
    display.update(state(40), now=28.0)  # the last step
    display.close()
    assert stream.getvalue().splitlines() == [
        "base: building the model  0:01",
        "base: building the model  0:01",
        "base: step 1/40",
        "base: step 3/40",
        "base: step 40/40",
    ]


def test_a_terminal_gets_one_line() -> None:
    stream = io.StringIO()
    display = ProgressDisplay(stream, interactive=True)
    display.update(state(1))
    display.update(state(2))
    display.close()
    display.close()
    assert stream.getvalue() == "\r\x1b[2Kstep 1/40\r\x1b[2Kstep 2/40\n"


def test_a_closed_stream_disturbs_nobody() -> None:
    stream = io.StringIO()
    stream.close()
    display = ProgressDisplay(stream, interactive=False)
    display.update(state(1))
    display.close()
