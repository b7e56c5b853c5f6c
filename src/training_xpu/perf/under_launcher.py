"""`ljperf train` as one rank of a launcher that exists already: torchrun, MPI, a scheduler."""

from __future__ import annotations

import dataclasses
import sys
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from training_xpu import envs
from training_xpu.errors import UserError
from training_xpu.perf import store
from training_xpu.perf.children import interrupt_on_signals
from training_xpu.perf.environment import extensions_folder
from training_xpu.perf.experiment import BASE, Outcome, document
from training_xpu.perf.fingerprint import collect
from training_xpu.perf.records import RUN_FILE, BenchmarkDocument, RankFailure, RunRecord
from training_xpu.perf.request import TrainingRequest
from training_xpu.perf.resolve import resolve
from training_xpu.perf.resume import resume_job
from training_xpu.perf.runner import close_record, with_run_folder
from training_xpu.workloads.config import JOB_FILE, EngineName, JobConfig
from training_xpu.workloads.process import failure_reason, is_lost_peer

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
        resume_job(request, given | {"nproc", "nnodes"}, say)
        if request.resume is not None
        else resolve(request, default_steps, say)
    )
    if job.engine is EngineName.DEEPSPEED:
        _prepare_deepspeed()
    fingerprint = collect().model_dump(mode="json", by_alias=True) if place.rank == 0 else {}
    folder, job = _agree(job, runs_folder)
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
    if place.rank == 0:
        record.write(folder / RUN_FILE)
        job.write(folder / JOB_FILE)

    from training_xpu.workloads.worker import run_rank

    if place.rank != 0:
        run_rank(job, folder, place.rank)
        return None
    with interrupt_on_signals():  # the launcher ends every rank once one has failed
        run_rank(job, folder, place.rank, lambda error: _close_failed(record, folder, error))
    record.status = "completed"
    close_record(record, folder)
    return document(job, Outcome(runs=[(folder, record)]), fingerprint)


def _close_failed(record: RunRecord, folder: Path, error: BaseException) -> None:
    """Closes the record on rank 0, which may have failed itself, lost a peer, or been told to end."""
    reason = failure_reason(error)
    told_to_end = isinstance(error, KeyboardInterrupt)
    until = time.monotonic() + PEER_SECONDS
    while (told_to_end or is_lost_peer(reason)) and not _failures_of_others(folder) and time.monotonic() < until:
        time.sleep(0.1)  # the rank that failed first may still be writing
    failures = _failures_of_others(folder)
    if not told_to_end:
        failures.append(RankFailure(rank=0, reason=reason, traceback=traceback.format_exc()))
    record.failures = sorted(failures, key=lambda f: (is_lost_peer(f.reason), f.rank))
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


def _failures_of_others(folder: Path) -> list[RankFailure]:
    return [
        RankFailure(rank=event.rank, reason=event.name, traceback=event.detail)
        for event in store.load_events(folder)
        if event.event == "failure" and event.rank != 0
    ]


def _agree(job: JobConfig, runs_folder: Path) -> tuple[Path, JobConfig]:
    """Rank 0's run folder and job, on every rank. The data stay each node's own."""
    import torch.distributed as dist

    from training_xpu.engines.model import compute_device
    from training_xpu.workloads.worker import init_process_group

    compute_device(envs.distributed().local_rank)
    init_process_group(job)
    told: list[Any] = [None]
    if dist.get_rank() == 0:
        folder = store.create_run(runs_folder, job.workload, BASE)
        told = [(str(folder), with_run_folder(job, folder).to_json())]
    dist.broadcast_object_list(told, src=0)
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
