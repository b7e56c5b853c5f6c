"""TRAINING_XPU_REPORT: the folder in which each process says what was asked for, what was decided and why.

One file per process, `<role>-<rank>-<pid>.jsonl`, one JSON object per line, see `report_lines.ReportLine`. Writing
never stops training: the first failure is one warning, after which the writer stays silent.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from training_xpu import envs

if TYPE_CHECKING:
    from training_xpu.report_lines import ReportLine

Role = Literal["launcher", "rank", "helper", "single"]
Event = Literal["process", "subscribed", "applied", "stepped-aside", "fault", "seen"]

SCHEMA = 1
FOLDER_NAME = "reports"  # the report folder inside a run folder

logger = logging.getLogger("training_xpu")


def set_up_logging(level: int) -> None:
    """Gives the project's one logger its level and, once, its own handler: one plain line on stderr."""
    logger.setLevel(level)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("training-xpu: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False


class Writer:
    """Appends lines to this process's own file; opens it with the first line.

    A process forked from this one writes to a file of its own.
    """

    def __init__(self, folder: Path, role: Role, rank: int) -> None:
        self.folder = folder
        self.role: Role = role
        self.rank = rank
        self._pid = os.getpid()
        self._descriptor: int | None = None
        self._broken = False
        self._lock = threading.Lock()

    def write(self, feature: str, event: Event, reason: str = "", asked: str = "", **data: Any) -> None:
        """Writes one line.

        Args:
            feature: which feature speaks; "" for the process itself.
            event: what happened.
            reason: why, in one sentence for people.
            asked: the value of the feature's variable.
            data: whatever else was seen; values that JSON does not know are written as text.
        """
        if os.getpid() != self._pid:
            self._become_forked()
        from training_xpu.device.processes import host_id  # not before there is something to write

        line = {
            "schema": SCHEMA,
            "time": time.time(),
            "role": self.role,
            "rank": self.rank,
            "feature": feature,
            "event": event,
            "reason": reason,
            "asked": asked,
            "pid": self._pid,
            "host": host_id(),
            "data": _plain(data),
        }
        with self._lock:
            self._append(json.dumps(line, default=str).encode() + b"\n")

    def _become_forked(self) -> None:
        # The parent's lock may have been held by another of its threads at the fork: take a new one.
        self._lock = threading.Lock()
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor, self._pid = None, os.getpid()
        # A notebook forks its ranks and gives each its place; whatever a rank forks is a worker.
        place = envs.distributed()
        became_rank = self.role == "single" and place.launched
        self.role, self.rank = ("rank", place.rank) if became_rank else ("helper", self.rank)

    def _append(self, line: bytes) -> None:
        if self._broken:
            return
        try:
            if self._descriptor is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                path = self.folder / f"{self.role}-{self.rank}-{self._pid}.jsonl"
                self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if os.write(self._descriptor, line) != len(line):
                raise OSError(28, "No space left on device")
        except OSError as error:
            self._broken = True
            logger.warning("no more reports from process %d: %s: %s", self._pid, self.folder, error.strerror or error)


_writer: Writer | None = None


def begin(folder: Path | None, role: Role, rank: int) -> None:
    """From now on `write` goes to this folder, or nowhere when there is none."""
    global _writer
    _writer = None if folder is None else Writer(folder, role, rank)


def write(feature: str, event: Event, reason: str = "", asked: str = "", **data: Any) -> None:
    """Writes one line to this process's report, see `Writer.write`; does nothing when nobody asked for reports."""
    if _writer is not None:
        _writer.write(feature, event, reason, asked, **data)


def read(folder: Path) -> Iterator[ReportLine]:
    """Yields the lines of all processes, file by file in order of their names, each file in the order of writing.

    Lines cut short by a crash or a full disk, and lines of newer versions, are passed over.
    """
    from training_xpu.records import read_lines
    from training_xpu.report_lines import ReportLine

    for path in sorted(folder.glob("*.jsonl")):
        yield from read_lines(path, ReportLine)


def _plain(value: Any) -> Any:
    """Non-finite floats become text, as in every record of the project: JSON has no word for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(v) for v in value]
    return value
