"""A folder of checkpoints is one job's at a time."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from training_xpu.errors import UserError
from training_xpu.workloads.folder_owner import OWNER_FILE, owning


def test_the_second_is_refused_and_the_next_one_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there yet"
    with owning(folder, ""):
        for job in ("", "another job"):
            with (
                pytest.raises(UserError, match=f"in use by another run, by process {os.getpid()}"),
                owning(folder, job),
            ):
                pass
        assert [p.name for p in folder.iterdir()] == [OWNER_FILE]
    assert list(folder.iterdir()) == []
    with owning(folder, ""):
        pass


def test_the_nodes_of_one_job_share_it(tmp_path: Path) -> None:
    with owning(tmp_path, "node-a:29400 job1"):
        with owning(tmp_path, "node-a:29400 job1"):
            pass
        with pytest.raises(UserError), owning(tmp_path, "node-a:29400 job2"):
            pass
        assert (tmp_path / OWNER_FILE).exists()


def hold(folder: Path, started: Connection) -> None:
    with owning(folder, ""):
        started.send(True)
        signal.pause()


def test_a_killed_owner_is_none(tmp_path: Path) -> None:
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=hold, args=(tmp_path, there))
    child.start()
    assert here.poll(60)
    with pytest.raises(UserError, match=f"by process {child.pid}"), owning(tmp_path, ""):
        pass
    child.kill()
    child.join()
    assert (tmp_path / OWNER_FILE).exists()  # the file alone means nothing
    with owning(tmp_path, ""):
        pass


def test_an_owner_that_leaves_while_another_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file is removed between the opening and the locking by the next one: the lock is taken on a new file."""
    lock = fcntl.flock
    removed: list[bool] = []

    def remove_first(descriptor: int, operation: int) -> None:
        if not removed:
            removed.append(True)
            (tmp_path / OWNER_FILE).unlink()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with owning(tmp_path, ""), pytest.raises(UserError), owning(tmp_path, ""):
        pass
    assert removed


def test_no_locks_on_this_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with owning(tmp_path, ""):
        pass


@pytest.mark.parametrize("spoil", [lambda f: f.write_text(""), lambda f: f.joinpath("inner")])
def test_a_place_that_cannot_be_a_folder(tmp_path: Path, spoil: Callable[[Path], object]) -> None:
    file = tmp_path / "file"
    file.write_text("")
    spoil(file)
    with pytest.raises(UserError, match=r"cannot be written: (File exists|Not a directory)"), owning(file, ""):
        pass
    with pytest.raises(UserError, match="cannot be written: Not a directory"), owning(file / "inner", ""):
        pass
