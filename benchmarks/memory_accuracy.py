"""Predicted peak memory of training steps against measured one: live tensor bytes, and the resident set.

Predicted from meta tensors (`training_xpu.recompute.prediction.predict`), measured on two ranks over Gloo with the real
engines: DDP, DeepSpeed's ZeRO 1 to 3 and FSDP2. A fixed fraction of families x engines x dtypes x layers x widths x
sequences x batches x optimizers x recomputed blocks x LoRA x accumulation x bucket settings: every level of every
factor occurs equally often, drawn with a fixed seed. Beside it what MemTracker, DeepSpeed's estimators and accelerate
say.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from common import finish, parser, rounds_of
from memory_cases import Case, build, sample
from memory_measured import WORLD_SIZE, measure
from memory_others import accelerate_estimate, deepspeed_estimate, mem_tracker
from training_xpu.recompute.prediction.calibration import Sample, fit
from training_xpu.recompute.prediction.predict import predict_peaks


def predicted(case: Case) -> dict[str, Any]:
    with torch.device("meta"):
        model = build(case)
    prediction = predict_peaks(model, case.setting(WORLD_SIZE))
    return {
        "untouched": prediction.untouched(case.recomputed),
        "predicted": prediction.peaks[case.recomputed],
        "phase": prediction.phases[case.recomputed],
        "parts": prediction.parts(case.recomputed),
        "mem_tracker": mem_tracker(case),
        "deepspeed": deepspeed_estimate(case, WORLD_SIZE),
        "accelerate": accelerate_estimate(case),
    }


def resident_coverage(rows: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Each row's resident set against the interval that the other rows predict for it.

    What the process held before the case is known; what the case adds is fitted as the project's calibration does.

    Returns:
        Share of rows inside their interval, and the median absolute relative error.
    """
    samples = [
        Sample(
            row["engine"],
            row["predicted"] - row["untouched"],
            row["live"] - row["untouched"],
            max(1, row["resident"] - row["resident_before"]),
        )
        for row in rows
    ]
    inside = []
    errors = []
    for index, row in enumerate(rows):
        fitted = fit([s for i, s in enumerate(samples) if i != index], "cpu", "C library", "the other cases")
        resident = row["predicted"] - row["untouched"]
        low, high = fitted.interval(resident, row["engine"])
        before = row["resident_before"]
        inside.append(before + low <= row["resident"] <= before + high)
        errors.append(abs((before + fitted.expected(resident, row["engine"])) / row["resident"] - 1))
        row["resident_interval"] = [before + low, before + high]
    return statistics.fmean(inside), statistics.median(errors)


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """One line per tool: cases it answers for, median and 95th percentile of errors, the largest underestimate."""
    lines = []
    for name, key in (
        ("predict_peaks", "predicted"),
        ("MemTracker, one process", "mem_tracker"),
        ("DeepSpeed's estimator", "deepspeed"),
        ("accelerate estimate-memory", "accelerate"),
    ):
        errors = [row[key] / row["live"] - 1 for row in rows if row[key] is not None]
        if errors:
            lines.append(f"{name:28} {len(errors):4} cases: {_figures(errors)}")
    return lines


def _figures(errors: Sequence[float]) -> str:
    sizes = sorted(abs(e) for e in errors)
    return (
        f"median error {statistics.median(sizes):.2%}, 95th percentile {_at_95(sizes):.2%}, "
        f"largest underestimate {min(0.0, min(errors)):.2%}"
    )


def _at_95(sizes: Sequence[float]) -> float:
    return sizes[min(len(sizes) - 1, int(0.95 * len(sizes)))]


def main() -> int:
    warnings.filterwarnings("ignore")
    options = parser(__doc__ or "", rounds=70, quick_rounds=8).parse_args()
    cases = sample(rounds_of(options))
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed logs to stdout
        predictions = [predicted(case) for case in cases]
    rows: list[dict[str, Any]] = []

    def report(number: int, measured: dict[str, Any]) -> None:
        case = cases[number]
        row = {**case.as_dict(), **predictions[number], **measured}
        row["error"] = row["predicted"] / row["live"] - 1
        rows.append(row)
        print(
            f"{number + 1:3} {case.label()}: measured {row['live'] / 2**20:8.2f} MiB, "
            f"predicted {row['predicted'] / 2**20:8.2f} MiB, {row['error']:+.2%}",
            file=sys.stderr,
        )

    measure(cases, report)
    lines = table(rows)
    if len(rows) > 20:
        covered, error = resident_coverage(rows)
        lines.append(f"resident set: {covered:.1%} inside the 95 % interval, median error {error:.1%}")
    for line in lines:
        print(line, file=sys.stderr)
    errors = [row["error"] for row in rows]
    finish(options, {"cases": rows, "summary": lines}, f"{len(rows)} cases on {WORLD_SIZE} ranks: {_figures(errors)}")
    sizes = sorted(abs(e) for e in errors)
    return 0 if statistics.median(sizes) <= 0.02 and _at_95(sizes) <= 0.05 and min(errors) >= -0.03 else 1


if __name__ == "__main__":
    sys.exit(main())
