"""Going on from a checkpoint: with the settings of its run, and only those changed that may change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from training_xpu import device
from training_xpu.errors import UserError
from training_xpu.perf.request import TrainingRequest
from training_xpu.perf.resolve import TRAINED_MODEL, check_choices, check_numbers, choose_nproc, with_data_in_place
from training_xpu.workloads import checkpoint
from training_xpu.workloads.config import JOB_FILE, JobConfig
from training_xpu.workloads.reporting import check_trackers

# How an option of the command line is called in the job, where it fixes what is trained.
FIXED = {
    "model": "workload",
    "zero": "zero_stage",
    "dtype": "dtype",
    "gradient_checkpointing": "gradient_checkpointing",
    "packing": "packing",
    "seq_len": "sequence_length",
    "micro_batch": "micro_batch",
    "gradient_accumulation": "gradient_accumulation",
    "learning_rate": "learning_rate",
    "warmup_steps": "warmup_steps",
    "weight_decay": "weight_decay",
    "clip": "gradient_clipping",
    "seed": "seed",
    "nproc": "nproc",
    "nnodes": "nnodes",
    "data": "data_path",
    "data_field": "data_field",
    "tokenizer": "tokenizer_path",
    "eval_sequences": "eval_sequences",  # what is held out is no training data
}


def given_options(context: Any) -> frozenset[str]:
    """Names of the options the user wrote, on the command line or in `--config`."""
    return frozenset(
        name
        for name in context.params
        if (source := context.get_parameter_source(name)) is not None and source.name in ("COMMANDLINE", "DEFAULT_MAP")
    )


def resume_job(request: TrainingRequest, given: frozenset[str], say: Callable[[str], None]) -> JobConfig:
    """The job that goes on from `request.resume`.

    Args:
        given: the options the user wrote; one that contradicts the checkpoint's job is refused.

    Raises:
        UserError: there is no complete checkpoint, or a setting cannot change between its steps.
    """
    assert request.resume is not None
    check_choices(request)
    check_numbers(request)
    check_trackers(list(request.report_to))
    found = checkpoint.find_checkpoint(request.resume)
    record = checkpoint.read_complete(found)
    job = record.job
    for option, name in FIXED.items():
        before = getattr(job, name)
        now = getattr(request, option)
        if option in ("data", "tokenizer") and now is not None:
            now = now.absolute()
        if option in given and now != before:
            raise _contradiction(option, now, before)
    for option, of_scale in (("layers", job.scale.layers), ("scale", job.scale.kind)):
        now = getattr(request, option)
        if option in given and now not in (of_scale, "auto"):
            raise _contradiction(option, now, of_scale)
    if job.nnodes > 1 and request.rdzv_endpoint is None:
        raise UserError(
            f"the checkpoint is of a job on {job.nnodes} nodes, which needs --rdzv-endpoint",
            "Give HOST:PORT of one node, the same on every node.",
        )
    steps = request.steps or job.steps
    if steps <= record.step:
        raise UserError(
            f"--steps {steps}: the checkpoint is at step {record.step} already",
            f"To go on beyond the schedule's end: --steps {record.step * 2}",
        )
    choose_nproc(TrainingRequest(model=job.workload, nproc=job.nproc), len(device.torch_view().accelerators))
    changes: dict[str, Any] = {
        "steps": steps,
        "resume_from": found.absolute(),
        "save_every": request.save_every if "save_every" in given else job.save_every,
        "keep_checkpoints": request.keep_checkpoints if "keep_checkpoints" in given else job.keep_checkpoints,
        "dataloader_workers": request.dataloader_workers if "dataloader_workers" in given else job.dataloader_workers,
        "measure_live_bytes": request.live_bytes,
        "report_to": list(request.report_to),
        "model_folder": TRAINED_MODEL if request.save_model else None,
        "checkpoint_folder": request.save.absolute() if request.save is not None else _shared_folder(found),
    }
    say(f"resuming {job.workload} at step {record.step} from {found}")
    return with_data_in_place(JobConfig.model_validate({**job.model_dump(), **changes}), say)


def _shared_folder(found: Path) -> Path | None:
    """The folder of checkpoints that goes on being used: one the user chose, not the inside of the earlier run."""
    folder = found.absolute().parent
    return None if (folder.parent / JOB_FILE).is_file() else folder


def _contradiction(option: str, now: object, before: object) -> UserError:
    name = option.replace("_", "-")
    if isinstance(now, bool):
        given, made = f"--{'' if now else 'no-'}{name}", f"{'without' if now else 'with'} {option.replace('_', ' ')}"
    else:
        given, made = f"--{name} {now}", f"with {before}"
    return UserError(f"{given}: the checkpoint was made {made}", "Leave the option out to go on, or start a new run.")
