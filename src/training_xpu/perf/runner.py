"""Runs one arm: a fresh set of processes, watched from start to end, whose record is kept whatever happens."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from training_xpu import envs, report
from training_xpu.device import oom_kills
from training_xpu.errors import CannotRunHere
from training_xpu.perf import store
from training_xpu.perf.children import deaf_to_interrupts, end_tree
from training_xpu.perf.environment import job_environment
from training_xpu.perf.failures import collect_failures
from training_xpu.perf.leftovers import RESERVE_FILE, clear_leftovers
from training_xpu.perf.progress import ProgressDisplay, ProgressFollower
from training_xpu.perf.records import RUN_FILE, RunRecord
from training_xpu.perf.summary import settled_at, summarise
from training_xpu.records import Record
from training_xpu.workloads import checkpoint
from training_xpu.workloads.config import JOB_FILE, EngineName, JobConfig
from training_xpu.workloads.folder_owner import owning
from training_xpu.workloads.launch import LAUNCH_FILE, check_loopback
from training_xpu.workloads.process import failure_reason
from training_xpu.workloads.records import PEAK_MEMORY_NOTE, TRACKER_NOTE, StepRecord

POLL_SECONDS = 0.2
LOOKING_SECONDS = 20.0
RESERVE_BYTES = 512 * 1024


@dataclass(frozen=True)
class Rendezvous:
    """How the nodes of a job find each other; the default is a single node on a free port."""

    node_rank: int | None = None
    endpoint: str = "localhost:0"
    run_id: str = ""


@dataclass(frozen=True)
class Arm:
    name: str
    features: list[str]


@dataclass
class RunContext:
    """What all arms of one command share."""

    runs_folder: Path
    command: list[str]
    display: ProgressDisplay
    fingerprint: dict[str, Any] = field(default_factory=dict)
    experiment: str | None = None
    rendezvous: Rendezvous = field(default_factory=Rendezvous)
    has_accelerator: bool = False
    say: Callable[[str], None] = lambda text: None


def launch_command(run_folder: Path, rendezvous: Rendezvous, parent: int | None) -> list[str]:
    command = [sys.executable, "-m", "training_xpu.workloads.launch", str(run_folder)]
    if parent is not None:
        command += ["--parent", str(parent)]
    command += ["--rdzv-endpoint", rendezvous.endpoint]
    if rendezvous.run_id:
        command += ["--rdzv-id", rendezvous.run_id]
    if rendezvous.node_rank is not None:
        command += ["--node-rank", str(rendezvous.node_rank)]
    return command


class PlannedArm(Record):
    """What would be done for one arm. The measured record of a run is written by `ljperf` itself, not by the ranks."""

    name: str
    run_folder: Path
    job: JobConfig  # goes into the folder as job.json
    environment: dict[str, str]  # beside what the user has set
    commands: list[list[str]]


class DryRunDocument(Record):
    """What `--dry-run --json` prints."""

    workload: str
    arms: list[PlannedArm]


def plan_arm(job: JobConfig, arm: Arm, context: RunContext) -> PlannedArm:
    """What `run_arm` would do; nothing is created or started."""
    folder = context.runs_folder / f"dry-run-{arm.name}"
    environment = job_environment(job, arm.features, folder, context.has_accelerator)
    commands = [launch_command(folder, context.rendezvous, None)]
    if job.engine is EngineName.DEEPSPEED:
        extensions = {**envs.snapshot(), **environment}["TORCH_EXTENSIONS_DIR"]
        commands.insert(0, [sys.executable, "-m", "training_xpu.engines.deepspeed_ops", extensions])
    return PlannedArm(
        name=arm.name,
        run_folder=folder,
        job=with_run_folder(job, folder),
        environment=environment,
        commands=commands,
    )


def as_script(planned: PlannedArm) -> str:
    """A shell script that trains the arm: its folder, its job, its environment, its commands."""
    folder = planned.run_folder
    return "\n".join(
        [
            f"mkdir -p {shlex.quote(str(folder / 'logs'))}",
            f"cat > {shlex.quote(str(folder / JOB_FILE))} <<'END_OF_JOB'",
            planned.job.to_json(indent=2),
            "END_OF_JOB",
            *(f"export {name}={shlex.quote(value)}" for name, value in sorted(planned.environment.items())),
            *map(shlex.join, planned.commands),
        ]
    )


def run_arm(job: JobConfig, arm: Arm, context: RunContext) -> Path:
    """Trains once and returns the run's folder, whose record says how it ended: completed, failed or interrupted.

    Raises:
        UserError: the folder for checkpoints or for runs cannot be used; nothing has started then.
        CannotRunHere: the ranks could not meet here, or what they need cannot be built.
    """
    check_loopback()
    with own_checkpoints(job, context.rendezvous):
        return _run_arm(job, arm, context)


def own_checkpoints(job: JobConfig, rendezvous: Rendezvous) -> contextlib.AbstractContextManager[None]:
    """Holds the folder that the user has chosen for checkpoints, if any, while the job runs.

    Raises:
        UserError: on entering: another run holds it, or its checkpoints are of another run than this one goes on from.
    """
    folder = job.checkpoint_folder
    if folder is None or not job.save_every:
        return contextlib.nullcontext()
    return _owned(folder, job, f"{rendezvous.endpoint} {rendezvous.run_id}" if job.nnodes > 1 else "")


@contextlib.contextmanager
def _owned(folder: Path, job: JobConfig, name: str) -> Iterator[None]:
    with owning(folder, name):
        if job.resume_from is None or job.resume_from.resolve().parent != folder.resolve():
            checkpoint.check_unused(folder)  # again: another run may have come and gone while the data were prepared
        yield


def _run_arm(job: JobConfig, arm: Arm, context: RunContext) -> Path:
    clear_leftovers(context.runs_folder)
    folder = store.create_run(context.runs_folder, job.workload, arm.name)
    job = with_run_folder(job, folder)
    environment = job_environment(job, arm.features, folder, context.has_accelerator)
    record = RunRecord(
        name=folder.name,
        created=datetime.now(UTC),
        command=context.command,
        workload=job.workload,
        arm=arm.name,
        features=arm.features,
        experiment=context.experiment,
        config=job,
        environment=environment,
        fingerprint=context.fingerprint,
        **store.owner(),
    )
    killed_before = oom_kills()
    child = None
    try:
        record.write(folder / RUN_FILE)
        (folder / RESERVE_FILE).write_bytes(b"\0" * RESERVE_BYTES)  # room for the closing record if the disk fills up
        job.write(folder / JOB_FILE)
        (folder / "logs").mkdir()
        child_environment = envs.child_environment(environment)
        if job.engine is EngineName.DEEPSPEED:
            build_operations(child_environment, context.say)
        with (folder / "logs" / "launcher.log").open("wb") as log:
            child = subprocess.Popen(
                launch_command(folder, context.rendezvous, os.getpid()),
                env=child_environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C of the terminal reaches us alone, and we end the ranks in order
            )
        _watch(child, ProgressFollower(folder, job.steps, job.nproc), context.display)
        record.status = "completed" if child.returncode == 0 else "failed"
        if record.status == "completed":
            diverged = first_step_without_loss(store.load_steps(folder))
            if diverged is not None:
                record.status = "failed"
                record.reason = f"training diverged: the loss is not a finite number from step {diverged} on"
        else:
            record.reason, record.failures = collect_failures(folder, killed_before, oom_kills(), child.returncode)
    except KeyboardInterrupt as interrupt:
        record.status = "interrupted"
        record.reason = str(interrupt) or "SIGINT"
    except Exception as error:
        record.reason = f"ljperf itself failed: {failure_reason(error)}"
        raise
    finally:
        with deaf_to_interrupts():
            if child is not None:
                end_tree(child)
            context.display.close()
            close_record(record, folder)
    for event in store.load_events(folder):
        if event.event == "note" and event.name == TRACKER_NOTE:
            context.say(event.detail)
    return folder


def close_record(record: RunRecord, folder: Path) -> None:
    """Adds what was measured, however the run ended, and writes the record for good."""
    config = record.config
    assert config is not None
    if record.status != "completed" and config.checkpoint_folder is not None and config.nnodes == 1:
        checkpoint.clear_unfinished(config.checkpoint_folder)
    (folder / RESERVE_FILE).unlink(missing_ok=True)
    (folder / LAUNCH_FILE).unlink(missing_ok=True)
    if record.status == "running":
        record.status = "failed"
        record.reason = record.reason or "ljperf itself failed"
    record.finished = datetime.now(UTC)
    events = store.load_events(folder)
    kinds = [event.detail for event in events if event.event == "note" and event.name == PEAK_MEMORY_NOTE]
    record.feature_reports = feature_reports(folder / report.FOLDER_NAME)
    settled = settled_at(record.feature_reports)
    record.summary = summarise(store.load_steps(folder), events, config, "".join(kinds[:1]), settled)
    record.write(folder / RUN_FILE)


def first_step_without_loss(steps: list[StepRecord]) -> int | None:
    """The first step whose loss is NaN or infinite."""
    return min((step.step for step in steps if not math.isfinite(step.loss)), default=None)


def feature_reports(folder: Path) -> list[dict[str, Any]]:
    """What the processes of a job said about features; the lines about the processes themselves are left out."""
    return [line.model_dump(mode="json", by_alias=True) for line in report.read(folder) if line.feature]


def with_run_folder(job: JobConfig, folder: Path) -> JobConfig:
    """The job with its relative outputs placed in the run folder."""
    changes: dict[str, Any] = {}
    if job.save_every and job.checkpoint_folder is None:
        changes["checkpoint_folder"] = folder / "checkpoints"
    if job.model_folder is not None and not job.model_folder.is_absolute():
        changes["model_folder"] = folder / job.model_folder
    return job.model_copy(update=changes)


def build_operations(environment: dict[str, str], say: Callable[[str], None]) -> None:
    """Builds DeepSpeed's native operations before the ranks need them; they can do without the fused optimizer.

    Raises:
        CannotRunHere: what DeepSpeed cannot do without cannot be built.
    """
    folder = environment["TORCH_EXTENSIONS_DIR"]
    builder = subprocess.Popen(
        [sys.executable, "-m", "training_xpu.engines.deepspeed_ops", folder, "--parent", str(os.getpid())],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        told = _wait_for_builder(builder, say)
    finally:
        if builder.poll() is None:
            with deaf_to_interrupts():
                end_tree(builder)  # the compilers too
    if builder.returncode != 0 or b"ShareMemCommBuilder" in told:
        raise CannotRunHere(
            "DeepSpeed cannot build its native operations here, which it needs on CPUs",
            "Install g++ and ninja, or use another engine, such as fsdp.",
        )
    if b"FusedAdamBuilder" in told:
        say("DeepSpeed's fused optimizer cannot be built here (is g++ installed?); torch's AdamW is used instead")


def _wait_for_builder(builder: subprocess.Popen[bytes], say: Callable[[str], None]) -> bytes:
    """What the builder printed; says that it builds once it takes longer than looking at what is built already."""
    begun = time.monotonic()
    while True:
        try:
            return builder.communicate(timeout=LOOKING_SECONDS)[0]
        except subprocess.TimeoutExpired:
            elapsed = time.monotonic() - begun
            if elapsed < 2 * LOOKING_SECONDS:
                say("building DeepSpeed's native operations, once per environment (one to four minutes on two cores)")
            else:
                say(f"still building, {elapsed:.0f} s")


def _watch(child: subprocess.Popen[bytes], follower: ProgressFollower, display: ProgressDisplay) -> None:
    while child.poll() is None:
        display.update(follower.poll())
        time.sleep(POLL_SECONDS)
    display.update(follower.poll())
