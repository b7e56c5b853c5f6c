"""Several arms of one workload, one after the other in fresh processes, and the document that shows them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training_xpu import features
from training_xpu.errors import ExitCode, UserError
from training_xpu.perf import store
from training_xpu.perf.records import ArmDocument, BenchmarkDocument, LossSummary, RunRecord, Status
from training_xpu.perf.runner import Arm, RunContext, run_arm
from training_xpu.workloads.config import JobConfig

BASE = "base"


def parse_arms(features_option: str | None, arms_option: str | None) -> list[Arm]:
    """`--features a,b` is one arm with both on; `--arms base,a,a+b` names several; neither is the base alone.

    Raises:
        UserError: a feature is unknown, an arm is named twice or both options are given.
    """
    if features_option is not None and arms_option is not None:
        raise UserError(
            "--features and --arms exclude each other", "--arms base,a+b compares the base with a and b on."
        )
    if arms_option is not None:
        arms = [_arm(part) for part in arms_option.split(",") if part.strip()]
        if not arms:
            raise UserError("--arms names no arm", "Such as: --arms base")
        names = [arm.name for arm in arms]
        for name in names:
            if names.count(name) > 1:
                raise UserError(f"--arms names {name!r} twice")
        return arms
    return [_arm(features_option or BASE)]


def _arm(text: str) -> Arm:
    names = features.parse_names(text)
    return Arm(name="+".join(names) or BASE, features=names)


@dataclass
class Outcome:
    """The records of an experiment, in the order of its arms; `interrupted` where a signal ended it."""

    runs: list[tuple[Path, RunRecord]]
    interrupted: bool = False

    @property
    def status(self) -> Status:
        if self.interrupted:
            return "interrupted"
        return "completed" if all(record.status == "completed" for _, record in self.runs) else "failed"

    @property
    def stepped_aside(self) -> list[str]:
        """Features that were asked for and did not apply, with their reason."""
        found: list[str] = []
        for _, record in self.runs:
            for name in record.features:
                own = [r for r in record.feature_reports if r.get("feature") == name]
                reasons = [
                    str(r.get("reason") or "no reason given")
                    for r in own
                    if r.get("event") in ("stepped-aside", "fault")
                ]
                if not reasons and record.status == "completed" and not any(r.get("event") == "applied" for r in own):
                    reasons = ["it never said that it applied; were there enough steps?"]
                if reasons:
                    found.append(f"{name}: {reasons[0]}")
        return list(dict.fromkeys(found))

    def exit_code(self) -> ExitCode:
        if self.interrupted:
            return ExitCode.INTERRUPTED
        if self.status != "completed":
            return ExitCode.FAILED
        return ExitCode.CANNOT_RUN if self.stepped_aside else ExitCode.DONE


def run_experiment(job: JobConfig, arms: list[Arm], context: RunContext) -> Outcome:
    """Runs every arm; a failed arm does not keep the others from running, an interrupt does."""
    outcome = Outcome(runs=[])
    for number, arm in enumerate(arms, start=1):
        if len(arms) > 1:
            context.say(f"arm {number} of {len(arms)}: {arm.name}")
        folder = run_arm(job, arm, context)
        record = store.load_run(folder)
        outcome.runs.append((folder, record))
        if record.status == "interrupted":
            outcome.interrupted = True
            break
    return outcome


def document(job: JobConfig, outcome: Outcome, fingerprint: dict[str, Any]) -> BenchmarkDocument:
    reasons = [f"{record.arm}: {record.reason}" for _, record in outcome.runs if record.reason]
    return BenchmarkDocument(
        workload=job.workload,
        scale=job.scale,
        status=outcome.status,
        reason="; ".join(reasons),
        arms=[_arm_document(folder, record) for folder, record in outcome.runs],
        world_size=job.world_size,
        fingerprint=fingerprint,
    )


def _arm_document(folder: Path, record: RunRecord) -> ArmDocument:
    summary = record.summary
    return ArmDocument(
        name=record.arm,
        features=record.features,
        status=record.status,
        reason=record.reason,
        tokens_per_second_per_device=summary.tokens_per_second_per_device if summary else None,
        step_time_s=summary.step_time_s if summary else None,
        mfu=summary.mfu if summary else None,
        hfu=summary.hfu if summary else None,
        peak_memory_bytes=summary.peak_memory_bytes if summary else None,
        loss=summary.loss if summary else LossSummary(),
        run=folder,
        summary=summary,
        features_applied=record.feature_reports,
    )
