"""What a killed run leaves behind goes; what a living one needs stays."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from training_xpu.device import processes
from training_xpu.perf.leftovers import RESERVE_FILE, clear_leftovers
from training_xpu.perf.records import RUN_FILE, RunRecord


def put(runs: Path, name: str, **fields: Any) -> Path:
    folder = runs / name
    (folder / "checkpoints" / ".step-0000004.partial").mkdir(parents=True)
    (folder / "checkpoints" / "step-0000002").mkdir()
    (folder / RESERVE_FILE).write_bytes(b"\0" * 1024)
    record = {"name": name, "created": datetime.now(UTC), "command": [], "workload": "w", "arm": "base", "features": []}
    RunRecord(**{**record, **fields}).write(folder / RUN_FILE)
    return folder


@pytest.fixture
def child() -> Any:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def test_only_of_runs_whose_process_is_gone(tmp_path: Path, child: subprocess.Popen[bytes]) -> None:
    here = {"host": processes.host_id(), "pid": child.pid, "pid_started": processes.started(child.pid)}
    alive = put(tmp_path, "alive", **here)
    elsewhere = put(tmp_path, "elsewhere", **{**here, "host": "another host"})
    recycled = put(tmp_path, "recycled", **{**here, "pid_started": 0.01})
    done = put(tmp_path, "done", **here, status="completed")
    damaged = put(tmp_path, "damaged", **here)
    (damaged / RUN_FILE).write_text("{")
    (tmp_path / "a file").write_text("")
    records = {folder: (folder / RUN_FILE).read_bytes() for folder in (alive, elsewhere, recycled, done, damaged)}
    clear_leftovers(tmp_path)
    kept = {folder for folder in records if (folder / RESERVE_FILE).exists()}
    assert kept == {alive, elsewhere, damaged}
    assert {f for f in records if (f / "checkpoints" / ".step-0000004.partial").exists()} == kept
    assert all((folder / "checkpoints" / "step-0000002").exists() for folder in records)
    assert records == {folder: (folder / RUN_FILE).read_bytes() for folder in records}
    child.kill()
    child.wait()
    clear_leftovers(tmp_path)
    assert not (alive / RESERVE_FILE).exists()


def test_no_runs_at_all(tmp_path: Path) -> None:
    clear_leftovers(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    clear_leftovers(tmp_path / "file")
