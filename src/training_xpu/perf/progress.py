"""Shows how far a running job is, from the line files its ranks write, without touching the job."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TextIO, TypeVar

from pydantic import ValidationError

from training_xpu.device import processes
from training_xpu.perf.stalls import StalledRank, hint, stalled
from training_xpu.records import Record
from training_xpu.workloads.config import EVENTS_FILE, STEPS_FILE
from training_xpu.workloads.records import PROCESS_NOTE, EventRecord, RankProcess, StepRecord

RECENT = 20  # steps that rates and the time left are taken from
LAG_SHARE = 0.02  # of a step; less apart, ranks count as even
STALL_STEPS = 5  # steps' worth of silence that is worth a word
STALL_SECONDS = 20.0
LOOK_SECONDS = 60.0  # of silence, after which the processes themselves are looked at

RecordT = TypeVar("RecordT", bound=Record)

_PHASES = {
    "": "starting",
    "building": "building the model",
    "evaluation": "evaluating",
    "saving": "saving",
    "live-bytes": "measuring live memory",
}


@dataclass(frozen=True, slots=True)
class ProgressState:
    """What is known of a job at one moment. Seconds; tokens per second are real tokens of all ranks."""

    phase: str  # "", finished, failed, or the job's own word: building, evaluation, training, saving, live-bytes
    phase_s: float  # how long it has been in this phase
    step: int  # the last step that every rank has finished; 0: none yet
    total_steps: int
    world_size: int
    loss: float | None = None
    tokens_per_second: float | None = None  # median of recent steps
    seconds_left: float | None = None  # of training alone
    silent_s: float | None = None  # since the last step, once that is unusually long
    lag_s: dict[int, float] = field(default_factory=dict)  # rank -> how much longer than the fastest it works on a step
    slowest_rank: int | None = None  # None: even, or not known
    stalled: tuple[StalledRank, ...] = ()  # ranks that keep the job from moving, once nothing has moved for long
    evaluation_loss: float | None = None  # the last one
    detail: str = ""  # of a failure


class LineTail(Generic[RecordT]):
    """Yields the records appended to a line file since it was last asked; half a line waits for its other half."""

    def __init__(self, path: Path, kind: type[RecordT]) -> None:
        self._path = path
        self._kind = kind
        self._offset = 0
        self._half = b""

    def poll(self) -> list[RecordT]:
        try:
            with self._path.open("rb") as stream:
                if os.fstat(stream.fileno()).st_size < self._offset:  # begun anew
                    self._offset, self._half = 0, b""
                stream.seek(self._offset)
                data = stream.read()
        except OSError:
            return []
        self._offset += len(data)
        *lines, self._half = (self._half + data).split(b"\n")
        records = []
        for line in lines:
            try:
                records.append(self._kind.model_validate_json(line))
            except ValidationError:
                continue
        return records


def state_of_rank(process: RankProcess) -> str:
    """The state of a rank of this host; "on another host" where it cannot be seen."""
    if process.host != processes.host_id():
        return "on another host"
    if processes.started(process.pid) not in (process.started, None):
        return "gone"
    return processes.state(process.pid)


class ProgressFollower:
    """Follows steps.jsonl and events.jsonl of one run; `poll` gives the state as of now.

    Args:
        run_folder: where the ranks write; the files need not exist yet.
        total_steps: of the whole schedule, resumed steps included.
        world_size: ranks that write here.
        state_of: a word for what a process does, see `device.processes.state`.
    """

    def __init__(
        self,
        run_folder: Path,
        total_steps: int,
        world_size: int,
        state_of: Callable[[RankProcess], str] = state_of_rank,
    ) -> None:
        self.total_steps = total_steps
        self.world_size = world_size
        self._steps = LineTail(run_folder / STEPS_FILE, StepRecord)
        self._events = LineTail(run_folder / EVENTS_FILE, EventRecord)
        self._state_of = state_of
        self._processes: dict[int, RankProcess] = {}
        self._reached: dict[int, int] = {}  # rank -> its last step
        self._moved_at = time.time()  # when any rank last wrote anything
        self._pending: dict[int, dict[int, StepRecord]] = {}
        self._recent: deque[dict[int, StepRecord]] = deque(maxlen=RECENT)
        self._step = 0
        self._last_step_at: float | None = None
        self._lead: int | None = None
        self._phase = ""
        self._phase_since = time.time()
        self._evaluation_loss: float | None = None
        self._detail = ""

    def poll(self, now: float | None = None) -> ProgressState:
        """Reads what is new.

        Args:
            now: Unix time; the clock's when left out.
        """
        for event in self._events.poll():
            self._moved_at = event.time
            self._take_event(event)
        for step in self._steps.poll():
            self._moved_at = step.time
            self._take_step(step)
        return self._state(time.time() if now is None else now)

    def _take_event(self, event: EventRecord) -> None:
        if event.event == "failure":
            if self._phase != "failed":
                self._phase, self._phase_since = "failed", event.time
                self._detail = f"rank {event.rank}: " + _last_line(event.name or event.detail)
        elif event.name == PROCESS_NOTE:
            self._processes[event.rank] = RankProcess.model_validate_json(event.detail)
        elif event.event == "evaluation":
            self._evaluation_loss = event.value
        elif event.event in ("phase", "finished"):
            self._enter(event)

    def _enter(self, event: EventRecord) -> None:
        """Phases are the lowest rank's, lest a late word of another rank turns them back; a failure is final."""
        self._lead = event.rank if self._lead is None else min(self._lead, event.rank)
        phase = event.name if event.event == "phase" else "finished"
        if event.rank == self._lead and self._phase not in (phase, "failed"):
            self._phase, self._phase_since = phase, event.time

    def _take_step(self, step: StepRecord) -> None:
        if step.step <= self._step:  # begun again from a checkpoint
            self._step = step.step - 1
            self._pending.clear()
        self._reached[step.rank] = step.step
        ranks = self._pending.setdefault(step.step, {})
        ranks[step.rank] = step
        if len(ranks) >= self.world_size:
            self._recent.append(ranks)
            self._step = step.step
            self._last_step_at = step.time
            self._pending = {n: r for n, r in self._pending.items() if n > step.step}

    def _state(self, now: float) -> ProgressState:
        times = [max(r.step_s for r in ranks.values()) for ranks in self._recent]
        typical = statistics.median(times) if times else None
        since = now - self._last_step_at if self._last_step_at is not None else None
        training = self._phase in ("training", "") and 0 < self._step < self.total_steps
        left = silent = None
        if typical is not None and since is not None and training:
            remaining = self.total_steps - self._step
            left = max(remaining * typical - max(since, 0.0), (remaining - 1) * typical)
            if since > max(STALL_STEPS * typical, STALL_SECONDS):
                silent = since
        lag = self._lag()
        slowest = max(lag, key=lambda rank: lag[rank]) if lag else None
        if slowest is not None and (typical is None or lag[slowest] < LAG_SHARE * typical):
            slowest = None
        return ProgressState(
            phase=self._phase,
            phase_s=max(now - self._phase_since, 0.0),
            step=self._step,
            total_steps=self.total_steps,
            world_size=self.world_size,
            loss=next(iter(self._recent[-1].values())).loss if self._recent else None,
            tokens_per_second=self._rate(),
            seconds_left=left,
            silent_s=silent,
            lag_s=lag,
            slowest_rank=slowest,
            stalled=self._stalled(now - self._moved_at, typical, training),
            evaluation_loss=self._evaluation_loss,
            detail=self._detail,
        )

    def _stalled(self, quiet: float, typical: float | None, training: bool) -> tuple[StalledRank, ...]:
        if self._phase in ("finished", "failed") or quiet <= max(STALL_STEPS * (typical or 0.0), LOOK_SECONDS):
            return ()
        found = {rank: (process.pid, self._state_of(process)) for rank, process in sorted(self._processes.items())}
        return stalled(found, self._reached, training and typical is not None, quiet)

    def _rate(self) -> float | None:
        rates = [
            sum(r.real_tokens for r in ranks.values()) / max(r.step_s for r in ranks.values())
            for ranks in self._recent
            if max(r.step_s for r in ranks.values()) > 0
        ]
        return statistics.median(rates) if rates else None

    def _lag(self) -> dict[int, float]:
        """Ranks end a step together, each waiting for the slowest; the work before the wait tells them apart."""
        if self.world_size < 2 or not self._recent:
            return {}
        work = {
            rank: statistics.median(_own_work(ranks[rank]) for ranks in self._recent if rank in ranks)
            for rank in self._recent[-1]
        }
        fastest = min(work.values())
        return {rank: seconds - fastest for rank, seconds in sorted(work.items())}


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1] if text.strip() else "unknown reason"


def _own_work(step: StepRecord) -> float:
    """Seconds a rank worked before it had to wait: without communication where that is known, else data and forward."""
    if step.communication_s is not None:
        return step.step_s - step.communication_s
    if step.data_s is not None and step.forward_s is not None:
        return step.data_s + step.forward_s
    return step.step_s


def describe(state: ProgressState) -> str:
    """One line for people: `step 12/40  loss 6.123  10,240 tokens/s/device  rank 1 slowest (+40 ms)  1:10 left`."""
    if state.phase == "failed":
        return f"failed  {state.detail}".rstrip()
    if state.phase == "finished":
        return "finished" + (f"  {state.step}/{state.total_steps} steps" if state.step else "")
    parts = []
    in_steps = state.phase in ("training", "") and 0 < state.step < state.total_steps
    if in_steps:
        parts.append(f"step {state.step}/{state.total_steps}")
    elif state.phase == "training" and not state.step:
        parts += [f"step 0/{state.total_steps}", _duration(state.phase_s)]
    elif state.phase == "training":
        parts.append(f"step {state.step}/{state.total_steps}")
    else:
        parts += [_PHASES.get(state.phase, state.phase), _duration(state.phase_s)]
    if state.loss is not None:
        parts.append(f"loss {state.loss:.3f}")
    if state.tokens_per_second is not None:
        parts.append(f"{state.tokens_per_second / state.world_size:,.0f} tokens/s/device")
    if state.world_size > 1:
        if state.slowest_rank is None:
            parts.append(f"{state.world_size} ranks")
        else:
            parts.append(f"rank {state.slowest_rank} slowest (+{1000 * state.lag_s[state.slowest_rank]:,.0f} ms)")
    if state.silent_s is not None:
        parts.append(f"no step for {_duration(state.silent_s)}")
    elif state.seconds_left is not None:
        parts.append(f"{_duration(state.seconds_left)} left")
    parts += [f"rank {rank.rank} {rank.state}" for rank in state.stalled]
    return "  ".join(parts)


def _duration(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


class ProgressDisplay:
    """Shows states on a stream: one line that is rewritten on a terminal, else a line now and then.

    Trouble with the stream (closed, full, its reader gone) silences the display and never disturbs the job.

    Args:
        stream: normally stderr.
        interactive: whether the stream is a terminal that people watch.
        label: stands before each line, such as the arm's name.
        every_s: without a terminal, seconds between lines while steps come; a new phase shows at once.
        heartbeat_s: without a terminal, seconds between lines while nothing comes.
    """

    def __init__(
        self,
        stream: TextIO,
        interactive: bool,
        label: str = "",
        every_s: float = 5.0,
        heartbeat_s: float = 20.0,
    ) -> None:
        self._stream = stream
        self._interactive = interactive
        self._prefix = f"{label}: " if label else ""
        self._every_s = every_s
        self._heartbeat_s = heartbeat_s
        self._shown: ProgressState | None = None
        self._shown_at = -float("inf")
        self._live = False
        self._broken = False
        self._warned: set[tuple[int, str]] = set()  # rank and state
        self._warned_at = ("", 0)  # phase and step

    def update(self, state: ProgressState, now: float | None = None) -> None:
        """Shows the state, when it is due.

        Args:
            now: seconds of any steady clock; the monotonic clock's when left out.
        """
        at = time.monotonic() if now is None else now
        self._warn(state)
        if self._interactive:
            width = shutil.get_terminal_size().columns
            line = self._prefix + describe(state)
            self._write("\r\x1b[2K" + line[: max(width - 1, 1)])
            self._live = True
        elif self._due(state, at):
            self._write(self._prefix + describe(state) + "\n")
        else:
            return
        self._shown, self._shown_at = state, at

    def _warn(self, state: ProgressState) -> None:
        """A line that stays, once for each rank and way in which it has stalled, until the job moves again."""
        at = (state.phase, state.step)
        if at != self._warned_at:
            self._warned_at, self._warned = at, set()
        new = [rank for rank in state.stalled if (rank.rank, rank.state) not in self._warned]
        for rank in new:
            self._warned.add((rank.rank, rank.state))
            clear = "\r\x1b[2K" if self._live else ""
            told = f"rank {rank.rank} (process {rank.pid}) has not moved for {_duration(rank.quiet_s)}: {rank.state}"
            self._write(f"{clear}{self._prefix}warning: {told}{hint(rank)}\n")

    def close(self) -> None:
        """Leaves the last line standing and the cursor on a new one."""
        if self._live:
            self._write("\n")
            self._live = False

    def _due(self, state: ProgressState, at: float) -> bool:
        last = self._shown
        if last is None or state.phase != last.phase:
            return True
        if state.step != last.step:
            return at - self._shown_at >= self._every_s or state.step >= state.total_steps
        return state.phase not in ("finished", "failed") and at - self._shown_at >= self._heartbeat_s

    def _write(self, text: str) -> None:
        if self._broken:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            self._broken = True
