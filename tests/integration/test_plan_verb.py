"""`ljperf plan` as a user calls it."""

from __future__ import annotations

import html.parser
import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from training_harness import TINY, write_model

from training_xpu.perf.calibrate import setting_of_job
from training_xpu.perf.plan_subject import meta_model
from training_xpu.perf.records import Estimate, RunRecord, Summary
from training_xpu.perf.store import owner
from training_xpu.recompute.prediction.predict import predict_peaks
from training_xpu.workloads.config import Dtype, EngineName, FlopShares, JobConfig, PreparedData, Scale

GIB = 2**30
CODE = (
    "import resource, sys; from training_xpu.cli.main import run; code = run(); "
    "print('torch' in sys.modules, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, file=sys.stderr); "
    "sys.exit(code)"
)
BUILD = """
import torch


class Block(torch.nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def build():
    print("not part of the document")
    module = torch.nn.Sequential(*[Block() for _ in range(6)], torch.nn.Linear(256, 10))
    return module, {"input": torch.zeros(64, 128, 256)}


def no_blocks():
    return torch.nn.Linear(4, 4), torch.zeros(2, 4)
"""


def ljperf(*arguments: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRAINING_XPU_")}
    environment |= {"TRAINING_XPU_CACHE": str(folder / "cache"), "COLUMNS": "160", **variables}
    command = [sys.executable, "-c", CODE, "plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, check=False)


def document(*arguments: str, folder: Path, **variables: str) -> dict[str, Any]:
    done = ljperf(*arguments, "--json", folder=folder, **variables)
    assert done.returncode == 0, done.stderr
    loaded: dict[str, Any] = json.loads(done.stdout)
    return loaded


def test_a_large_model_for_many_ranks(tmp_path: Path) -> None:
    done = ljperf(
        *("--model", "deepspeed/llama3.1-70b", "--world-size", "1024", "--device-memory", "80GiB", "--json"),
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    peak_resident = int(done.stderr.splitlines()[-1].split()[1])
    assert peak_resident <= GIB
    plan = json.loads(done.stdout)
    assert plan["schema"] == 1
    assert (plan["model"], plan["world_size"], plan["layers"]) == ("deepspeed/llama3.1-70b", 1024, 80)
    assert [option["layers"] for option in plan["options"]] == list(range(81))
    peaks = [option["predicted_peak_bytes"] for option in plan["options"]]
    assert peaks == sorted(peaks, reverse=True)
    ratios = [option["predicted_step_time_ratio"] for option in plan["options"]]
    assert ratios == sorted(ratios)
    assert ratios[0] == 1.0
    assert 1.25 < ratios[-1] < 4 / 3
    recommended = plan["recommended_layers"]
    assert plan["policy"] == "recompute"
    upper = [option["predicted_peak_interval_bytes"][1] for option in plan["options"]]
    assert upper[recommended] <= 80 * GIB < upper[recommended - 1]
    for option in plan["options"]:
        assert sum(option["parts"].values()) == option["predicted_peak_bytes"]
    assert plan["parts"] == plan["options"][recommended]["parts"]
    assert set(plan["calibration"]) >= {"device_kind", "version", "samples", "cross_validated_error"}


def test_model_states_are_what_zero_3_shards(tmp_path: Path) -> None:
    """16 bytes per parameter with AdamW in bf16: weights and gradients 2 each, master weights and moments 4 each."""
    plan = document(
        *("--model", "deepspeed/llama3-8b", "--seq-len", "4096", "--micro-batch", "2", "--world-size", "8"),
        *("--zero", "3", "--device-memory", "80GiB"),
        folder=tmp_path,
    )
    assert plan["parameters"] == 8_030_261_248
    assert plan["parts"]["model states"] == pytest.approx(16 * 8_030_261_248 / 8, rel=0.01)
    # A recomputed layer keeps its input: 2 x 4096 tokens of 4096 channels in bf16.
    kept = plan["options"][-1]["parts"]["block activations"]
    assert kept == pytest.approx(32 * 2 * 4096 * 4096 * 2, rel=0.05)


def test_the_table_marks_the_recommended_row(tmp_path: Path) -> None:
    done = ljperf("--model", "fsdp/llama3-8b", "--seq-len", "4096", "--micro-batch", "2", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    for word in ("model states", "block activations", "head and loss", "communication buffers", "overhead", "up to"):
        assert word in done.stdout
    (marked,) = (line for line in done.stdout.splitlines() if "<- recommended" in line)
    layers = int(marked.split()[0])
    assert f"Recommended: recompute {layers} of 32 blocks" in done.stdout
    assert "calibration 2 for accelerator" in done.stdout
    rows = [line for line in done.stdout.splitlines() if " of 32 " in line and "Recommended" not in line]
    assert len(rows) <= 9
    assert {rows[0].split()[0], rows[-1].split()[0]} == {"0", "32"}


def test_a_budget_that_nothing_meets(tmp_path: Path) -> None:
    done = ljperf(
        *("--model", "deepspeed/llama3-8b", "--zero", "1", "--micro-batch", "8", "--device-memory", "40GiB", "--json"),
        folder=tmp_path,
    )
    assert done.returncode == 1
    plan = json.loads(done.stdout)
    assert (plan["recommended_layers"], plan["policy"]) == (None, "does not fit")
    said = done.stderr.splitlines()
    assert "does not fit: with all 32 blocks recomputed it needs up to" in done.stderr
    assert "largest: " in done.stderr
    remedy = next(line for line in said if "Would fit: " in line)
    for suggestion in plan["suggestions"]:
        assert suggestion in remedy
    assert plan["suggestions"]
    # What is suggested is true.
    options = plan["suggestions"][0].partition(" (")[0].split()
    arguments = ["--model", "deepspeed/llama3-8b", "--device-memory", "40GiB"]
    for option, value in (("--zero", "1"), ("--micro-batch", "8")):
        arguments += [] if option in options else [option, value]
    assert document(*arguments, *options, folder=tmp_path)["recommended_layers"] is not None


def test_the_users_own_module(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(BUILD, encoding="utf-8")
    arguments = ("--module", "own:build", "--engine", "ddp", "--world-size", "4", "--dtype", "fp32")
    plan = document(*arguments, "--device-memory", "1GiB", folder=tmp_path)
    assert (plan["model"], plan["layers"], plan["sequence_length"]) == ("own:build", 6, None)
    parameters = 6 * (2 * 4 * 256 * 256 + 5 * 256) + 2570
    assert plan["parameters"] == parameters
    # fp32 weights, two moments; gradients come with the backward; inputs of 64 x 128 x 256 numbers.
    states = 12 * parameters + 4 * 64 * 128 * 256
    assert states <= plan["options"][0]["parts"]["model states"] <= states + 4 * parameters + 4096
    assert plan["options"][-1]["predicted_step_time_ratio"] == pytest.approx(4 / 3, rel=0.03)


def test_a_module_without_blocks_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(BUILD, encoding="utf-8")
    done = ljperf("--module", "own:no_blocks", "--device-memory", "1GiB", folder=tmp_path)
    assert done.returncode == 2
    assert "own:no_blocks has no blocks" in done.stderr
    assert "Traceback" not in done.stderr


def job(width: int, batch: int) -> JobConfig:
    """DDP in fp32 on two ranks; as much of it as a prediction needs is true."""
    shares = FlopShares(attention=0.3, mlp=0.4, head=0.3)
    sizes: dict[str, Any] = {
        f"{name}{full}": 1 for name in ("parameters", "layers", "sequence", "vocabulary") for full in ("", "_full")
    }
    scale = Scale(
        kind="full", reason="fits", shares=shares, shares_full=shares, target_device="", target_world_size=1, **sizes
    )
    paths: dict[str, Any] = dict.fromkeys(
        ("train_tokens", "train_offsets", "eval_tokens", "eval_offsets", "tokenizer"), Path("x")
    )
    counts: dict[str, Any] = dict.fromkeys(
        ("vocabulary_size", "eos_token_id", "pad_token_id", "train_token_count", "eval_token_count", "document_count"),
        1,
    )
    return JobConfig(
        workload="ddp/x",
        engine=EngineName.DDP,
        model={**TINY, "hidden_size": width, "intermediate_size": 3 * width},
        scale=scale,
        data=PreparedData(source="x", digest="x", **paths, **counts),
        dtype=Dtype.FP32,
        micro_batch=batch,
        sequence_length=128,
        nproc=2,
    )


def test_calibrating_to_runs_changes_later_plans(tmp_path: Path) -> None:
    for number in range(6):
        config = job(64 * (1 + number // 2), 4 + 40 * (number % 3))
        live = predict_peaks(meta_model(config.model), setting_of_job(config, "cpu")).peaks[0]
        summary = Summary(
            steps_measured=3,
            warmup_steps=0,
            peak_memory_kind="peak resident set",
            peak_memory_bytes=round(1.2 * live) + 300 * 2**20,
            live_bytes_peak=live,
        )
        run = tmp_path / "runs" / f"20261201-00000{number}-ddp-x-base"
        run.mkdir(parents=True)
        RunRecord(
            **owner(),
            name=run.name,
            created=datetime.now(UTC),
            command=[],
            workload="ddp/x",
            arm="base",
            features=[],
            config=config,
            status="completed" if number else "interrupted",
            summary=summary,
        ).write(run / "run.json")
    few = ljperf("--calibrate", "runs", folder=tmp_path)
    assert few.returncode == 2
    assert (
        "5 runs to calibrate with, and 6 of one kind of device are needed (passed over: 1 not completed)" in few.stderr
    )

    completed = RunRecord.read(run / "run.json")
    first = tmp_path / "runs" / "20261201-000000-ddp-x-base" / "run.json"
    RunRecord.read(first).model_copy(update={"status": completed.status}).write(first)
    fitted = document("--calibrate", "runs", folder=tmp_path)["calibrations"]
    assert [(c["device_kind"], c["samples"]) for c in fitted] == [("cpu", 6)]
    assert fitted[0]["cross_validated_error"] == pytest.approx(0.0, abs=1e-3)

    write_model(tmp_path / "tiny")
    plan = document(
        "--model", "ddp/./tiny", "--seq-len", "64", "--device", "cpu", "--device-memory", "1GiB", folder=tmp_path
    )
    assert plan["calibration"] == fitted[0] | {"source": plan["calibration"]["source"]}
    assert plan["calibration"]["source"].startswith("fitted here")
    option = plan["options"][0]
    live, expected = option["predicted_live_bytes"], option["predicted_peak_bytes"]
    assert expected == pytest.approx(1.2 * live + 300 * 2**20, rel=0.01)


def test_a_measured_forward_takes_the_place_of_flops(tmp_path: Path) -> None:
    write_model(tmp_path / "tiny")
    arguments = (
        "--model",
        "ddp/./tiny",
        "--seq-len",
        "128",
        "--micro-batch",
        "4",
        "--world-size",
        "2",
        "--dtype",
        "fp32",
    )
    arguments += ("--device", "cpu", "--device-memory", "4GiB")
    counted = document(*arguments, folder=tmp_path)
    assert counted["step_time_source"].startswith("FLOPs")

    config = job(64, 4)
    scale = config.scale.model_copy(update={"parameters": counted["parameters"]})
    step = Estimate(median=2.0, p5=2.0, p95=2.0, ci95=(2.0, 2.0), count=5)
    summary = Summary(steps_measured=5, warmup_steps=0, step_time_s=step, phases_s={"forward": 0.5})
    run = tmp_path / "runs" / "20261201-000000-ddp-tiny-base"
    run.mkdir(parents=True)
    RunRecord(
        **owner(),
        name=run.name,
        created=datetime.now(UTC),
        command=[],
        workload="ddp/./tiny",
        arm="base",
        features=[],
        config=config.model_copy(update={"workload": "ddp/./tiny", "scale": scale}),
        status="completed",
        summary=summary,
    ).write(run / "run.json")
    measured = document(*arguments, folder=tmp_path)
    assert run.name in measured["step_time_source"]
    # All blocks have the share of the forward's FLOPs that the head has not; the forward is a quarter of the step.
    attention = 2 * 64 * (64 + 32 + 32 + 64) + 4 * 64 * 129 / 2
    block, head = attention + 2 * 3 * 64 * 176, 2 * 64 * 512
    share = 2 * block / (2 * block + head)
    assert measured["options"][2]["predicted_step_time_ratio"] == pytest.approx(1 + 0.25 * share)
    other = document(*arguments, "--gradient-accumulation", "2", folder=tmp_path)
    assert other["step_time_source"].startswith("FLOPs")


class _Page(html.parser.HTMLParser):
    """Collects what a page would fetch, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.rows = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [str(v) for name, v in attrs if name in ("src", "href")]
        self.rows += tag == "tr"


def test_the_plot_needs_nothing_else(tmp_path: Path) -> None:
    plot = tmp_path / "plan.html"
    write_model(tmp_path / "tiny")
    done = ljperf(
        *("--model", "ddp/./tiny", "--seq-len", "64", "--device-memory", "1GiB", "--plot", "plan.html"),
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "plot: plan.html" in done.stderr
    page = _Page()
    page.feed(plot.read_text(encoding="utf-8"))
    assert page.fetched == []
    assert page.rows == 1 + 3  # head, and 0 to 2 layers


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--model and --module"),
        (["--model", "deepspeed/llama3-8b", "--device-memory", "lots"], "6GiB, 512MiB, 80GB"),
        (["--model", "deepspeed/llama3-8b", "--device-memory", "80"], "is a unit missing?"),
        (["--model", "deepspeed/llama3-8b", "--optimizer", "adamww"], "adamw"),
        (["--model", "deepspeed/llama3-8b", "--plot", "plan.png"], "--plot plan.html"),
        (["--model", "deepspeed/llama3-8b", "--plot", "no/such/plan.html"], "there is no folder no/such"),
        (["--calibrate", "nowhere"], "there is no folder nowhere"),
    ],
)
def test_wrong_usage_is_exit_2_with_a_remedy(arguments: list[str], said: str, tmp_path: Path) -> None:
    done = ljperf(*arguments, folder=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_malformed_budget_in_the_environment(tmp_path: Path) -> None:
    done = ljperf("--model", "ddp/llama3.2-1b", folder=tmp_path, TRAINING_XPU_MEMORY_BUDGET="6 gigs")
    assert done.returncode == 2
    assert "TRAINING_XPU_MEMORY_BUDGET is '6 gigs'" in done.stderr
    assert "6GiB, 512MiB, 80GB" in done.stderr


def test_a_live_budget_in_the_environment(tmp_path: Path) -> None:
    write_model(tmp_path / "tiny")
    arguments = ("--model", "ddp/./tiny", "--seq-len", "64", "--micro-batch", "8")
    live = [o["predicted_live_bytes"] for o in document(*arguments, folder=tmp_path)["options"]]
    plan = document(*arguments, folder=tmp_path, TRAINING_XPU_MEMORY_BUDGET=f"live:{live[1]}")
    assert (plan["budget_live"], plan["budget_bytes"], plan["recommended_layers"]) == (True, live[1], 1)
    wrong = ljperf(*arguments, folder=tmp_path, TRAINING_XPU_MEMORY_BUDGET="live:6 gigs")
    assert wrong.returncode == 2
    assert "TRAINING_XPU_MEMORY_BUDGET is 'live:6 gigs'" in wrong.stderr
    assert "live:6GiB" in wrong.stderr


def test_options_in_a_file(tmp_path: Path) -> None:
    write_model(tmp_path / "tiny")
    (tmp_path / "plan.yaml").write_text("model: fsdp/./tiny\nseq-len: 64\nworld-size: 4\ndevice-memory: 1GiB\n")
    plan = document("--config", "plan.yaml", "--world-size", "2", folder=tmp_path)
    assert (plan["model"], plan["sequence_length"], plan["world_size"]) == ("fsdp/./tiny", 64, 2)
    assert (plan["recommended_layers"], plan["policy"]) == (0, "none")


def test_help_loads_no_torch(tmp_path: Path) -> None:
    done = ljperf("--help", folder=tmp_path)
    assert done.returncode == 0
    assert done.stderr.split()[0] == "False"
