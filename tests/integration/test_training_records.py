"""What a run leaves: steps, events, run.json, the document, the table, trackers; counted by hand from known data."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from training_harness import Done, Ljperf, Run, lines_of

SENTENCE = "each document of this text has the same words and so it has the same number of tokens"
STEPS, RANKS, ACCUMULATION, MICRO, SEQUENCE = 6, 2, 2, 2, 64


@pytest.fixture(scope="module")
def padded(ljperf: Ljperf) -> Done:
    """Two ranks, accumulation, padding, recompute, live bytes and TensorBoard, on documents of one length."""
    file = ljperf.folder / "same.jsonl"
    file.write_text((json.dumps({"text": SENTENCE}) + "\n") * 200)
    options = (
        f"--data same.jsonl --nproc {RANKS} --gradient-accumulation {ACCUMULATION} --micro-batch {MICRO} "
        f"--no-packing --gradient-checkpointing --steps {STEPS} --warmup-steps 3 --live-bytes "
        "--report-to tensorboard --weight-decay 0"
    )
    return ljperf.train("ddp", *options.split())


@pytest.fixture(scope="module")
def length(padded: Done) -> int:
    """Tokens of a document, its end included, by the saved tokenizer alone."""
    from tokenizers import Tokenizer

    folder = Path(padded.run.record["config"]["data"]["tokenizer"])
    tokens: int = len(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(SENTENCE).ids) + 1
    assert 10 < tokens < SEQUENCE
    return tokens


def test_every_step_of_every_rank_is_there_with_its_tokens(padded: Done, length: int) -> None:
    data = padded.run.record["config"]["data"]
    offsets = np.load(data["train_offsets"])
    assert set(np.diff(offsets)) == {length}
    steps = padded.run.steps()
    assert [(s["step"], s["rank"]) for s in steps] == [(n, r) for n in range(1, STEPS + 1) for r in range(RANKS)]
    sequences = ACCUMULATION * MICRO
    for step in steps:
        assert step["real_tokens"] == sequences * length
        assert step["padded_tokens"] == sequences * (SEQUENCE - length)
        assert step["loss_tokens"] == sequences * (length - 1)
        assert math.isfinite(step["loss"])
        assert step["gradient_norm"] > 0
    assert [s["learning_rate"] for s in padded.run.steps(0)][:3] == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3])


def test_phases_fit_into_their_step_and_steps_into_the_run(padded: Done) -> None:
    for step in padded.run.steps():
        phases = [step[f"{name}_s"] for name in ("data", "forward", "backward", "optimizer")]
        assert all(seconds > 0 for seconds in phases)
        assert sum(phases) <= step["step_s"] * (1 + 1e-9)
        assert sum(phases) > 0.5 * step["step_s"]
        assert step["communication_s"] is None
    for rank in range(RANKS):
        steps = padded.run.steps(rank)
        between = steps[-1]["time"] - steps[0]["time"]
        assert between == pytest.approx(sum(s["step_s"] for s in steps[1:]), abs=0.05)


def test_model_flops_are_those_of_real_tokens_and_hardware_flops_all_that_was_computed(
    padded: Done, length: int
) -> None:
    # Multiply-adds per token: 12,288 for attention and 33,792 for the MLP in each of 2 layers, 32,768 for the head.
    # Scores and values: 4 * 64 operations for each causal pair and layer.
    def forward(tokens: int) -> tuple[int, int]:
        """Of the blocks, and in all, for the sequences of a rank's step."""
        blocks = 2 * (2 * tokens * (12_288 + 33_792) + 4 * 64 * tokens * (tokens + 1) // 2)
        return 4 * blocks, 4 * (blocks + 2 * tokens * 32_768)

    _, useful = forward(length)
    blocks, computed = forward(SEQUENCE)
    summary = padded.document["arms"][0]["summary"]
    for step in padded.run.steps():
        assert step["model_flops"] == pytest.approx(3 * useful, rel=1e-9)
        assert step["hardware_flops"] == pytest.approx(3 * computed + blocks, rel=1e-9)
    assert summary["hfu"] / summary["mfu"] == pytest.approx((3 * computed + blocks) / (3 * useful))
    rate = np.median([3 * useful / max(s["step_s"] for s in pair) for pair in measured_pairs(padded)])
    assert summary["model_flops_per_second"] == pytest.approx(rate)
    assert summary["mfu"] == pytest.approx(rate / summary["peak_flops"])


def measured_pairs(done: Done) -> list[list[dict[str, float]]]:
    """The records of both ranks for each step after the warm-up that the summary names."""
    steps = done.run.steps()
    pairs = [steps[i : i + RANKS] for i in range(0, len(steps), RANKS)]
    return pairs[done.document["arms"][0]["summary"]["warmup_steps"] :]


def test_the_summary_is_that_of_the_steps(padded: Done, length: int) -> None:
    summary = padded.document["arms"][0]["summary"]
    pairs = measured_pairs(padded)
    assert summary["steps_measured"] == len(pairs) == STEPS - summary["warmup_steps"] > 0
    slowest = [max(s["step_s"] for s in pair) for pair in pairs]
    assert summary["step_time_s"]["median"] == pytest.approx(np.median(slowest))
    tokens = ACCUMULATION * MICRO * length
    rates = [tokens / seconds for seconds in slowest]
    throughput = summary["tokens_per_second_per_device"]
    assert throughput["median"] == pytest.approx(np.median(rates))
    assert throughput["ci95"][0] <= throughput["median"] <= throughput["ci95"][1]
    assert summary["real_token_share"] == pytest.approx(length / SEQUENCE)
    peaks = {str(r): max(p[r]["peak_memory_bytes"] for p in pairs) for r in range(RANKS)}
    assert summary["peak_memory_bytes_by_rank"] == peaks
    assert summary["peak_memory_bytes"] == max(peaks.values())
    # At least weights, gradients and two moments of the parameters in fp32, and not what torch itself takes.
    assert 4 * 4 * 158_016 < summary["live_bytes_peak"] < 100e6 < summary["peak_memory_bytes"]


def test_learning_is_visible(padded: Done) -> None:
    loss = padded.document["arms"][0]["loss"]
    assert loss["first"] == padded.run.losses[0]
    assert loss["last"] == padded.run.losses[-1]
    assert loss["eval_before"] == padded.run.evaluation("before") == pytest.approx(math.log(512), rel=0.02)
    assert loss["eval_after"] == padded.run.evaluation("after") < loss["eval_before"] - 0.3


def test_the_record_and_the_document_tell_the_same_and_stdout_holds_nothing_else(padded: Done) -> None:
    assert padded.stdout == json.dumps(padded.document, indent=2, ensure_ascii=False) + "\n"
    record, (arm,) = padded.run.record, padded.document["arms"]
    assert padded.document["status"] == arm["status"] == record["status"] == "completed"
    assert (record["reason"], record["failures"]) == ("", [])
    assert record["summary"] == arm["summary"]
    assert record["fingerprint"] == padded.document["fingerprint"]
    assert record["fingerprint"]["host"]["id"] == record["host"]
    assert record["fingerprint"]["packages"]["torch"].split("+")[0].count(".") == 2
    assert record["command"][:4] == ["ljperf", "train", "--model", "ddp/./tiny"]
    assert record["created"] < record["finished"]
    assert (record["config"]["seed"], record["config"]["packing"], record["config"]["nproc"]) == (42, False, RANKS)
    assert record["name"] == padded.run.folder.name
    assert "OMP_NUM_THREADS" in record["environment"]
    kept = {p.name for p in padded.run.folder.iterdir()}
    assert kept >= {"run.json", "steps.jsonl", "events.jsonl", "job.json", "logs", "tensorboard"}
    assert not kept & {"launch.json", ".reserve"}
    told = [e["name"] for e in padded.run.events("phase") if e["rank"] == 0]
    assert told == ["building", "evaluation", "training", "evaluation", "live-bytes"]
    assert len(padded.run.events("finished")) == RANKS


def test_tensorboard_has_the_losses(padded: Done) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(padded.run.folder / "tensorboard"))
    events.Reload()
    losses = {e.step: e.value for e in events.Scalars("train/loss")}
    assert losses == pytest.approx({n + 1: loss for n, loss in enumerate(padded.run.losses)}, rel=1e-6)
    evaluations = [(e.step, e.value) for e in events.Scalars("eval/loss")]
    expected = [(0, padded.run.evaluation("before")), (STEPS, padded.run.evaluation("after"))]
    assert evaluations == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in expected]
    assert {"train/learning_rate", "train/gradient_norm", "perf/tokens_per_second_per_device"} <= set(
        events.Tags()["scalars"]
    )


@pytest.fixture(scope="module")
def table(ljperf: Ljperf) -> Done:
    options = (
        "--data text.jsonl --seq_len 64 --micro_batch 2 --nproc 1 --dtype fp32 --no_live_bytes --report_to tensorboard"
    )
    return ljperf("--action", "train", "--model_name", "transformers/./tiny", "--steps", "3", *options.split())


def test_without_json_people_get_a_table_and_the_path_of_the_record(table: Done) -> None:
    *_, last = table.stdout.splitlines()
    run = Run(Path(last.removeprefix("record of base: ")))
    assert run.record["status"] == "completed"
    assert "transformers/./tiny (full, 0.2 M parameters, 1 rank)" in table.stdout
    (row,) = (line for line in table.stdout.splitlines() if line.strip().startswith("base "))
    assert "completed" in row
    assert f"{run.losses[0]:.3f} -> {run.losses[-1]:.3f}" in row
    assert f"{run.evaluation('before'):.3f} -> {run.evaluation('after'):.3f}" in row
    assert "step 3" in table.stderr or "finished" in table.stderr
    assert "\x1b" not in table.stdout + table.stderr  # no terminal, no colours


def test_the_hf_trainer_is_measured_and_saved_as_the_others_are(table: Done) -> None:
    run = Run(Path(table.stdout.splitlines()[-1].removeprefix("record of base: ")))
    assert (run.folder / "model" / "model.safetensors").is_file()
    for step in run.steps():
        phases = [step[f"{name}_s"] for name in ("data", "forward", "backward", "optimizer")]
        assert all(seconds > 0 for seconds in phases)
        assert sum(phases) <= step["step_s"] * (1 + 1e-9)
        assert (step["real_tokens"], step["padded_tokens"], step["loss_tokens"]) == (2 * 64, 0, 2 * 63)
    assert [s["step"] for s in run.steps()] == [1, 2, 3]
    assert list((run.folder / "tensorboard").iterdir())
    assert [(e["name"], e["step"]) for e in run.events("evaluation")] == [("before", 0), ("after", 3)]


@pytest.fixture(scope="module")
def arms(ljperf: Ljperf) -> Done:
    options = (
        "--data text.jsonl --seq-len 64 --micro-batch 2 --nproc 1 --steps 3 --no-live-bytes --arms base,toy --json"
    )
    return ljperf("benchmark", "--model", "ddp/./tiny", *options.split(), plugin="toy")


def test_a_feature_is_switched_on_by_its_variable_in_its_arm_alone(arms: Done) -> None:
    base, toy = arms.document["arms"]
    assert (base["name"], base["features"], toy["name"], toy["features"]) == ("base", [], "toy", ["toy"])
    assert base["features_applied"] == []
    told = [r for r in toy["features_applied"] if r["feature"] == "toy"]
    assert [r["event"] for r in told].count("subscribed") == 1
    assert [r["event"] for r in told].count("applied") == 1
    assert [r["data"]["step"] for r in told if r["event"] == "seen"] == [1, 2, 3]
    records = [Run(Path(arm["run"])).record for arm in (base, toy)]
    assert [r["environment"]["TRAINING_XPU_TOY"] for r in records] == ["false", "true"]
    assert records[0]["experiment"] == records[1]["experiment"] is not None
    assert base["loss"] == toy["loss"]


def test_a_feature_that_cannot_run_here_is_named(ljperf: Ljperf) -> None:
    done = ljperf.train(
        "ddp", "--features", "toy", "--steps", "2",
        expect=3, plugin="toy", environment={"TOY_CANNOT_RUN": "this machine has no toy"},
    )  # fmt: skip
    assert "ljperf: feature stepped aside: toy: this machine has no toy" in done.stderr.splitlines()
    assert done.document["status"] == "completed"
    (told,) = (r for r in done.document["arms"][0]["features_applied"] if r["feature"] == "toy")
    assert (told["event"], told["reason"]) == ("stepped-aside", "this machine has no toy")
    assert lines_of(done.run.folder / "steps.jsonl")
