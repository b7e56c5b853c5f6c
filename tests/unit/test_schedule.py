"""Learning rates against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from training_xpu.workloads.schedule import learning_rate_ratio


def test_linear_warm_up_then_a_cosine_to_the_minimum() -> None:
    # Steps 1-4 rise by a quarter each; of the 8 that follow, the cosine is at pi/8, pi/4, ... pi.
    ratios = [learning_rate_ratio(step, steps=12, warmup_steps=4, minimum=0.2) for step in range(1, 13)]
    assert ratios[:4] == [0.25, 0.5, 0.75, 1.0]
    assert ratios[4] == pytest.approx(0.2 + 0.4 * (1 + math.cos(math.pi / 8)))
    assert ratios[7] == pytest.approx(0.6)  # half way down
    assert ratios[11] == pytest.approx(0.2)
    assert ratios[3:] == sorted(ratios[3:], reverse=True)


@pytest.mark.parametrize(
    ("step", "steps", "warmup", "expected"),
    [
        (1, 1, 0, 0.1),  # the only step is the last one
        (1, 10, 0, 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 10))),
        (5, 5, 5, 1.0),  # nothing but warm-up
        (3, 5, 8, 0.375),  # a run that ends within its warm-up
        (6, 5, 2, 0.0),  # beyond the end, so that an extra step changes no weight
        (6, 5, 8, 0.0),
    ],
)
def test_the_ends_of_the_schedule(step: int, steps: int, warmup: int, expected: float) -> None:
    assert learning_rate_ratio(step, steps, warmup, 0.1) == pytest.approx(expected)
