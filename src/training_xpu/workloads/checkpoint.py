"""Checkpoints that are whole or not there: written aside, marked complete, renamed into place.

A checkpoint is a folder `step-<n>` that holds what the engine wrote and `complete.json`, which lists every file with
its size. A folder without that marker, or whose files do not match it, is never loaded.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import AbstractContextManager
from pathlib import Path

from training_xpu.errors import UserError
from training_xpu.records import Record
from training_xpu.workloads import saving as saving_module
from training_xpu.workloads.config import JOB_FILE, EngineName, JobConfig

MARKER = "complete.json"
TRAINER_FOLDER = ".trainer.partial"  # where the HF Trainer writes what becomes a checkpoint
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


def prepare_staging(checkpoints: Path, step: int) -> Path:
    """An empty folder to write into, and nothing beside it that killed or failed saves have left.

    One rank calls it, before any rank writes.
    """
    for unfinished in checkpoints.glob(".step-*.partial"):
        shutil.rmtree(unfinished, ignore_errors=True)
    staging = staging_folder(checkpoints, step)
    staging.mkdir(parents=True)
    return staging


def clear_unfinished(checkpoints: Path) -> None:
    """Removes whatever a job that has ended was writing, the HF Trainer's own folder included."""
    for unfinished in (*checkpoints.glob(".step-*.partial"), checkpoints / TRAINER_FOLDER):
        shutil.rmtree(unfinished, ignore_errors=True)


def saving(checkpoints: Path, step: int, staging: Path | None = None) -> AbstractContextManager[None]:
    """Around the writing of one checkpoint, on every rank: see `saving.saving`.

    Args:
        staging: where the ranks write, if not in the folder of `prepare_staging`.
    """
    staging = staging or staging_folder(checkpoints, step)
    remedy = "choose another folder with --save, or lower --keep-checkpoints."
    return saving_module.saving(f"the checkpoint of step {step}", checkpoints, staging, remedy)


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
        UserError: no marker, it is damaged or contradicts itself, or a file is missing or has another size than it
            says.
    """
    marker = folder / MARKER
    if not marker.is_file():
        raise UserError(f"{folder} is not a complete checkpoint", f"It has no {MARKER}; choose an older step.")
    record = CheckpointRecord.read(marker)
    wrong = _contradiction(folder, record)
    if wrong:
        raise UserError(f"{marker} is damaged: {wrong}", "Choose an older step.")
    for name, size in record.files.items():
        file = folder / name
        if not file.is_file():
            raise UserError(f"checkpoint {folder} is damaged: {name} is missing", "Choose an older step.")
        if file.stat().st_size != size:
            raise UserError(
                f"checkpoint {folder} is damaged: {name} has {file.stat().st_size} bytes and not {size}",
                "Choose an older step.",
            )
    return record


def _contradiction(folder: Path, record: CheckpointRecord) -> str:
    """What in a marker cannot be, if anything."""
    job, named = record.job, STEP_FOLDER.match(folder.name)
    if record.world_size != job.world_size:
        return f"it is of {record.world_size} ranks, and its job of {job.world_size}"
    if record.engine != job.engine:
        return f"it is of {record.engine}, and its job of {job.engine}"
    if not 1 <= record.step <= job.steps:
        return f"it is at step {record.step} of a job of {job.steps}"
    if named and int(named[1]) != record.step:
        return f"it is of step {record.step}, and its folder of step {int(named[1])}"
    if not record.files:
        return "it lists no files"
    outside = next((n for n in record.files if Path(n).is_absolute() or ".." in Path(n).parts), None)
    return f"it lists a file outside the checkpoint, {outside}" if outside else ""


def find_checkpoint(path: Path) -> Path:
    """The newest complete checkpoint that a path stands for.

    Args:
        path: a checkpoint, the folder that holds checkpoints, or a run folder. A run that was itself resumed, and ended
            before its first checkpoint, stands for the one it was resumed from.

    Raises:
        UserError: nothing complete is there.
    """
    if not path.is_dir():
        problem = "is no folder" if path.exists() else "no such folder"
        raise UserError(f"--resume {path}: {problem}", "Give a run folder, its checkpoints folder or one checkpoint.")
    if (path / MARKER).is_file() or STEP_FOLDER.match(path.name):
        read_complete(path)
        return path
    newest_fault = ""
    for folder in (path, path / "checkpoints"):
        for candidate in reversed(_ordered(folder)):
            try:
                read_complete(candidate)
            except UserError as error:
                newest_fault = newest_fault or f": {error.problem}"
                continue
            return candidate
    if (path / JOB_FILE).is_file():
        origin = JobConfig.read(path / JOB_FILE)
        if origin.resume_from is not None and origin.resume_from.exists():
            read_complete(origin.resume_from)
            return origin.resume_from
        elsewhere = origin.checkpoint_folder
        if elsewhere is not None and elsewhere.parent != path and not (elsewhere / JOB_FILE).exists():
            return find_checkpoint(elsewhere)
    raise UserError(
        f"--resume {path}: no complete checkpoint there{newest_fault}",
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
