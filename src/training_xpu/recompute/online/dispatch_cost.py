"""What it costs that Python sees every operation: while a step is measured, and in the selective mode."""

from __future__ import annotations

import functools
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from training_xpu.recompute.online.measure import LiveTensors
from training_xpu.recompute.switching.policies import SelectivePolicy

OPERATIONS = 100
REPEATS = 5


@dataclass(frozen=True)
class DispatchCost:
    """Seconds per operation, over an operation that torch runs by itself."""

    counting: float  # its storages are counted
    selective: float  # it runs in a selective forward, and again, or not, in the recompute


@functools.cache
def dispatch_cost() -> DispatchCost:
    """Measured here, once per process, on operations too small to take time of their own; some 20 ms."""
    plain = _seconds(nullcontext)
    forward, again = SelectivePolicy().contexts()
    counting = _seconds(lambda: LiveTensors(frozenset())) - plain
    selective = _seconds(lambda: forward) + _seconds(lambda: again) - 2 * plain
    return DispatchCost(max(0.0, counting), max(0.0, selective))


def _seconds(mode: Any) -> float:
    best = float("inf")
    tensor = torch.ones(8)
    for _ in range(REPEATS):
        context: AbstractContextManager[Any] = mode()
        with torch.no_grad(), context:
            begun = time.perf_counter()
            for _ in range(OPERATIONS):
                tensor.add(1.0)
            best = min(best, time.perf_counter() - begun)
    return best / OPERATIONS
