"""The run store: folders, names, records in any state, and `ljperf runs`."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from training_xpu import records
from training_xpu.cli.runs import page, runs
from training_xpu.errors import UserError
from training_xpu.perf import store
from training_xpu.perf.explain import explain_run
from training_xpu.perf.records import RUN_FILE, Estimate, LossSummary, RankFailure, RunRecord, Summary
from training_xpu.workloads.config import EVENTS_FILE, STEPS_FILE

BEGIN = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


def record(name: str, minutes: int = 0, **changes: Any) -> RunRecord:
    settings: dict[str, Any] = {
        "name": name,
        "created": BEGIN + timedelta(minutes=minutes),
        "command": ["ljperf", "benchmark"],
        "workload": "ddp/llama3.2-1b",
        "arm": "base",
        "features": [],
        "status": "completed",
    }
    return RunRecord(**{**settings, **changes})


def put(folder: Path, name: str, minutes: int = 0, **changes: Any) -> Path:
    run = folder / name
    run.mkdir(parents=True)
    record(name, minutes, **changes).write(run / RUN_FILE)
    return run


def owned(**changes: Any) -> dict[str, Any]:
    return {"status": "running", **store.owner(), **changes}


OLD, MIDDLE, NEW = "20260301-120000-ddp-a-base", "20260301-120100-ddp-b-base", "20260302-120000-ddp-a-x"


@pytest.fixture
def three(tmp_path: Path) -> Path:
    put(tmp_path, OLD)
    put(tmp_path, MIDDLE, 1)
    put(tmp_path, NEW, 24 * 60)
    return tmp_path


def test_a_new_run_has_time_workload_and_arm_in_its_name(tmp_path: Path) -> None:
    run = store.create_run(tmp_path / "deep" / "runs", "deepspeed/llama3-8b", "compile+recompute")
    assert run.is_dir()
    assert run.is_absolute()
    assert list(run.iterdir()) == []
    time, rest = run.name[:15], run.name[15:]
    assert abs(datetime.strptime(time, "%Y%m%d-%H%M%S").replace(tzinfo=UTC) - datetime.now(UTC)) < timedelta(minutes=5)
    assert rest == "-deepspeed-llama3-8b-compile+recompute"


@pytest.mark.parametrize(
    ("workload", "arm", "ending"),
    [
        ("deepspeed/./my-model", "base", "-deepspeed-my-model-base"),
        ("fsdp//data/some folder/Ünïcode model", "base", "-fsdp-n-code-model-base"),
        ("fsdp//", "base", "-fsdp-base"),
        ("python train.py", "../../evil", "-python-train.py-evil"),
        ("", "..", "-run-arm"),
        ("x" * 300, "base", "-" + "x" * 80 + "-base"),
    ],
)
def test_names_are_safe(tmp_path: Path, workload: str, arm: str, ending: str) -> None:
    run = store.create_run(tmp_path, workload, arm)
    assert run.parent == tmp_path
    assert run.name[15:] == ending


def test_runs_at_the_same_moment_do_not_collide(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: store.create_run(tmp_path, "ddp/a", "base"), range(24)))
    assert len(set(made)) == 24


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write runs to") as caught:
        store.create_run(tmp_path / "file" / "runs", "ddp/a", "base")
    assert "--output" in caught.value.remedy


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_rights(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="Permission denied"):
        store.create_run(tmp_path, "ddp/a", "base")


def test_a_full_disk_shows_at_once_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="no space left"):
        store.create_run(tmp_path, "ddp/a", "base")
    assert list(tmp_path.iterdir()) == []


def test_find_by_name_prefix_path_and_latest(three: Path) -> None:
    assert store.find_run(OLD, three) == three / OLD
    assert store.find_run("20260302", three) == three / NEW
    assert store.find_run("latest", three) == three / NEW
    assert store.find_run(three / OLD, three / "elsewhere") == three / OLD
    assert store.find_run(f"{three / OLD}/{RUN_FILE}", three) == three / OLD
    (three / "20260401-000000-begins-just-now").mkdir()
    assert store.find_run("latest", three) == three / NEW


def test_an_exact_name_wins_over_longer_ones(three: Path) -> None:
    put(three, OLD + "-2")
    assert store.find_run(OLD, three) == three / OLD


@pytest.mark.parametrize(
    ("asked", "problem", "remedy"),
    [
        ("20260301", "2 runs begin with '20260301'", MIDDLE),
        ("20260301-120000-ddp-a-bsae", "no run '20260301-120000-ddp-a-bsae'", f"Did you mean {OLD}"),
        ("ddp-b", "no run 'ddp-b'", f"Did you mean {MIDDLE}?"),
        ("zzz", "no run 'zzz'", "ljperf runs lists them."),
        ("", "no run ''", ""),
        ("./nowhere", "no run './nowhere'", ""),
    ],
)
def test_unknown_names(three: Path, asked: str, problem: str, remedy: str) -> None:
    with pytest.raises(UserError) as caught:
        store.find_run(asked, three)
    assert problem in caught.value.problem
    assert remedy in caught.value.remedy


def test_a_folder_that_is_no_run(three: Path) -> None:
    with pytest.raises(UserError, match=r"holds no run\.json"):
        store.find_run(three, three)


@pytest.mark.parametrize("asked", ["latest", "anything"])
def test_no_runs_yet(tmp_path: Path, asked: str) -> None:
    with pytest.raises(UserError, match="no runs in") as caught:
        store.find_run(asked, tmp_path / "runs")
    assert "ljperf benchmark" in caught.value.remedy


def test_newest_first_and_the_unreadable_with_their_reason(three: Path) -> None:
    truncated = put(three, "20260303-000000-ddp-a-base") / RUN_FILE
    truncated.write_text(truncated.read_text()[:100])
    newer = put(three, "20260304-000000-ddp-a-base") / RUN_FILE
    newer.write_text(json.dumps({**json.loads(newer.read_text()), "schema": 99}))
    (three / "20260305-000000-ddp-a-base").mkdir()
    (three / "notes").mkdir()
    (three / "file").write_text("")
    found = {path.name: what for path, what in store.list_runs(three)}
    assert list(found) == [
        "20260305-000000-ddp-a-base",
        "20260304-000000-ddp-a-base",
        "20260303-000000-ddp-a-base",
        NEW,
        MIDDLE,
        OLD,
    ]
    assert "has no run.json" in str(found["20260305-000000-ddp-a-base"])
    assert "newer than 1" in str(found["20260304-000000-ddp-a-base"])
    assert "is not a RunRecord" in str(found["20260303-000000-ddp-a-base"])
    assert isinstance(found[OLD], RunRecord)


def set_to(**changes: Any) -> Callable[[Path], object]:
    return lambda file: file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def as_fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def as_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def as_huge(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.truncate(store.LARGEST_RECORD + 1)  # sparse: takes no room


@pytest.mark.parametrize(
    "damage",
    [
        as_fifo,
        as_folder,
        as_huge,
        set_to(created="2026-03-01T12:00:00"),
        set_to(created=7e30),
        set_to(finished="2026-03-01T12:00:00"),
        set_to(pid="x"),
        set_to(summary=[]),
        set_to(feature_reports=7),
        set_to(status="bored"),
        lambda file: file.write_text("[" * 200_000),
        lambda file: file.write_bytes(b"\xff\xfe"),
    ],
)
def test_a_damaged_record_is_listed_and_harms_no_other(three: Path, invoke: Invoke, damage: Any) -> None:
    damage(three / MIDDLE / RUN_FILE)
    shown = invoke("--json", "--output", three)
    assert shown.exit_code == 0, shown.exception
    entries = {run["name"]: run for run in json.loads(shown.stdout)["runs"]}
    assert {name: run["status"] for name, run in entries.items()} == {
        NEW: "completed", MIDDLE: "unreadable", OLD: "completed",
    }  # fmt: skip
    assert MIDDLE in entries[MIDDLE]["reason"]
    assert store.find_run("latest", three).name == NEW
    for read in (lambda: store.load_run(three / MIDDLE), lambda: explain_run(MIDDLE, three)):
        with pytest.raises(UserError, match=MIDDLE):
            read()


@pytest.mark.parametrize("year", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"])
def test_the_first_and_the_last_year(three: Path, invoke: Invoke, year: str) -> None:
    set_to(created=year)(three / MIDDLE / RUN_FILE)
    for arguments in (("--output", three), (MIDDLE, "--output", three)):
        shown = invoke(*arguments)
        assert shown.exit_code == 0, shown.exception
        assert MIDDLE in shown.stdout


@pytest.mark.parametrize("pid", [-1, 0, 2**31, 10**30])
def test_an_owner_that_cannot_be_is_dead(tmp_path: Path, pid: int) -> None:
    assert store.load_run(put(tmp_path, OLD, **owned(pid=pid))).status == "failed"


def test_lines_in_something_that_is_no_file_or_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / EVENTS_FILE)
    (tmp_path / STEPS_FILE).mkdir()
    assert store.load_events(tmp_path) == store.load_steps(tmp_path) == []
    (tmp_path / EVENTS_FILE).unlink()
    monkeypatch.setattr(records, "LONGEST_LINE", 1000)
    line = '{"schema":1,"rank":0,"time":1.0,"event":"finished"}\n'
    (tmp_path / EVENTS_FILE).write_text(line + "x" * 10_000 + "\n" + line)
    assert len(store.load_events(tmp_path)) == 2


def test_a_runs_folder_that_is_a_file(tmp_path: Path, invoke: Invoke) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(UserError, match=r"cannot read .*/runs: Not a directory"):
        store.list_runs(tmp_path / "runs")


def test_where_runs_cannot_be_written_is_told_beforehand(tmp_path: Path) -> None:
    store.check_runs_folder(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for folder in (Path("/dev/null"), tmp_path / "file", tmp_path / "file" / "runs", tmp_path / "link"):
        with pytest.raises(UserError, match="is no folder") as caught:
            store.check_runs_folder(folder)
        assert caught.value.problem.startswith(f"cannot write runs to {folder}: ")
        assert "--output" in caught.value.remedy


def test_a_record_without_an_owner_is_believed(tmp_path: Path) -> None:
    assert store.load_run(put(tmp_path, OLD, status="running")).status == "running"


def test_a_living_owner(tmp_path: Path) -> None:
    assert store.load_run(put(tmp_path, OLD, **owned())).status == "running"


def test_an_owner_on_another_machine_is_believed(tmp_path: Path) -> None:
    run = put(tmp_path, OLD, **owned(host="another", pid=2**22 + 1))
    assert store.load_run(run).status == "running"


def test_a_dead_owner_and_a_pid_used_again(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    dead = put(tmp_path, OLD, **owned(pid=child.pid))
    child.wait()
    assert store.load_run(dead).status == "failed"
    assert "ended without a word" in store.load_run(dead).reason
    assert RunRecord.read(dead / RUN_FILE).status == "running"  # the file stays as its owner left it
    again = put(tmp_path, MIDDLE, **owned(pid_started=0.01))
    assert store.load_run(again).status == "failed"


def test_a_zombie_is_dead(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.read()  # to its end; nobody has waited for the child yet
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    run = put(tmp_path, OLD, **owned(pid=child.pid, pid_started=None))
    assert store.load_run(run).status == "failed"
    child.wait()


def test_no_record_at_all(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    with pytest.raises(UserError, match=r"has no run\.json"):
        store.load_run(tmp_path / "x")


def test_line_files_that_are_missing_or_cut_short(tmp_path: Path) -> None:
    assert store.load_steps(tmp_path) == []
    line = '{"schema":1,"rank":0,"time":1.0,"event":"finished"}\n'
    (tmp_path / EVENTS_FILE).write_text(line + line[:20])
    (tmp_path / STEPS_FILE).write_text('{"rank":')
    assert [e.event for e in store.load_events(tmp_path)] == ["finished"]
    assert store.load_steps(tmp_path) == []


Invoke = Callable[..., Any]


@pytest.fixture
def invoke() -> Invoke:
    app = typer.Typer()
    app.command()(runs)
    return lambda *arguments: CliRunner().invoke(app, [str(a) for a in arguments])


MEASURED = Summary(
    steps_measured=38,
    warmup_steps=2,
    tokens_per_second_per_device=Estimate(median=1234.5, p5=1200, p95=1300, ci95=(1230.0, 1240.0), count=38),
    mfu=0.321,
    hfu=0.4,
    peak_flops=2e11,
    peak_source="measured",
    loss=LossSummary(first=8.5, last=6.25, eval_before=8.4, eval_after=6.5),
)


def test_the_list(three: Path, invoke: Invoke) -> None:
    put(three, "20260306-000000-ddp-a-base", 10000, summary=MEASURED, status="failed", reason="rank 1: killed\nmore")
    shown = invoke("--output", three)
    lines = [line for line in shown.stdout.splitlines() if line.startswith("2026")]
    assert [line.split()[0] for line in lines] == ["20260306-000000-ddp-a-base", NEW, MIDDLE, OLD]
    for cell in ("failed", "1,234", "32.1%", "6.250"):
        assert cell in lines[0]
    assert "rank 1: killed" in shown.stderr
    document = json.loads(invoke("--json", "--output", three).stdout)
    assert document["runs"][0]["tokens_per_second_per_device"]["ci95"] == [1230.0, 1240.0]
    assert [r["status"] for r in document["runs"]] == ["failed", "completed", "completed", "completed"]


def test_an_empty_store(tmp_path: Path, invoke: Invoke) -> None:
    shown = invoke("--output", tmp_path / "none")
    assert shown.exit_code == 0
    assert "no runs in" in shown.stdout
    assert json.loads(invoke("--json", "--output", tmp_path / "none").stdout)["runs"] == []


def test_one_run_in_detail(tmp_path: Path, invoke: Invoke) -> None:
    failure = RankFailure(rank=1, reason="ValueError: no", traceback="Traceback\n  here\nValueError: no", exit_code=1)
    run = put(tmp_path, OLD, status="failed", reason="rank 1 failed", failures=[failure], summary=MEASURED)
    shown = invoke("latest", "--output", tmp_path).stdout
    for part in (
        "failed: rank 1 failed",
        "38 after 2 of warm-up",
        "1,234  (95 % interval 1,230 - 1,240)",
        "32.1%, HFU 40.0% of 0.200 TFLOP/s per rank (measured)",
        "8.400 -> 6.500",
        "Rank 1 failed: ValueError: no (exit code 1)",
        "  here",
        str(run),
    ):
        assert part in shown
    assert json.loads(invoke(OLD, "--json", "--output", tmp_path).stdout)["status"] == "failed"


def test_a_page_of_a_run_with_nothing_measured(tmp_path: Path) -> None:
    text = page(tmp_path, record("r", status="interrupted", reason="SIGINT"), None)
    assert "interrupted: SIGINT" in text
    assert "Measured" not in text


def test_listing_imports_no_torch(three: Path) -> None:
    code = (
        "import sys; from training_xpu.perf import store; from pathlib import Path; import training_xpu.cli.runs as r;"
        f"r.runs(None, False, Path({str(three)!r})); assert not {{'torch', 'numpy'}} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
