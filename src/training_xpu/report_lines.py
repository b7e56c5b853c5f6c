"""The record behind a line of a report; apart from `report`, which training processes import without pydantic."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from training_xpu.records import Record
from training_xpu.report import Event, Role


class ReportLine(Record):
    """One line of `<role>-<rank>-<pid>.jsonl`."""

    time: float  # Unix time
    role: Role
    rank: int  # 0 for a process that is no rank
    feature: str  # "" for the process itself
    event: Event
    reason: str = ""
    asked: str = ""  # the value of the feature's variable: true, false or auto
    pid: int
    host: str
    data: dict[str, Any] = Field(default_factory=dict)
