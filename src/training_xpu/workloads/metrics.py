"""Times the phases of a step without slowing it, and streams one record per step and rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from training_xpu.device import PeakMemory
from training_xpu.records import append_line
from training_xpu.workloads.config import EVENTS_FILE, STEPS_FILE
from training_xpu.workloads.flops import ModelFlops
from training_xpu.workloads.records import PEAK_MEMORY_NOTE, EventRecord, StepRecord

Phase = Literal["data", "forward", "backward", "optimizer"]
EventKind = Literal["phase", "evaluation", "checkpoint", "live-bytes", "failure", "finished", "note"]


class PhaseClock:
    """Adds up the seconds between marks, per phase.

    On the CPU a mark is a reading of the monotonic clock. On an accelerator it is an event on the current stream, read
    after the step, since waiting for the device at every mark would change what is measured.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type != "cpu"
        self._device = device
        self._marks: list[tuple[Phase | None, Any]] = []

    def start(self) -> None:
        self._marks = [(None, self._now())]

    def go_on(self) -> None:
        """Starts anew where the last mark was, so that what happens between two steps belongs to the second one."""
        self._marks = [(None, self._marks[-1][1])]

    def end(self) -> None:
        """A mark that belongs to no phase."""
        self._marks.append((None, self._now()))

    def mark(self, phase: Phase) -> None:
        """Ends the phase that ran since the last mark."""
        self._marks.append((phase, self._now()))

    def stop(self) -> tuple[float, dict[Phase, float]]:
        """Seconds from start to the last mark, and their split."""
        if self._on_device:
            self._marks[-1][1].synchronize()
        seconds: dict[Phase, float] = {}
        for (_, before), (phase, after) in zip(self._marks, self._marks[1:], strict=False):
            if phase is not None:
                seconds[phase] = seconds.get(phase, 0.0) + self._between(before, after)
        return self._between(self._marks[0][1], self._marks[-1][1]), seconds

    def _now(self) -> Any:
        if not self._on_device:
            return time.perf_counter()
        event = torch.Event(device=self._device, enable_timing=True)
        event.record()
        return event

    def _between(self, before: Any, after: Any) -> float:
        if self._on_device:
            return float(before.elapsed_time(after)) / 1000
        return float(after - before)


@dataclass
class TokenCounts:
    """What one rank processed in one step; `lengths` are the real lengths of the sequences, for attention's FLOPs."""

    real: int = 0
    padded: int = 0
    loss: int = 0
    lengths: list[int] = field(default_factory=list)

    @property
    def padded_to(self) -> int | None:
        """Tokens of every sequence with its padding; all batches of a job have one shape."""
        return (self.real + self.padded) // len(self.lengths) if self.padded else None

    def add(self, real: int, padded: int, loss: int, lengths: Sequence[int]) -> None:
        self.real += real
        self.padded += padded
        self.loss += loss
        self.lengths.extend(lengths)


class RunWriter:
    """Writes this rank's steps and events into the run folder as they come."""

    def __init__(self, run_folder: Path, rank: int) -> None:
        self.folder = run_folder
        self.rank = rank

    def step(self, record: StepRecord) -> None:
        append_line(self.folder / STEPS_FILE, record)

    def event(
        self,
        event: EventKind,
        name: str = "",
        detail: str = "",
        step: int | None = None,
        value: float | None = None,
        seconds: float | None = None,
    ) -> None:
        record = EventRecord(
            rank=self.rank,
            time=time.time(),
            event=event,
            name=name,
            detail=detail,
            step=step,
            value=value,
            seconds=seconds,
        )
        append_line(self.folder / EVENTS_FILE, record)


class StepMeter:
    """Makes one `StepRecord` per step from the clock, the token counts, the model's FLOPs and the peak memory."""

    def __init__(self, writer: RunWriter, flops: ModelFlops, device: torch.device) -> None:
        self.writer = writer
        self.flops = flops
        self.device = device
        self.clock = PhaseClock(device)
        self.memory = PeakMemory()
        self.recomputed_share = 0.0  # of the blocks' forward FLOPs
        writer.event("note", PEAK_MEMORY_NOTE, detail=self.memory.kind)

    def start(self) -> None:
        """Before the first step, and after anything that is no step: an evaluation, a checkpoint."""
        self.memory.reset()
        self.clock.start()

    def go_on(self) -> None:
        """Before a step that follows another one: step time is wall-clock time, the measuring included."""
        self.memory.reset()
        self.clock.go_on()

    def finish(
        self,
        step: int,
        loss: float,
        gradient_norm: float | None,
        learning_rate: float,
        tokens: TokenCounts,
        seconds: float,
        phases: dict[Phase, float],
    ) -> StepRecord:
        model_flops, hardware_flops = self.flops.training(
            tokens.lengths, self.recomputed_share, padded_to=tokens.padded_to
        )
        record = StepRecord(
            rank=self.writer.rank,
            step=step,
            time=time.time(),
            loss=loss,
            gradient_norm=gradient_norm,
            learning_rate=learning_rate,
            step_s=seconds,
            data_s=phases.get("data"),
            forward_s=phases.get("forward"),
            backward_s=phases.get("backward"),
            optimizer_s=phases.get("optimizer"),
            communication_s=None,
            real_tokens=tokens.real,
            padded_tokens=tokens.padded,
            loss_tokens=tokens.loss,
            model_flops=model_flops,
            hardware_flops=hardware_flops,
            peak_memory_bytes=self.memory.read(),
        )
        self.writer.step(record)
        return record
