"""Hands training metrics to the trackers people use; each is imported only when it was asked for."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from training_xpu import envs
from training_xpu.errors import CannotRunHere
from training_xpu.workloads.config import JobConfig
from training_xpu.workloads.process import failure_reason
from training_xpu.workloads.records import TRACKER_NOTE, StepRecord

if TYPE_CHECKING:
    from training_xpu.workloads.metrics import RunWriter

PACKAGES = {"tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb"}


class Tracker(Protocol):
    def log(self, values: dict[str, float], step: int) -> None: ...

    def close(self, failed: bool) -> None: ...


def check_trackers(names: list[str]) -> None:
    """Refuses, before any rank starts, a tracker whose package is not installed.

    Raises:
        CannotRunHere: with the package to install.
    """
    for name in names:
        spec = find_spec(PACKAGES[name])
        if spec is None or spec.origin is None:  # a folder of that name, such as the one wandb writes, is no package
            raise CannotRunHere(
                f"--report-to {name}: the package {PACKAGES[name]} is not installed",
                f"pip install 'training-xpu-pytorch[{name}]'",
            )


class Trackers:
    """All trackers of a job. One that fails while the job runs is dropped and named; the training goes on."""

    def __init__(self, trackers: dict[str, Tracker], on_fault: Callable[[str], None]) -> None:
        """
        Args:
            trackers: name -> tracker.
            on_fault: is given one sentence about a tracker that was dropped.
        """
        self._trackers = trackers
        self._on_fault = on_fault

    def log(self, values: dict[str, float], step: int) -> None:
        self._each(lambda tracker: tracker.log(values, step))

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """Closes the trackers with the work, and tells them whether it failed: a rank's end runs no exit handlers."""
        try:
            yield
        except BaseException:
            self._each(lambda tracker: tracker.close(failed=True))
            raise
        self._each(lambda tracker: tracker.close(failed=False))

    def _each(self, do: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                do(tracker)
            except Exception as error:
                del self._trackers[name]
                self._on_fault(f"{name} was given no more values: {failure_reason(error)}")


def open_trackers(config: JobConfig, run_folder: Path, writer: RunWriter) -> Trackers:
    """The trackers of a job, on rank 0; the other ranks have none.

    A tracker that cannot be opened ends the rank, as nothing has been trained yet.
    """
    makers: dict[str, Any] = {"tensorboard": TensorBoardTracker, "mlflow": MlflowTracker, "wandb": WandbTracker}
    opened: dict[str, Tracker] = (
        {name: makers[name](config, run_folder) for name in config.report_to} if writer.rank == 0 else {}
    )
    return Trackers(opened, lambda fault: writer.event("note", TRACKER_NOTE, detail=fault))


def log_step(trackers: Trackers, record: StepRecord) -> None:
    """Hands one step of rank 0 to the trackers."""
    values = {
        "train/loss": record.loss,
        "train/learning_rate": record.learning_rate,
        "perf/step_time_s": record.step_s,
        "perf/tokens_per_second_per_device": record.real_tokens / record.step_s,
    }
    if record.gradient_norm is not None:
        values["train/gradient_norm"] = record.gradient_norm
    trackers.log(values, record.step)


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

    def close(self, failed: bool) -> None:
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
        self._mlflow.log_metrics(values, step=step, synchronous=False)  # a step must not wait for a server

    def close(self, failed: bool) -> None:
        with contextlib.redirect_stdout(sys.stderr):  # it prints a link; stdout may carry a JSON document
            self._mlflow.flush_async_logging()
            self._mlflow.end_run("FAILED" if failed else "FINISHED")


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

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
