"""Plans: what is recommended, what is said when nothing fits, and which runs a calibration is fitted to."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from training_xpu.cli import plan as verb
from training_xpu.errors import UserError
from training_xpu.perf import calibrate, plan, plan_plot
from training_xpu.perf.calibrate import calibration_file, calibration_for
from training_xpu.perf.plan_records import PlanDocument
from training_xpu.perf.plan_subject import PlanRequest, build_subject
from training_xpu.perf.records import RunRecord, Summary
from training_xpu.recompute.prediction.calibration import shipped
from training_xpu.recompute.prediction.setting import TrainingSetting
from training_xpu.records import Record

GIB = 2**30
CONFIG = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4}
CONFIG |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 512}


class TenPercent(Record):
    """A calibration that is known: a tenth more than is alive is expected, within nothing and a fifth."""

    device_kind: str = "cuda"
    allocator: str = "of the test"
    samples: int = 10
    fitted_on: str = "nothing"
    error: float | None = 0.01

    def expected(self, live: int, engine: str) -> int:
        return live + live // 10

    def interval(self, live: int, engine: str) -> tuple[int, int]:
        return live, live + live // 5


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., PlanDocument]:
    """Plans a small model on one rank with the calibration above."""
    monkeypatch.setattr(plan, "calibration_for", lambda device_type: (TenPercent(), "of the test"))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")

    def make(memory: int = 8 * GIB, **changes: Any) -> PlanDocument:
        request = PlanRequest(
            model=f"ddp/{tmp_path}", seq_len=256, micro_batch=8, world_size=1, dtype="fp32", device_memory=str(memory)
        )
        return plan.make_plan(replace(request, **changes), tmp_path / "runs")

    return make


def test_the_fewest_layers_that_fit_are_recommended(planned: Callable[..., PlanDocument]) -> None:
    roomy = planned()
    assert (roomy.recommended_layers, roomy.policy) == (0, "none")
    upper = [option.predicted_peak_interval_bytes[1] for option in roomy.options]
    assert upper == sorted(upper, reverse=True)
    assert len(set(upper)) == 5
    for layers, policy in ((1, "recompute"), (3, "recompute"), (4, "recompute all")):
        exact = planned(upper[layers])
        assert (exact.recommended_layers, exact.policy) == (layers, policy)
        assert exact.parts == exact.options[layers].parts
        assert [option.fits for option in exact.options] == [n >= layers for n in range(5)]
    tight = planned(upper[4] - 1)
    assert (tight.recommended_layers, tight.policy) == (None, "does not fit")


def test_parts_add_up_and_the_overhead_is_what_is_expected_beyond_live_bytes(
    planned: Callable[..., PlanDocument],
) -> None:
    for option in planned().options:
        live = option.predicted_live_bytes
        assert option.predicted_peak_interval_bytes == (live, live + live // 5)
        assert option.parts["overhead"] == option.predicted_peak_bytes - live == pytest.approx(live / 10, abs=1)
        assert sum(option.parts.values()) == option.predicted_peak_bytes


def test_a_live_budget_is_compared_with_live_tensors_alone(
    planned: Callable[..., PlanDocument], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    live = [option.predicted_live_bytes for option in planned().options]
    monkeypatch.setenv("TRAINING_XPU_MEMORY_BUDGET", f"live:{live[2]}")
    document = planned(device_memory=None)
    assert (document.budget_live, document.budget_bytes, document.recommended_layers) == (True, live[2], 2)
    assert [option.fits for option in document.options] == [size <= live[2] for size in live]
    assert document.options[2].predicted_peak_interval_bytes[1] > live[2]
    assert planned(device_memory=f"live:{live[2]}").recommended_layers == 2
    verb.show(document)
    shown = capsys.readouterr().out
    assert "live" in document.amount_names
    assert "up to" not in shown
    assert f"{live[2] / 2**20:.2f} MiB (TRAINING_XPU_MEMORY_BUDGET=live:{live[2]})" in shown
    assert '"live" must fit it' in shown


def test_what_does_not_fit_a_live_budget_is_told_in_live_tensors(planned: Callable[..., PlanDocument]) -> None:
    live = planned().options[-1].predicted_live_bytes
    document = planned(device_memory=f"live:{live - 1}")
    error = plan.does_not_fit(document)
    assert f"its live tensors need {live / 2**20:.2f} MiB of" in error.problem
    assert "overhead" not in error.problem
    half = planned(micro_batch=4).options[-1].predicted_live_bytes
    assert document.suggestions == [f"--micro-batch 4 ({half / 2**20:.2f} MiB)"]


def test_a_small_model_is_shown_in_mebibytes(
    planned: Callable[..., PlanDocument], capsys: pytest.CaptureFixture[str]
) -> None:
    document = planned()
    option = document.options[0]
    verb.show(document)
    title, *rows = capsys.readouterr().out.splitlines()
    assert title.rstrip().endswith("; MiB of one rank")
    first = next(row for row in rows if row.strip().startswith("0 of 4"))
    assert f"{option.predicted_peak_bytes / 2**20:.2f}" in first
    assert "peak MiB" in plan_plot.plot_page(document)
    error = plan.does_not_fit(planned(2**21))
    assert " GiB" not in str(error)
    larger = option.model_copy(update={"predicted_peak_interval_bytes": (0, 2 * GIB)})
    verb.show(document.model_copy(update={"options": [larger, *document.options[1:]]}))
    assert capsys.readouterr().out.splitlines()[0].rstrip().endswith("; GiB of one rank")


def test_the_title_says_what_a_bare_number_is(planned: Callable[..., PlanDocument]) -> None:
    document = planned()
    assert plan_plot.title(document).endswith(", 1 rank, 8 x 256 tokens, fp32")
    own = document.model_copy(update={"sequence_length": None, "world_size": 8})
    assert plan_plot.title(own).endswith(", 8 ranks, batch 8, fp32")


def test_what_was_not_given_is_said(planned: Callable[..., PlanDocument], capsys: pytest.CaptureFixture[str]) -> None:
    document = planned(world_size=None)
    assert document.defaults == ["8 ranks, the default of a folder"]
    verb.show(document)
    assert "Not given: 8 ranks, the default of a folder." in capsys.readouterr().out
    verb.show(planned())
    assert "Not given" not in capsys.readouterr().out


def test_what_is_never_written_to_is_alive_and_not_resident(
    planned: Callable[..., PlanDocument], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = {"model": f"deepspeed/{tmp_path}", "zero": 2}
    resident, reserved = planned(device="cpu", **engine), planned(**engine)
    parameters = resident.parameters
    # In the bucket of half a billion elements no more is written to than there are gradients.
    never = 4 * (500_000_000 - 2 * parameters)
    for option, other in zip(resident.options, reserved.options, strict=True):
        live, untouched = option.predicted_live_bytes, option.untouched_bytes
        assert untouched >= never
        touched = live - untouched
        assert option.predicted_peak_interval_bytes == (touched, touched + touched // 5)
        assert option.parts["overhead"] == option.predicted_peak_bytes - touched
        assert sum(option.parts.values()) == option.predicted_peak_bytes
        assert other.untouched_bytes == 0
        assert other.parts["communication buffers"] - option.parts["communication buffers"] == untouched
    verb.show(resident)
    assert "allocated and never written to" in capsys.readouterr().out
    verb.show(reserved)
    assert "never written to" not in capsys.readouterr().out
    least = min(option.predicted_live_bytes for option in resident.options)
    assert planned(device="cpu", device_memory=f"live:{least}", **engine).recommended_layers is not None
    short = planned(device="cpu", device_memory=f"live:{least - 1}", **engine)
    assert "largest: buffers never written to" in plan.does_not_fit(short).problem


def test_states_and_saved_activations_by_hand(planned: Callable[..., PlanDocument]) -> None:
    document = planned()
    block = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 160 + 2 * 64
    assert document.parameters == 4 * block + 2 * 256 * 64 + 64
    # A recomputed layer keeps its input alone: 8 x 256 tokens of 64 channels in fp32.
    kept = [option.parts["block activations"] for option in document.options]
    saved = {kept[n] - kept[n + 1] for n in range(3)}
    assert len(saved) == 1
    # SDPA keeps q, k, v (with k and v of half the heads) and its output; the MLP three vectors of its width; norms
    # their inputs and what they multiply: at least 3 hidden vectors more.
    tokens = 8 * 256 * 4
    assert saved.pop() > tokens * (64 + 2 * 32 + 64 + 3 * 160 + 3 * 64)


def test_the_hf_trainer_is_ddp_on_several_ranks(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    for ranks, engine in ((1, "plain"), (2, "ddp")):
        request = PlanRequest(model=f"transformers/{tmp_path}", world_size=ranks, device_memory="1GiB")
        assert plan.setting_of(build_subject(request), request).engine == engine


def test_the_error_names_the_largest_parts_and_what_would_fit(planned: Callable[..., PlanDocument]) -> None:
    smallest = planned().options[-1]
    document = planned(smallest.predicted_peak_interval_bytes[1] - 1)
    error = plan.does_not_fit(document)
    assert error.exit_code == 1
    assert len(str(error).splitlines()) == 2
    named = [part for part in smallest.parts if f"{part} " in error.problem.partition("largest: ")[2]]
    assert sorted(named, key=smallest.parts.__getitem__) == sorted(smallest.parts, key=smallest.parts.__getitem__)[-3:]
    (suggestion,) = document.suggestions  # a micro batch of 4 is the largest that fits
    assert suggestion.startswith("--micro-batch 4 (")
    assert suggestion in error.remedy
    assert planned(document.budget_bytes, micro_batch=4).recommended_layers is not None


@dataclass
class FakeSubject:
    inputs: None
    budget: Any


class FakePlanner:
    """Needs 1 byte for a sequence, and 100 bytes of states that each stage halves and ranks share from stage 1."""

    def __init__(self, setting: TrainingSetting, budget: int) -> None:
        self.setting = setting
        self.subject = FakeSubject(None, plan_budget(budget))

    def smallest(self, setting: TrainingSetting) -> int:
        ranks = setting.world_size if setting.zero_stage or setting.engine == "fsdp" else 1
        return setting.batch_size + 100 // (2**setting.zero_stage * ranks)


def plan_budget(size: int) -> Any:
    from training_xpu.recompute.budget import Budget

    return Budget(size, "a test")


@pytest.mark.parametrize(
    ("engine", "stage", "ranks", "batch", "budget", "expected"),
    [
        ("deepspeed", 0, 2, 8, 104, ["--micro-batch 4", "--zero 1"]),
        ("deepspeed", 1, 2, 8, 28, ["--micro-batch 2", "--zero 2"]),  # 2 + 25, 8 + 12
        ("deepspeed", 2, 2, 8, 9, ["--micro-batch 1 --zero 3"]),  # 1 + 12 and 8 + 6 are too much, 1 + 6 is not
        ("deepspeed", 3, 2, 8, 5, ["--micro-batch 1 --world-size 4"]),  # 1 + 100 / (8 x 4)
        ("fsdp", 0, 2, 1, 14, ["--world-size 8"]),  # 1 + 100 / 8
        ("ddp", 0, 2, 4, 90, []),
    ],
)
def test_suggestions_begin_with_the_smallest_change(
    engine: Any, stage: int, ranks: int, batch: int, budget: int, expected: list[str]
) -> None:
    setting = TrainingSetting(engine=engine, zero_stage=stage, world_size=ranks, batch_size=batch)
    fake: Any = FakePlanner(setting, budget)
    found = [suggestion.partition(" (")[0] for suggestion in plan.suggestions(fake)]
    assert found == expected


def test_a_long_table_shows_what_matters(planned: Callable[..., PlanDocument]) -> None:
    document = planned()
    assert [o.layers for o in verb._selected(document)] == [0, 1, 2, 3, 4]
    option = document.options[0]
    options = [option.model_copy(update={"layers": n}) for n in range(81)]
    long = document.model_copy(update={"layers": 80, "options": options, "recommended_layers": 33})
    assert [o.layers for o in verb._selected(long)] == [0, 20, 32, 33, 34, 40, 60, 80]
    nothing = long.model_copy(update={"recommended_layers": None})
    assert [o.layers for o in verb._selected(nothing)] == [0, 20, 40, 60, 80]


def test_a_part_that_gave_back_more_than_it_took_is_nothing() -> None:
    assert plan._non_negative({"a": 10, "b": -3, "c": 2}) == {"a": 7, "b": 0, "c": 2}


def run_record(**changes: Any) -> RunRecord:
    summary = Summary(
        steps_measured=3,
        warmup_steps=0,
        peak_memory_bytes=900,
        peak_memory_kind="peak resident set",
        live_bytes_peak=500,
    )
    record = RunRecord(
        name="a run",
        created=datetime.now(UTC),
        command=[],
        workload="ddp/x",
        arm="base",
        features=[],
        status="completed",
        summary=summary,
    )
    return record.model_copy(update=changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"status": "failed"}, "not completed"),
        ({"status": "interrupted", "summary": None}, "not completed"),
        ({"summary": None}, "a command of your own"),
        ({}, "a command of your own"),
        ({"config": object(), "summary": None}, "without measured steps"),
        ({"config": object(), "features": ["recompute"]}, "features"),
        ({"config": object(), "kind": "allocator peak"}, "reserved"),
        ({"config": object(), "kind": "peak resident set since process start"}, "per step"),
        ({"config": object(), "live": None}, "live tensor bytes"),
    ],
)
def test_runs_that_tell_nothing_about_the_allocator(changes: dict[str, Any], said: str) -> None:
    record = run_record(**{k: v for k, v in changes.items() if k not in ("kind", "live")})
    if record.summary is not None:
        record.summary.peak_memory_kind = changes.get("kind", record.summary.peak_memory_kind)
        record.summary.live_bytes_peak = changes.get("live", record.summary.live_bytes_peak)
    reason = calibrate.unsuitable(record)
    assert reason is not None
    assert said in reason


def test_a_completed_run_of_a_known_model_is_a_sample() -> None:
    config: Any = object()
    assert calibrate.unsuitable(run_record(config=config)) is None
    assert calibrate.unsuitable("damaged") == "unreadable"
    assert calibrate.device_kind_of(run_record(fingerprint={"hardware": {"kind": "cuda"}})) == "cuda"


def test_each_reason_for_passing_over_runs_is_said(tmp_path: Path) -> None:
    runs: list[dict[str, Any]] = [{"status": "failed"}, {"summary": None}, {"summary": None}, {}]
    for number, changes in enumerate(runs):
        folder = tmp_path / f"20261201-00000{number}-ddp-x-base"
        folder.mkdir()
        run_record(**changes).write(folder / "run.json")
    found = calibrate.collect(tmp_path, print)
    assert found.passed_over == {"not completed": 1, "of a command of your own, whose model is not known": 3}


def test_samples_leave_out_what_is_never_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    class Prediction:
        blocks = 2
        peaks = (500, 450, 400)

        def untouched(self, recomputed: int) -> int:
            return 100 + recomputed

    setting = TrainingSetting(engine="deepspeed", zero_stage=2)
    monkeypatch.setattr(calibrate, "setting_of_job", lambda job, kind: setting)
    monkeypatch.setattr("training_xpu.perf.plan_subject.meta_model", lambda config: None)
    monkeypatch.setattr("training_xpu.recompute.prediction.predict.predict_peaks", lambda model, setting: Prediction())

    @dataclass
    class Job:
        gradient_checkpointing: bool
        model: str = "of a test"

    plain: Any
    plain, recomputed = (calibrate._sample(run_record(config=Job(on)), {}) for on in (False, True))
    assert plain == ("deepspeed zero-2", 500 - 100, 500 - 100, 900)
    assert recomputed == ("deepspeed zero-2", 400 - 102, 500 - 102, 900)


def test_calibrating_needs_runs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no folder"):
        calibrate.calibrate_from(tmp_path / "nowhere", print)
    with pytest.raises(UserError, match="no runs in"):
        calibrate.calibrate_from(tmp_path, print)
    folder = tmp_path / "20261201-000000-ddp-x-base"
    folder.mkdir()
    run_record(status="failed").write(folder / "run.json")
    with pytest.raises(UserError, match=r"0 runs .* 6 of one kind of device are needed .*1 not completed") as refused:
        calibrate.calibrate_from(tmp_path, print)
    assert refused.value.exit_code == 2


def test_a_calibration_of_an_older_version_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINING_XPU_CACHE", str(tmp_path))
    own = shipped("cpu").model_copy(update={"baseline": 12345})
    file = calibration_file("cpu")
    file.parent.mkdir(parents=True, exist_ok=True)
    own.write(file)
    assert calibration_for("cpu")[0].baseline == 12345
    own.model_copy(update={"schema_version": 1}).write(file)
    found, source = calibration_for("cpu")
    assert found == shipped("cpu")
    assert "fit it again with --calibrate" in source
