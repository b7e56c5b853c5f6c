"""What goes wrong while a job runs: a rank's end, signals, a full disk, bad folders, no network."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from training_harness import Done, Ljperf, Run, Started, wait_for

CGROUP = Path("/sys/fs/cgroup/memory")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def faulty(ljperf: Ljperf, fault: str, *more: str, **options: Any) -> Started:
    """A training whose rank does what `fault` says, see faults/sitecustomize.py."""
    environment = {"TRAINING_TEST_FAULT": fault, **options.pop("environment", {})}
    arguments = ljperf.training("ddp", "--nproc", "2", "--steps", "50", *more)
    return ljperf.start(*arguments, plugin="faults", environment=environment, **options)


def failed(started: Started) -> tuple[Done, dict[str, Any]]:
    """Waits for the job's failure, and checks what every failure must leave."""
    done = started.done()
    assert done.code == 1, done.stderr
    started.assert_nothing_left()
    document, record = done.document, done.run.record
    assert document["status"] == record["status"] == document["arms"][0]["status"] == "failed"
    assert record["reason"]
    assert record["reason"] in document["reason"]
    assert record["finished"] is not None
    assert record["reason"] in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.run.losses) >= 2
    assert record["summary"]["loss"]["first"] == done.run.losses[0]
    return done, record


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("1:step:2:raise", "rank 1: ValueError: the rank was told to fail"),
        ("0:step:2:SIGKILL", "rank 0: killed by signal 9 (SIGKILL)"),
        ("1:step:2:SIGSEGV", "rank 1: killed by signal 11 (SIGSEGV)"),
        ("1:step:2:limit", "rank 1: out of memory: "),
        ("1:step:2:leave", "rank 1: ValueError: the rank that had left"),
    ],
)
def test_a_rank_that_ends_is_named_with_its_reason(own_runs: Ljperf, fault: str, reason: str) -> None:
    done, record = failed(faulty(own_runs, fault))
    assert record["reason"].startswith(reason)
    assert record["failures"][0]["rank"] == int(fault[0])
    # The rank's last step, and the moment at which ljperf had closed everything.
    last = max(s["time"] for s in done.run.steps())
    assert (done.run.folder / "run.json").stat().st_mtime - last < 60


@needs_root
@pytest.mark.skipif(not os.access(CGROUP, os.W_OK), reason="needs a memory control group, version 1")
def test_the_kernel_killing_for_memory_is_named(own_runs: Ljperf) -> None:
    group = CGROUP / f"training-test-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(3 << 30))
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    shell = ("sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *Ljperf.COMMAND)
    try:
        started = faulty(own_runs, "1:step:2:hog", command=shell)
        _, record = failed(started)
        assert record["reason"] == "rank 1: killed by signal 9 (SIGKILL), by the kernel's out-of-memory killer", record[
            "reason"
        ]
    finally:
        wait_for(lambda: not (group / "cgroup.procs").read_text().strip(), "the end of the group", seconds=20)
        group.rmdir()


def held(ljperf: Ljperf, tmp_path: Path, *more: str) -> Started:
    """A training in the middle of its third step, from where it would never go on."""
    flag = tmp_path / "held"
    started = faulty(ljperf, "0:step:2:hold", *more, environment={"TRAINING_TEST_HELD": str(flag)})
    wait_for(lambda: flag.exists() or started.process.poll() is not None, "the third step")
    assert started.process.poll() is None, started.done()
    assert len(started.ranks()) == 2
    return started


@pytest.mark.parametrize("way", ["SIGINT", "SIGINT to the group", "SIGTERM", "SIGHUP"])
def test_a_signal_ends_everything_and_keeps_the_record(own_runs: Ljperf, tmp_path: Path, way: str) -> None:
    started = held(own_runs, tmp_path)
    name = way.split()[0]
    if "group" in way:
        os.killpg(started.process.pid, signal.SIGINT)
    else:
        started.process.send_signal(getattr(signal, name))
    done = started.done()
    assert done.code == 130
    started.assert_nothing_left()
    assert done.document["status"] == done.document["arms"][0]["status"] == "interrupted"
    record = done.run.record
    assert record["status"] == "interrupted"
    assert record["reason"] == name
    assert record["summary"]["loss"]["first"] == done.run.losses[0]
    assert "Traceback" not in done.stderr
    listed = own_runs("runs", "--json").document["runs"]
    assert [(r["status"], r["reason"]) for r in listed] == [("interrupted", name)]


def test_kill_9_of_ljperf_takes_its_ranks_with_it(own_runs: Ljperf, tmp_path: Path) -> None:
    started = held(own_runs, tmp_path)
    started.process.kill()
    started.process.wait()
    started.assert_nothing_left()
    (entry,) = own_runs("runs", "--json").document["runs"]
    assert entry["status"] == "failed"
    assert "killed" in entry["reason"]
    run = Run(Path(entry["run"]))
    assert len(run.losses) == 2
    assert run.record["status"] == "running"  # the file is as it was left


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """An empty file system of 2 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], check=False)
    if made.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@needs_root
def test_a_disk_that_fills_up_ends_the_run_and_harms_no_earlier_one(own_runs: Ljperf, small_disk: Path) -> None:
    own_runs.environment["TRAINING_XPU_RUNS"] = str(small_disk)
    first = own_runs.train("ddp", "--steps", "2").run
    kept = {path: path.read_bytes() for path in first.folder.rglob("*") if path.is_file()}

    # The first checkpoint, weights and two moments of 0.16 million parameters, is larger than what is left.
    done, record = failed(own_runs.start(*own_runs.training("ddp", "--steps", "20", "--save-every", "4")))
    assert "No space left" in record["reason"] or "disk is full" in record["reason"]
    assert {path: path.read_bytes() for path in first.folder.rglob("*") if path.is_file()} == kept
    listed = own_runs("runs", "--json").document["runs"]
    assert [r["status"] for r in listed] == ["failed", "completed"]
    assert Path(listed[0]["run"]) == done.run.folder

    # Nothing is left for another one: refused before anything starts.
    (small_disk / "filler").write_bytes(b"\0" * (os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize))
    refused = own_runs.train("ddp", expect=2)
    assert f"no space left for a run in {small_disk}" in refused.stderr
    assert len(list(small_disk.iterdir())) == 3


@needs_root
def test_a_loopback_interface_that_is_down_is_named_before_anything_starts(own_runs: Ljperf) -> None:
    if subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no network name spaces here")
    done = own_runs.train("ddp", "--nproc", "2", expect=3, command=("unshare", "-n", *Ljperf.COMMAND))
    assert done.stderr.splitlines()[-2:] == [
        "ljperf: the loopback network interface does not work: Network is unreachable",
        "  Ranks meet at 127.0.0.1; switch it on with: ip link set lo up",
    ]
    assert not own_runs.runs.exists()


def test_two_runs_at_once_in_one_folder_do_not_collide(own_runs: Ljperf) -> None:
    both = [own_runs.start(*own_runs.training("ddp", "--nproc", "2", "--steps", "3")) for _ in range(2)]
    runs = [started.done() for started in both]
    assert [r.code for r in runs] == [0, 0], [r.stderr for r in runs]
    assert len({r.run.folder for r in runs}) == 2
    assert runs[0].run.losses == runs[1].run.losses
    assert {len(r.run.steps()) for r in runs} == {6}


@needs_root
def test_no_network_odd_names_no_stdin_and_a_dumb_terminal(ljperf: Ljperf, tmp_path: Path) -> None:
    folder = tmp_path / "wörk und spaß 数据"
    folder.mkdir()
    model, data = folder / "my modèl", folder / "my dâta.jsonl"
    model.mkdir()
    (model / "config.json").write_bytes((ljperf.folder / "tiny" / "config.json").read_bytes())
    data.write_bytes((ljperf.folder / "text.jsonl").read_bytes())
    environment = {
        "TERM": "dumb",
        "TRAINING_XPU_CACHE": str(folder / "the cäche"),
        "TRAINING_XPU_RUNS": str(folder / "the rüns"),
        "HF_HUB_OFFLINE": "0",
    }
    inside = 'ip link set lo up 2>/dev/null || ifconfig lo up; exec "$@" <&-'
    shell = ("unshare", "-n", "sh", "-c", inside, "sh", *Ljperf.COMMAND)
    arguments = ["--model", f"deepspeed/{model}", "--data", str(data), "--nproc", "2", "--save-model"]
    done = ljperf.train("deepspeed", *arguments, environment=environment, command=shell)
    assert done.run.folder.is_relative_to(folder / "the rüns")
    assert len(done.run.steps()) == 8
    assert (done.run.folder / "model" / "config.json").is_file()
    assert "\x1b" not in done.stderr


def test_readers_that_leave_do_not_disturb_the_job(own_runs: Ljperf) -> None:
    started = own_runs.start(*own_runs.training("ddp"))
    assert started.process.stderr is not None
    assert started.process.stdout is not None
    for line in started.process.stderr:
        if line.startswith("4 steps on 1 rank"):
            break
    started.process.stderr.close()
    started.process.stdout.close()
    code = started.process.wait(timeout=300)
    started.assert_nothing_left()
    (folder,) = own_runs.runs.iterdir()
    assert json.loads((folder / "run.json").read_text())["status"] == "completed"
    assert code == 1  # the document was not delivered
