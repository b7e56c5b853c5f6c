"""What `ljperf benchmark` and `ljperf train` do with a request: resolve it, run its arms, show what came out."""

from __future__ import annotations

import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from training_xpu import envs
from training_xpu.cli import console
from training_xpu.errors import ExitCode, UserError

if TYPE_CHECKING:
    from training_xpu.perf.records import BenchmarkDocument
    from training_xpu.perf.request import TrainingRequest
    from training_xpu.perf.runner import Arm, RunContext
    from training_xpu.workloads.config import JobConfig


def refuse_existing_launcher() -> None:
    """`ljperf benchmark` starts its own ranks; under torchrun every rank would start them again."""
    if envs.distributed().launched:
        raise UserError(
            "ljperf benchmark starts its own ranks, and runs inside a launcher here (RANK is set)",
            "Start it without torchrun, or use: torchrun ... --no-python ljperf train ...",
        )


def launch_and_show(
    request: TrainingRequest,
    arms: list[Arm],
    default_steps: int,
    output: Path | None,
    as_json: bool,
    dry_run: bool,
    given: frozenset[str] = frozenset(),
) -> int:
    """Runs the arms and prints the table or the document; returns the exit code."""
    from training_xpu.perf.children import interrupt_on_signals
    from training_xpu.perf.experiment import document, run_experiment
    from training_xpu.perf.resolve import resolve
    from training_xpu.perf.resume import resume_job
    from training_xpu.perf.runner import DryRunDocument, as_script, plan_arm

    with interrupt_on_signals():
        job = (
            resume_job(request, given, console.note)
            if request.resume is not None
            else resolve(request, default_steps, console.note)
        )
        context = make_context(request, job, output, len(arms))
        if dry_run:
            planned = [plan_arm(job, arm, context) for arm in arms]
            if as_json:
                console.result(DryRunDocument(workload=job.workload, arms=planned).to_json(indent=2))
            else:
                console.result("\n\n".join(f"# arm {arm.name}\n{as_script(arm)}" for arm in planned))
            return ExitCode.DONE
        introduce(job)
        outcome = run_experiment(job, arms, context)
    shown = document(job, outcome, context.fingerprint)
    _print(shown, as_json)
    for line in outcome.stepped_aside:
        console.error(f"feature stepped aside: {line}")
    for arm in shown.arms:
        if arm.status == "failed":
            console.error(f"arm {arm.name} failed: {arm.reason}", f"See {arm.run}/logs, or: ljperf runs {arm.run.name}")
    if outcome.interrupted:
        console.error("interrupted; the record of what was measured is kept")
    return int(outcome.exit_code())


def make_context(request: TrainingRequest, job: JobConfig, output: Path | None, arms: int) -> RunContext:
    from training_xpu.device import may_have_accelerator, torch_view
    from training_xpu.perf.fingerprint import collect
    from training_xpu.perf.progress import ProgressDisplay
    from training_xpu.perf.runner import Rendezvous, RunContext

    runs = (output or envs.runs_folder()).absolute()
    return RunContext(
        runs_folder=runs,
        command=["ljperf", *sys.argv[1:]],
        display=ProgressDisplay(sys.stderr, sys.stderr.isatty()),
        fingerprint=collect().model_dump(mode="json", by_alias=True),
        experiment=uuid.uuid4().hex[:12] if arms > 1 else None,
        rendezvous=Rendezvous(request.node_rank, request.rdzv_endpoint or "localhost:0", request.rdzv_id),
        has_accelerator=may_have_accelerator() and bool(torch_view().accelerators),
        say=console.note,
    )


def introduce(job: JobConfig) -> None:
    """What is about to be trained, so that nobody mistakes a proxy for the model."""
    scale = job.scale
    console.note(f"{job.workload}: {scale.kind}, {scale.parameters / 1e6:,.1f} million parameters. {scale.reason}")
    console.note(
        f"data: {job.data.source}, {job.data.train_token_count:,} training tokens "
        f"in {job.data.document_count:,} documents"
    )
    ranks = "1 rank" if job.world_size == 1 else f"{job.world_size} ranks"
    console.note(
        f"{job.steps} steps on {ranks}: {job.micro_batch} x {job.sequence_length} tokens per rank and micro batch, "
        f"{job.gradient_accumulation} micro batch{'es' if job.gradient_accumulation > 1 else ''} per step, {job.dtype}"
    )


def train_under_launcher(
    request: TrainingRequest,
    arm: Arm,
    default_steps: int,
    output: Path | None,
    as_json: bool,
    dry_run: bool,
    given: frozenset[str],
) -> int | None:
    """Trains as one rank of a launcher that has set RANK; None where there is none."""
    if not envs.distributed().launched:
        return None
    for option, asked in (
        ("--dry-run", dry_run),
        ("--node-rank", "node_rank" in given),
        ("--rdzv-endpoint", "rdzv_endpoint" in given),
        ("--rdzv-id", "rdzv_id" in given),
    ):
        if asked:
            raise UserError(
                f"{option} works where ljperf starts the ranks; here a launcher has", f"Leave {option} out."
            )
    if arm.features:
        raise UserError(
            "--features works where ljperf starts the ranks; here a launcher has",
            "Set the features' own variables before the launcher.",
        )
    from training_xpu.perf.under_launcher import train_as_rank

    shown = train_as_rank(request, default_steps, (output or envs.runs_folder()).absolute(), given, console.note)
    if shown is not None:
        _print(shown, as_json)
    from training_xpu.workloads.process import leave

    leave(ExitCode.DONE)


def _print(shown: BenchmarkDocument, as_json: bool) -> None:
    if as_json:
        console.result(shown.to_json(indent=2))
    else:
        from training_xpu.cli.outcome import show

        show(shown)
