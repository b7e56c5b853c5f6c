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


def check_variables() -> None:
    """Every verb that starts processes calls it first.

    Raises:
        BadValue: a variable of the project holds something it cannot mean.
    """
    from training_xpu.perf.variables import check_ours

    check_ours(console.note if envs.distributed().rank == 0 else lambda text: None)


def refuse_existing_launcher(verb: str) -> None:
    """Some verbs start their own ranks; under torchrun every rank would start them again."""
    if envs.distributed().launched:
        raise UserError(
            f"ljperf {verb} starts its own ranks, and runs inside a launcher here (RANK is set)",
            "Start it without torchrun, or use: torchrun ... --no-python ljperf train ...",
        )


def check_meeting_point() -> None:
    """
    Raises:
        UserError: a launcher has set this rank's place, and not where the ranks meet.
    """
    place = envs.distributed()
    if place.launched:
        lacking = [
            name
            for name, value in (("MASTER_ADDR", place.master_address), ("MASTER_PORT", place.master_port))
            if value is None
        ]
        if lacking:
            raise UserError(
                f"RANK and WORLD_SIZE are set, as by a launcher, but not {' and '.join(lacking)}",
                "The launcher must set them to the host and a free port of rank 0, the same for every rank; without "
                "a launcher, unset RANK and WORLD_SIZE.",
            )
        if not 1 <= (place.master_port or 0) <= 65535:
            raise UserError(f"MASTER_PORT is {place.master_port}", "It is a port of rank 0's host, from 1 to 65535.")
    elif envs.get("RANK") is not None:
        raise UserError(
            "RANK is set, as by a launcher, but not WORLD_SIZE", "The launcher must set both; without one, unset RANK."
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
    from training_xpu.perf.store import check_runs_folder

    runs_folder = (output or envs.runs_folder()).absolute()
    with interrupt_on_signals():
        check_runs_folder(runs_folder)
        job = (
            resume_job(request, given, console.note, runs_folder)
            if request.resume is not None
            else resolve(request, default_steps, console.note)
        )
        job = _with_memory_budget(request, job, arms)
        context = make_context(request, job, runs_folder, len(arms))
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


def _with_memory_budget(request: TrainingRequest, job: JobConfig, arms: list[Arm]) -> JobConfig:
    """Only where it matters: predicting memory takes some seconds."""
    asked = request.memory_budget or envs.get("TRAINING_XPU_MEMORY_BUDGET")
    if request.memory_budget is None and not any("recompute" in arm.features for arm in arms):
        return job
    from training_xpu.device import may_have_accelerator, torch_view
    from training_xpu.perf.memory_target import with_memory_budget

    device_type = torch_view().kind if may_have_accelerator() and torch_view().accelerators else "cpu"
    return with_memory_budget(job, asked, device_type, console.note)


def make_context(request: TrainingRequest, job: JobConfig, runs_folder: Path, arms: int) -> RunContext:
    from training_xpu.device import may_have_accelerator, torch_view
    from training_xpu.perf.fingerprint import collect
    from training_xpu.perf.progress import ProgressDisplay
    from training_xpu.perf.runner import Rendezvous, RunContext

    return RunContext(
        runs_folder=runs_folder,
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
        f"data: {job.data.source}, {console.count(job.data.train_token_count, 'training token')} "
        f"in {console.count(job.data.document_count, 'document')}"
    )
    steps, ranks = console.count(job.steps, "step"), console.count(job.world_size, "rank")
    console.note(
        f"{steps} on {ranks}: {job.micro_batch} x {job.sequence_length} tokens per rank and micro batch, "
        f"{console.count(job.gradient_accumulation, 'micro batch', 'micro batches')} per step, {job.dtype}"
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
    check_meeting_point()
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
    from training_xpu.perf.store import check_runs_folder
    from training_xpu.perf.under_launcher import train_as_rank

    runs_folder = (output or envs.runs_folder()).absolute()
    check_runs_folder(runs_folder)
    shown = train_as_rank(request, default_steps, runs_folder, given, console.note)
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
