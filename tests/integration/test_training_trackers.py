"""Trackers that are no part of the test environment: each is tried where it is installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from training_harness import Ljperf

MEASURES = (
    "train/loss",
    "train/learning_rate",
    "train/gradient_norm",
    "perf/step_time_s",
    "perf/tokens_per_second_per_device",
)


def mlflow_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """MLflow's client on a folder of files, and the one run in it."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient(folder.as_uri())
    (experiment,) = client.search_experiments(filter_string="name != 'Default'")
    assert experiment.name == "ddp/./tiny"
    (run,) = client.search_runs([experiment.experiment_id])
    return client, run


@pytest.mark.skipif(find_spec("mlflow") is None, reason="needs mlflow-skinny")
def test_mlflow_has_every_step_and_the_settings(own_runs: Ljperf, monkeypatch: pytest.MonkeyPatch) -> None:
    done = own_runs.train("ddp", "--report-to", "mlflow", "--nproc", "2")
    client, run = mlflow_runs(done.run.folder / "mlflow", monkeypatch)
    assert (run.info.status, run.info.run_name) == ("FINISHED", done.run.folder.name)
    assert (run.data.params["steps"], run.data.params["learning_rate"]) == ("4", "0.001")
    history = {name: client.get_metric_history(run.info.run_id, name) for name in (*MEASURES, "eval/loss")}
    assert [(m.step, m.value) for m in history["train/loss"]] == list(enumerate(done.run.losses, start=1))
    assert {name: len(history[name]) for name in MEASURES} == dict.fromkeys(MEASURES, 4)
    evaluations = [done.run.evaluation("before"), done.run.evaluation("after")]
    assert [m.value for m in sorted(history["eval/loss"], key=lambda m: m.step)] == evaluations


@pytest.mark.skipif(find_spec("mlflow") is None, reason="needs mlflow-skinny")
def test_mlflow_is_told_of_a_failure(own_runs: Ljperf, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"TRAINING_TEST_FAULT": "0:step:2:raise"}
    done = own_runs.train("ddp", "--report-to", "mlflow", expect=1, plugin="faults", environment=environment)
    _, run = mlflow_runs(done.run.folder / "mlflow", monkeypatch)
    # The rank failed after it had written its second step and before it had handed it on.
    assert (run.info.status, run.data.metrics["train/loss"]) == ("FAILED", done.run.losses[0])


@pytest.mark.skipif(find_spec("wandb") is None, reason="needs wandb")
def test_wandb_keeps_an_offline_run(own_runs: Ljperf) -> None:
    done = own_runs.train("transformers", "--report-to", "wandb")
    (kept,) = (done.run.folder / "wandb").glob("offline-run-*/run-*.wandb")
    content = kept.read_bytes()
    for name in (*MEASURES, "eval/loss"):
        assert content.count(name.encode()) >= (2 if name == "eval/loss" else 4), name
    assert done.run.folder.name.encode() in content
