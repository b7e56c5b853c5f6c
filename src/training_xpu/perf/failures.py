"""Why a job failed: which rank first, and for what reason."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

from training_xpu.device import OomKills
from training_xpu.errors import UserError
from training_xpu.perf.records import RankFailure
from training_xpu.records import read_lines
from training_xpu.workloads.config import EVENTS_FILE
from training_xpu.workloads.launch import LAUNCH_FILE, EndedRank, LaunchRecord
from training_xpu.workloads.process import is_lost_peer
from training_xpu.workloads.records import EventRecord
from training_xpu.workloads.saving import FULL_DISK_BYTES

LOG_TAIL_LINES = 15
CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


def collect_failures(
    run_folder: Path, kills_before: OomKills | None, kills_after: OomKills | None, launcher_exit: int = 1
) -> tuple[str, list[RankFailure]]:
    """One line for the whole job, and every failed rank, the one to blame first.

    Args:
        kills_before: the kernel's out-of-memory kills before the job started.
        kills_after: and after it ended; more of them explain a SIGKILL.
        launcher_exit: exit code of the process that started the ranks; negative: the signal that ended it.
    """
    kernel = oom_words(kills_before, kills_after)
    launch = _launch_record(run_folder)
    told = {e.rank: e for e in read_lines(run_folder / EVENTS_FILE, EventRecord) if e.event == "failure"}
    failures: dict[int, RankFailure] = {}
    for ended in launch.failed:
        event = told.get(ended.rank)
        failures[ended.rank] = RankFailure(
            rank=ended.rank,
            reason=_reason(ended, event, kernel, run_folder),
            traceback=event.detail if event else "",
            exit_code=ended.exit_code,
        )
    for rank, event in told.items():
        if rank not in failures:
            failures[rank] = RankFailure(rank=rank, reason=event.name, traceback=event.detail)
    ordered = sorted(failures.values(), key=blame)
    if ordered:
        reason = f"rank {ordered[0].rank}: {ordered[0].reason}"
    elif launch.error:
        reason = launch.error.splitlines()[0]
    elif launcher_exit < 0:
        reason = "the launcher of the ranks was " + killed_by(-launcher_exit, kernel)
    else:
        reason = "the launcher ended without a word" + _tail(run_folder / "logs" / "launcher.log")
    if "No space left" not in reason and shutil.disk_usage(run_folder).free < FULL_DISK_BYTES:
        reason += f" (the disk of {run_folder} is full: free space, or choose another folder with --output)"
    return reason, ordered


def _launch_record(run_folder: Path) -> LaunchRecord:
    try:
        return LaunchRecord.read(run_folder / LAUNCH_FILE)
    except UserError:
        return LaunchRecord()


def _reason(ended: EndedRank, event: EventRecord | None, kernel: str, run_folder: Path) -> str:
    if ended.exit_code < 0:
        reason = killed_by(-ended.exit_code, kernel)
        if -ended.exit_code in CRASHES:  # what the process said last tells why
            reason += _tail(run_folder / "logs" / f"rank-{ended.rank}.log")
        return reason
    if event is not None:
        return event.name
    return f"ended with exit code {ended.exit_code}" + _tail(run_folder / "logs" / f"rank-{ended.rank}.log")


def oom_words(before: OomKills | None, after: OomKills | None) -> str:
    """What to add to a SIGKILL that more of the kernel's out-of-memory kills than before explain; "" without them."""
    if before is None or after is None or after.count <= before.count:
        return ""
    return f", {'' if after.scope == 'cgroup' else 'probably '}by the kernel's out-of-memory killer"


def killed_by(number: int, kernel: str = "") -> str:
    """Words for the end by a signal; real-time signals have no name."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = "unknown"
    return f"killed by signal {number} ({name})" + (kernel if name == "SIGKILL" else "")


def blame(failure: RankFailure) -> tuple[int, int]:
    """Signals come before errors of a rank's own, and those before the errors of ranks that lost a peer."""
    if failure.exit_code is not None and failure.exit_code < 0:
        return (0 if failure.exit_code != -signal.SIGTERM else 3, failure.rank)
    return (2 if is_lost_peer(failure.reason) else 1, failure.rank)


def _tail(log: Path) -> str:
    """The last line of a log that says something, to be put behind a reason."""
    try:
        lines = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    except OSError:
        return ""
    spoken = [line.strip() for line in lines if line.strip()]
    return f": {spoken[-1]}" if spoken else ""
