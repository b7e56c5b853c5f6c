"""Checkpoints that are whole or not there: written aside, marked complete, renamed into place.

A checkpoint is a folder `step-<n>` that holds what the engine wrote and `complete.json`, which lists every file with
its size. A folder without that marker, or whose files do not match it, is never loaded.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from training_xpu.errors import UserError
from training_xpu.records import Record
from training_xpu.workloads.config import JOB_FILE, EngineName, JobConfig

MARKER = "complete.json"
STEP_FOLDER = re.compile(r"step-(\d+)$")


class CheckpointRecord(Record):
    """The marker: written last."""

    step: int
    engine: EngineName
    world_size: int
    job: JobConfig
    files: dict[str, int]  # relative path -> bytes


def staging_folder(checkpoints: Path, step: int) -> Path:
    """Where the ranks write before the checkpoint is complete."""
    return checkpoints / f".step-{step:07d}.partial"


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:07d}"


def prepare_staging(checkpoints: Path, step: int) -> None:
    """Clears what a killed run may have left of the same step. One rank calls it, before any rank writes."""
    staging = staging_folder(checkpoints, step)
    if staging.exists():
        shutil.rmtree(staging)
    staging.mkdir(parents=True)


def check_shared(staging: Path) -> None:
    """Every rank calls it, once rank 0 has made the folder.

    Raises:
        UserError: this rank's node does not see the folder, so that no checkpoint would be whole.
    """
    if not staging.is_dir():
        raise UserError(
            f"{staging.parent} is not the same folder on all nodes", "Give --save a folder that all nodes share."
        )


def complete(checkpoints: Path, step: int, job: JobConfig, keep: int) -> Path:
    """Marks the staged checkpoint complete, moves it into place and removes all but the newest `keep`.

    One rank calls it, after every rank has written.
    """
    staging = staging_folder(checkpoints, step)
    files = {str(p.relative_to(staging)): p.stat().st_size for p in sorted(staging.rglob("*")) if p.is_file()}
    for name in files:
        _flush(staging / name)
    CheckpointRecord(step=step, engine=job.engine, world_size=job.world_size, job=job, files=files).write(
        staging / MARKER
    )
    _flush(staging)
    final = step_folder(checkpoints, step)
    if final.exists():
        shutil.rmtree(final)
    staging.rename(final)
    _flush(checkpoints)
    for old in _ordered(checkpoints)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def read_complete(folder: Path) -> CheckpointRecord:
    """The marker of one checkpoint folder.

    Raises:
        UserError: no marker, or a file is missing or has another size than the marker says.
    """
    if not (folder / MARKER).is_file():
        raise UserError(f"{folder} is not a complete checkpoint", "It has no complete.json; choose an older step.")
    record = CheckpointRecord.read(folder / MARKER)
    for name, size in record.files.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != size:
            raise UserError(f"checkpoint {folder} is damaged: {name}", "Choose an older step.")
    return record


def find_checkpoint(path: Path) -> Path:
    """The newest complete checkpoint that a path stands for.

    Args:
        path: a checkpoint, the folder that holds checkpoints, or a run folder. A run that was itself resumed, and ended
            before its first checkpoint, stands for the one it was resumed from.

    Raises:
        UserError: nothing complete is there.
    """
    if not path.exists():
        raise UserError(
            f"--resume {path}: no such folder", "Give a run folder, its checkpoints folder or one checkpoint."
        )
    if (path / MARKER).is_file() or STEP_FOLDER.match(path.name):
        read_complete(path)
        return path
    for folder in (path, path / "checkpoints"):
        for candidate in reversed(_ordered(folder)):
            try:
                read_complete(candidate)
            except UserError:
                continue
            return candidate
    if (path / JOB_FILE).is_file():
        origin = JobConfig.read(path / JOB_FILE)
        if origin.resume_from is not None and origin.resume_from.exists():
            read_complete(origin.resume_from)
            return origin.resume_from
        if origin.checkpoint_folder is not None and origin.checkpoint_folder.parent != path:
            return find_checkpoint(origin.checkpoint_folder)
    raise UserError(
        f"--resume {path}: no complete checkpoint there",
        "The run ended before its first checkpoint, or was started without --save-every.",
    )


def check_unused(checkpoints: Path) -> None:
    """Refuses a folder that holds checkpoints of another run: a new one would overwrite and remove them.

    Raises:
        UserError: it holds some.
    """
    if _ordered(checkpoints):
        raise UserError(
            f"--save {checkpoints}: holds checkpoints of another run",
            f"Choose another folder, or go on from them with --resume {checkpoints}.",
        )


def _ordered(checkpoints: Path) -> list[Path]:
    if not checkpoints.is_dir():
        return []
    found = [(int(m[1]), p) for p in checkpoints.iterdir() if (m := STEP_FOLDER.match(p.name))]
    return [p for _, p in sorted(found)]


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
