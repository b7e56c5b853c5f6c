"""What the options of a training job may be: every number has a lower and an upper bound, checked before any work.

The upper bounds lie far beyond any real job. They are there so that a slip (a missing unit, one zero too many) is
answered at once, and not by a machine without memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from training_xpu import device, envs
from training_xpu.errors import UserError, nearest
from training_xpu.perf.request import TrainingRequest
from training_xpu.recompute import budget
from training_xpu.workloads.config import Dtype, JobConfig
from training_xpu.workloads.proxy import gibibytes
from training_xpu.workloads.ranks import PROCESSES_PER_CORE, most_processes
from training_xpu.workloads.reporting import PACKAGES

SCALES = ("auto", "full", "proxy")
HOST_MEMORY_SHARE = 0.25  # of a rank's share of main memory that the tokens of a step or of an evaluation may take
BYTES_PER_TOKEN = 24  # ids, labels and mask of a batch, 8 bytes each
MOST_SEQUENCES = 1 << 62  # over a whole job: they are numbered with 64-bit integers

# Option -> smallest and largest value.
RANGES: Mapping[str, tuple[float, float]] = {
    "--micro-batch": (1, 1 << 16),
    "--gradient-accumulation": (1, 1 << 16),
    "--seq-len": (2, 1 << 24),
    "--layers": (1, math.inf),  # the model says how many it has
    "--steps": (1, 10**9),
    "--warmup-steps": (0, 10**9),
    "--weight-decay": (0, math.inf),
    "--clip": (0, math.inf),
    "--seed": (0, 2**32 - 1),
    "--eval-sequences": (0, 100_000),
    "--dataloader-workers": (0, math.inf),
    "--nproc": (1, math.inf),
    "--nnodes": (1, 100_000),
    "--save-every": (0, 10**9),
    "--keep-checkpoints": (1, 10**6),
}
_SUCH_AS = {"--seed": 42}

_HOST = r"(?:\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]|[\w.-]+)"  # [IPv6], or a name or IPv4 address
_ENDPOINT = re.compile(rf"{_HOST}:(\d{{1,5}})", re.ASCII)


def check_request(request: TrainingRequest) -> None:
    """All that can be told from the options alone.

    Raises:
        UserError: an option has a value it cannot have, or needs another one beside it.
    """
    _check_choices(request)
    _check_ranges(
        {
            "--micro-batch": request.micro_batch,
            "--gradient-accumulation": request.gradient_accumulation,
            "--seq-len": request.seq_len,
            "--layers": request.layers,
            "--steps": request.steps,
            "--warmup-steps": request.warmup_steps,
            "--weight-decay": request.weight_decay,
            "--clip": request.clip,
            "--seed": request.seed,
            "--eval-sequences": request.eval_sequences,
            "--dataloader-workers": request.dataloader_workers,
            "--nproc": request.nproc,
            "--nnodes": request.nnodes,
            "--save-every": request.save_every,
            "--keep-checkpoints": request.keep_checkpoints,
        }
    )
    _check_workers(request.dataloader_workers)
    if request.zero is not None and not 0 <= request.zero <= 3:
        raise UserError(f"--zero {request.zero}: DeepSpeed has ZeRO stages 0, 1, 2 and 3", "Such as: --zero 3")
    if request.memory_budget is not None:
        budget.read_budget(request.memory_budget, budget.Budget(1 << 62, "any"), "--memory-budget")
    if request.learning_rate is not None and not 0 < request.learning_rate < math.inf:
        raise UserError(f"--learning-rate {request.learning_rate}: must be above 0", "Such as: --learning-rate 1e-3")
    _check_nodes(request)
    if request.save is not None and not request.save_every and request.resume is None:
        raise UserError("--save names a folder, but not how often", "Add --save-every STEPS.")


def check_job(job: JobConfig) -> None:
    """A job that comes from a file (a checkpoint's, a run's) instead of the command line.

    Raises:
        UserError: a number lies outside the range of its option.
    """
    _check_ranges(
        {
            "--micro-batch": job.micro_batch,
            "--gradient-accumulation": job.gradient_accumulation,
            "--seq-len": job.sequence_length,
            "--steps": job.steps,
            "--warmup-steps": job.warmup_steps,
            "--weight-decay": job.weight_decay,
            "--clip": job.gradient_clipping,
            "--seed": job.seed,
            "--eval-sequences": job.eval_sequences,
            "--nnodes": job.nnodes,
            "--save-every": job.save_every,
            "--keep-checkpoints": job.keep_checkpoints,
        }
    )
    _check_workers(job.dataloader_workers)
    check_volume(
        steps=job.steps,
        nproc=job.nproc,
        world_size=job.world_size,
        micro_batch=job.micro_batch,
        gradient_accumulation=job.gradient_accumulation,
        sequence_length=job.sequence_length,
        eval_sequences=job.eval_sequences,
    )


def check_volume(
    *,
    steps: int,
    nproc: int,
    world_size: int,
    micro_batch: int,
    gradient_accumulation: int,
    sequence_length: int,
    eval_sequences: int,
) -> None:
    """What a job asks for in all: the tokens each rank holds in main memory, and the number of its sequences.

    Raises:
        UserError: it is more than a rank has, or than can be counted.
    """
    share = device.usable_memory() / nproc
    step = gradient_accumulation * micro_batch * sequence_length * BYTES_PER_TOKEN
    if step > HOST_MEMORY_SHARE * share:
        raise UserError(
            f"--gradient-accumulation {gradient_accumulation}: the tokens of one step "
            f"({gradient_accumulation} x {micro_batch} x {sequence_length}) take {gibibytes(step)} of a rank's "
            f"{gibibytes(share)} of main memory",
            f"Use --gradient-accumulation {_at_most(gradient_accumulation, step, share)} or less, "
            "or a smaller --micro-batch.",
        )
    evaluation = eval_sequences * sequence_length * BYTES_PER_TOKEN / world_size
    if evaluation > HOST_MEMORY_SHARE * share:
        raise UserError(
            f"--eval-sequences {eval_sequences}: their tokens take {gibibytes(evaluation)} of a rank's "
            f"{gibibytes(share)} of main memory",
            f"Use --eval-sequences {_at_most(eval_sequences, evaluation, share)} or less.",
        )
    if steps * world_size * gradient_accumulation * micro_batch > MOST_SEQUENCES:
        raise UserError(f"--steps {steps}: the job would have more than 2**62 sequences", "Use fewer steps.")


def _at_most(value: int, taken: float, share: float) -> int:
    return max(1, int(value * HOST_MEMORY_SHARE * share / taken))


def _check_choices(request: TrainingRequest) -> None:
    """Options whose value is one of a few words."""
    for option, value, known in (
        ("--scale", request.scale, SCALES),
        ("--dtype", request.dtype, tuple(Dtype)),
        *(("--report-to", name, tuple(PACKAGES)) for name in request.report_to),
    ):
        if value is not None and value not in known:
            raise UserError(f"{option} {value}: unknown", nearest(value, known))


def _check_ranges(values: Mapping[str, float | None]) -> None:
    for option, value in values.items():
        least, most = RANGES[option]
        if value is None or (least <= value <= most and value < math.inf):
            continue
        allowed = f"at least {least:g}, and finite" if most == math.inf else f"{least:g} to {int(most)}"
        such_as = _SUCH_AS.get(option, max(1, least) if not value > most else most)
        raise UserError(f"{option} {value}: must be {allowed}", f"Such as: {option} {such_as:.15g}")


def _check_workers(workers: int) -> None:
    most = most_processes()
    if workers > most:
        raise UserError(
            f"--dataloader-workers {workers}: at most {most} for each rank, {PROCESSES_PER_CORE} for each usable core",
            "Such as: --dataloader-workers 2",
        )


def _check_nodes(request: TrainingRequest) -> None:
    endpoint = request.rdzv_endpoint
    if request.nnodes > 1 and endpoint is None:
        raise UserError(
            f"--nnodes {request.nnodes} needs --rdzv-endpoint", "Give HOST:PORT of one node, the same on every node."
        )
    if endpoint is not None and not envs.distributed().launched:  # else nobody reads it
        found = _ENDPOINT.fullmatch(endpoint)
        if found is None or not 1 <= int(found[1]) <= 65535:
            raise UserError(
                f"--rdzv-endpoint {endpoint!r}: must be HOST:PORT, the port from 1 to 65535",
                "Such as: --rdzv-endpoint node0:29400, or for IPv6: --rdzv-endpoint [fd00::1]:29400",
            )
    if request.node_rank is not None and not 0 <= request.node_rank < request.nnodes:
        raise UserError(
            f"--node-rank {request.node_rank}: with --nnodes {request.nnodes} it is 0 to {request.nnodes - 1}"
        )
    if request.nnodes > 1 and request.save_every and request.save is None and request.resume is None:
        raise UserError(
            f"--save-every with --nnodes {request.nnodes} needs --save", "Name a folder that all nodes share."
        )
