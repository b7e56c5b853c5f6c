"""Budgets of experiments: what fits, what the base must do, and how a proxy's budget is scaled."""

from __future__ import annotations

from typing import Any

import pytest

from training_xpu.errors import JobFailed, UserError
from training_xpu.perf import memory_target
from training_xpu.recompute.prediction.predict import PeakPrediction

MIB = 2**20


class Job:
    """The fields of a job that matter here."""

    workload = "ddp/llama3.2-1b"
    engine: Any = "ddp"
    micro_batch = 2
    zero_stage = 0
    nproc = 2
    gradient_checkpointing = False

    def __init__(self, kind: str = "full") -> None:
        self.scale = type("Scale", (), {"kind": kind})()
        self.changes: dict[str, Any] = {}

    def model_copy(self, update: dict[str, Any]) -> Job:
        self.changes = update
        other = Job()
        vars(other).update(update)
        return other


def prediction(*mebibytes: int) -> PeakPrediction:
    peaks = tuple(size * MIB for size in mebibytes)
    blocks = len(peaks) - 1
    parts = tuple({"model states": peak // 2, "block activations": peak - peak // 2} for peak in peaks)
    return PeakPrediction(("Block",) * blocks, ("b",) * blocks, peaks, ("",) * len(peaks), parts, {"Block": MIB})


def budgeted(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, kind: str = "full"
) -> tuple[dict[str, Any], list[str]]:
    def predict(job: Job, device_type: str) -> PeakPrediction:
        return prediction(*(peak * job.micro_batch // 2 for peak in (400, 300, 200)))

    monkeypatch.setattr(memory_target, "predict", predict)
    job, said = Job(kind), list[str]()
    memory_target.with_memory_budget(job, asked, "cpu", said.append)  # type: ignore[arg-type]
    return job.changes, said


@pytest.mark.parametrize(
    ("asked", "recompute"), [("live:400MiB", False), ("live:399MiB", True), ("live:200MiB", True), ("live:1GiB", False)]
)
def test_the_base_recomputes_everything_where_nothing_less_fits(
    asked: str, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, said = budgeted(monkeypatch, asked)
    assert changes == {"memory_budget": asked, "gradient_checkpointing": recompute}
    assert bool(said) is recompute


def test_a_budget_that_nothing_meets_names_the_largest_parts_and_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(JobFailed) as caught:
        budgeted(monkeypatch, "live:199MiB")
    assert caught.value.exit_code == 1
    assert "with all 2 layers recomputed it needs 200.00 MiB of 199.00 MiB" in caught.value.problem
    assert "model states 100.00 MiB" in caught.value.problem
    assert "--micro-batch 1" in caught.value.remedy
    with pytest.raises(JobFailed) as caught:
        budgeted(monkeypatch, "live:99MiB")
    assert caught.value.remedy == "Try a larger budget (--memory-budget or TRAINING_XPU_MEMORY_BUDGET)."


def test_a_malformed_budget_is_wrong_input(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError) as caught:
        budgeted(monkeypatch, "lots")
    assert caught.value.exit_code == 2
    assert "--memory-budget is 'lots'" in caught.value.problem


@pytest.mark.parametrize(("needed", "count"), [(0, 0), (8, 1), (16, 2), (12, 2)])
def test_a_proxy_recomputes_the_share_of_the_full_model(
    needed: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 layers, of which `needed` must be recomputed on the target, and a proxy of 2."""
    memory = 80 * 2**30
    peaks = [memory * 2 if n < needed else memory // 4 for n in range(17)]
    full = PeakPrediction(("B",) * 16, ("b",) * 16, tuple(peaks), ("",) * 17, ({},) * 17, {})
    monkeypatch.setattr("training_xpu.recompute.prediction.predict.predict_peaks", lambda model, setting: full)
    monkeypatch.setattr("training_xpu.perf.plan_subject.meta_model", lambda config: None)
    job: Any = Job("proxy")
    job.dtype = "bf16"
    proxy = prediction(400, 300, 200)
    budget = memory_target.scaled_budget(job, proxy, lambda text: None)
    assert budget.live
    assert proxy.fewest_recomputed(budget.bytes) == count
