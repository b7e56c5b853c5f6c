"""`ljperf plan`: what a training step needs with 0 to all blocks recomputed, and the fewest that fit a rank's memory.

Nothing is run and no weights exist: live tensor bytes are predicted from the model's shapes, what the allocator holds
beyond them from measured runs (both in `recompute.prediction`), and the slow-down from FLOPs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from training_xpu.blocks import find_blocks
from training_xpu.errors import JobFailed, UserError
from training_xpu.perf.calibrate import calibration_for, calibration_record, engine_key
from training_xpu.perf.garbage import objects_that_stay
from training_xpu.perf.plan_records import OVERHEAD, PlanDocument, PlanOption, Policy
from training_xpu.perf.plan_subject import PlanRequest, Subject, build_subject
from training_xpu.recompute.budget import size_text, unit_for
from training_xpu.recompute.prediction.ledger import COMMUNICATION, HEAD_AND_LOSS
from training_xpu.recompute.prediction.setting import TrainingSetting

if TYPE_CHECKING:
    import torch

    from training_xpu.recompute.prediction.predict import PeakPrediction

_UNTOUCHED = "buffers never written to"
_MORE_RANKS = (2, 4, 8, 16, 32, 64)  # times as many, tried in turn


def make_plan(request: PlanRequest, runs_folder: Path) -> PlanDocument:
    """Predicts every option of a request and recommends the one with the fewest recomputed blocks that fits.

    Args:
        runs_folder: where measured steps of the same workload are looked for.

    Raises:
        UserError: the request is wrong, or the memory of its model cannot be predicted.
    """
    with objects_that_stay():
        subject = build_subject(request)
        setting = setting_of(subject, request)
        _check_blocks(subject)
        from training_xpu.recompute.prediction import predict  # noqa: F401  # what it imports stays too
    planner = Planner(subject, setting)
    prediction = planner.prediction
    ratios, source = _time_ratios(subject, request, prediction, runs_folder)
    options = [planner.option(n, ratios[n]) for n in range(prediction.blocks + 1)]
    recommended = next((option.layers for option in options if option.fits), None)
    shown = options[-1] if recommended is None else options[recommended]
    return PlanDocument(
        model=subject.name,
        engine=subject.engine,
        zero_stage=subject.zero_stage,
        world_size=subject.world_size,
        micro_batch=subject.micro_batch,
        sequence_length=subject.sequence_length,
        gradient_accumulation=request.gradient_accumulation,
        dtype=subject.dtype,
        optimizer=request.optimizer,
        device_kind=subject.device_kind,
        parameters=sum(p.numel() for p in subject.model.parameters()),
        layers=prediction.blocks,
        budget_bytes=subject.budget.bytes,
        budget_source=subject.budget.source,
        budget_live=subject.budget.live,
        defaults=list(subject.defaults),
        recommended_layers=recommended,
        policy=_policy(recommended, prediction.blocks),
        options=options,
        parts=shown.parts,
        step_time_source=source,
        suggestions=suggestions(planner) if recommended is None else [],
        calibration=calibration_record(planner.calibration, planner.calibration_source),
    )


def setting_of(subject: Subject, request: PlanRequest) -> TrainingSetting:
    """The subject in the words of `recompute.prediction.predict`; the HF Trainer on several ranks is DDP."""
    engine = subject.engine
    if engine == "transformers":
        engine = "ddp" if subject.world_size > 1 else "plain"
    return TrainingSetting(
        engine=cast(Any, engine),
        zero_stage=subject.zero_stage or 0,
        world_size=subject.world_size,
        dtype=cast(Any, subject.dtype),
        batch_size=subject.micro_batch,
        sequence_length=subject.sequence_length or 1,
        gradient_accumulation=request.gradient_accumulation,
        optimizer=request.optimizer,
        device_type="cpu" if subject.device_kind == "cpu" else "cuda",
    )


def _policy(recommended: int | None, layers: int) -> Policy:
    if recommended is None:
        return "does not fit"
    if recommended == 0:
        return "none"
    return "recompute all" if recommended == layers else "recompute"


def _check_blocks(subject: Subject) -> None:
    if not find_blocks(subject.model):
        raise UserError(
            f"{subject.name} has no blocks: no layers of one class repeat in it, so there is nothing to recompute",
            "Keep repeated layers in an nn.ModuleList or nn.Sequential.",
        )


def _time_ratios(
    subject: Subject, request: PlanRequest, prediction: PeakPrediction, runs_folder: Path
) -> tuple[list[float | None], str]:
    from training_xpu.perf import plan_time

    if subject.counts is not None and subject.sequence_length is not None:
        flops: plan_time.StepFlops | None = plan_time.flops_from_counts(subject.counts, subject.sequence_length)
    else:
        flops = plan_time.flops_from_trace(subject.model, _inputs(subject), block_names(subject.model))
    measured = plan_time.measured_step(subject, subject.dtype, request.gradient_accumulation, runs_folder)
    return plan_time.time_ratios(prediction.blocks, flops, measured)


def block_names(model: torch.nn.Module) -> list[str]:
    """Names of all blocks in the order in which the model holds them."""
    names = {name for group in find_blocks(model) for name in group.names}
    return [name for name, _ in model.named_modules() if name in names]


def _inputs(subject: Subject) -> dict[str, torch.Tensor]:
    """The function's own inputs, or token ids and labels for a language model."""
    import torch

    if subject.inputs is not None:
        return subject.inputs
    tokens = torch.zeros(subject.micro_batch, subject.sequence_length or 1, dtype=torch.long, device="meta")
    return {"input_ids": tokens, "labels": tokens}


class Planner:
    """Predictions for one subject, and for the same subject with another setting."""

    def __init__(self, subject: Subject, setting: TrainingSetting) -> None:
        self.subject = subject
        self.setting = setting
        self.calibration, self.calibration_source = calibration_for(setting.device_type)
        self.prediction = self._predict(setting)

    def _predict(self, setting: TrainingSetting) -> PeakPrediction:
        from training_xpu.recompute.prediction.predict import predict_peaks

        return predict_peaks(self.subject.model, setting, inputs=self.subject.inputs)

    def option(self, layers: int, time_ratio: float | None) -> PlanOption:
        """One row of the plan."""
        live, untouched = self.prediction.peaks[layers], self.prediction.untouched(layers)
        engine, touched = engine_key(self.setting), live - untouched
        expected = self.calibration.expected(touched, engine)
        parts = self.prediction.parts(layers)
        parts[COMMUNICATION] -= untouched
        return PlanOption(
            layers=layers,
            predicted_peak_bytes=expected,
            predicted_peak_interval_bytes=self.calibration.interval(touched, engine),
            predicted_live_bytes=live,
            predicted_step_time_ratio=time_ratio,
            fits=self._needed(self.prediction, layers, self.setting) <= self.subject.budget.bytes,
            phase=self.prediction.phases[layers],
            parts={**_non_negative(parts), OVERHEAD: expected - touched},
        )

    def smallest(self, setting: TrainingSetting) -> int:
        """What must be within the budget with every block recomputed, under another setting."""
        prediction = self._predict(setting)
        return self._needed(prediction, prediction.blocks, setting)

    def _needed(self, prediction: PeakPrediction, layers: int, setting: TrainingSetting) -> int:
        live = prediction.peaks[layers]
        if self.subject.budget.live:
            return live
        return self.calibration.interval(live - prediction.untouched(layers), engine_key(setting))[1]


def _non_negative(parts: dict[str, int]) -> dict[str, int]:
    """A part that has given back more than it took, such as labels by the head, is nothing; the sum stays."""
    kept = {name: max(0, size) for name, size in parts.items()}
    largest = max(kept, key=kept.__getitem__)
    kept[largest] += sum(parts.values()) - sum(kept.values())
    return kept


def suggestions(planner: Planner) -> list[str]:
    """Options that were predicted to make the full recompute fit, each with what it would need.

    Single changes first: a smaller micro batch, then a higher ZeRO stage; both together where neither is enough; more
    ranks where that is not enough either.
    """
    unit = unit_for(planner.subject.budget.bytes)
    for candidates in (_single_changes(planner), _combined_changes(planner)):
        found: dict[str, str] = {}
        for options, setting in candidates:
            option = options.split()[0]
            if option not in found and (needed := planner.smallest(setting)) <= planner.subject.budget.bytes:
                found[option] = f"{options} ({unit.amount(needed)})"
        if found:
            return list(found.values())
    return []


def _single_changes(planner: Planner) -> Iterator[tuple[str, TrainingSetting]]:
    setting = planner.setting
    for batch in _smaller_batches(planner):
        yield f"--micro-batch {batch}", replace(setting, batch_size=batch)
    for stage in _higher_stages(setting):
        yield f"--zero {stage}", replace(setting, zero_stage=stage)


def _combined_changes(planner: Planner) -> Iterator[tuple[str, TrainingSetting]]:
    setting, options = planner.setting, ""
    if _smaller_batches(planner):
        setting, options = replace(setting, batch_size=1), "--micro-batch 1 "
    if _higher_stages(setting):
        setting, options = replace(setting, zero_stage=3), f"{options}--zero 3 "
        yield options.strip(), setting
    if setting.engine == "fsdp" or setting.zero_stage > 0:
        for factor in _MORE_RANKS:
            ranks = setting.world_size * factor
            yield f"{options}--world-size {ranks}", replace(setting, world_size=ranks)


def _smaller_batches(planner: Planner) -> list[int]:
    if planner.subject.inputs is not None:
        return []
    batch = planner.setting.batch_size
    return [batch >> shift for shift in range(1, batch.bit_length())]


def _higher_stages(setting: TrainingSetting) -> list[int]:
    sharded = setting.engine == "deepspeed" and setting.world_size > 1
    return list(range(setting.zero_stage + 1, 4)) if sharded else []


def does_not_fit(document: PlanDocument) -> JobFailed:
    """The error for a budget that even full recompute cannot meet."""
    option = document.options[-1]
    needed = document.needed_bytes(option)
    unit = unit_for(needed)
    counted = dict(option.parts)
    if document.budget_live:
        counted[_UNTOUCHED] = option.untouched_bytes
        del counted[OVERHEAD]
    largest = sorted(counted.items(), key=lambda part: part[1], reverse=True)[:3]
    parts = ", ".join(f"{name} {unit.amount(size)}" for name, size in largest)
    remedy = "Would fit: " + "; ".join(document.suggestions) if document.suggestions else _untested(document)
    if HEAD_AND_LOSS in dict(largest):
        remedy += "; a loss computed in chunks would take away most of the head and loss"
    return JobFailed(
        f"{document.model} does not fit: with all {document.layers} blocks recomputed "
        f"{'its live tensors need' if document.budget_live else 'it needs up to'} {unit.amount(needed)} of "
        f"{size_text(document.budget_bytes)} (largest: {parts})",
        remedy,
    )


def _untested(document: PlanDocument) -> str:
    sharded = document.engine == "fsdp" or bool(document.zero_stage)
    return "Use devices with more memory" + ("" if sharded else ", or an engine that shards: fsdp, or deepspeed")
