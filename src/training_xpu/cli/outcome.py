"""The table at the end of `ljperf benchmark` and `ljperf train`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from training_xpu.cli import console

if TYPE_CHECKING:
    from training_xpu.perf.records import ArmDocument, BenchmarkDocument, Estimate, Summary

UNKNOWN = "-"


def show(document: BenchmarkDocument) -> None:
    """One row per arm, then what the numbers mean and where the records are."""
    scale = document.scale
    ranks = "1 rank" if document.world_size == 1 else f"{document.world_size} ranks"
    console.table(
        f"{document.workload} ({scale.kind}, {scale.parameters / 1e6:,.1f} M parameters, {ranks})",
        ["arm", "status", "tokens/s/device", "95 % interval", "step s", "MFU", "peak memory", "loss", "eval loss"],
        [_row(arm) for arm in document.arms],
    )
    first = document.arms[0].summary if document.arms else None
    if first is not None and first.steps_measured:
        _explain(first)
    for arm in document.arms:
        for line in _applied(arm):
            console.result(f"{arm.name}: {line}")
        for what in ("model", "checkpoints"):
            if (Path(arm.run) / what).is_dir():
                console.result(f"{what}: {Path(arm.run) / what}")
        console.result(f"record of {arm.name}: {arm.run}")


def _applied(arm: ArmDocument) -> list[str]:
    """What each feature of an arm last said of its effect, on the first rank that said so."""
    last: dict[str, tuple[int, str]] = {}
    for told in arm.features_applied:
        name, rank = str(told.get("feature")), int(told.get("rank", 0))
        if told.get("event") == "applied" and told.get("reason") and rank <= last.get(name, (rank, ""))[0]:
            last[name] = (rank, str(told["reason"]))
    return [reason for _, reason in last.values()]


def _row(arm: ArmDocument) -> list[str]:
    rate, step, loss = arm.tokens_per_second_per_device, arm.step_time_s, arm.loss
    return [
        arm.name,
        arm.status,
        _number(rate, 0),
        f"{rate.ci95[0]:,.0f} - {rate.ci95[1]:,.0f}" if rate and rate.count > 1 else UNKNOWN,
        _number(step, 3),
        f"{arm.mfu:.1%}" if arm.mfu is not None else UNKNOWN,
        f"{arm.peak_memory_bytes / 2**30:,.2f} GiB" if arm.peak_memory_bytes is not None else UNKNOWN,
        _change(loss.first, loss.last),
        _change(loss.eval_before, loss.eval_after),
    ]


def _explain(summary: Summary) -> None:
    phases = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in summary.phases_s.items() if seconds is not None)
    console.result(
        f"medians over {_count(summary.steps_measured, 'step')} after {_count(summary.warmup_steps, 'warm-up step')}, "
        f"{_method(summary.steps_measured)}; per step: {phases}"
    )
    if summary.mfu is not None and summary.peak_flops is not None:
        console.result(
            f"MFU against {summary.peak_flops / 1e9:,.0f} GFLOP/s per rank ({summary.peak_source}); "
            f"HFU {summary.hfu:.1%}"
        )
    memory = f"peak memory: {summary.peak_memory_kind} of the largest rank"
    if summary.live_bytes_peak is not None:
        memory += f"; live tensor bytes {summary.live_bytes_peak / 2**30:,.2f} GiB in a separate, untimed step"
    console.result(memory)


def _method(steps: int) -> str:
    """How `statistics.estimate` comes to its interval for so many values."""
    from training_xpu.perf.statistics import FEWEST_TO_RESAMPLE

    if steps >= FEWEST_TO_RESAMPLE:
        return "bootstrap intervals"
    return "intervals by Student's t" if steps > 1 else "no interval from a single one"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _number(estimate: Estimate | None, digits: int) -> str:
    return f"{estimate.median:,.{digits}f}" if estimate else UNKNOWN


def _change(first: float | None, last: float | None) -> str:
    if first is None or last is None:
        return UNKNOWN
    return f"{first:.3f} -> {last:.3f}"
