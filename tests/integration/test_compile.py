"""TRAINING_XPU_COMPILE=true in scripts that know nothing of it: real ranks, every engine, changing lengths."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "jobs" / "training_job.py"
HF_SCRIPT = Path(__file__).parents[2] / "examples" / "hf_trainer.py"
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
STEPS = 18  # compiling, the graphs for all sizes, the trial, and what the ranks agree on


def train(
    engine: str, folder: Path, environment: dict[str, str], name: str, *more: str, **variables: str
) -> list[dict[str, Any]]:
    """What each of two ranks wrote."""
    out = folder / name
    command = [TORCHRUN, "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2", str(SCRIPT), engine]
    own = {
        **environment,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
        "TRAINING_XPU_CACHE": str(folder / "cache"),
        "TRAINING_XPU_REPORT": str(folder / f"{name}-reports"),
        **variables,
    }
    done = subprocess.run(
        [*command, str(STEPS), str(out), *more], env=own, cwd=folder, capture_output=True, text=True, timeout=550
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [{**json.loads(Path(f"{out}.{rank}.json").read_text()), "stderr": done.stderr} for rank in (0, 1)]


def reports(folder: Path, name: str, feature: str = "compile") -> list[dict[str, Any]]:
    """The last line that each process wrote of a feature."""
    last = []
    for path in sorted((folder / f"{name}-reports").glob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        own = [line for line in lines if line["feature"] == feature and line["event"] != "subscribed"]
        last += own[-1:]
    return last


@pytest.fixture(scope="module")
def plain(
    training_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """Without the feature. FSDP trains as DDP does; DeepSpeed's AdamW decays less."""
    folder = tmp_path_factory.mktemp("plain")
    return {
        engine: train(engine, folder, training_environment, f"plain-{engine}", TRAINING_XPU_COMPILE="false")
        for engine in ("ddp", "zero3")
    }


@pytest.mark.parametrize("engine", ["ddp", "fsdp", "zero3"])
def test_two_ranks_with_changing_lengths_train_alike(
    engine: str, plain: dict[str, list[dict[str, Any]]], training_environment: dict[str, str], tmp_path: Path
) -> None:
    ours = train(engine, tmp_path, training_environment, "ours", TRAINING_XPU_COMPILE="true")
    expected = plain["zero3" if engine == "zero3" else "ddp"]
    for rank in (0, 1):
        assert ours[rank]["losses"] == pytest.approx(expected[rank]["losses"], rel=1e-5)
    said = reports(tmp_path, "ours")
    assert len(said) == 2
    for line in said:
        block = next(row for row in line["data"]["regions"] if row["name"] == "LlamaDecoderLayer")
        assert block["count"] == 6
        assert (block["graphs"], block["breaks"], block["recompiles"]) == (2, 0, 1)
        assert block["gain"] > 0
        assert line["data"]["compile_seconds"] > 0
    # What is decided is decided for all.
    first, second = ([(r["name"], r["compiled"], r["gain"]) for r in line["data"]["regions"]] for line in said)
    assert first == second


def test_with_recompute(
    plain: dict[str, list[dict[str, Any]]], training_environment: dict[str, str], tmp_path: Path
) -> None:
    both = train(
        "zero3",
        tmp_path,
        training_environment,
        "both",
        TRAINING_XPU_COMPILE="true",
        CHECKPOINT_OPTIMIZATION="true",
        TRAINING_XPU_MEMORY_BUDGET="live:16MiB",
    )
    assert both[0]["losses"] == pytest.approx(plain["zero3"][0]["losses"], rel=1e-5)
    compiled, recomputed = reports(tmp_path, "both"), reports(tmp_path, "both", "recompute")
    assert all(row["event"] == "applied" for row in (*compiled, *recomputed))
    assert recomputed[0]["data"]["layers_total"] == 6


def test_a_trainer_script_that_compiles_by_itself(training_environment: dict[str, str], tmp_path: Path) -> None:
    """TrainingArguments(torch_compile=True): the call is taken, and what is saved has the model's own names."""
    command = [sys.executable, str(HF_SCRIPT), "--layers", "2", "--length", "64", "--steps", "16", "--torch-compile"]
    own = {
        **training_environment,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRAINING_XPU_COMPILE": "true",
        "TRAINING_XPU_REPORT": str(tmp_path / "ours-reports"),
    }
    saved = tmp_path / "saved"
    done = subprocess.run(
        [*command, "--save", str(saved)], env=own, cwd=tmp_path, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (said,) = reports(tmp_path, "ours")
    regions = {row["name"]: row for row in said["data"]["regions"]}
    assert (regions["LlamaDecoderLayer"]["graphs"], regions["LlamaDecoderLayer"]["breaks"]) == (1, 0)
    assert "head and loss" in regions
    from safetensors import safe_open

    with safe_open(saved / "model.safetensors", "pt") as weights:
        names = list(weights.keys())
    assert names
    assert not any("_orig_mod" in name for name in names)
    assert "training-xpu: compile: " in done.stderr


def test_without_a_compiler_training_goes_on(training_environment: dict[str, str], tmp_path: Path) -> None:
    own = {
        **training_environment,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CXX": "/no/such/compiler",
        "TRAINING_XPU_COMPILE": "true",
    }
    command = [sys.executable, str(HF_SCRIPT), "--layers", "2", "--length", "32", "--steps", "2"]
    done = subprocess.run(command, env=own, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "compile steps aside: no C++ compiler was found; install g++, or name one in CXX" in done.stderr
    assert done.stdout.count("'loss'") == 2
