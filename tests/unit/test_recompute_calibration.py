"""What an allocator adds to live bytes: known coefficients are found again, and errors come from runs left out."""

from __future__ import annotations

import random

import pytest

from training_xpu.errors import UserError
from training_xpu.recompute.prediction.calibration import FEWEST_SAMPLES, Sample, fit, shipped

MIB = 2**20


def samples(slope: float, baselines: dict[str, int], noise: float, count: int, seed: int = 1) -> list[Sample]:
    chance = random.Random(seed)
    found = []
    for index in range(count):
        engine = sorted(baselines)[index % len(baselines)]
        live = chance.randint(200, 4000) * MIB
        total = (slope * live + baselines[engine]) * (1 + chance.uniform(-noise, noise))
        found.append(Sample(engine, live, live, round(total)))
    return found


def test_coefficients_are_found_again() -> None:
    baselines = {"ddp": 500 * MIB, "fsdp": 700 * MIB, "deepspeed": -200 * MIB}
    fitted = fit(samples(1.2, baselines, 0.0, 18), "cpu", "glibc", "a test")
    assert fitted.slope == pytest.approx(1.2)
    assert fitted.baselines == pytest.approx(baselines, abs=2)
    assert fitted.error == pytest.approx(0.0, abs=1e-6)
    assert fitted.live_error == 0.0
    assert fitted.interval_factor == pytest.approx(1.0, abs=1e-6)
    assert fitted.expected(1000 * MIB, "fsdp") == pytest.approx(1900 * MIB, abs=4)
    assert (fitted.device_kind, fitted.allocator, fitted.samples) == ("cpu", "glibc", 18)


def test_engines_with_enough_runs_have_slopes_of_their_own() -> None:
    steep, flat = samples(2.4, {"fsdp": 400 * MIB}, 0.0, 6), samples(1.3, {"ddp": 500 * MIB}, 0.0, 8, seed=2)
    few = samples(1.3, {"zero": 600 * MIB}, 0.0, 2, seed=3)
    fitted = fit([*steep, *flat, *few], "cpu", "glibc", "a test")
    assert fitted.slopes == pytest.approx({"fsdp": 2.4, "ddp": 1.3})
    assert fitted.expected(1000 * MIB, "fsdp") == pytest.approx(2800 * MIB, abs=4)
    assert fitted.expected(1000 * MIB, "zero") == pytest.approx(1900 * MIB, abs=4)


def test_an_odd_run_bends_nothing() -> None:
    straight = samples(1.1, {"ddp": 400 * MIB}, 0.0, 12)
    odd = straight[3]._replace(measured_total=3 * straight[3].measured_total)
    fitted = fit([*straight[:3], odd, *straight[4:]], "cpu", "glibc", "a test")
    assert fitted.slope == pytest.approx(1.1)
    assert fitted.baselines["ddp"] == pytest.approx(400 * MIB, abs=2)


@pytest.mark.parametrize("seed", range(4))
def test_the_interval_covers_new_runs_of_the_same_kind(seed: int) -> None:
    baselines = {"ddp": 500 * MIB, "fsdp": 700 * MIB}
    fitted = fit(samples(1.15, baselines, 0.08, 24, seed), "cpu", "glibc", "a test")
    assert fitted.error is not None
    assert 0.01 < fitted.error < 0.08
    new = samples(1.15, baselines, 0.08, 400, seed + 100)
    within = 0
    for sample in new:
        low, high = fitted.interval(sample.predicted_live, sample.engine)
        within += low <= sample.measured_total <= high
    assert within >= 0.95 * len(new)


def test_an_engine_without_runs_has_the_baseline_of_all() -> None:
    fitted = fit(samples(1.0, {"ddp": 500 * MIB, "fsdp": 500 * MIB}, 0.0, 8), "cpu", "glibc", "a test")
    assert fitted.expected(100 * MIB, "plain") == pytest.approx(600 * MIB, abs=2)


def test_too_few_runs_are_refused() -> None:
    few = samples(1.0, {"ddp": MIB}, 0.0, FEWEST_SAMPLES - 1)
    with pytest.raises(UserError, match=f"At least {FEWEST_SAMPLES} are needed"):
        fit(few, "cpu", "glibc", "a test")


def test_what_is_shipped() -> None:
    cpu, accelerator = shipped("cpu"), shipped("cuda")
    assert cpu.device_kind == "cpu"
    assert cpu.samples >= FEWEST_SAMPLES
    assert cpu.error is not None
    assert shipped("xpu") == accelerator
    assert (accelerator.samples, accelerator.error) == (0, None)
    for calibration in (cpu, accelerator):
        low, high = calibration.interval(10**10, "ddp")
        assert low <= calibration.expected(10**10, "ddp") <= high
        assert high > 10**10
