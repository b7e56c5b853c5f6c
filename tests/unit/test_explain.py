"""explain: the reports of many processes put together into one outcome per feature."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from training_xpu import report
from training_xpu.perf.explain import (
    NO_TORCH,
    NOT_TOLD,
    NOTHING_HAPPENED,
    asked_in,
    explain_process,
    outcomes,
    sentence,
)
from training_xpu.report_lines import ReportLine


def line(
    feature: str, event: report.Event, rank: int = 0, reason: str = "", asked: str = "", **data: Any
) -> ReportLine:
    return ReportLine(
        time=1.0,
        role="rank",
        rank=rank,
        feature=feature,
        event=event,
        reason=reason,
        asked=asked,
        pid=100 + rank,
        host="node",
        data=data,
    )


PROCESSES = [line("", "process", 0), line("", "process", 1)]


def test_applied_on_all_ranks() -> None:
    lines = [*PROCESSES, line("a", "subscribed", asked="true"), line("a", "applied", 0), line("a", "applied", 1)]
    (found,) = outcomes(lines, asked_in(lines))
    assert (found.asked, found.outcome, found.applied_in) == ("true", "applied", ["rank 0", "rank 1"])
    assert sentence(found) == "a applied (rank 0, rank 1)"


def test_one_rank_that_stepped_aside_decides() -> None:
    lines = [line("a", "applied", 0), line("a", "stepped-aside", 1, "too little memory", "true")]
    (found,) = outcomes(lines, {"a": "true"})
    assert (found.outcome, found.applied_in, found.aside_in) == ("stepped-aside", ["rank 0"], ["rank 1"])
    assert sentence(found) == "a stepped aside (rank 1): too little memory"


def test_a_fault_takes_back_that_it_applied() -> None:
    lines = [line("a", "applied", 0), line("a", "fault", 0, "broke"), line("a", "fault", 0, "broke")]
    (found,) = outcomes(lines, {"a": "auto"})
    assert (found.outcome, found.applied_in, found.reason) == ("stepped-aside", [], "broke")


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([], NO_TORCH),
        (PROCESSES, NOT_TOLD),
        ([*PROCESSES, line("a", "subscribed", asked="true")], NOTHING_HAPPENED),
    ],
)
def test_why_a_feature_did_not_apply(lines: list[ReportLine], reason: str) -> None:
    (found,) = outcomes(lines, {"a": "true"})
    assert (found.outcome, found.reason) == ("not-applied", reason)


def test_a_process_is_shown_with_its_sibling_ranks_and_not_with_another_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    def process(pid: int, rank: int, job: str) -> None:
        writer = report.Writer(tmp_path, "rank", rank)
        writer._pid = pid
        monkeypatch.setattr(os, "getpid", lambda: pid)
        writer.write("", "process", job=job, asked_for={"a": "true"}, program="train.py")
        writer.write("a", "subscribed", asked="true")
        writer.write("a", "applied")

    monkeypatch.setattr("training_xpu.envs.of_process", lambda pid, names: {"TRAINING_XPU_REPORT": str(tmp_path)})
    process(4_000_001, 0, "node0:29500")
    process(4_000_002, 1, "node0:29500")
    process(4_000_003, 0, "node0:29600")
    found = explain_process(4_000_002)
    assert [(p.rank, p.pid) for p in found.processes] == [(0, 4_000_001), (1, 4_000_002)]
    assert found.features[0].applied_in == ["rank 0", "rank 1"]
