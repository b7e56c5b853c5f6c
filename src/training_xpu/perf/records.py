"""The record of a run (`run.json`) and the document `ljperf benchmark --json` prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import AwareDatetime, Field

from training_xpu.records import Record
from training_xpu.workloads.config import JobConfig, Scale

RUN_FILE = "run.json"

Status = Literal["running", "completed", "failed", "interrupted"]


Verdict = Literal["faster", "slower", "same", "inconclusive"]

ReproductionVerdict = Literal["identical", "within tolerance", "differs", "failed", "interrupted"]


class Estimate(Record):
    """A median with its spread over the measured steps and its 95 % interval, see `perf.statistics.estimate`."""

    median: float
    p5: float
    p95: float
    ci95: tuple[float, float]  # one step tells nothing about the next: then 0 and infinity
    count: int


class RatioEstimate(Record):
    """Median of one arm over median of another, see `perf.statistics.ratio`."""

    ratio: float
    ci95: tuple[float, float]
    count: int  # values of the arm above the line
    count_reference: int
    margin: float  # a ratio within 1 / (1 + margin) .. 1 + margin is the same for any practical purpose
    verdict: Verdict  # of the arm above the line, against the reference


class LossSummary(Record):
    first: float | None = None
    last: float | None = None
    eval_before: float | None = None
    eval_after: float | None = None


class RankFailure(Record):
    rank: int
    reason: str  # one line: "killed by signal 9 (SIGKILL) by the kernel's out-of-memory killer", "ValueError: ..."
    traceback: str = ""
    exit_code: int | None = None


class Summary(Record):
    """What was measured over the steps after warm-up. Per device means per rank."""

    steps_measured: int
    warmup_steps: int  # detected from the data
    tokens_per_second_per_device: Estimate | None = None  # real tokens
    step_time_s: Estimate | None = None
    phases_s: dict[str, float | None] = Field(default_factory=dict)  # median per step: data, forward, ...
    data_share: float | None = None  # time spent waiting for data / step time, both summed over the measured steps
    real_token_share: float | None = None  # real / (real + padded)
    model_flops_per_second: float | None = None  # per device, as peak_flops: their quotient is the MFU
    mfu: float | None = None
    hfu: float | None = None
    mfu_formula: str = ""
    peak_flops: float | None = None
    peak_source: str = ""
    peak_memory_bytes: int | None = None  # the largest rank
    peak_memory_kind: str = ""  # "allocator peak" | "peak resident set"
    peak_memory_bytes_by_rank: dict[int, int] = Field(default_factory=dict)
    live_bytes_peak: int | None = None  # live tensor bytes in the separate, unmeasured step, largest rank
    # Seconds of that step in which a collective ran; profiled, so longer than in a measured step. Largest rank.
    communication_s_profiled: float | None = None
    loss: LossSummary = Field(default_factory=LossSummary)


class RunRecord(Record):
    """One arm of one workload, measured. Lives in `runs/<time>-<workload>-<arm>/run.json`."""

    name: str  # the folder's name
    created: AwareDatetime
    finished: AwareDatetime | None = None
    command: list[str]
    workload: str
    arm: str
    features: list[str]
    experiment: str | None = None  # what ties the arms of one comparison together
    config: JobConfig | None = None  # None for a user's own command
    environment: dict[str, str] = Field(default_factory=dict)  # variables set for the job
    fingerprint: dict[str, Any] = Field(default_factory=dict)
    status: Status = "running"
    reason: str = ""  # why it failed or was interrupted
    failures: list[RankFailure] = Field(default_factory=list)
    summary: Summary | None = None
    feature_reports: list[dict[str, Any]] = Field(default_factory=list)
    host: str | None = None  # digest of the host name; with the next two it tells whether the run's process still lives
    pid: int | None = None
    pid_started: float | None = None  # seconds after that machine's boot


class ArmDocument(Record):
    """One arm in the document of `ljperf benchmark --json`."""

    name: str
    features: list[str]
    status: Status
    reason: str = ""
    tokens_per_second_per_device: Estimate | None = None
    step_time_s: Estimate | None = None
    mfu: float | None = None
    hfu: float | None = None
    peak_memory_bytes: int | None = None
    loss: LossSummary
    run: Path
    summary: Summary | None = None
    features_applied: list[dict[str, Any]] = Field(default_factory=list)


class BenchmarkDocument(Record):
    """What `ljperf benchmark --json` and `ljperf train --json` print."""

    workload: str
    scale: Scale
    status: Status
    reason: str = ""
    arms: list[ArmDocument]
    world_size: int
    fingerprint: dict[str, Any] = Field(default_factory=dict)


class LossComparison(Record):
    """Two loss curves of the same configuration, step by step."""

    steps_compared: int
    steps_expected: int  # steps the original has a loss for
    identical: bool  # every compared loss equal bit for bit
    within_tolerance: bool
    first_difference: int | None = None  # step
    first_outside: int | None = None  # the first step outside the tolerance
    largest_absolute: float = 0.0
    largest_absolute_step: int | None = None
    largest_relative: float = 0.0  # |a - b| / max(|a|, |b|)
    largest_relative_step: int | None = None
    tolerance: float  # relative, at each step; losses under 1 count as 1
    tolerance_reason: str
    evaluation_before: float | None = None  # relative difference of the evaluation losses
    evaluation_after: float | None = None


class Difference(Record):
    """A field of the fingerprint that differs between the original run and its reproduction."""

    field: str
    original: Any
    reproduction: Any


class ReproductionDocument(Record):
    """What `ljperf reproduce RUN --json` prints."""

    original: Path
    reproduction: Path
    workload: str
    arm: str
    verdict: ReproductionVerdict
    reason: str  # one sentence for the user
    loss: LossComparison | None = None  # None: the reproduction wrote no step
    throughput: RatioEstimate | None = None  # tokens per second and device, reproduction over original
    differences: list[Difference] = Field(default_factory=list)


class RunEntry(Record):
    """One line of `ljperf runs --json`."""

    run: Path
    name: str
    status: Status | Literal["unreadable"]
    reason: str = ""
    created: AwareDatetime | None = None
    workload: str | None = None
    arm: str | None = None
    experiment: str | None = None
    tokens_per_second_per_device: Estimate | None = None
    mfu: float | None = None
    loss: LossSummary | None = None


class RunsDocument(Record):
    """What `ljperf runs --json` prints, newest run first."""

    runs_folder: Path
    runs: list[RunEntry]
