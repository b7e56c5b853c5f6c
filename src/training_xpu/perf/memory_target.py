"""The memory budget of an experiment with recompute, and whether its base would fit it.

A proxy fits this machine, so that nothing would have to be recomputed. Its budget is therefore scaled: it must
recompute the share of its layers that the full model must on its target device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

from training_xpu.errors import JobFailed
from training_xpu.recompute.budget import LIVE, VARIABLE, Budget, memory_limit, read_budget, size_text
from training_xpu.recompute.prediction.setting import TrainingSetting
from training_xpu.workloads import catalogue
from training_xpu.workloads.config import EngineName, JobConfig
from training_xpu.workloads.listing import TARGET_DTYPE

if TYPE_CHECKING:
    from training_xpu.recompute.prediction.predict import PeakPrediction

FEATURE = "recompute"


def with_memory_budget(job: JobConfig, asked: str | None, device_type: str, say: Callable[[str], None]) -> JobConfig:
    """The job with its budget, and with every layer recomputed in the base arm where that would not fit without.

    Args:
        asked: --memory-budget, or what the user's TRAINING_XPU_MEMORY_BUDGET says; None: scaled with a proxy, else all
            that the machine leaves a rank.
        device_type: torch's name of what the ranks compute on.
        say: is given lines for people.

    Raises:
        UserError: the budget is malformed.
        JobFailed: even with all layers recomputed it cannot be met.
    """
    prediction = predict(job, device_type)
    limit = memory_limit(job.nproc, device_type)
    if asked is not None:
        budget, text = read_budget(asked, limit, "--memory-budget"), asked
    elif job.scale.kind == "proxy":
        budget = scaled_budget(job, prediction, say)
        text = f"{LIVE}{budget.bytes}B"
    else:
        budget, text = limit, None
    fitting = [
        n for n in range(prediction.blocks + 1) if _needed(prediction, n, budget, job, device_type) <= budget.bytes
    ]
    if not fitting:
        raise _impossible(job, prediction, budget, device_type)
    base_fits = fitting[0] == 0
    if not base_fits and not job.gradient_checkpointing:
        say(
            f"memory budget {size_text(budget.bytes)} per rank ({budget.source}): not all activations fit, so that "
            "the base recomputes every layer, as a user would have it"
        )
    return job.model_copy(
        update={"memory_budget": text, "gradient_checkpointing": job.gradient_checkpointing or not base_fits}
    )


def predict(job: JobConfig, device_type: str) -> PeakPrediction:
    """Peaks of live bytes of the job's model."""
    from training_xpu.perf.plan_subject import meta_model
    from training_xpu.recompute.prediction.predict import predict_peaks

    setting = _setting(
        job.engine,
        job.zero_stage,
        job.world_size,
        job.micro_batch,
        job.sequence_length,
        dtype=str(job.dtype),
        gradient_accumulation=job.gradient_accumulation,
        device_type=device_type,
    )
    return predict_peaks(meta_model(job.model), setting)


def scaled_budget(job: JobConfig, proxy: PeakPrediction, say: Callable[[str], None]) -> Budget:
    """Live bytes that let a proxy keep the share of its layers that the full model can keep on its target device.

    The budget lies in the middle between what that count needs and what one recomputed layer fewer would need.
    """
    from training_xpu.perf.calibrate import calibration_for, engine_key
    from training_xpu.perf.plan_subject import meta_model
    from training_xpu.recompute.prediction.predict import predict_peaks

    model = catalogue.resolve(job.workload).model
    target = catalogue.targets()[model.target_device]
    setting = _setting(
        job.engine,
        job.zero_stage,
        model.target_world_size,
        model.target_micro_batch,
        model.sequence_length,
        dtype=TARGET_DTYPE,
        gradient_accumulation=1,
        device_type="cuda",
    )
    full = predict_peaks(meta_model(model.config), setting)
    calibration, _ = calibration_for("cuda")
    held = [calibration.interval(peak, engine_key(setting))[1] for peak in full.peaks]
    needed = next((n for n, size in enumerate(held) if size <= target.memory_bytes), full.blocks)
    count = math.ceil(proxy.blocks * needed / full.blocks)
    say(
        f"the full model must recompute {needed} of its {full.blocks} layers on {model.target_world_size} x "
        f"{target.name}, the proxy accordingly {count} of {proxy.blocks}"
    )
    peak = proxy.peaks[count]
    size = round(peak * 1.02) if count == 0 else (peak + proxy.peaks[count - 1]) // 2
    return Budget(max(peak, size), f"scaled from a {target.name}", live=True)


def _setting(
    engine: EngineName,
    zero_stage: int,
    world_size: int,
    micro_batch: int,
    sequence_length: int,
    *,
    dtype: str,
    gradient_accumulation: int,
    device_type: str,
) -> TrainingSetting:
    name: str = str(engine)
    if engine is EngineName.TRANSFORMERS:
        name = "ddp" if world_size > 1 else "plain"
    return TrainingSetting(
        engine=cast(Any, name),
        zero_stage=zero_stage if engine is EngineName.DEEPSPEED else 0,
        world_size=world_size,
        dtype=cast(Any, dtype),
        batch_size=micro_batch,
        sequence_length=sequence_length,
        gradient_accumulation=gradient_accumulation,
        device_type=device_type,
    )


def _needed(prediction: PeakPrediction, count: int, budget: Budget, job: JobConfig, device_type: str) -> int:
    """Bytes in the unit of the budget: live ones, or what the process is expected to hold."""
    live = prediction.peaks[count]
    if budget.live:
        return live
    from training_xpu.perf.calibrate import calibration_for, engine_key

    setting = _setting(
        job.engine,
        job.zero_stage,
        job.world_size,
        job.micro_batch,
        job.sequence_length,
        dtype=str(job.dtype),
        gradient_accumulation=job.gradient_accumulation,
        device_type=device_type,
    )
    calibration, _ = calibration_for(device_type)
    return calibration.expected(live - prediction.untouched(count), engine_key(setting))


def _impossible(job: JobConfig, prediction: PeakPrediction, budget: Budget, device_type: str) -> JobFailed:
    needed = _needed(prediction, prediction.blocks, budget, job, device_type)
    largest = sorted(prediction.parts(prediction.blocks).items(), key=lambda part: part[1], reverse=True)[:3]
    parts = ", ".join(f"{name} {size_text(size)}" for name, size in largest)
    remedies = [option for option, other in _smaller(job) if _could_fit(other, budget, device_type)]
    remedies.append(f"a larger budget (--memory-budget or {VARIABLE})")
    return JobFailed(
        f"{job.workload} does not fit: with all {prediction.blocks} layers recomputed it needs {size_text(needed)} "
        f"of {size_text(budget.bytes)}, {budget.source} (largest: {parts})",
        "Try " + ", or ".join(remedies) + ".",
    )


def _smaller(job: JobConfig) -> Iterator[tuple[str, JobConfig]]:
    """Options that need less memory, and the job with each of them."""
    if job.micro_batch > 1:
        yield "--micro-batch 1", job.model_copy(update={"micro_batch": 1})
    if job.engine is EngineName.DEEPSPEED:
        for stage in range(job.zero_stage + 1, 4):
            yield f"--zero {stage}", job.model_copy(update={"zero_stage": stage})


def _could_fit(job: JobConfig, budget: Budget, device_type: str) -> bool:
    prediction = predict(job, device_type)
    return _needed(prediction, prediction.blocks, budget, job, device_type) <= budget.bytes
