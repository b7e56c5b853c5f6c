"""Preparing data and loading batches with other processes about, some of which are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

PREPARE = """
import sys, time
from pathlib import Path
from training_xpu.workloads.data.prepare import prepare

def progress(text):
    print(text, flush=True)
    if text.startswith("training a tokenizer"):
        print("MADE" if not sys.argv[3:] else "READY", flush=True)
        time.sleep(float(sys.argv[3]) if sys.argv[3:] else 0)

prepare(Path(sys.argv[1]), None, 300, Path(sys.argv[2]), 8, None, 0, None, progress)
"""

LOAD = """
import os, sys, time
from pathlib import Path
import psutil
from training_xpu.workloads.data.batches import training_batches
from training_xpu.workloads.data.prepare import prepare

data = prepare(Path(sys.argv[1]), None, 300, Path(sys.argv[2]), 8, None, 0, None, lambda text: None)
batches = training_batches(data, rank=0, world_size=1, micro_batch=2, gradient_accumulation=1, sequence_length=8,
                           workers=2)
next(batches)
print(*[child.pid for child in psutil.Process().children()], flush=True)
if sys.argv[3] == "close":
    batches.close()
    print(len([c for c in psutil.Process().children() if c.status() != psutil.STATUS_ZOMBIE]), flush=True)
else:
    time.sleep(600)
"""


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text("".join(f"line {i} of some text\n" for i in range(2000)))
    return path


def start(program: str, *arguments: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def wait_for(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    for said in process.stdout:
        if said.strip() == line:
            return
    pytest.fail(f"the process ended without saying {line}")


def test_two_runs_at_once_share_the_work(corpus: Path, tmp_path: Path) -> None:
    first = start(PREPARE, corpus, tmp_path / "cache", "3")
    wait_for(first, "READY")
    second = start(PREPARE, corpus, tmp_path / "cache")
    said = second.communicate(timeout=60)[0]
    assert first.wait(timeout=60) == 0
    assert second.returncode == 0
    assert "waiting for it" in said
    assert "from the cache" in said
    assert "MADE" not in said


def test_killed_run_leaves_no_lock_and_no_half_made_data(corpus: Path, tmp_path: Path) -> None:
    killed = start(PREPARE, corpus, tmp_path / "cache", "600")
    wait_for(killed, "READY")
    killed.kill()
    killed.wait()
    assert list((tmp_path / "cache").rglob("*.building-*"))
    said = start(PREPARE, corpus, tmp_path / "cache").communicate(timeout=60)[0]
    assert "MADE" in said
    assert "waiting" not in said
    assert not list((tmp_path / "cache").rglob("*.building-*"))


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_their_rank(corpus: Path, tmp_path: Path, end: signal.Signals) -> None:
    rank = start(LOAD, corpus, tmp_path / "cache", "stay")
    assert rank.stdout is not None
    workers = [psutil.Process(int(pid)) for pid in rank.stdout.readline().split()]
    assert len(workers) == 2
    os.kill(rank.pid, end)
    rank.wait()
    deadline = time.monotonic() + 30
    while any(is_alive(worker) for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_alive(worker) for worker in workers)


def test_closing_ends_the_workers(corpus: Path, tmp_path: Path) -> None:
    said = start(LOAD, corpus, tmp_path / "cache", "close").communicate(timeout=60)[0].splitlines()
    assert said[-1] == "0"


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
