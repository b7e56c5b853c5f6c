"""The run store: one folder per run, `runs/<time>-<workload>-<arm>/`, with run.json, steps.jsonl and events.jsonl.

The time in a folder's name is UTC, so that folders sort by age whatever the clock of the machine shows.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, TypedDict

from training_xpu.device import processes
from training_xpu.errors import UserError, nearest

if TYPE_CHECKING:
    from training_xpu.perf.records import RunRecord
    from training_xpu.workloads.records import EventRecord, StepRecord

LATEST = "latest"
DEAD_REASON = "ended without a word: the process that led the run is gone (killed, or the machine went down)"

LARGEST_RECORD = 64 << 20  # bytes; a record with long tracebacks and many reports has far less

_RUN_FOLDER = re.compile(r"\d{8}-\d{6}-.")
_PROBE_BYTES = 64 * 1024  # room that a run's records need at least
_LONGEST_PART = 80  # characters; a file name holds 255 bytes


class Owner(TypedDict):
    """The fields of `RunRecord` that say which process leads the run."""

    host: str
    pid: int
    pid_started: float | None


def owner() -> Owner:
    """This process, as fields for `RunRecord(**owner(), ...)`, so that its death can be noticed later."""
    return {"host": processes.host_id(), "pid": os.getpid(), "pid_started": processes.started(os.getpid())}


def create_run(runs_folder: Path, workload: str, arm: str) -> Path:
    """Makes a new, empty run folder that belongs to the caller alone.

    Two runs that start in the same second get different folders. The folder is tried with 64 KiB of data, so that a
    full disk shows before anything has been computed.

    Returns:
        The absolute path of the folder.

    Raises:
        UserError: the folder cannot be made or written.
    """
    now = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    stem = f"{now}-{_safe_workload(workload)}-{_safe(arm, 'arm')}"
    try:
        runs_folder.mkdir(parents=True, exist_ok=True)
        for attempt in itertools.count(1):
            folder = runs_folder.absolute() / (stem if attempt == 1 else f"{stem}-{attempt}")
            try:
                folder.mkdir()
            except FileExistsError:
                continue
            break
    except OSError as error:
        raise _unusable(runs_folder, error) from error
    probe = folder / ".probe"
    try:
        with probe.open("wb") as stream:
            stream.write(b"\0" * _PROBE_BYTES)
            stream.flush()
            os.fsync(stream.fileno())
        probe.unlink()
    except OSError as error:
        probe.unlink(missing_ok=True)
        folder.rmdir()
        raise _unusable(runs_folder, error) from error
    return folder


def check_writable(option: str, folder: Path) -> None:
    """Tells beforehand, without making anything, whether a folder can be made and written.

    Args:
        option: which names it, for the error.
        folder: need not exist yet.

    Raises:
        UserError: a part of the path is no folder, or may not be written.
    """
    there = folder.absolute()
    while not there.exists() and not there.is_symlink() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise UserError(f"{option} {folder}: {there} is no folder", f"Name another folder with {option}.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"{option} {folder}: {there} cannot be written", f"Name another folder with {option}.")


def check_runs_folder(folder: Path) -> None:
    """As `check_writable`, for the folder that `--output` or TRAINING_XPU_RUNS names; it is told as `create_run` does.

    Raises:
        UserError: no run can be written there.
    """
    try:
        check_writable("--output", folder)
    except UserError as error:
        reason = error.problem.partition(": ")[2]
        raise UserError(f"cannot write runs to {folder}: {reason}", error.remedy) from None


def find_run(name_or_path: str | Path, runs_folder: Path) -> Path:
    """The folder of a run.

    Args:
        name_or_path: `latest` (of those whose record can be read), a run's name or the beginning of exactly one
            name, or the path of a run folder or of its run.json.
        runs_folder: where names are looked up.

    Raises:
        UserError: there is no such run, or several names begin so.
    """
    from training_xpu.perf.records import RUN_FILE

    asked = str(name_or_path)
    known = _run_folders(runs_folder)
    if asked == LATEST:
        if not known:
            raise UserError(f"no runs in {runs_folder}", "Start one with ljperf benchmark.")
        newest_first = list_runs(runs_folder)
        readable = [folder for folder, record in newest_first if not isinstance(record, str)]
        return readable[0] if readable else newest_first[0][0]
    by_name = {folder.name: folder for folder in known}
    if asked in by_name:
        return by_name[asked]
    path = Path(asked)
    if path.name == RUN_FILE and path.is_file():
        return path.absolute().parent
    if (path / RUN_FILE).is_file():
        return path.absolute()
    if path.is_dir() and "/" in asked:
        raise UserError(f"{asked} holds no {RUN_FILE}", "Name a run folder; ljperf runs lists them.")
    matching = sorted(name for name in by_name if asked and name.startswith(asked))
    if len(matching) == 1:
        return by_name[matching[0]]
    if matching:
        shown = ", ".join(matching[-3:])
        raise UserError(f"{len(matching)} runs begin with {asked!r}", f"Write more of the name, such as: {shown}")
    if not known:
        raise UserError(f"no run {asked!r}: no runs in {runs_folder}", "Start one with ljperf benchmark.")
    raise UserError(f"no run {asked!r} in {runs_folder}", _remedy(asked, list(by_name)))


def list_runs(runs_folder: Path) -> list[tuple[Path, RunRecord | str]]:
    """Every run, newest first: its folder, and its record or the reason why that cannot be read."""
    found: list[tuple[Path, RunRecord | str]] = []
    for folder in _run_folders(runs_folder):
        try:
            found.append((folder, load_run(folder)))
        except UserError as error:
            found.append((folder, error.problem))
        except OSError as error:
            found.append((folder, f"cannot read {folder}: {error.strerror}"))
    return sorted(found, key=lambda item: _age_key(*item), reverse=True)


def load_run(folder: Path) -> RunRecord:
    """The record of a run. One that says `running` though its process is gone is given back as failed.

    The file itself stays as it is: whoever reads is not its owner. A run led from another machine is believed.

    Raises:
        UserError: the record is missing, damaged or newer than this version.
    """
    from training_xpu.perf.records import RUN_FILE, RunRecord

    path = folder / RUN_FILE
    if folder.is_dir() and not path.exists():
        raise UserError(f"{folder} has no {RUN_FILE}", "Its run was killed before it began, or begins just now.")
    if path.is_file() and path.stat().st_size > LARGEST_RECORD:
        raise UserError(f"{path} is far too large for a RunRecord: {path.stat().st_size >> 20} MiB")
    record = RunRecord.read(path)
    if record.status == "running" and not _owner_lives(record):
        return record.model_copy(update={"status": "failed", "reason": DEAD_REASON})
    return record


def load_steps(folder: Path) -> list[StepRecord]:
    """All steps of all ranks in the order they were written; lines cut short are passed over."""
    from training_xpu.records import read_lines
    from training_xpu.workloads.config import STEPS_FILE
    from training_xpu.workloads.records import StepRecord

    return list(read_lines(folder / STEPS_FILE, StepRecord))


def load_events(folder: Path) -> list[EventRecord]:
    """All events of all ranks in the order they were written; lines cut short are passed over."""
    from training_xpu.records import read_lines
    from training_xpu.workloads.config import EVENTS_FILE
    from training_xpu.workloads.records import EventRecord

    return list(read_lines(folder / EVENTS_FILE, EventRecord))


def _run_folders(runs_folder: Path) -> list[Path]:
    from training_xpu.perf.records import RUN_FILE

    try:
        entries = sorted(runs_folder.absolute().iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"cannot read {runs_folder}: {error.strerror}") from error
    return [e for e in entries if e.is_dir() and (_RUN_FOLDER.match(e.name) or (e / RUN_FILE).is_file())]


def _age_key(folder: Path, found: RunRecord | str) -> tuple[float, str]:
    if not isinstance(found, str):
        return found.created.timestamp(), folder.name
    try:
        told = datetime.strptime(folder.name[:15], "%Y%m%d-%H%M%S").replace(tzinfo=UTC)
        return told.timestamp(), folder.name
    except ValueError:
        pass
    try:
        return folder.stat().st_mtime, folder.name
    except OSError:
        return 0.0, folder.name


def _remedy(asked: str, names: list[str]) -> str:
    """Nearest names; a name's time is no help to who remembers the workload, so that parts count too."""
    holding = sorted((n for n in names if asked.lower() in n.lower()), reverse=True)[:3]
    if holding:
        return "Did you mean " + " or ".join(holding) + "?"
    hint = nearest(asked, names)
    return hint if hint.startswith("Did you mean") else "ljperf runs lists them."


def _safe_workload(workload: str) -> str:
    """`deepspeed/llama3-8b` -> `deepspeed-llama3-8b`; of a model's path only the last part is kept."""
    engine, slash, model = workload.partition("/")
    if model.startswith((".", "/")):
        model = PurePath(model).name
    return _safe(f"{engine}-{model}" if slash and model else engine, "run")


def _safe(text: str, otherwise: str) -> str:
    cleaned = re.sub(r"[^A-Za-z0-9._+]+", "-", text)[:_LONGEST_PART].strip("-.")
    return cleaned or otherwise


def _unusable(folder: Path, error: OSError) -> UserError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(f"no space left for a run in {folder}", "Free space or choose another folder with --output.")
    return UserError(
        f"cannot write runs to {folder}: {error.strerror}", "Choose another folder with --output or mend its rights."
    )


def _owner_lives(record: RunRecord) -> bool:
    if record.pid is None or record.host != processes.host_id():
        return True
    if not 0 < record.pid < 1 << 31:
        return False
    started = processes.started(record.pid)
    if started is None:
        return _hidden(record.pid)
    return record.pid_started is None or started == record.pid_started


def _hidden(pid: int) -> bool:
    """Whether the process exists although /proc does not show it, as under hidepid for another user's."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return not Path(f"/proc/{pid}").exists()
    except OSError:
        return False
    return False
