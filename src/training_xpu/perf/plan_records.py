"""The document that `ljperf plan --json` prints."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from training_xpu.records import Record

Policy = Literal["none", "recompute", "recompute all", "does not fit"]
OVERHEAD = "overhead"  # the part that is no tensors


class PlanOption(Record):
    """What one rank needs, and how long a step takes, with the first `layers` blocks recomputed."""

    layers: int
    predicted_peak_bytes: int  # live tensor bytes and the allocator's overhead: what is expected
    predicted_peak_interval_bytes: tuple[int, int]  # 95 %; the upper end is what must fit
    predicted_live_bytes: int  # tensors alone
    # Step time over that without recompute, the same memory given. null: the FLOPs could not be counted.
    predicted_step_time_ratio: float | None
    fits: bool
    phase: str  # of the step, in which the peak is
    # Bytes by part at the peak, on CPUs without what is never written to; they add up to predicted_peak_bytes.
    parts: dict[str, int]

    @property
    def untouched_bytes(self) -> int:
        """Of the live tensors, those that are allocated and never written to, and so not resident on CPUs."""
        return self.predicted_live_bytes - sum(size for name, size in self.parts.items() if name != OVERHEAD)


class PlanCalibration(Record):
    """Where the overhead beyond live tensor bytes is taken from."""

    device_kind: str
    allocator: str
    version: int
    source: str  # shipped with this version, or the file that `ljperf plan --calibrate` wrote
    samples: int  # measured runs; 0: assumed, nothing was measured
    fitted_on: str  # for people: which runs
    cross_validated_error: float | None  # median relative error of what runs reserved, each predicted from the others


class PlanDocument(Record):
    """A plan: which option is recommended, and what all of them need."""

    model: str  # engine/model, or module:function
    engine: str
    zero_stage: int | None  # null where the engine is not DeepSpeed
    world_size: int
    micro_batch: int
    sequence_length: int | None  # tokens; null where the function's own inputs say what a batch is
    gradient_accumulation: int
    dtype: str
    optimizer: str
    device_kind: str
    parameters: int
    layers: int
    budget_bytes: int  # of one rank
    budget_source: str
    budget_live: bool  # whether it counts live tensor bytes alone
    defaults: list[str]  # for people: what was assumed, for it was not given and the model does not say it
    recommended_layers: int | None  # the fewest that fit; null where none do
    policy: Policy
    options: list[PlanOption]  # element n: the first n blocks recomputed
    parts: dict[str, int]  # of the recommended option, or of full recompute where nothing fits
    step_time_source: str  # what the step time ratios rest on
    suggestions: list[str] = Field(default_factory=list)  # where nothing fits: changes that were predicted to fit
    calibration: PlanCalibration

    def needed_bytes(self, option: PlanOption) -> int:
        """What must be within the budget."""
        return option.predicted_live_bytes if self.budget_live else option.predicted_peak_interval_bytes[1]

    def amounts(self, option: PlanOption) -> list[int]:
        """Of an option, what a table shows: each part, the peak and what must be within the budget."""
        parts = (option.parts.get(part, 0) for part in self.parts)
        return [*parts, option.predicted_peak_bytes, self.needed_bytes(option)]

    @property
    def amount_names(self) -> list[str]:
        """What `amounts` are called."""
        return [*self.parts, "peak", "live" if self.budget_live else "up to"]

    @property
    def largest_bytes(self) -> int:
        """The largest amount of all options, which decides about the unit of a table."""
        return max(max(self.amounts(option)) for option in self.options)


class CalibrationDocument(Record):
    """What `ljperf plan --calibrate RUNS --json` prints: one calibration per kind of device the runs were made on."""

    runs_folder: Path
    calibrations: list[PlanCalibration]
    passed_over: dict[str, int] = Field(default_factory=dict)  # why runs were left out -> how many
