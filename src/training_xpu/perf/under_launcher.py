"""`ljperf train` as one rank of a launcher that exists already: torchrun, MPI, a scheduler."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from training_xpu import envs
from training_xpu.device import OomKills, oom_kills, processes
from training_xpu.errors import UserError
from training_xpu.perf import store
from training_xpu.perf.children import interrupt_on_signals
from training_xpu.perf.environment import extensions_folder
from training_xpu.perf.experiment import BASE, Outcome, document
from training_xpu.perf.failures import blame, killed_by, oom_words
from training_xpu.perf.fingerprint import collect
from training_xpu.perf.records import RUN_FILE, BenchmarkDocument, RankFailure, RunRecord
from training_xpu.perf.request import TrainingRequest
from training_xpu.perf.resolve import resolve
from training_xpu.perf.resume import resume_job
from training_xpu.perf.runner import Rendezvous, close_record, own_checkpoints, with_run_folder
from training_xpu.workloads.config import JOB_FILE, EngineName, JobConfig
from training_xpu.workloads.launch import check_loopback
from training_xpu.workloads.process import failure_reason, is_lost_peer
from training_xpu.workloads.records import INTERRUPTED_NOTE, PROCESS_NOTE, EventRecord, RankProcess

PEER_SECONDS = 3.0  # that rank 0 waits for the words of a rank that failed before it


def train_as_rank(
    request: TrainingRequest, default_steps: int, runs_folder: Path, given: frozenset[str], say: Callable[[str], None]
) -> BenchmarkDocument | None:
    """One rank's part: rank 0 resolves the request, makes the run folder and tells the others; then all train.

    A wrong request ends every rank with the same error before the process group exists. The document comes on rank 0.
    """
    place = envs.distributed()
    for option, value, actual in (
        ("--nproc", request.nproc, place.local_world_size),
        ("--nnodes", request.nnodes if "nnodes" in given else None, place.world_size // place.local_world_size),
    ):
        if value is not None and value != actual:
            raise UserError(f"{option} {value}: the launcher has set {actual}", f"Leave {option} out.")
    request = dataclasses.replace(
        request,
        nproc=place.local_world_size,
        nnodes=place.world_size // place.local_world_size,
        rdzv_endpoint=request.rdzv_endpoint or "set-by-the-launcher",
    )
    say = say if place.rank == 0 else _silent
    job = (
        resume_job(request, given | {"nproc", "nnodes"}, say, runs_folder)
        if request.resume is not None
        else resolve(request, default_steps, say)
    )
    if envs.snapshot().get("MASTER_ADDR") in ("127.0.0.1", "localhost"):
        check_loopback()
    if job.engine is EngineName.DEEPSPEED:
        _prepare_deepspeed()
    fingerprint = collect().model_dump(mode="json", by_alias=True) if place.rank == 0 else {}
    kills = oom_kills()
    with contextlib.ExitStack() as held:
        folder, job = _agree(job, runs_folder, held)
        return _train(job, folder, fingerprint, kills, held)


def _train(
    job: JobConfig, folder: Path, fingerprint: dict[str, Any], kills: OomKills | None, held: contextlib.ExitStack
) -> BenchmarkDocument | None:
    """The training itself.

    Args:
        kills: the kernel's out-of-memory kills before it.
        held: closed before the process ends in a failure.
    """
    rank = envs.distributed().rank
    record = RunRecord(
        name=folder.name,
        created=datetime.now(UTC),
        command=["ljperf", *sys.argv[1:]],
        workload=job.workload,
        arm=BASE,
        features=[],
        config=job,
        fingerprint=fingerprint,
        **store.owner(),
    )
    if rank == 0:
        record.write(folder / RUN_FILE)
        job.write(folder / JOB_FILE)

    from training_xpu.workloads.worker import run_rank

    with interrupt_on_signals():  # the launcher ends every rank once one has failed
        if rank != 0:
            run_rank(job, folder, rank)
            return None

        def on_failure(error: BaseException) -> None:
            held.close()
            _close_failed(record, folder, error, kills)

        run_rank(job, folder, rank, on_failure)
    record.status = "completed"
    close_record(record, folder)
    return document(job, Outcome(runs=[(folder, record)]), fingerprint)


def _close_failed(record: RunRecord, folder: Path, error: BaseException, kills: OomKills | None) -> None:
    """Closes the record on rank 0, which may have failed itself, lost a peer, or been told to end."""
    reason = failure_reason(error)
    told_to_end = isinstance(error, KeyboardInterrupt)
    until = time.monotonic() + PEER_SECONDS
    failures = failures_of_others(folder, kills)
    while (told_to_end or is_lost_peer(reason)) and not failures and time.monotonic() < until:
        time.sleep(0.02)  # the rank that failed first may still be writing
        failures = failures_of_others(folder, kills)
    if not told_to_end:
        failures.append(RankFailure(rank=0, reason=reason, traceback=traceback.format_exc()))
    record.failures = sorted(failures, key=blame)
    if record.failures:
        first = record.failures[0]
        record.status = "failed"
        record.reason = f"rank {first.rank}: {first.reason}"
        if is_lost_peer(first.reason):
            record.reason += " (another rank is gone: the launcher says which)"
    else:
        record.status = "interrupted"
        record.reason = f"{error or 'SIGINT'} (from the user, or from the launcher because a rank was killed)"
    close_record(record, folder)


def failures_of_others(folder: Path, kills: OomKills | None) -> list[RankFailure]:
    """What the other ranks said before they ended, and which of this host are gone without a word."""
    events = store.load_events(folder)
    told = [
        RankFailure(rank=event.rank, reason=event.name, traceback=event.detail)
        for event in events
        if event.event == "failure" and event.rank != 0
    ]
    return told + _gone(events, kills)


def _gone(events: list[EventRecord], kills: OomKills | None) -> list[RankFailure]:
    spoken = {e.rank for e in events if e.event in ("failure", "finished") or e.name == INTERRUPTED_NOTE}
    found = []
    for event in events:
        if event.name != PROCESS_NOTE or event.rank in spoken or event.rank == 0:
            continue
        process = RankProcess.model_validate_json(event.detail)
        if process.host != processes.host_id() or processes.started(process.pid) == process.started:
            continue
        number = processes.signal_of_zombie(process.pid)  # None once the launcher has collected it
        if number is not None:
            reason = killed_by(number, oom_words(kills, oom_kills()))
        else:
            reason = "gone without a word, probably killed by a signal" + oom_words(kills, oom_kills())
        found.append(RankFailure(rank=event.rank, reason=reason, exit_code=-number if number else None))
    return found


def _agree(job: JobConfig, runs_folder: Path, held: contextlib.ExitStack) -> tuple[Path, JobConfig]:
    """Rank 0's run folder and job, on every rank. The data stay each node's own.

    Args:
        held: rank 0 holds the folder of checkpoints in it.

    Raises:
        UserError: on every rank, where rank 0 cannot use the folder for runs or for checkpoints.
    """
    import torch.distributed as dist

    from training_xpu.engines.model import compute_device
    from training_xpu.workloads.worker import init_process_group

    compute_device(envs.distributed().local_rank)
    init_process_group(job)
    told: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            held.enter_context(own_checkpoints(job, Rendezvous()))
            folder = store.create_run(runs_folder, job.workload, BASE)
            told = [(str(folder), with_run_folder(job, folder).to_json())]
        except UserError as error:
            told = [(error.problem, error.remedy, None)]
    dist.broadcast_object_list(told, src=0)
    if len(told[0]) == 3:
        dist.destroy_process_group()
        raise UserError(told[0][0], told[0][1])
    folder, agreed = Path(told[0][0]), JobConfig.model_validate_json(told[0][1])
    folder.mkdir(parents=True, exist_ok=True)  # nodes may not share a file system
    return folder, agreed.model_copy(update={"data": job.data})


def _prepare_deepspeed() -> None:
    from training_xpu.device import may_have_accelerator
    from training_xpu.engines.deepspeed_ops import build_operations

    folder = str(extensions_folder())
    defaults = {"TORCH_EXTENSIONS_DIR": folder}
    if not may_have_accelerator():
        defaults["DS_ACCELERATOR"] = "cpu"
    present = envs.snapshot()
    envs.set_for_children({name: value for name, value in defaults.items() if name not in present})
    build_operations(Path(envs.snapshot()["TORCH_EXTENSIONS_DIR"]))


def _silent(text: str) -> None:
    return None
