"""The summary of a run, against numbers worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from training_xpu.perf.summary import (
    evaluation_losses,
    group_steps,
    losses_by_step,
    measured,
    settled_at,
    summarise,
)
from training_xpu.workloads.config import EngineName, FlopShares, JobConfig, PreparedData, Scale
from training_xpu.workloads.records import EventRecord, StepRecord


def job(**changes: Any) -> JobConfig:
    shares = FlopShares(attention=0.3, mlp=0.5, head=0.2)
    settings: dict[str, Any] = {
        "workload": "ddp/llama3.2-1b",
        "engine": EngineName.DDP,
        "model": {"model_type": "llama"},
        "scale": Scale(
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
            shares_full=shares,
            shares=shares,
            target_device="none",
            target_world_size=1,
        ),
        "data": PreparedData(
            source="words",
            train_tokens=Path("a"),
            train_offsets=Path("b"),
            eval_tokens=Path("c"),
            eval_offsets=Path("d"),
            tokenizer=Path("e"),
            vocabulary_size=8,
            eos_token_id=0,
            pad_token_id=0,
            train_token_count=100,
            eval_token_count=10,
            document_count=3,
            digest="1",
        ),
        "sequence_length": 8,
        "nproc": 2,
        "peak_flops_per_rank": 1e12,
        "peak_source": "known",
    }
    return JobConfig(**{**settings, **changes})


def step(number: int, rank: int = 0, **changes: Any) -> StepRecord:
    values: dict[str, Any] = {
        "rank": rank,
        "step": number,
        "time": 1000.0 + number,
        "loss": 7.0 - number,
        "gradient_norm": 1.0,
        "learning_rate": 1e-3,
        "step_s": 2.0,
        "data_s": 0.1,
        "forward_s": 0.5,
        "backward_s": 1.0,
        "optimizer_s": 0.2,
        "communication_s": None,
        "real_tokens": 100,
        "padded_tokens": 0,
        "loss_tokens": 90,
        "model_flops": 1e12,
        "hardware_flops": 1.3e12,
        "peak_memory_bytes": 1000,
    }
    return StepRecord(**{**values, **changes})


def event(kind: Any, name: str = "", value: float | None = None, rank: int = 0) -> EventRecord:
    return EventRecord(rank=rank, time=0.0, event=kind, name=name, value=value)


def two_ranks(count: int, **of_rank_1: Any) -> list[StepRecord]:
    return [s for n in range(1, count + 1) for s in (step(n), step(n, 1, **of_rank_1))]


def test_the_slowest_rank_sets_the_pace() -> None:
    found = summarise(two_ranks(10, step_s=4.0, real_tokens=60, forward_s=0.7, model_flops=2e12), [], job())
    assert found.steps_measured == 10
    assert found.warmup_steps == 0
    assert found.step_time_s is not None
    assert found.step_time_s.median == 4.0
    assert found.tokens_per_second_per_device is not None
    assert found.tokens_per_second_per_device.median == (100 + 60) / 2 / 4
    assert found.phases_s["forward"] == pytest.approx(0.6)
    assert found.phases_s["communication"] is None
    assert found.model_flops_per_second == 3e12 / 2 / 4
    assert found.mfu == 3e12 / (4.0 * 2 * 1e12)
    assert found.hfu == 2.6e12 / (4.0 * 2 * 1e12)
    assert found.mfu_formula
    assert found.peak_flops == 1e12


def test_gradient_accumulation_and_packing_count_real_tokens_once() -> None:
    # 3 micro batches of 2 sequences of 8 tokens, the last sequence half padding: 44 real, 4 padded; 0.5 s a step.
    steps = [step(n, step_s=0.5, real_tokens=44, padded_tokens=4, loss_tokens=38) for n in range(1, 9)]
    config = job(nproc=1, gradient_accumulation=3, micro_batch=2, packing=False)
    found = summarise(steps, [], config)
    assert found.tokens_per_second_per_device is not None
    assert found.tokens_per_second_per_device.median == 88.0
    assert found.real_token_share == pytest.approx(44 / 48)


def test_warmup_is_left_out_of_everything_but_the_loss() -> None:
    steps = two_ranks(12)
    for record in steps[:4]:
        record.step_s = 30.0
        record.peak_memory_bytes = 9999
        record.data_s = 20.0
    found = summarise(steps, [], job())
    assert (found.warmup_steps, found.steps_measured) == (2, 10)
    assert found.step_time_s is not None
    assert found.step_time_s.p95 == 2.0
    assert found.peak_memory_bytes == 1000
    assert found.data_share == pytest.approx(0.05)
    assert found.loss.first == 6.0
    assert found.loss.last == 7.0 - 12


def test_data_share_counts_rare_stalls() -> None:
    steps = [step(n, data_s=0.0) for n in range(1, 10)] + [step(10, data_s=4.0, step_s=6.0)]
    assert summarise(steps, [], job(nproc=1)).data_share == pytest.approx(4 / (9 * 2 + 6))


def test_only_steps_that_every_rank_completed() -> None:
    steps = [*two_ranks(5), step(6), step(7), step(8, 1)]
    assert [g.step for g in group_steps(steps, job())] == [1, 2, 3, 4, 5]
    assert summarise(steps, [], job()).loss.last == -1.0  # step 8, of one rank alone


def test_a_rank_that_never_wrote_leaves_no_complete_step() -> None:
    found = summarise([step(1), step(2)], [], job())
    assert found.steps_measured == 0
    assert found.step_time_s is None
    assert found.loss.first == 6.0


def test_a_step_done_twice_counts_as_it_was_done_last() -> None:
    steps = [step(1), step(2), step(3, step_s=9.0, loss=1.0), step(3, step_s=2.5, loss=2.0), step(4)]
    groups = group_steps(steps, job(nproc=1))
    assert [g.step for g in groups] == [1, 2, 3, 4]
    assert groups[2].step_s == 2.5
    assert losses_by_step(steps)[3] == 2.0


def test_a_resumed_run_begins_where_it_went_on() -> None:
    found = summarise([step(n) for n in range(21, 31)], [], job(nproc=1))
    assert found.steps_measured == 10
    assert found.loss.first == 7.0 - 21


def test_a_node_with_a_folder_of_its_own() -> None:
    # The second node's ranks are 2 and 3; the first node's records are elsewhere.
    steps = [step(n, rank) for n in range(1, 5) for rank in (2, 3)]
    found = summarise(steps, [], job(nnodes=2))
    assert found.steps_measured == 4
    assert found.tokens_per_second_per_device is not None
    assert found.tokens_per_second_per_device.median == 50.0
    assert set(found.peak_memory_bytes_by_rank) == {2, 3}


def test_both_nodes_in_one_folder_must_be_complete() -> None:
    steps = [step(n, rank) for n in range(1, 5) for rank in range(4)]
    assert len(group_steps(steps[:-1], job(nnodes=2))) == 3


def test_no_steps_at_all() -> None:
    found = summarise([], [], job())
    assert (found.steps_measured, found.warmup_steps) == (0, 0)
    assert found.tokens_per_second_per_device is None
    assert found.mfu is None
    assert found.peak_memory_bytes is None
    assert found.peak_flops == 1e12
    assert type(found).model_validate_json(found.to_json()) == found


def test_one_step() -> None:
    found = summarise([step(1)], [], job(nproc=1))
    assert found.steps_measured == 1
    assert found.step_time_s is not None
    assert found.step_time_s.ci95 == (0.0, math.inf)
    assert type(found).model_validate_json(found.to_json()) == found


def test_evaluations_and_live_bytes_come_from_events() -> None:
    events = [
        event("phase", "building"),
        event("evaluation", "before", 9.0),
        event("evaluation", "after", 5.0),
        event("evaluation", "after", 5.0, rank=1),
        event("live-bytes", value=70.0),
        event("live-bytes", value=80.0, rank=1),
    ]
    found = summarise(two_ranks(3), events, job())
    assert (found.loss.eval_before, found.loss.eval_after) == (9.0, 5.0)
    assert found.live_bytes_peak == 80
    assert evaluation_losses(events) == {"before": 9.0, "after": 5.0}


def test_a_diverged_loss_stays_nan() -> None:
    steps = [step(1), step(2, loss=math.nan)]
    found = summarise(steps, [event("evaluation", "after", math.nan)], job(nproc=1))
    assert found.loss.last is not None
    assert math.isnan(found.loss.last)
    assert '"last":"NaN"' in found.to_json()
    assert found.loss.eval_after is not None
    assert math.isnan(found.loss.eval_after)


def test_hidden_phases_and_unknown_numbers_stay_null() -> None:
    steps = two_ranks(6, data_s=None, peak_memory_bytes=None)
    found = summarise(steps, [], job(peak_flops_per_rank=None), peak_memory_kind="allocator peak")
    assert found.phases_s["data"] is None
    assert found.data_share is None
    assert found.mfu is None
    assert found.mfu_formula == ""
    assert found.peak_memory_bytes_by_rank == {0: 1000}
    assert found.peak_memory_kind == "allocator peak"
    silent = summarise([step(n, peak_memory_bytes=None) for n in range(1, 4)], [], job(nproc=1), "allocator peak")
    assert silent.peak_memory_kind == ""


def test_a_step_without_a_time_is_not_measured() -> None:
    steps = [step(1), step(2, step_s=0.0), step(3, step_s=math.nan), step(4)]
    assert [g.step for g in measured(steps, job(nproc=1)).steps] == [1, 4]


@pytest.mark.parametrize(
    "damage",
    [
        {"step_s": 1e-320},
        {"step_s": 1e300},
        {"real_tokens": 10**400},
        {"real_tokens": -5},
        {"model_flops": math.inf},
        {"hardware_flops": -1.0},
        {"forward_s": math.nan},
        {"peak_memory_bytes": 10**30},
        {"rank": 7},
        {"rank": -1},
    ],
)
def test_a_damaged_step_neither_counts_nor_breaks_the_summary(damage: dict[str, Any]) -> None:
    config = job(nproc=1)
    good = [step(n) for n in (1, 2, 4)]
    found = summarise([*good, step(3, **damage)], [], config)
    assert found.model_copy(update={"loss": None}) == summarise(good, [], config).model_copy(update={"loss": None})
    assert found.steps_measured == 3
    assert "Infinity" not in found.to_json()


def test_a_damaged_job_of_a_billion_ranks_does_not_fill_memory() -> None:
    assert group_steps([step(1)], job(nproc=10**12)) == []


def applied(time: float, pid: int, **data: Any) -> dict[str, Any]:
    return {"feature": "recompute", "event": "applied", "host": "a", "pid": pid, "time": time, "data": data}


def test_steps_in_which_features_measure_are_warm_up() -> None:
    reports = [
        {"feature": "recompute", "event": "subscribed", "host": "a", "pid": 1, "time": 1000.0},
        applied(1002.5, 1, settled=False),
        applied(1003.5, 1, settled=True),
        applied(1003.7, 2, settled=True),
        applied(1008.0, 2, settled=True),  # planned again later, which costs what it costs
    ]
    assert settled_at(reports) == 1003.7
    assert settled_at(reports[:2]) is None
    found = summarise(two_ranks(10), [], job(), settled_at=settled_at(reports))
    assert (found.warmup_steps, found.steps_measured) == (4, 6)  # step 4 ends at 1004.0


def test_a_run_that_ends_while_features_still_measure_keeps_its_steps() -> None:
    found = measured(two_ranks(3), job(), settled_at=1002.9)
    assert (len(found.steps), found.settled) == (3, False)
