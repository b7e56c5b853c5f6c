"""The clock, the token counts and the record of a step, on times and numbers that are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from training_xpu.workloads import metrics
from training_xpu.workloads.config import EVENTS_FILE, STEPS_FILE
from training_xpu.workloads.flops import ModelFlops
from training_xpu.workloads.metrics import PhaseClock, RunWriter, StepMeter, TokenCounts

CPU = torch.device("cpu")


class Time:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def time(self) -> float:
        return 1.75e9 + self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    found = Time()
    monkeypatch.setattr(metrics, "time", found)
    return found


def test_phases_add_up_over_micro_batches_and_gaps_belong_to_none(clock: Time) -> None:
    measured = PhaseClock(CPU)
    measured.start()
    for phase, seconds in (("data", 1.0), ("forward", 2.0), ("backward", 4.0), ("forward", 2.5), ("backward", 4.5)):
        clock.now += seconds
        measured.mark(phase)  # type: ignore[arg-type]
    clock.now += 0.25
    measured.end()
    clock.now += 8.0
    measured.mark("optimizer")
    clock.now += 0.5
    measured.end()
    seconds, phases = measured.stop()
    assert seconds == 22.75
    assert phases == {"data": 1.0, "forward": 4.5, "backward": 8.5, "optimizer": 8.0}


def test_the_time_between_two_steps_belongs_to_the_second_unless_the_clock_starts_anew(clock: Time) -> None:
    measured = PhaseClock(CPU)
    measured.start()
    clock.now += 1.0
    measured.end()
    assert measured.stop()[0] == 1.0
    clock.now += 3.0  # writing the record
    measured.go_on()
    clock.now += 1.0
    measured.end()
    assert measured.stop()[0] == 4.0
    clock.now += 100.0  # a checkpoint
    measured.start()
    clock.now += 1.0
    measured.end()
    assert measured.stop()[0] == 1.0


def test_token_counts_of_padded_sequences() -> None:
    counts = TokenCounts()
    counts.add(real=10, padded=6, loss=8, lengths=[7, 3])
    counts.add(real=16, padded=0, loss=14, lengths=[8, 8])
    assert (counts.real, counts.padded, counts.loss, counts.lengths) == (26, 6, 22, [7, 3, 8, 8])
    assert counts.padded_to == 8
    packed = TokenCounts()
    packed.add(real=16, padded=0, loss=14, lengths=[8, 8])
    assert packed.padded_to is None


def test_a_step_becomes_one_line_with_the_flops_of_its_real_tokens(tmp_path: Path, clock: Time) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    }
    meter = StepMeter(RunWriter(tmp_path, rank=3), ModelFlops.from_config(config), CPU)
    meter.recomputed_share = 0.5
    tokens = TokenCounts()
    tokens.add(real=64, padded=0, loss=63, lengths=[64])
    meter.start()
    record = meter.finish(5, 2.5, None, 1e-3, tokens, 2.0, {"data": 0.5, "forward": 1.0})
    # By hand, forward: per token and layer 12,288 (attention) and 33,792 (MLP) multiply-adds, 32,768 for the head;
    # 64 * 65 / 2 causal pairs, each 4 * 64 operations per layer.
    blocks = 2 * (2 * 64 * (12_288 + 33_792) + 4 * 64 * 2_080)
    forward = blocks + 2 * 64 * 32_768
    assert record.model_flops == 3 * forward
    assert record.hardware_flops == 3 * forward + blocks / 2
    (line,) = (json.loads(text) for text in (tmp_path / STEPS_FILE).read_text().splitlines())
    assert line == json.loads(record.to_json())
    assert (line["rank"], line["step"], line["time"]) == (3, 5, 1.75e9 + 100)
    assert (line["loss"], line["gradient_norm"], line["learning_rate"]) == (2.5, None, 1e-3)
    assert (line["step_s"], line["data_s"], line["forward_s"]) == (2.0, 0.5, 1.0)
    assert (line["backward_s"], line["optimizer_s"], line["communication_s"]) == (None, None, None)
    assert (line["real_tokens"], line["padded_tokens"], line["loss_tokens"]) == (64, 0, 63)
    assert 1 << 20 < line["peak_memory_bytes"] < 1 << 40
    (note,) = (json.loads(text) for text in (tmp_path / EVENTS_FILE).read_text().splitlines())
    assert (note["event"], note["name"], note["detail"]) == ("note", "peak memory", "peak resident set")


def test_a_diverged_loss_is_kept_as_what_it_is(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, rank=0)
    writer.event("evaluation", "after", value=float("nan"))
    assert json.loads((tmp_path / EVENTS_FILE).read_text())["value"] == "NaN"
