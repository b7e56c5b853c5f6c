"""Which features applied to a job, which stepped aside and why: the reports of its processes, put together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from training_xpu import envs, report
from training_xpu.errors import UserError
from training_xpu.perf import store
from training_xpu.records import Record
from training_xpu.report_lines import ReportLine

Result = Literal["applied", "stepped-aside", "not-applied"]

NO_TORCH = "no process of the job imported torch"
NOT_TOLD = "its variable did not reach the processes that train"
NOTHING_HAPPENED = "what it waits for did not happen, such as a training forward"


class FeatureOutcome(Record):
    """What became of one feature in one job."""

    name: str
    asked: str  # true or auto
    outcome: Result
    reason: str = ""
    applied_in: list[str] = Field(default_factory=list)  # "rank 0", "single process 4711"
    aside_in: list[str] = Field(default_factory=list)


class ProcessSeen(Record):
    """A process of the job that imported torch."""

    role: str
    rank: int
    pid: int
    host: str
    started: float  # Unix time
    program: str
    asked_for: dict[str, str]  # feature -> value of its variable


class Explanation(Record):
    """What `ljperf explain --json` prints."""

    run: Path | None = None  # the run folder, where the job has one
    reports: Path
    command: list[str] = Field(default_factory=list)
    status: str = ""
    features: list[FeatureOutcome]
    processes: list[ProcessSeen]
    lines: list[ReportLine]  # all that was reported about features


def explain_run(name_or_path: str, runs_folder: Path) -> Explanation:
    """
    Raises:
        UserError: there is no such run.
    """
    folder = store.find_run(name_or_path, runs_folder)
    record = store.load_run(folder)
    reports = folder / report.FOLDER_NAME
    lines = list(report.read(reports))
    asked = {**dict.fromkeys(record.features, "true"), **asked_in(lines)}
    return _explanation(lines, asked, reports, run=folder, command=record.command, status=record.status)


def explain_process(pid: int) -> Explanation:
    """What is known of a running process, of those it started, and of the ranks of the same job.

    Raises:
        UserError: there is no such process, it belongs to another user, or it writes no reports.
    """
    folder = envs.of_process(pid, ["TRAINING_XPU_REPORT"]).get("TRAINING_XPU_REPORT")
    if not folder:
        raise UserError(
            f"process {pid} was started without TRAINING_XPU_REPORT, so nothing is known of it",
            "Start it with ljperf run -- COMMAND, or set TRAINING_XPU_REPORT to a folder.",
        )
    reports = Path(folder).expanduser()
    if not reports.is_absolute():
        reports = _working_folder(pid) / reports
    lines = list(report.read(reports))
    family = {pid, *_descendants(pid)}
    jobs = {_job(line) for line in lines if line.pid in family and line.event == "process"} - {""}
    members = {line.pid for line in lines if line.event == "process" and _job(line) in jobs} | family
    lines = [line for line in lines if line.pid in members]
    if not lines:
        raise UserError(
            f"process {pid} has reported nothing to {reports}",
            "It has not imported torch yet, is a helper such as a dataloader's worker, or has the package disabled.",
        )
    return _explanation(lines, asked_in(lines), reports)


def _explanation(
    lines: Sequence[ReportLine],
    asked: Mapping[str, str],
    reports: Path,
    run: Path | None = None,
    command: Sequence[str] = (),
    status: str = "",
) -> Explanation:
    return Explanation(
        run=run,
        reports=reports,
        command=list(command),
        status=status,
        features=outcomes(lines, asked),
        processes=[
            ProcessSeen(
                role=line.role,
                rank=line.rank,
                pid=line.pid,
                host=line.host,
                started=line.time,
                program=str(line.data.get("program", "")),
                asked_for=_texts(line.data.get("asked_for")),
            )
            for line in lines
            if line.event == "process"
        ],
        lines=[line for line in lines if line.feature],
    )


def _job(line: ReportLine) -> str:
    return str(line.data.get("job") or "")


def _texts(told: object) -> dict[str, str]:
    return {str(k): str(v) for k, v in told.items()} if isinstance(told, Mapping) else {}


def asked_in(lines: Iterable[ReportLine]) -> dict[str, str]:
    """Feature -> true or auto, as the processes of a job found it in their environment."""
    return {line.feature: line.asked for line in lines if line.feature and line.asked not in ("", "false")}


def outcomes(lines: Sequence[ReportLine], asked: Mapping[str, str]) -> list[FeatureOutcome]:
    """What became of each feature asked for.

    A feature has applied when at least one process says so and none says that it stepped aside, be it before it began
    or by a fault later on. A feature that was subscribed but never said that it applied has not.

    Args:
        lines: the reports of all processes of the job.
        asked: feature -> true or auto.
    """
    return [_outcome(name, value, lines) for name, value in asked.items()]


def _outcome(name: str, asked: str, lines: Sequence[ReportLine]) -> FeatureOutcome:
    own = [line for line in lines if line.feature == name]
    aside = [line for line in own if line.event in ("stepped-aside", "fault")]
    aside_pids = {(line.host, line.pid) for line in aside}
    applied = [line for line in own if line.event == "applied" and (line.host, line.pid) not in aside_pids]
    result: Result = "stepped-aside" if aside else "applied" if applied else "not-applied"
    if aside:
        reason = "; ".join(dict.fromkeys(line.reason for line in aside))
    elif applied:
        reason = applied[-1].reason
    else:
        reason = NO_TORCH if not lines else NOTHING_HAPPENED if own else NOT_TOLD
    return FeatureOutcome(
        name=name,
        asked=asked,
        outcome=result,
        reason=reason,
        applied_in=list(dict.fromkeys(map(_where, applied))),
        aside_in=list(dict.fromkeys(map(_where, aside))),
    )


def _where(line: ReportLine) -> str:
    return f"rank {line.rank}" if line.role == "rank" else f"{line.role} process {line.pid}"


def sentence(outcome: FeatureOutcome) -> str:
    """One line for people."""
    if outcome.outcome == "applied":
        detail = f": {outcome.reason}" if outcome.reason else ""
        return f"{outcome.name} applied ({', '.join(outcome.applied_in)}){detail}"
    verb = "stepped aside" if outcome.outcome == "stepped-aside" else "did not apply"
    where = f" ({', '.join(outcome.aside_in)})" if outcome.aside_in else ""
    return f"{outcome.name} {verb}{where}: {outcome.reason or 'no reason given'}"


def _descendants(pid: int) -> list[int]:
    import psutil

    try:
        return [p.pid for p in psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return []


def _working_folder(pid: int) -> Path:
    try:
        return Path(f"/proc/{pid}/cwd").resolve(strict=True)
    except OSError:
        return Path.cwd()
