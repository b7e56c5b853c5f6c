"""Comparing a run with its reproduction; the job itself is played by a function that writes the records of one."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from training_xpu.cli.reproduce import exit_code, page
from training_xpu.errors import UserError
from training_xpu.perf.records import RUN_FILE, ReproductionDocument, RunRecord
from training_xpu.perf.reproduce import check_data, check_reproducible, compare_losses, reproduce
from training_xpu.perf.store import create_run
from training_xpu.records import append_line
from training_xpu.workloads.config import (
    EVENTS_FILE,
    STEPS_FILE,
    Dtype,
    EngineName,
    FlopShares,
    JobConfig,
    PreparedData,
    Scale,
)
from training_xpu.workloads.records import EventRecord, StepRecord

SHARES = FlopShares(attention=0.3, mlp=0.5, head=0.2)
SCALE = Scale(
    kind="full",
    reason="fits",
    parameters_full=1,
    parameters=1,
    layers_full=1,
    layers=1,
    sequence_full=8,
    sequence=8,
    vocabulary_full=8,
    vocabulary=8,
    shares_full=SHARES,
    shares=SHARES,
    target_device="none",
    target_world_size=1,
)
HERE = Path("x")
DATA = PreparedData(
    source="words.txt",
    train_tokens=HERE,
    train_offsets=HERE,
    eval_tokens=HERE,
    eval_offsets=HERE,
    tokenizer=HERE,
    vocabulary_size=8,
    eos_token_id=0,
    pad_token_id=0,
    train_token_count=1000,
    eval_token_count=10,
    document_count=3,
    digest="1",
)
CURVE = [7.0, 6.5, 6.0, 5.5, 5.25, 5.0, 4.75, 4.5]


def job(**changes: Any) -> JobConfig:
    settings: dict[str, Any] = {
        "workload": "ddp/llama3.2-1b",
        "engine": EngineName.DDP,
        "model": {"model_type": "llama"},
        "scale": SCALE,
        "data": DATA,
        "sequence_length": 8,
    }
    return JobConfig(**{**settings, **changes})


def steps(losses: list[float], first: int = 1, step_s: float = 1.0) -> list[StepRecord]:
    return [
        StepRecord(
            rank=0,
            step=number,
            time=float(number),
            loss=loss,
            gradient_norm=None,
            learning_rate=1e-3,
            step_s=step_s + 0.001 * (number % 3),
            data_s=None,
            forward_s=None,
            backward_s=None,
            optimizer_s=None,
            communication_s=None,
            real_tokens=100,
            padded_tokens=0,
            loss_tokens=90,
            model_flops=1.0,
            hardware_flops=1.0,
            peak_memory_bytes=None,
        )
        for number, loss in enumerate(losses, first)
    ]


def write_run(folder: Path, config: JobConfig | None, losses: list[float], step_s: float = 1.0, **changes: Any) -> Path:
    run = create_run(folder, "ddp/llama3.2-1b", "base")
    settings: dict[str, Any] = {
        "name": run.name,
        "created": datetime.now(UTC),
        "command": ["ljperf", "benchmark", "--model", "ddp/llama3.2-1b"],
        "workload": "ddp/llama3.2-1b",
        "arm": "compile",
        "features": ["compile"],
        "config": config,
        "fingerprint": {"torch": "2.13.0"},
        "status": "completed",
    }
    RunRecord(**{**settings, **changes}).write(run / RUN_FILE)
    for step in steps(losses, step_s=step_s):
        append_line(run / STEPS_FILE, step)
    for name, value in (("before", losses[0] + 0.5 if losses else 8.0), ("after", losses[-1] if losses else 8.0)):
        append_line(run / EVENTS_FILE, EventRecord(rank=0, time=0.0, event="evaluation", name=name, value=value))
    return run


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    return [(key, a.get(key), b.get(key)) for key in sorted({*a, *b}) if a.get(key) != b.get(key)]


def again(tmp_path: Path, losses: list[float], original: list[float] = CURVE, **changes: Any) -> ReproductionDocument:
    """Reproduces a run of `original` losses with a job that gives `losses`."""

    def launch(config: JobConfig, arm: str, features: list[str], runs_folder: Path) -> Path:
        assert (arm, features, runs_folder) == ("compile", ["compile"], tmp_path / "runs")
        return write_run(runs_folder, changes.pop("config", config), losses, **changes)

    first = write_run(tmp_path / "runs", job(), original)
    return reproduce(first, launch, tmp_path / "runs", differences)


def test_equal_bit_for_bit(tmp_path: Path) -> None:
    found = again(tmp_path, CURVE)
    assert found.verdict == "identical"
    assert found.loss is not None
    assert (found.loss.steps_compared, found.loss.largest_absolute, found.loss.first_difference) == (8, 0.0, None)
    assert found.loss.evaluation_after == 0.0
    assert found.original != found.reproduction
    assert exit_code(found) == 0
    assert "the losses of 8 steps are equal bit for bit" in page(found)
    assert ReproductionDocument.model_validate_json(found.to_json()) == found


def test_a_difference_within_rounding(tmp_path: Path) -> None:
    found = again(tmp_path, [*CURVE[:5], 5.0 * 1.01, 4.75, 4.5])
    assert found.verdict == "within tolerance"
    assert found.loss is not None
    assert found.loss.first_difference == found.loss.largest_absolute_step == found.loss.largest_relative_step == 6
    assert found.loss.largest_absolute == pytest.approx(0.05)
    assert found.loss.largest_relative == pytest.approx(0.05 / 5.05)
    assert exit_code(found) == 0


def test_another_curve(tmp_path: Path) -> None:
    found = again(tmp_path, [*CURVE[:7], 5.0])
    assert found.verdict == "differs"
    assert exit_code(found) == 1
    assert found.reason == "the losses leave the tolerance of 2 % at step 8"
    assert "relative 10.00% at step 8" in page(found)
    assert "tolerance: 2.0%" in page(found)


def test_throughput_and_environment(tmp_path: Path) -> None:
    found = again(tmp_path, CURVE, step_s=2.0, fingerprint={"torch": "2.14.0", "numpy": "2"})
    assert found.throughput is not None
    assert found.throughput.ratio == pytest.approx(0.5, abs=0.01)
    assert found.throughput.verdict == "slower"
    assert [(d.field, d.original, d.reproduction) for d in found.differences] == [
        ("numpy", None, "2"),
        ("torch", "2.13.0", "2.14.0"),
    ]
    assert "numpy: not there -> 2" in page(found)


def test_a_reproduction_that_failed(tmp_path: Path) -> None:
    found = again(tmp_path, CURVE[:3], status="failed", reason="rank 0: killed")
    assert found.verdict == "failed"
    assert found.reason == "the reproduction failed: rank 0: killed"
    assert found.loss is not None
    assert found.loss.steps_compared == 3
    assert exit_code(found) == 1


def test_a_reproduction_that_was_interrupted(tmp_path: Path) -> None:
    found = again(tmp_path, [], status="interrupted", reason="SIGINT")
    assert found.verdict == "interrupted"
    assert found.loss is None
    assert exit_code(found) == 130


def test_a_reproduction_that_lacks_steps(tmp_path: Path) -> None:
    found = again(tmp_path, CURVE[:5])
    assert found.verdict == "failed"
    assert "only 5 of the original's 8 steps" in found.reason


def test_an_original_that_was_cut_short_is_compared_as_far_as_it_came(tmp_path: Path) -> None:
    assert again(tmp_path, CURVE, original=CURVE[:3]).verdict == "identical"


def test_changed_data_are_refused(tmp_path: Path) -> None:
    changed = DATA.model_copy(update={"digest": "2", "train_token_count": 999})
    with pytest.raises(UserError, match=r"data have changed .* words\.txt") as caught:
        again(tmp_path, CURVE, config=job(data=changed))
    assert "1,000 training tokens, now 999" in caught.value.remedy
    check_data(DATA, DATA.model_copy(update={"source": "moved.txt"}))


def test_nothing_of_the_original_is_overwritten(tmp_path: Path) -> None:
    config = job(model_folder=tmp_path / "m", checkpoint_folder=tmp_path / "c", save_every=2, report_to=["wandb"])
    run = write_run(tmp_path, config, CURVE)
    launched = check_reproducible(run, RunRecord.read(run / RUN_FILE))
    assert launched == job()


@pytest.mark.parametrize(
    ("config", "losses", "changes", "problem"),
    [
        (None, CURVE, {}, "a command of your own"),
        (job(), CURVE, {"status": "running"}, "still running"),
        (job(), [], {"status": "failed", "reason": "no memory"}, "no steps to compare with: no memory"),
        (job(initial_weights=Path("/nowhere/weights")), CURVE, {}, "/nowhere/weights, which are gone"),
        (job(resume_from=Path("/nowhere/step-5")), CURVE, {}, "/nowhere/step-5, which are gone"),
        (job(nnodes=2), CURVE, {}, "ran on 2 nodes"),
    ],
)
def test_runs_that_cannot_be_reproduced(
    tmp_path: Path, config: JobConfig | None, losses: list[float], changes: dict[str, Any], problem: str
) -> None:
    run = write_run(tmp_path, config, losses, **changes)

    def launch(config: JobConfig, arm: str, features: list[str], runs_folder: Path) -> Path:
        raise AssertionError("nothing may be started")

    with pytest.raises(UserError) as caught:
        reproduce(run, launch, tmp_path, differences)
    assert problem in caught.value.problem
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("a", "b", "identical", "within"),
    [
        ([math.nan], [math.nan], True, True),
        ([math.nan], [1.0], False, False),
        ([math.inf], [math.inf], True, True),
        ([math.inf], [1.0], False, False),
        ([0.0], [0.0], True, True),
        ([0.01], [0.011], False, True),  # 10 % of a loss near zero is rounding still
    ],
)
def test_losses_that_are_no_plain_numbers(a: list[float], b: list[float], identical: bool, within: bool) -> None:
    found = compare_losses(steps(a), steps(b), Dtype.BF16)
    assert (found.identical, found.within_tolerance) == (identical, within)
    json.loads(found.to_json())


def test_fp32_is_held_to_more(tmp_path: Path) -> None:
    a, b = steps([5.0]), steps([5.01])
    assert compare_losses(a, b, Dtype.BF16).within_tolerance
    assert not compare_losses(a, b, Dtype.FP32).within_tolerance


def test_curves_are_compared_by_step_number() -> None:
    found = compare_losses(steps(CURVE[:4]), steps(CURVE[2:], first=3), Dtype.FP32)
    assert (found.identical, found.steps_compared) == (True, 2)
    with pytest.raises(ValueError):
        compare_losses(steps(CURVE), steps(CURVE, first=100), Dtype.FP32)
