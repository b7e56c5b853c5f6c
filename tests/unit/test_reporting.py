"""Trackers: what they are handed, and that their faults cost no training."""

from __future__ import annotations

import contextlib
from importlib.machinery import ModuleSpec
from typing import Any

import pytest

from training_xpu.errors import CannotRunHere
from training_xpu.workloads import reporting
from training_xpu.workloads.reporting import Trackers, check_trackers


class Recorder:
    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at
        self.heard: list[Any] = []

    def log(self, values: dict[str, float], step: int) -> None:
        if step == self.fails_at:
            raise ConnectionError("the server is gone")
        self.heard.append((step, values))

    def close(self, failed: bool) -> None:
        self.heard.append("failed" if failed else "finished")


def test_one_that_fails_is_dropped_and_named_and_the_others_go_on() -> None:
    faults: list[str] = []
    bad, good = Recorder(fails_at=2), Recorder()
    trackers = Trackers({"bad": bad, "good": good}, faults.append)
    with trackers.closing():
        for step in (1, 2, 3):
            trackers.log({"loss": 1.0}, step)
    assert faults == ["bad was given no more values: ConnectionError: the server is gone"]
    assert bad.heard == [(1, {"loss": 1.0})]
    assert good.heard == [(1, {"loss": 1.0}), (2, {"loss": 1.0}), (3, {"loss": 1.0}), "finished"]


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_a_failure_is_told_and_passed_on(error: BaseException) -> None:
    tracker = Recorder()
    with pytest.raises(type(error)), Trackers({"one": tracker}, pytest.fail).closing():
        raise error
    assert tracker.heard == ["failed"]


def test_a_fault_while_closing_hides_no_failure() -> None:
    class Stubborn(Recorder):
        def close(self, failed: bool) -> None:
            raise ConnectionError("the server is gone")

    faults: list[str] = []
    with contextlib.suppress(ValueError), Trackers({"one": Stubborn()}, faults.append).closing():
        raise ValueError("no")
    assert faults == ["one was given no more values: ConnectionError: the server is gone"]


def test_a_folder_of_its_name_is_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb makes a folder `wandb` where it runs, which Python would import."""
    monkeypatch.setattr(reporting, "find_spec", lambda name: ModuleSpec(name, None, is_package=True))
    with pytest.raises(CannotRunHere, match="the package wandb is not installed"):
        check_trackers(["wandb"])
