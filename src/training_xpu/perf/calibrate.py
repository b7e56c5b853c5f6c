"""`ljperf plan --calibrate RUNS`: fits what the allocator adds to live tensor bytes to runs that have been measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from training_xpu import envs
from training_xpu.device.host_memory import ALLOCATOR_PEAK, RESIDENT_PEAK
from training_xpu.errors import UserError
from training_xpu.perf.plan_records import CalibrationDocument, PlanCalibration

if TYPE_CHECKING:
    from training_xpu.perf.records import RunRecord
    from training_xpu.recompute.prediction.calibration import Calibration, Sample
    from training_xpu.recompute.prediction.setting import TrainingSetting
    from training_xpu.workloads.config import JobConfig

FOLDER = "calibration"
SHIPPED = "shipped with this version"
ALLOCATORS = {"cpu": "C library"}


@dataclass(frozen=True)
class Collected:
    """Samples by device kind, and why other runs are none."""

    samples: dict[str, list[Sample]]
    passed_over: Counter[str]


def calibration_file(device_kind: str) -> Path:
    """Where the calibration fitted on this machine lies."""
    return envs.cache_folder() / FOLDER / f"{device_kind}.json"


def collect(folder: Path, say: Callable[[str], None]) -> Collected:
    """Predicts every completed run of a folder again and pairs the predictions with what was measured.

    Args:
        say: is given progress.

    Raises:
        UserError: there is no such folder, or no run in it.
    """
    from training_xpu.perf.store import list_runs

    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}", "Name the folder of your runs; ljperf benchmark makes it.")
    runs = list_runs(folder)
    if not runs:
        raise UserError(f"no runs in {folder}", "Make some with ljperf benchmark.")
    found = Collected({}, Counter())
    predicted: dict[str, tuple[int, int]] = {}
    for number, (path, record) in enumerate(reversed(runs), start=1):
        reason = unsuitable(record)
        if reason is not None or isinstance(record, str):
            found.passed_over[reason or "unreadable"] += 1
            continue
        say(f"run {number} of {len(runs)}: {path.name}")
        try:
            sample = _sample(record, predicted)
        except UserError as error:
            found.passed_over[error.problem] += 1
            continue
        found.samples.setdefault(device_kind_of(record), []).append(sample)
    return found


def unsuitable(record: RunRecord | str) -> str | None:
    """Why a run tells nothing about the allocator; None where it does."""
    if isinstance(record, str):
        return "unreadable"
    if record.status != "completed":
        return "not completed"
    if record.config is None:
        return "of a command of your own, whose model is not known"
    if record.summary is None:
        return "without measured steps"
    if record.features:
        return "measured with features on"
    if record.summary.peak_memory_kind == ALLOCATOR_PEAK:
        return "on an accelerator, where runs do not record what the allocator reserved"
    if record.summary.peak_memory_bytes is None or record.summary.peak_memory_kind != RESIDENT_PEAK:
        return "without a peak of memory measured per step"
    if record.summary.live_bytes_peak is None:
        return "without measured live tensor bytes"
    return None


def device_kind_of(record: RunRecord) -> str:
    """What the run was measured on, in torch's words."""
    kind: Any = record.fingerprint.get("hardware", {}).get("kind", "cpu")
    return str(kind)


def setting_of_job(job: JobConfig, device_type: str) -> TrainingSetting:
    """How a run was trained: engines as `engines/` sets them up, with AdamW and their own defaults."""
    from training_xpu.recompute.prediction.setting import TrainingSetting
    from training_xpu.workloads.config import EngineName

    engine = str(job.engine.value)
    if job.engine == EngineName.TRANSFORMERS:
        engine = "ddp" if job.world_size > 1 else "plain"
    return TrainingSetting(
        engine=cast(Any, engine),
        zero_stage=job.zero_stage if job.engine == EngineName.DEEPSPEED else 0,
        world_size=job.world_size,
        dtype=cast(Any, job.dtype.value),
        batch_size=job.micro_batch,
        sequence_length=job.sequence_length,
        gradient_accumulation=job.gradient_accumulation,
        optimizer="adamw",
        device_type=device_type,
    )


def calibrate_from(folder: Path, say: Callable[[str], None]) -> CalibrationDocument:
    """Fits one calibration for each kind of device in a folder of runs and keeps them for later plans.

    Args:
        say: is given progress.

    Raises:
        UserError: there are too few runs that can be used.
    """
    from training_xpu.recompute.prediction.calibration import FEWEST_SAMPLES, fit

    collected = collect(folder, say)
    enough = {kind: samples for kind, samples in collected.samples.items() if len(samples) >= FEWEST_SAMPLES}
    if not enough:
        raise _too_few(folder, collected)
    records = []
    for kind, samples in sorted(enough.items()):
        allocator = ALLOCATORS.get(kind, "caching allocator")
        fitted = fit(samples, kind, allocator, f"{len(samples)} runs in {folder.absolute()}")
        file = calibration_file(kind)
        file.parent.mkdir(parents=True, exist_ok=True)
        fitted.write(file)
        records.append(calibration_record(fitted, f"written to {file}"))
    for kind in collected.samples.keys() - enough.keys():
        collected.passed_over[f"fewer than {FEWEST_SAMPLES} on {kind}"] += len(collected.samples[kind])
    return CalibrationDocument(
        runs_folder=folder.absolute(), calibrations=records, passed_over=dict(collected.passed_over)
    )


def _too_few(folder: Path, collected: Collected) -> UserError:
    from training_xpu.recompute.prediction.calibration import FEWEST_SAMPLES

    usable = max((len(samples) for samples in collected.samples.values()), default=0)
    reasons = ", ".join(f"{count} {reason}" for reason, count in collected.passed_over.most_common(3))
    return UserError(
        f"{folder} has {usable} runs to calibrate with, and {FEWEST_SAMPLES} of one kind of device are needed"
        + (f" (passed over: {reasons})" if reasons else ""),
        "Make more with ljperf benchmark, of different models and sizes.",
    )


def _sample(record: RunRecord, predicted: dict[str, tuple[int, int]]) -> Sample:
    """The prediction for a run beside its measurements.

    Args:
        predicted: earlier predictions by model and setting, so that repeated runs cost nothing: the peak, and what
            of it is never written to.
    """
    from training_xpu.perf.plan_subject import meta_model
    from training_xpu.recompute.prediction.calibration import Sample
    from training_xpu.recompute.prediction.predict import predict_peaks

    job, summary = record.config, record.summary
    assert job is not None
    assert summary is not None
    setting = setting_of_job(job, "cpu" if device_kind_of(record) == "cpu" else "cuda")
    key = f"{setting}, {job.gradient_checkpointing}, {job.model}"
    if key not in predicted:
        prediction = predict_peaks(meta_model(job.model), setting)
        recomputed = prediction.blocks if job.gradient_checkpointing else 0
        predicted[key] = prediction.peaks[recomputed], prediction.untouched(recomputed)
    assert summary.live_bytes_peak is not None
    assert summary.peak_memory_bytes is not None
    live, untouched = predicted[key]
    # What is never written to is alive and not resident: without it, the overhead is that of the others.
    return Sample(engine_key(setting), live - untouched, summary.live_bytes_peak - untouched, summary.peak_memory_bytes)


def engine_key(setting: TrainingSetting) -> str:
    """What tells engines with different baselines apart: ZeRO's stages have buckets of different kinds."""
    return f"deepspeed zero-{setting.zero_stage}" if setting.engine == "deepspeed" else setting.engine


def calibration_for(device_type: str) -> tuple[Calibration, str]:
    """The calibration fitted on this account, or the one shipped with this version, and where it is from.

    Raises:
        UserError: the file is damaged, or from a newer version.
    """
    from training_xpu.recompute.prediction.calibration import VERSION, Calibration, shipped

    file = calibration_file(device_type)
    if not file.exists():
        return shipped(device_type), SHIPPED
    found = Calibration.read(file)
    if found.schema_version < VERSION:
        return shipped(device_type), f"{SHIPPED}; {file} is of an older version: fit it again with --calibrate"
    return found, f"fitted here ({file})"


def calibration_record(calibration: Calibration, source: str) -> PlanCalibration:
    """What a document says about a calibration."""
    return PlanCalibration(
        device_kind=calibration.device_kind,
        allocator=calibration.allocator,
        version=calibration.schema_version,
        source=source,
        samples=calibration.samples,
        fitted_on=calibration.fitted_on,
        cross_validated_error=calibration.error,
    )
