"""Switching blocks at every micro batch under real engines, on two ranks: not one bit of the training changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

JOB = Path(__file__).parent / "jobs" / "recompute_engines.py"
MODELS = ("llama fp32", "llama bf16", "lora bf16", "frozen norms bf16", "moe bf16", "own weights bf16")
ENGINES = ("ddp", "fsdp", "zero1", "zero2", "zero3")

# Blocks that run in the micro batches, three in each, and three more in an evaluation between the second forward and
# its backward; each block that is recomputed or selectively recomputed runs once more.
WITHOUT = [3, 6, 3, 3, 3, 3]
WITH = [6, 7, 3, 6, 5, 5]


def run_job(engines: tuple[str, ...], folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Trains every model under these engines in one set of processes."""
    file = folder / "traces.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(JOB), str(file), *engines]
    variables = {
        **os.environ,
        **environment,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
    }
    ran = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=500, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(file.read_text())  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory, training_environment: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for engines in (("ddp", "fsdp"), ("zero1", "zero2", "zero3")):
        found.update(run_job(engines, tmp_path_factory.mktemp("engines"), training_environment))
    return found


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("engine", ENGINES)
def test_losses_gradients_and_weights_are_bit_equal(traces: dict[str, Any], engine: str, model: str) -> None:
    found = traces[f"{engine} {model}"]
    assert "error" not in found, found["error"]
    without, switched = found["without"], found["with"]
    for name in ("losses", "gradients", "evaluations", "weights", "generator"):
        assert switched[name] == without[name], name
    assert len(set(without["losses"])) == 6
    assert len(set(without["gradients"])) == 3
    assert without["runs"] == WITHOUT
    assert switched["runs"] == WITH
    assert switched["matched"] == [True] * 3
