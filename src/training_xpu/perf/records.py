"""The record of a run (`run.json`) and the document `ljperf benchmark --json` prints."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from training_xpu.records import Record
from training_xpu.workloads.config import JobConfig, Scale

RUN_FILE = "run.json"

Status = Literal["running", "completed", "failed", "interrupted"]


class Estimate(Record):
    """A median with its spread over the measured steps and its bootstrap 95 % interval."""

    median: float
    p5: float
    p95: float
    ci95: tuple[float, float]
    count: int


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
    data_share: float | None = None  # data time / step time
    real_token_share: float | None = None  # real / (real + padded)
    model_flops_per_second: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    mfu_formula: str = ""
    peak_flops: float | None = None
    peak_source: str = ""
    peak_memory_bytes: int | None = None  # the largest rank
    peak_memory_kind: str = ""  # "allocator peak" | "peak resident set"
    peak_memory_bytes_by_rank: dict[int, int] = Field(default_factory=dict)
    live_bytes_peak: int | None = None  # live tensor bytes in the separate, unmeasured step, largest rank
    loss: LossSummary = Field(default_factory=LossSummary)


class RunRecord(Record):
    """One arm of one workload, measured. Lives in `runs/<time>-<workload>-<arm>/run.json`."""

    name: str  # the folder's name
    created: datetime
    finished: datetime | None = None
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
