"""From what the user asked to a job that can run: every wrong input is refused here, before any process starts."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

from training_xpu import device, envs
from training_xpu.errors import CannotRunHere, UserError, nearest
from training_xpu.perf.request import TrainingRequest
from training_xpu.workloads import catalogue, checkpoint, proxy
from training_xpu.workloads.config import Dtype, EngineName, JobConfig, PreparedData
from training_xpu.workloads.data import tokenizer as tokenizers
from training_xpu.workloads.data.prepare import prepare
from training_xpu.workloads.reporting import PACKAGES, check_trackers

SCALES = ("auto", "full", "proxy")
SMALL_MODEL_PARAMETERS = 200_000_000
PREPARED_TOKENS = 1 << 23  # tokens prepared at least, so that runs of different lengths share them
RANKS_ON_CPU = 2
TRAINED_MODEL = Path("model")  # within the run folder


def resolve(request: TrainingRequest, default_steps: int, say: Callable[[str], None]) -> JobConfig:
    """Checks a request, scales the model, prepares the data and returns the job.

    Args:
        default_steps: optimizer steps where the user names none.
        say: is given lines for people.

    Raises:
        UserError: something is unknown, impossible or unreadable.
        CannotRunHere: this machine lacks a dtype, a device or a package that was asked for.
    """
    check_choices(request)
    check_numbers(request)
    workload = catalogue.resolve(request.model)
    engine = EngineName(workload.engine)
    if request.save is not None:
        checkpoint.check_unused(request.save)
    check_trackers(list(request.report_to))
    if request.tokenizer is not None:
        tokenizers.check_given(request.tokenizer)
    view = device.torch_view()
    accelerators = len(view.accelerators)
    nproc = choose_nproc(request, accelerators)
    dtype = request.dtype or ("bf16" if "bf16" in view.dtypes else "fp32")
    if dtype not in view.dtypes:
        raise CannotRunHere(f"--dtype {dtype}: this device cannot train in it", "Use " + " or ".join(view.dtypes) + ".")
    peak = device.cached_peak(dtype)
    assert peak is not None
    peak_per_rank = peak.flops if accelerators else peak.flops / nproc
    memory_per_rank = device.usable_memory() // nproc
    if accelerators:
        memory_per_rank = min(a.memory_bytes or memory_per_rank for a in view.accelerators)
    scaled = proxy.choose_scale(
        workload,
        mode=cast(Literal["full", "proxy", "auto"], request.scale),
        budget=proxy.Budget(
            memory_bytes_per_rank=memory_per_rank,
            flops_per_second_per_rank=peak_per_rank,
            world_size=nproc * request.nnodes,
        ),
        zero_stage=request.zero,
        dtype=dtype,
        gradient_checkpointing=request.gradient_checkpointing,
        micro_batch=request.micro_batch,
        sequence_length=request.seq_len,
        layers=request.layers,
        vocabulary=vocabulary_of(request.tokenizer) if request.tokenizer is not None else None,
    )
    steps = request.steps or default_steps
    tokens_per_step = (
        nproc * request.nnodes * scaled.micro_batch * request.gradient_accumulation * scaled.sequence_length
    )
    # Rounded up to a power of two, so that a somewhat longer run finds the same data again.
    data_tokens = max(PREPARED_TOKENS, 1 << math.ceil(math.log2(steps * tokens_per_step)))
    data = prepare(
        request.data,
        request.tokenizer,
        scaled.vocabulary,
        envs.cache_folder(),
        scaled.sequence_length,
        max_tokens=data_tokens,
        seed=request.seed,
        data_field=request.data_field,
        progress=say,
        eval_sequences=request.eval_sequences,
    )
    small = scaled.scale.parameters < SMALL_MODEL_PARAMETERS
    shared = "" if accelerators else f", divided among {nproc} rank{'s' if nproc > 1 else ''}"
    return JobConfig(
        workload=request.model,
        engine=engine,
        model=with_special_tokens(scaled.config, data),
        initial_weights=workload.initial_weights if scaled.scale.kind == "full" else None,
        scale=scaled.scale,
        data=data,
        data_path=request.data.absolute() if request.data is not None else None,
        data_field=request.data_field,
        data_tokens=data_tokens,
        tokenizer_path=request.tokenizer.absolute() if request.tokenizer is not None else None,
        dtype=Dtype(dtype),
        zero_stage=request.zero,
        micro_batch=scaled.micro_batch,
        gradient_accumulation=request.gradient_accumulation,
        sequence_length=scaled.sequence_length,
        packing=request.packing,
        dataloader_workers=request.dataloader_workers,
        gradient_checkpointing=request.gradient_checkpointing,
        steps=steps,
        learning_rate=request.learning_rate or (1e-3 if small else 3e-4),
        warmup_steps=min(5, steps // 4) if request.warmup_steps is None else request.warmup_steps,
        weight_decay=request.weight_decay,
        gradient_clipping=request.clip,
        seed=request.seed,
        eval_sequences=request.eval_sequences,
        save_every=request.save_every,
        checkpoint_folder=request.save.absolute() if request.save is not None else None,
        keep_checkpoints=request.keep_checkpoints,
        model_folder=TRAINED_MODEL if request.save_model else None,
        measure_live_bytes=request.live_bytes,
        report_to=cast(Any, list(request.report_to)),
        nproc=nproc,
        nnodes=request.nnodes,
        peak_flops_per_rank=peak_per_rank,
        peak_source=peak.source + shared,
    )


def with_special_tokens(config: dict[str, Any], data: PreparedData) -> dict[str, Any]:
    """The model's config with the tokenizer's special tokens, where scaling took its own away."""
    own = {"eos_token_id": data.eos_token_id, "pad_token_id": data.pad_token_id}
    return {**config, **{name: value for name, value in own.items() if config.get(name) is None}}


def vocabulary_of(tokenizer: Path) -> int:
    """Rows a model's embedding needs for a local tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        return tokenizers.adopt(tokenizer, Path(folder)).size


def with_data_in_place(job: JobConfig, say: Callable[[str], None]) -> JobConfig:
    """The job of an earlier run, its data prepared again where the cache has lost them.

    Raises:
        UserError: the data are not what they were.
    """
    data = prepare(
        job.data_path,
        job.tokenizer_path,
        job.data.vocabulary_size,
        envs.cache_folder(),
        job.sequence_length,
        max_tokens=job.data_tokens,
        seed=job.seed,
        data_field=job.data_field,
        progress=say,
        eval_sequences=job.eval_sequences,
    )
    if data.digest != job.data.digest:
        raise UserError(
            f"the data ({data.source}) have changed since the run was made",
            "Start a new run, or bring the old data back.",
        )
    return job.model_copy(update={"data": data})


def check_choices(request: TrainingRequest) -> None:
    """Options whose value is one of a few words."""
    for option, value, known in (
        ("--scale", request.scale, SCALES),
        ("--dtype", request.dtype, tuple(Dtype)),
        *(("--report-to", name, tuple(PACKAGES)) for name in request.report_to),
    ):
        if value is not None and value not in known:
            raise UserError(f"{option} {value}: unknown", nearest(value, known))


def check_numbers(request: TrainingRequest) -> None:
    """Options whose value must lie in a range."""
    at_least: list[tuple[str, float | None, float]] = [
        ("--micro-batch", request.micro_batch, 1),
        ("--gradient-accumulation", request.gradient_accumulation, 1),
        ("--seq-len", request.seq_len, 2),
        ("--layers", request.layers, 1),
        ("--steps", request.steps, 1),
        ("--warmup-steps", request.warmup_steps, 0),
        ("--weight-decay", request.weight_decay, 0),
        ("--clip", request.clip, 0),
        ("--seed", request.seed, 0),
        ("--eval-sequences", request.eval_sequences, 0),
        ("--dataloader-workers", request.dataloader_workers, 0),
        ("--nproc", request.nproc, 1),
        ("--nnodes", request.nnodes, 1),
        ("--save-every", request.save_every, 0),
        ("--keep-checkpoints", request.keep_checkpoints, 1),
    ]
    for option, value, least in at_least:
        if value is not None and not least <= value < math.inf:
            raise UserError(
                f"{option} {value}: must be at least {least:g}, and finite", f"Such as: {option} {max(1, least):g}"
            )
    if not 0 <= request.zero <= 3:
        raise UserError(f"--zero {request.zero}: DeepSpeed has ZeRO stages 0, 1, 2 and 3", "Such as: --zero 3")
    if request.learning_rate is not None and not 0 < request.learning_rate < math.inf:
        raise UserError(f"--learning-rate {request.learning_rate}: must be above 0", "Such as: --learning-rate 1e-3")
    if request.seed >= 2**32:
        raise UserError(f"--seed {request.seed}: must be below 2**32", "Such as: --seed 42")
    if request.nnodes > 1 and request.rdzv_endpoint is None:
        raise UserError(
            f"--nnodes {request.nnodes} needs --rdzv-endpoint", "Give HOST:PORT of one node, the same on every node."
        )
    if request.node_rank is not None and not 0 <= request.node_rank < request.nnodes:
        raise UserError(
            f"--node-rank {request.node_rank}: with --nnodes {request.nnodes} it is 0 to {request.nnodes - 1}"
        )
    if request.save is not None and not request.save_every:
        raise UserError("--save names a folder, but not how often", "Add --save-every STEPS.")
    if request.nnodes > 1 and request.save_every and request.save is None and request.resume is None:
        raise UserError(
            f"--save-every with --nnodes {request.nnodes} needs --save", "Name a folder that all nodes share."
        )


def choose_nproc(request: TrainingRequest, accelerators: int) -> int:
    """Ranks on this node: one per accelerator; on CPUs two where there are two cores, so that something is parallel.

    Raises:
        CannotRunHere: more ranks than accelerators.
    """
    if request.nproc is None:
        return accelerators or min(RANKS_ON_CPU, device.usable_cores())
    if accelerators and request.nproc > accelerators:
        raise CannotRunHere(
            f"--nproc {request.nproc}: this machine has {accelerators} accelerators", f"Use --nproc {accelerators}."
        )
    return request.nproc
