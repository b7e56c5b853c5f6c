"""Arms as a user names them, and what an experiment answers for its runs."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from training_xpu import features
from training_xpu.errors import ExitCode, UserError
from training_xpu.perf import experiment, store
from training_xpu.perf.experiment import Outcome, parse_arms, run_experiment
from training_xpu.perf.records import RUN_FILE, RunRecord
from training_xpu.perf.runner import Arm


@pytest.fixture(autouse=True)
def toys() -> Iterator[None]:
    for name in ("toy-a", "toy-b"):
        variable = f"TRAINING_XPU_{name.upper().replace('-', '_')}"
        features.register(features.Feature(name, variable, "For tests.", "0.1.0", "nowhere:available"))
    yield
    for name in ("toy-a", "toy-b"):
        features.unregister(name)


@pytest.mark.parametrize(
    ("asked", "arms", "expected"),
    [
        (None, None, [("base", [])]),
        ("base", None, [("base", [])]),
        ("toy-b,toy-a", None, [("toy-a+toy-b", ["toy-a", "toy-b"])]),
        (None, "base,toy-a,toy-b+toy-a", [("base", []), ("toy-a", ["toy-a"]), ("toy-a+toy-b", ["toy-a", "toy-b"])]),
        (None, " toy-b , base ", [("toy-b", ["toy-b"]), ("base", [])]),
    ],
)
def test_arms_in_the_order_given_features_in_that_of_the_list(
    asked: str | None, arms: str | None, expected: list[tuple[str, list[str]]]
) -> None:
    assert [(arm.name, arm.features) for arm in parse_arms(asked, arms)] == expected


@pytest.mark.parametrize(
    ("asked", "arms", "problem"),
    [
        ("toy-c", None, "unknown feature 'toy-c'"),
        ("base,toy-a", None, "base means no feature"),
        (None, "toy-a+toy-b,toy-b+toy-a", "names 'toy-a+toy-b' twice"),
        (None, ", ,", "names no arm"),
        ("base", "base", "exclude each other"),
    ],
)
def test_arms_that_cannot_be(asked: str | None, arms: str | None, problem: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_arms(asked, arms)
    assert problem in caught.value.problem


def record(arm: str, status: Any = "completed", **more: Any) -> RunRecord:
    return RunRecord(
        name=arm, created=datetime.now(UTC), command=["ljperf"], workload="ddp/tiny", arm=arm,
        features=[] if arm == "base" else arm.split("+"), status=status, **more,
    )  # fmt: skip


def outcome(*records: RunRecord, interrupted: bool = False) -> Outcome:
    return Outcome([(Path(r.name), r) for r in records], interrupted)


def aside(feature: str, reason: str) -> dict[str, Any]:
    return {"feature": feature, "event": "stepped-aside", "reason": reason}


def test_the_exit_code_is_that_of_the_worst_arm() -> None:
    fine, bad = record("base"), record("toy-a", "failed")
    left = record("toy-b", feature_reports=[aside("toy-b", "no toy"), aside("toy-b", "no toy"), aside("other", "-")])
    assert outcome(fine).exit_code() == ExitCode.DONE
    assert outcome(fine, bad).exit_code() == ExitCode.FAILED
    assert outcome(fine, left).exit_code() == ExitCode.CANNOT_RUN
    assert outcome(fine, left).stepped_aside == ["toy-b: no toy"]
    assert outcome(left, bad).exit_code() == ExitCode.FAILED
    assert outcome(bad, interrupted=True).exit_code() == ExitCode.INTERRUPTED


def test_a_failed_arm_does_not_keep_the_others_from_running_and_an_interrupt_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endings = {"base": "failed", "toy-a": "completed", "toy-b": "interrupted", "toy-a+toy-b": "completed"}

    def run_arm(job: Any, arm: Arm, context: Any) -> Path:
        folder = tmp_path / arm.name
        folder.mkdir()
        record(arm.name, endings[arm.name], **store.owner()).write(folder / RUN_FILE)
        return folder

    class Context:
        said: list[str] = []  # noqa: RUF012

        def say(self, text: str) -> None:
            self.said.append(text)

    monkeypatch.setattr(experiment, "run_arm", run_arm)
    context: Any = Context()
    found = run_experiment(None, parse_arms(None, "base,toy-a,toy-b,toy-a+toy-b"), context)  # type: ignore[arg-type]
    assert [(r.arm, r.status) for _, r in found.runs] == [
        ("base", "failed"),
        ("toy-a", "completed"),
        ("toy-b", "interrupted"),
    ]
    assert (found.status, found.exit_code()) == ("interrupted", ExitCode.INTERRUPTED)
    assert context.said[2] == "arm 3 of 4: toy-b"
