"""What an allocator holds for a peak of live tensor bytes: resident memory on CPUs, reserved memory on accelerators.

    total = baseline of the engine + slope of the engine x live

On CPUs live bytes count here without what is never written to, such as buckets larger than a model's gradients: that
does not become resident. The baseline is what a training process has beside tensors, such as libraries and the
collectives' buffers. The slope is what the allocator keeps between and beside tensors; under FSDP2, whose gathered
weights come and go in large pieces, that is more than elsewhere. Engines with few runs share one. Both are fitted to
measured runs by least absolute relative error, which a few odd runs do not bend. Every run is predicted from a fit to
the others; the spread of these errors gives the interval.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from importlib import resources
from typing import NamedTuple

from pydantic import Field

from training_xpu.errors import UserError
from training_xpu.records import Record

VERSION = 2
FEWEST_SAMPLES = 6  # for a slope, baselines and their spread
ENOUGH_FOR_A_SLOPE = 5  # samples of one engine
COVERAGE = 0.95  # of the interval
_SLOPES = [1.0 + step / 50 for step in range(101)]


class Sample(NamedTuple):
    """One measured run, of its largest rank, in bytes."""

    engine: str  # engines with baselines of their own have names of their own
    predicted_live: int
    measured_live: int
    measured_total: int  # peak resident set, or peak reserved by the allocator


class Calibration(Record):
    """A fit for one kind of device and allocator; before version 2, buffers never written to counted as live."""

    schema_version: int = Field(default=VERSION, alias="schema")
    device_kind: str  # "cpu", or torch's name of an accelerator
    allocator: str
    samples: int  # measured runs; 0: assumed, nothing was measured
    fitted_on: str  # for people: which runs
    slope: float = Field(ge=1.0)  # of engines without one of their own
    slopes: dict[str, float] = Field(default_factory=dict)
    baselines: dict[str, int]  # engine -> bytes
    baseline: int  # of an engine that no sample has
    interval_factor: float = Field(ge=1.0)  # 95 % of totals are within expected / factor .. expected x factor
    error: float | None  # median absolute relative error, cross-validated; None: nothing was measured
    live_error: float | None = None  # the same of predicted live bytes against measured ones

    def expected(self, live: int, engine: str) -> int:
        """Bytes the process will hold with this peak of live bytes."""
        slope = self.slopes.get(engine, self.slope)
        return max(1, round(slope * live) + self.baselines.get(engine, self.baseline))

    def interval(self, live: int, engine: str) -> tuple[int, int]:
        """Its 95 % interval."""
        expected = self.expected(live, engine)
        return round(expected / self.interval_factor), round(expected * self.interval_factor)


def shipped(device_kind: str) -> Calibration:
    """The calibration that comes with this version: of CPUs, or of accelerators in general."""
    name = "cpu" if device_kind == "cpu" else "accelerator"
    text = (resources.files(__package__) / "calibrations" / f"{name}.json").read_text(encoding="utf-8")
    return Calibration.model_validate_json(text)


def fit(samples: Sequence[Sample], device_kind: str, allocator: str, fitted_on: str) -> Calibration:
    """Fits a calibration and predicts each sample from the others.

    Raises:
        UserError: there are too few samples.
    """
    if len(samples) < FEWEST_SAMPLES:
        raise UserError(f"{len(samples)} runs are too few to calibrate with", f"At least {FEWEST_SAMPLES} are needed.")
    fitted = _fitted(samples)
    ratios = []
    for index, left_out in enumerate(samples):
        others = [s for i, s in enumerate(samples) if i != index]
        ratios.append(left_out.measured_total / _total(_fitted(others), left_out))
    return Calibration(
        device_kind=device_kind,
        allocator=allocator,
        samples=len(samples),
        fitted_on=fitted_on,
        slope=fitted.slope,
        slopes=fitted.slopes,
        baselines=fitted.baselines,
        baseline=fitted.baseline,
        interval_factor=_interval_factor(ratios),
        error=statistics.median(abs(ratio - 1) for ratio in ratios),
        live_error=statistics.median(abs(s.predicted_live / s.measured_live - 1) for s in samples),
    )


class _Fitted(NamedTuple):
    slope: float
    slopes: dict[str, float]
    baselines: dict[str, int]
    baseline: int


def _fitted(samples: Sequence[Sample]) -> _Fitted:
    shared = _with_best_slope(samples)
    slopes: dict[str, float] = {}
    baselines = dict(shared.baselines)
    for engine in baselines:
        own = [sample for sample in samples if sample.engine == engine]
        if len(own) >= ENOUGH_FOR_A_SLOPE:
            alone = _with_best_slope(own)
            slopes[engine], baselines[engine] = alone.slope, alone.baselines[engine]
    return _Fitted(shared.slope, slopes, baselines, shared.baseline)


def _with_best_slope(samples: Sequence[Sample]) -> _Fitted:
    """For each slope the medians of what is left are the best baselines; the slope with the smallest error wins."""
    return min((_with_slope(samples, slope) for slope in _SLOPES), key=lambda fitted: _error(samples, fitted))


def _with_slope(samples: Sequence[Sample], slope: float) -> _Fitted:
    rest: dict[str, list[float]] = {}
    for sample in samples:
        rest.setdefault(sample.engine, []).append(sample.measured_total - slope * sample.predicted_live)
    baselines = {engine: round(statistics.median(values)) for engine, values in rest.items()}
    overall = round(statistics.median(value for values in rest.values() for value in values))
    return _Fitted(slope, {}, baselines, overall)


def _error(samples: Sequence[Sample], fitted: _Fitted) -> float:
    return sum(abs(_total(fitted, s) / s.measured_total - 1) for s in samples)


def _total(fitted: _Fitted, sample: Sample) -> int:
    slope = fitted.slopes.get(sample.engine, fitted.slope)
    return max(1, round(slope * sample.predicted_live) + fitted.baselines.get(sample.engine, fitted.baseline))


def _interval_factor(ratios: Sequence[float]) -> float:
    """How far one more ratio is off, up or down, in 95 % of cases.

    With enough ratios the conformal quantile of their own distances, which supposes nothing of their distribution
    (Barber, Candes, Ramdas and Tibshirani, Predictive inference with the jackknife+, 2021); it has to, since a few odd
    runs are far off. With fewer, Student's t prediction interval on logarithms.
    """
    count = len(ratios)
    distances = sorted(abs(math.log(ratio)) for ratio in ratios)
    rank = math.ceil(COVERAGE * (count + 1))
    if rank <= count:
        return math.exp(distances[rank - 1])
    from scipy.stats import t

    spread = math.sqrt(statistics.fmean(distance**2 for distance in distances))
    return math.exp(float(t.ppf((1 + COVERAGE) / 2, count - 1)) * spread * math.sqrt(1 + 1 / count))
