"""report: what is written can be read, and nothing that goes wrong with it reaches training."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from training_xpu import report
from training_xpu.device.processes import host_id


def test_a_line_has_the_envelope(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there yet"
    writer = report.Writer(folder, "rank", 3)
    assert not folder.exists()  # lazily: nobody has written
    writer.write("toy", "stepped-aside", "no reason", "auto", steps=[1, 2], loss=float("nan"), path=Path("/x"))
    (file,) = folder.iterdir()
    assert file.name == f"rank-3-{os.getpid()}.jsonl"
    line = json.loads(file.read_text())
    assert line.pop("time") > 1.6e9
    assert line.pop("host") == host_id()  # and no name of a host
    assert line == {
        "schema": 1,
        "role": "rank",
        "rank": 3,
        "feature": "toy",
        "event": "stepped-aside",
        "reason": "no reason",
        "asked": "auto",
        "pid": os.getpid(),
        "data": {"steps": [1, 2], "loss": "NaN", "path": "/x"},
    }


def test_reading_passes_over_cut_and_foreign_lines(tmp_path: Path) -> None:
    writer = report.Writer(tmp_path, "single", 0)
    writer.write("a", "applied")
    writer.write("b", "applied")
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    newer = whole.splitlines()[0].replace(b'"schema": 1', b'"schema": 2, "unknown": 1')
    file.write_bytes(newer + b"\n\xff\xfe\n" + whole[:-20])
    assert [line.feature for line in report.read(tmp_path)] == ["a"]


def test_reading_a_missing_folder_gives_nothing(tmp_path: Path) -> None:
    assert list(report.read(tmp_path / "nowhere")) == []


@pytest.mark.parametrize("target", ["/dev/null/sub", "/proc/sub"])
def test_a_folder_that_cannot_be_made_is_one_warning(target: str, caplog: pytest.LogCaptureFixture) -> None:
    report.logger.propagate = True
    writer = report.Writer(Path(target), "rank", 0)
    with caplog.at_level(logging.WARNING, logger="training_xpu"):
        writer.write("a", "applied")
        writer.write("a", "applied")
    assert len(caplog.records) == 1
    assert target in caplog.text


def test_a_full_disk_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    report.logger.propagate = True
    (tmp_path / f"rank-0-{os.getpid()}.jsonl").symlink_to("/dev/full")
    writer = report.Writer(tmp_path, "rank", 0)
    with caplog.at_level(logging.WARNING, logger="training_xpu"):
        for _ in range(3):
            writer.write("a", "applied")
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text


def test_a_forked_process_writes_to_a_file_of_its_own(tmp_path: Path) -> None:
    writer = report.Writer(tmp_path, "rank", 1)
    writer.write("parent", "applied")
    child = os.fork()
    if child == 0:
        writer.write("child", "applied")
        os._exit(0)
    os.waitpid(child, 0)
    writer.write("parent", "applied")
    assert {p.name for p in tmp_path.iterdir()} == {f"rank-1-{os.getpid()}.jsonl", f"helper-1-{child}.jsonl"}
    assert [line.feature for line in report.read(tmp_path)] == ["child", "parent", "parent"]


def test_nobody_asked_nothing_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    report.begin(None, "rank", 0)
    report.write("a", "applied")
    assert list(tmp_path.iterdir()) == []
