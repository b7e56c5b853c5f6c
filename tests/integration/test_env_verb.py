"""`ljperf env` as a user runs it, and the process that asks torch for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from training_xpu.perf.fingerprint import Fingerprint

# The verb alone, so that the test does not depend on how the others import.
RUN = (
    "import sys, typer; from training_xpu.cli import console; from training_xpu.cli.env import env; "
    "app = typer.Typer(); app.command()(env); app(sys.argv[1:])"
)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TRAINING_XPU_", "OMP_"))}
    return {**kept, "TRAINING_XPU_CACHE": str(tmp_path / "cache")}


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RUN, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_page_then_json_then_measured(environment: dict[str, str]) -> None:
    page = run(environment | {"OMP_NUM_THREADS": "3", "HF_TOKEN": "hf_secret"})
    assert page.returncode == 0, page.stderr
    for title in ("Hardware", "Limits", "System", "Packages", "Variables"):
        assert f"\n{title}\n" in f"\n{page.stdout}"
    assert "OMP_NUM_THREADS" in page.stdout
    assert "3  [user]" in page.stdout
    assert "hf_secret" not in page.stdout
    assert "Folder for what can be computed again" in page.stdout  # what TRAINING_XPU_CACHE means
    assert "ljperf env --measure" in page.stdout

    plain = run(environment, "--json")
    assert plain.returncode == 0, plain.stderr
    document = Fingerprint.model_validate_json(plain.stdout)
    assert plain.stderr == ""
    assert document.torch is not None
    assert document.packages["torch"] == document.torch.version
    if document.hardware.kind == "cpu":
        assert document.peaks == []

    measured = run(environment, "--json", "--measure")
    assert measured.returncode == 0, measured.stderr
    peaks = {peak.dtype: peak for peak in Fingerprint.model_validate_json(measured.stdout).peaks}
    assert set(peaks) == set(document.torch.dtypes)
    assert all(peak.flops > 1e6 for peak in peaks.values())

    again = run(environment, "--json", "--no-measure")
    if document.hardware.kind == "cpu":
        assert {p.dtype: p for p in Fingerprint.model_validate_json(again.stdout).peaks} == peaks


def test_the_asking_process_prints_one_document(environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "training_xpu.device", "--json", "--dtype", "fp32"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    document = json.loads(done.stdout)
    assert document["view"]["torch"]
    assert [peak["dtype"] for peak in document["peaks"]] == ["fp32"]
    cached = list((Path(environment["TRAINING_XPU_CACHE"]) / "torch").glob("*.json"))
    assert len(cached) == (1 if document["view"]["device_type"] == "cpu" else 0)


def test_torch_is_not_loaded_where_there_is_no_accelerator(environment: dict[str, str]) -> None:
    code = (
        "import sys; from training_xpu.perf.fingerprint import collect; from training_xpu import device; "
        "collect(); print('torch' in sys.modules or device.may_have_accelerator(), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split()[1] == "False"
