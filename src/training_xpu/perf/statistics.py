"""Statistics of step times and of what is derived from them: warm-up, medians with intervals, ratios with verdicts.

What an interval means here: the range in which the median of this process's steady state lies with 95 % confidence, as
far as its own steps can tell. What differs from one start of the program to the next (memory layout, neighbours on the
machine) is not in it: only more runs would show that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from training_xpu.perf.records import Estimate, RatioEstimate, Verdict

Values = NDArray[np.float64]

RESAMPLES = 4000
SEED = 20177
FEWEST_TO_RESAMPLE = 6  # the smallest n whose range holds the median with over 95 %: 1 - 2 ** (1 - n)
DEFAULT_MARGIN = 0.02

_NOISE_FLOOR = 0.01  # relative; a difference this small is not told from noise, however even the steps are
_NOISE_FLOOR_FEW = 0.1  # of a single step; falls as 0.4 / n, since the spread of few steps says little about the noise
_FEW = 8
_CLIP = 5.0  # in units of the noise: how far one value may pull
_SETTLED = 2.5  # in units of the noise: nearer than this to the steady state is steady
_MAD_TO_SIGMA = 1.4826  # median absolute deviation to standard deviation, of normal noise


class WarmUp(NamedTuple):
    """How many leading steps are not steady state."""

    steps: int
    settled: bool  # False: still drifting where the search had to stop, half way; more steps are needed


def detect_warmup(times: Sequence[float]) -> WarmUp:
    """Finds how many of the first steps differ from the steady state.

    The rule is MSER (White, "An effective truncation heuristic for bias reduction in simulation output", Simulation
    69(6), 1997): drop the first d values, d <= n / 2, where d makes the squared standard error of the mean of the rest,
    sum((x - mean) ** 2) / (n - d) ** 2, smallest. Three changes fit it to step times:

    - Values are first clipped to five times the noise around the median of the later part. A single slow step near the
      end would otherwise outweigh a slow start, and hide it.
    - The noise is at least 1 % of a step, and more with few steps, whose spread says little (10 % up to 4 steps, 5 %
      with 8), so that even steps do not make a warm-up out of nothing.
    - Afterwards the cut moves back over steps that lie within 2.5 times the noise of what remains: MSER alone also
      drops good steps where noise happens to favour it.

    Args:
        times: seconds per step in order, finite and positive.

    Returns:
        The number of warm-up steps, 0 for fewer than two steps, never more than half of them.

    Raises:
        ValueError: a time is not finite or not positive.
    """
    x = _array(times)
    n = len(x)
    if n < 2:
        return WarmUp(0, True)
    if bool((x <= 0).any()):
        raise ValueError("a step cannot take zero or negative time")
    later = x[-max(n - n // 2, min(n - 1, 4)) :]
    centre, noise = _centre_and_noise(later, n)
    clipped = np.clip(x, centre - _CLIP * noise, centre + _CLIP * noise)
    floor = _floor(n) * centre
    scores = [_squared_standard_error(clipped[d:], floor) for d in range(n // 2 + 1)]
    cut = int(np.argmin(scores))
    if cut == 0:
        return WarmUp(0, True)
    centre, noise = _centre_and_noise(x[cut:], n)
    at_the_end = cut == n // 2 and n >= _FEW
    while cut and abs(x[cut - 1] - centre) <= _SETTLED * noise:
        cut -= 1
    return WarmUp(cut, not (at_the_end and cut))


def _floor(n: int) -> float:
    return max(_NOISE_FLOOR, min(_NOISE_FLOOR_FEW, 0.4 / n))


def _centre_and_noise(x: Values, n: int) -> tuple[float, float]:
    """Median and robust standard deviation of x; m / (m - 0.8) corrects short series (Croux and Rousseeuw, 1992)."""
    centre = float(np.median(x))
    spread = _MAD_TO_SIGMA * len(x) / (len(x) - 0.8) * float(np.median(np.abs(x - centre)))
    return centre, max(spread, _floor(n) * centre)


def _squared_standard_error(x: Values, floor: float) -> float:
    m = len(x)
    return float(((x - x.mean()) ** 2).sum() / m**2 + floor**2 / m)


def estimate(values: Sequence[float], seed: int = SEED) -> Estimate:
    """Median, 5th and 95th percentile, and a 95 % interval of the median.

    From six values on, the interval is the percentile bootstrap of the median. Steps that follow one another resemble
    one another, so whole blocks of neighbouring steps are drawn, the series taken as a circle (Politis and Romano, "A
    circular block-resampling procedure for stationary data", 1992); see `block_length`. The interval is widened by
    sqrt(n / (n - block)), since blocks of a short series vary too little, and kept within the range of the values.
    Measured coverage on independent values: 92 to 96 %, whatever their distribution; when neighbours correlate strongly
    (0.6), about 86 % at 35 steps: a short, drifting series cannot know how far it drifts.

    With two to five values no resampling reaches 95 %, as even their whole range does not hold the median that often.
    Then the logarithms are taken as normal and Student's t gives the interval, which is accordingly wide. One value
    tells nothing about the next: the interval is 0 to infinity (minus infinity to infinity where values may be
    negative).

    Args:
        values: one per step, in the order of the steps, finite.
        seed: of the resampling; the same values and seed give the same interval.

    Raises:
        ValueError: there is no value, or one is not finite.
    """
    x = _array(values)
    if not len(x):
        raise ValueError("an estimate needs at least one value")
    p5, median, p95 = (float(v) for v in np.percentile(x, [5, 50, 95]))
    return Estimate(median=median, p5=p5, p95=p95, ci95=_interval(x, seed), count=len(x))


def _interval(x: Values, seed: int) -> tuple[float, float]:
    if len(x) >= FEWEST_TO_RESAMPLE:
        low, high = np.percentile(bootstrap_medians(x, np.random.default_rng(seed)), [2.5, 97.5])
        return float(low), float(high)
    positive = bool((x > 0).all())
    if len(x) == 1:
        return (0.0, math.inf) if positive else (-math.inf, math.inf)
    y = np.log(x) if positive else x
    centre = float(y.mean())
    half = _student(len(y) - 1) * float(y.std(ddof=1)) / math.sqrt(len(y))
    return (_exp(centre - half), _exp(centre + half)) if positive else (centre - half, centre + half)


def bootstrap_medians(values: Sequence[float] | Values, generator: np.random.Generator) -> Values:
    """Medians of `RESAMPLES` circular block resamples, widened as `estimate` describes; shape [RESAMPLES]."""
    x = np.asarray(values, dtype=np.float64)
    n = len(x)
    block = block_length(x)
    starts = generator.integers(0, n, (RESAMPLES, -(-n // block)))
    drawn = ((starts[:, :, None] + np.arange(block)) % n).reshape(RESAMPLES, -1)[:, :n]
    medians = np.median(x[drawn], axis=1)
    centre = np.median(x)
    widened: Values = centre + (medians - centre) * math.sqrt(n / (n - block))
    return np.clip(widened, x.min(), x.max())


def block_length(values: Sequence[float] | Values) -> int:
    """How many neighbouring steps are drawn together: 1 when neighbours do not resemble each other, at most n / 3.

    The rule is Carlstein's (Annals of Statistics 14, 1986) for a first-order autoregressive series with correlation r,
    (2 r / (1 - r ** 2)) ** (2 / 3) * n ** (1 / 3). The correlation is taken from the signs of the deviations from the
    median, on which alone the spread of a median depends, corrected for its bias of about -(1 + 2 r) / n, and turned
    into the correlation of a normal series by sin(pi / 2 * r). Below 1 / sqrt(n), one standard error, it is none.
    """
    x = np.asarray(values, dtype=np.float64)
    n = len(x)
    signs = np.sign(x - np.median(x))
    weight = float((signs**2).sum())
    if n < FEWEST_TO_RESAMPLE or not weight:
        return 1
    r = float((signs[1:] * signs[:-1]).sum()) / weight
    r += (1 + 2 * max(r, 0.0)) / n
    if r * math.sqrt(n) < 1:
        return 1
    rho = min(math.sin(math.pi / 2 * min(r, 1.0)), 0.95)
    wanted = (2 * rho / (1 - rho**2)) ** (2 / 3) * float(n) ** (1 / 3)
    return int(max(1, min(round(wanted), n // 3)))


def ratio(
    values: Sequence[float],
    reference: Sequence[float],
    *,
    margin: float = DEFAULT_MARGIN,
    lower_is_better: bool = False,
    seed: int = SEED,
) -> RatioEstimate:
    """Median of `values` over median of `reference`, with a 95 % interval and a verdict.

    Both arms are resampled independently as in `estimate`. When either has fewer than six values, Welch's t on the
    logarithms takes the place of resampling; when either has one value, the interval is 0 to infinity.

    The verdict: `same` when the whole interval lies within the margin, `faster` or `slower` when it lies on one side
    of 1, else `inconclusive`.

    Args:
        values: the arm under test, positive, in the order of the steps; for a rate such as tokens per second more is
            better, for step times set `lower_is_better`.
        reference: the arm it is compared with.
        margin: relative difference that does not matter to anybody.
        lower_is_better: values are times: a ratio under 1 is `faster`.
        seed: of the resampling.

    Raises:
        ValueError: an arm is empty, or a value is not finite or not positive.
    """
    x, y = _array(values), _array(reference)
    if not len(x) or not len(y):
        raise ValueError("a ratio needs at least one value of each arm")
    if bool((x <= 0).any()) or bool((y <= 0).any()):
        raise ValueError("a ratio needs positive values")
    low, high = _ratio_interval(x, y, seed)
    return RatioEstimate(
        ratio=float(np.median(x) / np.median(y)),
        ci95=(low, high),
        count=len(x),
        count_reference=len(y),
        margin=margin,
        verdict=_verdict(low, high, margin, lower_is_better),
    )


def _ratio_interval(x: Values, y: Values, seed: int) -> tuple[float, float]:
    if min(len(x), len(y)) >= FEWEST_TO_RESAMPLE:
        generator = np.random.default_rng(seed)
        quotients = bootstrap_medians(x, generator) / bootstrap_medians(y, generator)
        low, high = (float(v) for v in np.percentile(quotients, [2.5, 97.5]))
        return low, high
    if min(len(x), len(y)) < 2:
        return 0.0, math.inf
    logs = [np.log(x), np.log(y)]
    centre = float(logs[0].mean() - logs[1].mean())
    variances = [float(v.var(ddof=1)) / len(v) for v in logs]
    total = sum(variances)
    if total == 0:
        return math.exp(centre), math.exp(centre)
    freedom = total**2 / sum(v**2 / (len(w) - 1) for v, w in zip(variances, logs, strict=True))
    half = _student(freedom) * math.sqrt(total)
    return _exp(centre - half), _exp(centre + half)


def _verdict(low: float, high: float, margin: float, lower_is_better: bool) -> Verdict:
    if 1 / (1 + margin) <= low and high <= 1 + margin:
        return "same"
    if low > 1:
        return "slower" if lower_is_better else "faster"
    if high < 1:
        return "faster" if lower_is_better else "slower"
    return "inconclusive"


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf  # 709 is where a double overflows


def _student(freedom: float) -> float:
    """The 97.5 % quantile of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 0.975))


def _array(values: Sequence[float] | Values) -> Values:
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1 or not bool(np.isfinite(x).all()):
        raise ValueError("statistics need a flat series of finite numbers")
    return x
