"""A save that fails leaves nothing half written and is told from others by its words."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest
import torch

from training_xpu.errors import JobFailed
from training_xpu.workloads.process import failure_reason, is_lost_peer
from training_xpu.workloads.saving import saving


def fail_with(error: BaseException, folder: Path) -> None:
    staging = folder / ".partial"
    (staging / "inner").mkdir(parents=True)
    (staging / "inner" / "half").write_text("half")
    with saving("the model", folder, staging, "or pray."):
        raise error


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        RuntimeError("I/O error: Os { code: 28, kind: StorageFull, message: ... }"),  # safetensors
    ],
)
def test_a_full_disk_is_named(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(JobFailed) as caught:
        fail_with(error, tmp_path)
    assert failure_reason(caught.value) == f"No space left in {tmp_path} for the model. Free space, or pray."
    assert caught.value.__cause__ is error
    assert list(tmp_path.iterdir()) == []


def test_what_torch_says_of_a_full_disk_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="No space left") as full:
        Path("/dev/full").write_text("x")
    with pytest.raises(RuntimeError) as caught:
        torch.save(torch.ones(1 << 20), "/dev/full")
    later = RuntimeError("unexpected pos 64 vs 0")
    for error in (caught.value, later):
        error.__context__ = full.value
        with pytest.raises(JobFailed, match="No space left"):
            fail_with(error, tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=4096))
    with pytest.raises(JobFailed, match="No space left"):
        fail_with(RuntimeError("unexpected pos 64 vs 0"), tmp_path)


def test_the_room_is_free_although_the_writer_lives_on(tmp_path: Path) -> None:
    staging = tmp_path / ".partial"
    staging.mkdir()

    def write_half(stream: IO[bytes]) -> None:
        with saving("the model", tmp_path, staging, "or pray."):
            stream.write(b"x" * 100_000)
            stream.flush()
            raise ValueError("no")

    with (staging / "half").open("wb") as writer:
        with pytest.raises(ValueError, match="no"):
            write_half(writer)
        assert os.fstat(writer.fileno()).st_blocks == 0


def test_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no"):
        fail_with(ValueError("no"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_whose_peer_gave_up_is_not_to_blame(tmp_path: Path) -> None:
    staging = tmp_path / ".partial"

    def save(write: Callable[[], object]) -> None:
        staging.mkdir()
        with saving("the model", tmp_path, staging, "or pray."):
            shutil.rmtree(staging)  # what the other rank does
            write()

    for write in (lambda: (staging / "file").write_text("x"), lambda: torch.save({}, staging / "file")):
        with pytest.raises(JobFailed) as caught:
            save(write)
        assert is_lost_peer(failure_reason(caught.value))


def test_an_interrupt_leaves_the_cleaning_to_who_ends_the_ranks(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fail_with(KeyboardInterrupt(), tmp_path)
    assert (tmp_path / ".partial").exists()
