"""The learning rate of every step, the same for all engines."""

from __future__ import annotations

import math


def learning_rate_ratio(step: int, steps: int, warmup_steps: int, minimum: float) -> float:
    """Linear warm-up, then a cosine to the minimum (Loshchilov and Hutter 2017, SGDR, without restarts).

    Args:
        step: 1-based optimizer step.
        steps: length of the schedule; beyond it the ratio is 0, so that an extra step changes no weight.
        warmup_steps: the step at which the peak is reached first.
        minimum: ratio at the last step.
    """
    if step > steps:
        return 0.0
    if step <= warmup_steps:
        return step / warmup_steps
    if steps == warmup_steps:
        return 1.0
    progress = (step - warmup_steps) / (steps - warmup_steps)
    return minimum + (1 - minimum) * 0.5 * (1 + math.cos(math.pi * progress))
