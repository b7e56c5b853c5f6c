"""What the runner makes of a finished job."""

from __future__ import annotations

from typing import Any

import pytest

from training_xpu.perf.runner import first_step_without_loss
from training_xpu.workloads.records import StepRecord


def step(number: int, loss: float) -> StepRecord:
    nothing: dict[str, Any] = dict.fromkeys(
        ("gradient_norm", "data_s", "forward_s", "backward_s", "optimizer_s", "communication_s", "peak_memory_bytes")
    )
    counts: dict[str, Any] = dict.fromkeys(
        (
            "rank",
            "time",
            "learning_rate",
            "real_tokens",
            "padded_tokens",
            "loss_tokens",
            "model_flops",
            "hardware_flops",
        ),
        0,
    )
    return StepRecord(step=number, loss=loss, step_s=1.0, **nothing, **counts)


@pytest.mark.parametrize(
    ("losses", "expected"),
    [([3.0, 2.0], None), ([], None), ([3.0, float("nan"), float("nan")], 2), ([float("inf"), 1.0], 1)],
)
def test_divergence_is_the_first_loss_that_is_no_number(losses: list[float], expected: int | None) -> None:
    assert first_step_without_loss([step(i, loss) for i, loss in enumerate(losses, start=1)]) == expected
