"""Going on from a checkpoint: with the settings of its run, and only those changed that may change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from training_xpu import device, envs
from training_xpu.errors import UserError, nearest
from training_xpu.perf import store
from training_xpu.perf.limits import check_job, check_request
from training_xpu.perf.request import TrainingRequest
from training_xpu.perf.resolve import TRAINED_MODEL, with_data_in_place
from training_xpu.workloads import checkpoint
from training_xpu.workloads.config import JOB_FILE, JobConfig
from training_xpu.workloads.model_check import check_model
from training_xpu.workloads.ranks import choose_nproc
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


def resume_job(
    request: TrainingRequest, given: frozenset[str], say: Callable[[str], None], runs_folder: Path | None = None
) -> JobConfig:
    """The job that goes on from `request.resume`.

    Args:
        given: the options the user wrote; one that contradicts the checkpoint's job is refused.
        say: is given lines for people.
        runs_folder: where `request.resume` is looked up as a run's name. Default: TRAINING_XPU_RUNS or ./runs.

    Raises:
        UserError: there is no complete checkpoint, its job is damaged, or a setting cannot change between its steps.
    """
    assert request.resume is not None
    check_request(request)
    check_trackers(list(request.report_to))
    found = checkpoint_of(request.resume, runs_folder or envs.runs_folder())
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
    choose_nproc(job.nproc, len(device.torch_view().accelerators))
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
    if request.save is not None:
        if not changes["save_every"]:
            raise UserError("--save names a folder, but not how often", "Add --save-every STEPS.")
        store.check_writable("--save", request.save)
        if request.save.absolute() != found.absolute().parent:
            checkpoint.check_unused(request.save)
    resumed = JobConfig.model_validate({**job.model_dump(), **changes})
    _check_marker(record, resumed, found / checkpoint.MARKER)
    say(f"resuming {job.workload} at step {record.step} from {found}")
    return with_data_in_place(resumed, say)


def checkpoint_of(asked: str, runs_folder: Path) -> Path:
    """The checkpoint that `--resume` stands for.

    Args:
        asked: `latest`: of the newest run that has ended and has a complete checkpoint; a run's name or the beginning
            of one; or the path of a run folder, a folder of checkpoints or one checkpoint.
        runs_folder: where names are looked up.

    Raises:
        UserError: nothing complete is there.
    """
    if not asked.strip():
        raise UserError("--resume: the path is empty", "Name a run, its folder, a checkpoint, or latest.")
    if asked == store.LATEST:
        return _latest(runs_folder)
    named = runs_folder / asked
    if "/" not in asked and not asked.startswith(".") and (named / JOB_FILE).is_file():
        return checkpoint.find_checkpoint(named)
    path = Path(asked).expanduser() if asked.startswith("~") else Path(asked)
    if path.exists():
        return checkpoint.find_checkpoint(path)
    runs = [folder.name for folder, _ in store.list_runs(runs_folder)]
    beginning = [name for name in runs if name.startswith(asked)]
    if len(beginning) == 1:
        return checkpoint.find_checkpoint(runs_folder / beginning[0])
    if beginning:
        raise UserError(
            f"--resume {asked}: {len(beginning)} runs begin so", f"Write more of the name, such as: {beginning[0]}"
        )
    near = nearest(asked, runs) if runs else ""
    raise UserError(
        f"--resume {asked}: no such folder, and no run of that name in {runs_folder}",
        near if near.startswith("Did you mean") else "Give a run's name, a run folder, a checkpoint, or latest.",
    )


def _latest(runs_folder: Path) -> Path:
    for folder, record in store.list_runs(runs_folder):
        if not isinstance(record, str) and record.status == "running":
            continue  # it still writes where this one would go on
        try:
            return checkpoint.find_checkpoint(folder)
        except UserError:
            continue
    raise UserError(
        f"--resume latest: no run in {runs_folder} has ended and has a complete checkpoint",
        "Start one with --save-every STEPS, or name a checkpoint.",
    )


def _check_marker(record: checkpoint.CheckpointRecord, job: JobConfig, marker: Path) -> None:
    """The job comes from a file, and is checked as if it came from the command line."""
    weights = job.initial_weights
    if weights is not None and not weights.exists():
        raise UserError(f"{marker}: the job started from the weights {weights}, which are gone", "Put them back there.")
    try:
        check_job(job)
        if envs.distributed().local_rank == 0:
            check_model(job.model, "its model")
    except UserError as error:
        raise UserError(f"{marker}: its job cannot be run: {error.problem}", "Choose another checkpoint.") from error


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
