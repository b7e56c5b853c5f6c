"""One rank of a training job: `python -m training_xpu.workloads.worker RUN_FOLDER`, started by the launcher."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from training_xpu import envs
from training_xpu.device import processes, usable_memory
from training_xpu.errors import ExitCode
from training_xpu.workloads.config import JOB_FILE, EngineName, JobConfig
from training_xpu.workloads.process import die_with_parent, failure_reason, leave, log_to
from training_xpu.workloads.records import INTERRUPTED_NOTE, PROCESS_NOTE, RankProcess

if TYPE_CHECKING:
    from training_xpu.workloads.metrics import RunWriter


def main(run_folder: Path) -> int:
    """Trains as the run folder's `job.json` says; a failure is recorded there before the process ends."""
    die_with_parent(os.getppid())
    rank = envs.distributed().rank
    log_to(run_folder / "logs" / f"rank-{rank}.log")
    return run_rank(JobConfig.read(run_folder / JOB_FILE), run_folder, rank)


def run_rank(
    config: JobConfig, run_folder: Path, rank: int, on_failure: Callable[[BaseException], None] = lambda error: None
) -> int:
    """The rank's whole life, from the process group to its end.

    Never returns after a failure or an interrupt: the process ends, once the failure is recorded and `on_failure` has
    been called.
    """
    from training_xpu.workloads.metrics import RunWriter

    writer = RunWriter(run_folder, rank)
    try:
        process = RankProcess(host=processes.host_id(), pid=os.getpid(), started=processes.started(os.getpid()))
        writer.event("note", PROCESS_NOTE, detail=process.to_json())
        writer.event("phase", "building")
        train(config, run_folder, writer)
        writer.event("finished")
    except BaseException as error:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        interrupted = isinstance(error, KeyboardInterrupt)
        with contextlib.suppress(OSError):  # the disk may be what failed
            traceback.print_exc()
        with contextlib.suppress(OSError):
            if interrupted:
                writer.event("note", INTERRUPTED_NOTE, detail=str(error))
            else:
                writer.event("failure", failure_reason(error), detail=traceback.format_exc())
        with contextlib.suppress(OSError):
            on_failure(error)
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        # Tearing down Gloo or a half-finished collective can hang or abort; the peers must learn of the end at once.
        os._exit(ExitCode.INTERRUPTED if interrupted else ExitCode.FAILED)
    import torch.distributed as dist

    dist.barrier()  # whoever reads the run folder after rank 0 has ended finds everything
    dist.destroy_process_group()
    return ExitCode.DONE


def train(config: JobConfig, run_folder: Path, writer: RunWriter) -> None:
    from training_xpu.engines.model import compute_device

    place = envs.distributed()
    device = compute_device(place.local_rank)
    init_process_group(config)
    if config.engine is EngineName.TRANSFORMERS:
        from training_xpu.workloads.hf_trainer import train_with_hf_trainer

        train_with_hf_trainer(config, run_folder, writer, device)
        return
    from training_xpu.workloads.loop import TrainingLoop

    TrainingLoop(config, run_folder, writer, device, must_partition_while_building(config)).run()


def init_process_group(config: JobConfig) -> None:
    """The engine's own way: DeepSpeed chooses its backend, the others leave it to torch."""
    import torch.distributed as dist

    if dist.is_initialized():
        return
    if config.engine is EngineName.DEEPSPEED:
        import deepspeed

        deepspeed.init_distributed()
    else:
        dist.init_process_group()


def must_partition_while_building(config: JobConfig) -> bool:
    """True when one whole fp32 copy per local rank would take more than 40 % of the machine's memory."""
    return 4 * config.scale.parameters * config.nproc > 0.4 * usable_memory()


if __name__ == "__main__":
    leave(main(Path(sys.argv[1])))
