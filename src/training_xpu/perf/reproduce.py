"""Runs the configuration of an earlier run again and compares: loss curve, throughput, environment."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from training_xpu.errors import UserError
from training_xpu.perf.records import (
    Difference,
    LossComparison,
    RatioEstimate,
    ReproductionDocument,
    ReproductionVerdict,
    RunRecord,
)
from training_xpu.perf.store import load_events, load_run, load_steps
from training_xpu.perf.summary import Measured, evaluation_losses, losses_by_step, measured, settled_at
from training_xpu.workloads.config import Dtype, JobConfig, PreparedData
from training_xpu.workloads.records import EventRecord, StepRecord

Launch = Callable[[JobConfig, str, list[str], Path], Path]
"""(config, arm, features, runs folder) -> folder of the new run, once it has ended.

It prepares the data again where they are gone, and passes the result to `check_data` before any rank starts.
"""

Differences = Callable[[dict[str, Any], dict[str, Any]], Iterable[tuple[str, Any, Any]]]
"""(fingerprint, fingerprint) -> (field, first value, second value) for each field that differs."""


class Tolerance(NamedTuple):
    relative: float
    reason: str


def loss_tolerance(dtype: Dtype) -> Tolerance:
    """How far apart the losses of two runs may lie that differ in nothing but the order of floating-point sums.

    Rounding differences grow from step to step, so that no bound holds for ever. Measured on a four-layer Llama (hidden
    size 128) over 40 to 60 steps, two runs with the rows of each batch in opposite order drifted apart by up to 0.58 %
    in bf16, 0.67 % in fp16 and 0.0002 % in fp32, while another seed changes the loss by 4 % within ten steps. The
    tolerances leave room above the former and stay below the latter.
    """
    if dtype is Dtype.FP32:
        return Tolerance(1e-3, "fp32: the order of sums alone moves the loss by about 0.0002 % in 40 steps")
    return Tolerance(2e-2, f"{dtype}: the order of sums alone moves the loss by up to about 0.7 % in 60 steps")


def check_reproducible(folder: Path, record: RunRecord) -> JobConfig:
    """The configuration to launch again: as it was, but without writing to where the original wrote.

    Neither the model nor checkpoints nor outside trackers belong to what is compared, and the original's must not be
    overwritten.

    Raises:
        UserError: there is nothing to run again or to compare with, or what the run started from is gone.
    """
    if record.config is None:
        raise UserError(
            f"{record.name} ran a command of your own, which only you can start again",
            "ljperf reproduce works on runs of ljperf benchmark and ljperf train.",
        )
    if record.config.nnodes > 1:
        raise UserError(
            f"{record.name} ran on {record.config.nnodes} nodes, and ljperf reproduce starts ranks on this one alone",
            f"Start it again on each node with: {' '.join(record.command)}",
        )
    if record.status == "running":
        raise UserError(f"{record.name} is still running", "Wait until it has ended.")
    if not losses_by_step(load_steps(folder)):
        raise UserError(
            f"{record.name} has no steps to compare with" + (f": {record.reason}" if record.reason else ""),
            f"Start it anew with: {' '.join(record.command)}",
        )
    config = record.config
    for what, path in (("weights", config.initial_weights), ("checkpoint", config.resume_from)):
        if path is not None and not path.exists():
            raise UserError(f"{record.name} started from the {what} {path}, which are gone", "Put them back there.")
    return config.model_copy(update={"model_folder": None, "checkpoint_folder": None, "save_every": 0, "report_to": []})


def check_data(original: PreparedData, prepared: PreparedData) -> None:
    """Refuses data that are no longer those of the original run.

    Raises:
        UserError: the tokens differ.
    """
    if original.digest != prepared.digest:
        raise UserError(
            f"the data have changed since the original run: {original.source}",
            f"It had {original.train_token_count:,} training tokens, now {prepared.train_token_count:,}; "
            "put the old data back, or start a new run.",
        )


def compare_losses(
    original: Sequence[StepRecord],
    reproduction: Sequence[StepRecord],
    dtype: Dtype,
    original_events: Sequence[EventRecord] = (),
    reproduction_events: Sequence[EventRecord] = (),
) -> LossComparison:
    """Compares two loss curves at every step that both have.

    Two losses that are both NaN are the same; one NaN against a number is an infinite difference.

    Raises:
        ValueError: no step is in both.
    """
    a, b = losses_by_step(original), losses_by_step(reproduction)
    common = sorted(a.keys() & b.keys())
    if not common:
        raise ValueError("the curves have no step in common")
    absolute = {n: _difference(a[n], b[n]) for n in common}
    relative = {n: _relative(a[n], b[n]) for n in common}
    tolerance = loss_tolerance(dtype)
    differing = [n for n in common if absolute[n] != 0]
    outside = [n for n in differing if not _within(a[n], b[n], tolerance.relative)]
    at_absolute = max(common, key=lambda n: absolute[n])
    at_relative = max(common, key=lambda n: relative[n])
    before = evaluation_losses(original_events), evaluation_losses(reproduction_events)
    evaluations = {k: _relative(before[0][k], before[1][k]) for k in before[0].keys() & before[1].keys()}
    return LossComparison(
        steps_compared=len(common),
        steps_expected=len(a),
        identical=not differing,
        within_tolerance=not outside,
        first_difference=differing[0] if differing else None,
        first_outside=outside[0] if outside else None,
        largest_absolute=absolute[at_absolute],
        largest_absolute_step=at_absolute if differing else None,
        largest_relative=relative[at_relative],
        largest_relative_step=at_relative if differing else None,
        tolerance=tolerance.relative,
        tolerance_reason=tolerance.reason,
        evaluation_before=evaluations.get("before"),
        evaluation_after=evaluations.get("after"),
    )


def reproduce(folder: Path, launch: Launch, runs_folder: Path, differences: Differences) -> ReproductionDocument:
    """Launches the run's configuration again and compares the two.

    Args:
        folder: of the original run.
        launch: starts the job and waits for its end.
        runs_folder: where the new run goes.
        differences: of two fingerprints.

    Raises:
        UserError: the run cannot be reproduced, or its data have changed; and whatever the launcher raises.
    """
    original = load_run(folder)
    config = check_reproducible(folder, original)
    return compare_runs(folder, launch(config, original.arm, original.features, runs_folder), differences)


def compare_runs(original: Path, reproduction: Path, differences: Differences) -> ReproductionDocument:
    """Compares a run with its reproduction; both have ended.

    Raises:
        UserError: a record cannot be read, or the data differ.
    """
    old, new = load_run(original), load_run(reproduction)
    if old.config is None or new.config is None:
        raise UserError("only runs of ljperf benchmark and ljperf train can be compared step by step")
    check_data(old.config.data, new.config.data)
    old_steps, new_steps = load_steps(original), load_steps(reproduction)
    document = ReproductionDocument(
        original=original,
        reproduction=reproduction,
        workload=old.workload,
        arm=old.arm,
        verdict="failed",
        reason=f"the reproduction {'was ' if new.status == 'interrupted' else ''}{new.status}"
        + (f": {new.reason}" if new.reason else ""),
        differences=[
            Difference(field=field, original=before, reproduction=after)
            for field, before, after in differences(old.fingerprint, new.fingerprint)
        ],
    )
    if losses_by_step(old_steps).keys() & losses_by_step(new_steps).keys():
        document.loss = compare_losses(
            old_steps, new_steps, old.config.dtype, load_events(original), load_events(reproduction)
        )
        document.throughput = _throughput(
            measured(old_steps, old.config, settled_at(old.feature_reports)),
            measured(new_steps, new.config, settled_at(new.feature_reports)),
        )
    if new.status == "completed":
        document.verdict, document.reason = _verdict(document.loss, new.name)
    elif new.status == "interrupted":
        document.verdict = "interrupted"
    return document


def _throughput(old: Measured, new: Measured) -> RatioEstimate | None:
    from training_xpu.perf.statistics import ratio

    rates = [[group.tokens_per_second_per_device for group in found.steps] for found in (new, old)]
    if not all(rates) or not all(rate > 0 for arm in rates for rate in arm):
        return None
    return ratio(rates[0], rates[1])


def _verdict(loss: LossComparison | None, name: str) -> tuple[ReproductionVerdict, str]:
    if loss is None:
        return "failed", f"{name} recorded none of the original's steps"
    if loss.steps_compared < loss.steps_expected:
        return "failed", f"{name} recorded only {loss.steps_compared} of the original's {loss.steps_expected} steps"
    steps = "1 step" if loss.steps_compared == 1 else f"{loss.steps_compared} steps"
    if loss.identical:
        return "identical", f"the losses of {steps} are equal bit for bit"
    most = f"{100 * loss.largest_relative:.2g} % at step {loss.largest_relative_step}"
    if loss.within_tolerance:
        return "within tolerance", f"the losses of {steps} differ by at most {most}, as the order of sums explains"
    return "differs", f"the losses leave the tolerance of {100 * loss.tolerance:g} % at step {loss.first_outside}"


def _within(a: float, b: float, tolerance: float) -> bool:
    """Losses under 1 count as 1: near zero, rounding is no longer small against the loss."""
    return math.isfinite(_difference(a, b)) and _difference(a, b) <= tolerance * max(abs(a), abs(b), 1.0)


def _difference(a: float, b: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return abs(a - b) if math.isfinite(a) and math.isfinite(b) else math.inf


def _relative(a: float, b: float) -> float:
    difference = _difference(a, b)
    return difference / max(abs(a), abs(b)) if 0 < difference < math.inf else difference
