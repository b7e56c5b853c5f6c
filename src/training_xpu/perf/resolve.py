"""From what the user asked to a job that can run: every wrong input is refused here, before any process starts."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

from training_xpu import device, envs
from training_xpu.errors import CannotRunHere, UserError
from training_xpu.perf.limits import check_request, check_volume
from training_xpu.perf.request import TrainingRequest
from training_xpu.perf.store import check_writable
from training_xpu.workloads import catalogue, checkpoint, proxy
from training_xpu.workloads.config import Dtype, EngineName, JobConfig, PreparedData
from training_xpu.workloads.data import tokenizer as tokenizers
from training_xpu.workloads.data.prepare import check_data, prepare
from training_xpu.workloads.model_check import check_model
from training_xpu.workloads.ranks import choose_nproc
from training_xpu.workloads.reporting import check_trackers

SMALL_MODEL_PARAMETERS = 200_000_000
PREPARED_TOKENS = 1 << 23  # tokens prepared at least, so that runs of different lengths share them
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
    check_request(request)
    workload = catalogue.resolve(request.model)
    engine = EngineName(workload.engine)
    zero = _zero_stage(request.zero, engine)
    if request.save is not None:
        check_writable("--save", request.save)
        checkpoint.check_unused(request.save)
    check_trackers(list(request.report_to))
    if request.tokenizer is not None:
        tokenizers.check_given(request.tokenizer)
    check_data(request.data, request.data_field)
    view = device.torch_view()
    accelerators = len(view.accelerators)
    nproc = choose_nproc(request.nproc, accelerators)
    dtype = request.dtype or _default_dtype(view, say)
    if dtype not in view.dtypes:
        raise CannotRunHere(f"--dtype {dtype}: this device cannot train in it", "Use " + " or ".join(view.dtypes) + ".")
    if workload.model.is_folder and envs.distributed().local_rank == 0:
        model = workload.model
        check_model(model.config, f"{model.source}/config.json", model.weights)
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
        zero_stage=zero,
        dtype=dtype,
        gradient_checkpointing=request.gradient_checkpointing,
        micro_batch=request.micro_batch,
        sequence_length=request.seq_len,
        layers=request.layers,
        vocabulary=vocabulary_of(request.tokenizer) if request.tokenizer is not None else None,
    )
    steps = request.steps or default_steps
    check_volume(
        steps=steps,
        nproc=nproc,
        world_size=nproc * request.nnodes,
        micro_batch=scaled.micro_batch,
        gradient_accumulation=request.gradient_accumulation,
        sequence_length=scaled.sequence_length,
        eval_sequences=request.eval_sequences,
    )
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
        zero_stage=zero,
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


def _zero_stage(asked: int | None, engine: EngineName) -> int:
    if engine is EngineName.DEEPSPEED:
        return 3 if asked is None else asked
    if asked is not None:
        raise UserError(f"--zero {asked}: {engine.value} has no ZeRO stages", "Leave it out, or use deepspeed.")
    return 0


def _default_dtype(view: device.TorchView, say: Callable[[str], None]) -> str:
    """bf16, unless the device has none or runs it many times slower than fp32."""
    if "bf16" not in view.dtypes:
        return "fp32"
    if "bf16" in view.emulated:
        say(
            "training in fp32: this CPU has no bf16 kernels and would be many times slower in it (--dtype bf16 insists)"
        )
        return "fp32"
    return "bf16"


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
