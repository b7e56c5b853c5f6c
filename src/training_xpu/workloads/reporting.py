"""Hands training metrics to the trackers people use; each is imported only when it was asked for."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from training_xpu import envs
from training_xpu.errors import CannotRunHere
from training_xpu.workloads.config import JobConfig
from training_xpu.workloads.records import StepRecord

PACKAGES = {"tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb"}


class Tracker(Protocol):
    def log(self, values: dict[str, float], step: int) -> None: ...

    def close(self) -> None: ...


def check_trackers(names: list[str]) -> None:
    """Refuses, before any rank starts, a tracker whose package is not installed.

    Raises:
        CannotRunHere: with the package to install.
    """
    for name in names:
        if find_spec(PACKAGES[name]) is None:
            raise CannotRunHere(
                f"--report-to {name}: the package {PACKAGES[name]} is not installed",
                f"pip install 'training-xpu-pytorch[{name}]'",
            )


def open_trackers(config: JobConfig, run_folder: Path) -> list[Tracker]:
    """The trackers of a job; call it on rank 0 only."""
    makers: dict[str, Any] = {"tensorboard": TensorBoardTracker, "mlflow": MlflowTracker, "wandb": WandbTracker}
    return [makers[name](config, run_folder) for name in config.report_to]


def log_step(trackers: list[Tracker], record: StepRecord) -> None:
    """Hands one step of rank 0 to the trackers."""
    values = {
        "train/loss": record.loss,
        "train/learning_rate": record.learning_rate,
        "perf/step_time_s": record.step_s,
        "perf/tokens_per_second_per_device": record.real_tokens / record.step_s,
    }
    if record.gradient_norm is not None:
        values["train/gradient_norm"] = record.gradient_norm
    for tracker in trackers:
        tracker.log(values, record.step)


def scalar_settings(config: JobConfig) -> dict[str, Any]:
    """The settings of a job that a tracker can show: no nested ones."""
    return {
        key: value
        for key, value in config.model_dump(mode="json").items()
        if isinstance(value, str | int | float | bool)
    }


class TensorBoardTracker:
    def __init__(self, config: JobConfig, run_folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(run_folder / "tensorboard"))

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class MlflowTracker:
    """Into the tracking server of MLFLOW_TRACKING_URI, else into files in the run folder."""

    def __init__(self, config: JobConfig, run_folder: Path) -> None:
        self._mlflow: Any = importlib.import_module("mlflow")
        if not self._mlflow.is_tracking_uri_set():
            envs.set_for_children({"MLFLOW_ALLOW_FILE_STORE": "true"})  # recent releases refuse files otherwise
            self._mlflow.set_tracking_uri((run_folder / "mlflow").resolve().as_uri())
        self._mlflow.set_experiment(config.workload)
        self._mlflow.start_run(run_name=run_folder.name)
        self._mlflow.log_params(scalar_settings(config))

    def log(self, values: dict[str, float], step: int) -> None:
        self._mlflow.log_metrics(values, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


class WandbTracker:
    """Offline unless the user has set WANDB_MODE."""

    def __init__(self, config: JobConfig, run_folder: Path) -> None:
        self._wandb: Any = importlib.import_module("wandb")
        self._run = self._wandb.init(
            project="training-xpu",
            name=run_folder.name,
            dir=str(run_folder),
            config=scalar_settings(config),
            mode=envs.snapshot().get("WANDB_MODE", "offline"),
        )

    def log(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()
