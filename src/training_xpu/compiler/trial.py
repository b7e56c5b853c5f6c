"""Compiled against plain on live steps: how long each region's forwards and backwards take, and which is kept."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

PAIRS = 5  # of a compiled and a plain step


class Moment:
    """A point in time of the device that computes: on accelerators when the work queued so far is done."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None
        self._time = 0.0
        if device.type == "cpu":
            self._time = time.perf_counter()
        else:
            self._event = torch.Event(device=device, enable_timing=True)
            self._event.record()

    def until(self, later: Moment) -> float:
        """Seconds; on accelerators it waits for `later`."""
        if self._event is None:
            return later._time - self._time
        later._event.synchronize()
        milliseconds: float = self._event.elapsed_time(later._event)
        return milliseconds / 1e3


class RegionClock:
    """Times one region's calls within a step, in seconds per element of their first input.

    The forward is timed around the call; the backward from when the gradient of its output is there to when that of its
    input is. A call whose input needs no gradient counts with its forward only.
    """

    def __init__(self) -> None:
        self._forwards: list[tuple[Moment, Moment, int]] = []  # begin, end, elements
        self._backwards: list[tuple[Moment, Moment, int]] = []

    def timed(self, run: Callable[[], Any], tensors: tuple[torch.Tensor, ...]) -> Any:
        if not tensors:
            return run()
        device, elements = tensors[0].device, tensors[0].numel()
        begun = Moment(device)
        result = run()
        self._forwards.append((begun, Moment(device), elements))
        output = _first_tensor(result)
        entry = next((t for t in tensors if t.requires_grad and not t.is_leaf), None)
        if output is not None and output.requires_grad and entry is not None and entry is not output:
            self._watch(output, entry, elements)
        return result

    @staticmethod
    def moment(tensor: torch.Tensor) -> Moment:
        return Moment(tensor.device)

    def passed(self, begun: Moment, entry: torch.Tensor, output: torch.Tensor) -> None:
        """A stretch of the forward that is no call: from `entry`, then, to `output`, now."""
        self._forwards.append((begun, Moment(output.device), entry.numel()))
        if entry.requires_grad and not entry.is_leaf:
            self._watch(output, entry, entry.numel())

    def _watch(self, output: torch.Tensor, entry: torch.Tensor, elements: int) -> None:
        begun: list[Moment] = []

        def begin(gradient: torch.Tensor) -> None:
            begun.append(Moment(gradient.device))

        def end(gradient: torch.Tensor) -> None:
            if begun:
                self._backwards.append((begun.pop(), Moment(gradient.device), elements))

        output.register_hook(begin)  # type: ignore[no-untyped-call]
        entry.register_hook(end)  # type: ignore[no-untyped-call]

    def take(self) -> float | None:
        """Seconds per element since it was last asked; None where nothing ran."""
        forwards, backwards = self._forwards, self._backwards
        self._forwards, self._backwards = [], []
        return _per_element(forwards) + _per_element(backwards) if forwards else None


def _per_element(calls: list[tuple[Moment, Moment, int]]) -> float:
    elements = sum(number for _, _, number in calls)
    return sum(begin.until(end) for begin, end, _ in calls) / elements if elements else 0.0


def _first_tensor(result: Any) -> torch.Tensor | None:
    if isinstance(result, torch.Tensor):
        return result
    values = result.values() if isinstance(result, dict) else result if isinstance(result, (tuple, list)) else ()
    return next((v for v in values if isinstance(v, torch.Tensor)), None)


@dataclass
class Trial:
    """Steps that take turns; each region's two times of neighbouring steps are compared."""

    compiled: dict[str, list[float]] = field(default_factory=dict)
    plain: dict[str, list[float]] = field(default_factory=dict)

    def add(self, region: str, spent: float | None, was_compiled: bool) -> None:
        if spent is not None:
            (self.compiled if was_compiled else self.plain).setdefault(region, []).append(spent)

    def pairs(self, region: str) -> int:
        return min(len(self.plain.get(region, ())), len(self.compiled.get(region, ())))

    def gain(self, region: str) -> float | None:
        """Plain time over compiled time, the median over pairs of steps; None where it was not seen."""
        pairs = list(zip(self.plain.get(region, ()), self.compiled.get(region, ()), strict=False))
        ratios = [plain / compiled for plain, compiled in pairs if compiled > 0]
        return statistics.median(ratios) if ratios else None


def mean_gain(gains: list[float]) -> float:
    """One gain for all ranks: the geometric mean of theirs."""
    return math.exp(statistics.fmean(math.log(max(g, 1e-6)) for g in gains))
