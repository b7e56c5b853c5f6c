"""What ranks write while they train: `steps.jsonl` and `events.jsonl` in the run folder."""

from __future__ import annotations

from typing import Literal

from training_xpu.records import Record

PEAK_MEMORY_NOTE = "peak memory"  # name of the note that says what `StepRecord.peak_memory_bytes` counts
PROCESS_NOTE = "process"  # name of a rank's first note; its detail is a `RankProcess`
INTERRUPTED_NOTE = "interrupted"  # name of the last note of a rank that was told to end
TRACKER_NOTE = "tracker"  # name of the note about a tracker that failed


class RankProcess(Record):
    """Which process a rank is, so that its state and its end can be told."""

    host: str  # `device.processes.host_id`
    pid: int
    started: float | None  # seconds after that machine's boot


class StepRecord(Record):
    """One optimizer step of one rank. Seconds, bytes, tokens; null where an engine hides the phase."""

    rank: int
    step: int  # 1-based, counted over resumes
    time: float  # Unix time at the end of the step
    loss: float  # mean over this step's loss tokens of all ranks, natural log
    gradient_norm: float | None
    learning_rate: float
    step_s: float
    data_s: float | None
    forward_s: float | None
    backward_s: float | None
    optimizer_s: float | None  # clipping, update, zeroing
    communication_s: float | None
    real_tokens: int  # this rank's, over all micro batches of the step
    padded_tokens: int
    loss_tokens: int  # positions that have a label
    model_flops: float  # this rank's, forward and backward, no recompute
    hardware_flops: float  # model_flops, what was recomputed, and padding
    peak_memory_bytes: int | None  # accelerators: allocator peak of the step; CPU: peak resident set of the step


class EventRecord(Record):
    """Something that happens once: a phase, an evaluation, a checkpoint, a failure."""

    rank: int
    time: float
    event: Literal["phase", "evaluation", "checkpoint", "live-bytes", "failure", "finished", "note"]
    name: str = ""  # phase: building|training|saving; evaluation: before|after; failure: exception class or signal
    detail: str = ""
    step: int | None = None
    value: float | None = None  # evaluation: loss; live-bytes: peak bytes
    seconds: float | None = None  # how long it took; live-bytes: seconds in which a collective ran
