"""Saving that goes wrong: a full disk, another run in the same folder, a folder that is not ours alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from training_harness import Ljperf, Started, wait_for

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

# Weights and two moments in fp32 are 1.9 MB: one checkpoint fits, a second one beside it does not.
DISK = "size=3m"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", DISK, "tmpfs", str(folder)], check=False)
    if made.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@needs_root
@pytest.mark.parametrize("engine", ["ddp", "fsdp", "transformers"])
def test_a_full_disk_is_named_and_the_earlier_checkpoint_stays(own_runs: Ljperf, small_disk: Path, engine: str) -> None:
    folder = small_disk / "checkpoints"
    user_s_own = folder / "checkpoint-4" / "precious"  # the name the HF Trainer would choose
    user_s_own.parent.mkdir(parents=True)
    user_s_own.write_text("mine")
    saving = ("--nproc", "2", "--steps", "20", "--save-every", "2", "--save", str(folder))
    done = own_runs.train(engine, *saving, expect=1)
    record = done.run.record
    rank, _, reason = record["reason"].partition(": ")
    assert rank in ("rank 0", "rank 1")
    assert reason == (
        f"No space left in {folder} for the checkpoint of step 4. "
        "Free space, choose another folder with --save, or lower --keep-checkpoints."
    )
    assert reason in done.stderr
    assert {p.name for p in folder.iterdir() if not p.is_relative_to(user_s_own.parent)} == {"step-0000002"}
    assert user_s_own.read_text() == "mine"
    marker = json.loads((folder / "step-0000002" / "complete.json").read_text())
    sizes = {name: (folder / "step-0000002" / name).stat().st_size for name in marker["files"]}
    assert sizes == marker["files"]


@needs_root
def test_a_run_whose_own_disk_is_full_still_says_why(own_runs: Ljperf, small_disk: Path) -> None:
    own_runs.environment["TRAINING_XPU_RUNS"] = str(small_disk)
    done = own_runs.train("ddp", "--steps", "20", "--save-every", "4", expect=1)
    assert "for the checkpoint of step" in done.run.record["reason"]
    assert not list(done.run.folder.rglob("*.partial"))
    assert done.run.record["failures"][0]["traceback"]


def held(ljperf: Ljperf, flag: Path, *more: str) -> Started:
    """A training that waits for ever after its second step."""
    environment = {"TRAINING_TEST_FAULT": "0:step:2:hold", "TRAINING_TEST_HELD": str(flag)}
    arguments = ljperf.training("ddp", "--steps", "6", *more)
    started = ljperf.start(*arguments, plugin="faults", environment=environment)
    wait_for(lambda: flag.exists() or started.process.poll() is not None, "the second step")
    assert started.process.poll() is None, started.done()
    return started


def test_a_folder_is_one_run_s_until_it_has_ended_however_it_ended(own_runs: Ljperf, tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    saving = ("--save-every", "5", "--save", str(folder))
    first = held(own_runs, tmp_path / "held", *saving)
    runs = sorted(own_runs.runs.iterdir())
    refused = own_runs.train("ddp", *saving, expect=2)
    assert refused.stderr.splitlines()[-2:] == [
        f"ljperf: --save {folder}: in use by another run, by process {first.process.pid}",
        "  Wait until it has ended, or choose another folder.",
    ]
    assert sorted(own_runs.runs.iterdir()) == runs
    first.process.kill()
    first.process.wait()
    first.assert_nothing_left()
    own_runs.train("ddp", *saving)
    assert [p.name for p in folder.iterdir()] == ["step-0000004"]


def test_what_a_killed_run_holds_is_freed_by_the_next_look(own_runs: Ljperf, tmp_path: Path) -> None:
    dead, alive = held(own_runs, tmp_path / "held", "--save-every", "5"), held(own_runs, tmp_path / "too")
    first, second = sorted(own_runs.runs.iterdir())
    unfinished = first / "checkpoints" / ".step-0000005.partial"
    unfinished.mkdir(parents=True)
    dead.process.kill()
    dead.process.wait()
    dead.assert_nothing_left()
    reserves = [folder / ".reserve" for folder in (first, second)]
    assert all(reserve.stat().st_size == 512 * 1024 for reserve in reserves)
    listed: list[dict[str, Any]] = own_runs("runs", "--json").document["runs"]
    assert [(entry["name"], entry["status"]) for entry in listed] == [
        (second.name, "running"),
        (first.name, "failed"),
    ]
    assert [reserve.exists() for reserve in reserves] == [False, True]
    assert not unfinished.exists()
    alive.process.send_signal(signal.SIGINT)
    assert alive.done().code == 130
    assert not reserves[1].exists()
