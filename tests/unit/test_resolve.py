"""From a request to a job, on a tiny model and a little text."""

from __future__ import annotations

import dataclasses
import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from training_xpu import device
from training_xpu.errors import CannotRunHere, UserError
from training_xpu.perf import limits, resume, store
from training_xpu.perf import resolve as resolving
from training_xpu.perf.records import RUN_FILE, RunRecord
from training_xpu.perf.request import TrainingRequest
from training_xpu.perf.resolve import resolve, with_data_in_place
from training_xpu.perf.resume import resume_job
from training_xpu.workloads import checkpoint
from training_xpu.workloads.config import JOB_FILE, JobConfig

MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "eos_token_id": 3,
}
PEAK = 2e11


@dataclasses.dataclass
class View:
    """A machine whose devices the test chooses."""

    accelerators: list[Any] = dataclasses.field(default_factory=list)
    dtypes: tuple[str, ...] = ("bf16", "fp32")
    emulated: tuple[str, ...] = ()
    models_checked: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Accelerator:
    memory_bytes: int | None


@pytest.fixture
def view(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> View:
    found = View()
    peak = dataclasses.make_dataclass("Peak", ["flops", "source"])(PEAK, "measured here")
    for name, value in (
        ("torch_view", lambda: found),
        ("cached_peak", lambda dtype: peak),
        ("usable_memory", lambda: 16 << 30),
        ("usable_cores", lambda: 2),
    ):
        monkeypatch.setattr(device, name, value, raising=False)
    monkeypatch.setenv("TRAINING_XPU_CACHE", str(tmp_path / "cache"))
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    # The check takes a process and seconds each; it has its own tests.
    for module in (resolving, resume):
        monkeypatch.setattr(module, "check_model", lambda *question: found.models_checked.append(question))
    return found


@pytest.fixture
def request_(tmp_path: Path) -> TrainingRequest:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    lines = [json.dumps({"text": f"document {i} has words and the number {i * i}"}) for i in range(300)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    return TrainingRequest(f"ddp/{tmp_path}/model", data=tmp_path / "text.jsonl", seq_len=32, micro_batch=3)


def job_of(request: TrainingRequest, **changes: Any) -> JobConfig:
    return resolve(dataclasses.replace(request, **changes), 40, lambda text: None)


def test_defaults_are_those_of_the_help_and_of_this_device(view: View, request_: TrainingRequest) -> None:
    job = job_of(request_)
    assert (job.steps, job.warmup_steps, job.dtype, job.nproc, job.nnodes) == (40, 5, "bf16", 2, 1)
    assert (job.micro_batch, job.sequence_length, job.scale.kind) == (3, 32, "full")
    assert job.learning_rate == 1e-3  # a small model
    assert (job.peak_flops_per_rank, job.peak_source) == (PEAK / 2, "measured here, divided among 2 ranks")
    assert job.model_folder is None
    assert (job.data_path, job.initial_weights) == (request_.data, None)
    # The model's own end token stays; the tokenizer's padding fills what the model leaves open.
    assert (job.model["eos_token_id"], job.model["pad_token_id"]) == (3, job.data.pad_token_id)
    assert job_of(request_, steps=8).warmup_steps == 2
    assert job_of(request_, warmup_steps=0, learning_rate=0.5).warmup_steps == 0


def test_the_device_decides_what_is_not_asked_for(view: View, request_: TrainingRequest) -> None:
    view.dtypes = ("fp32",)
    assert job_of(request_).dtype == "fp32"
    with pytest.raises(CannotRunHere, match="--dtype bf16: this device cannot train in it"):
        job_of(request_, dtype="bf16")
    view.dtypes, view.emulated = ("bf16", "fp32"), ("bf16",)
    assert (job_of(request_).dtype, job_of(request_, dtype="bf16").dtype) == ("fp32", "bf16")
    view.dtypes, view.emulated = ("bf16", "fp16", "fp32"), ()
    view.accelerators = [Accelerator(80 << 30), Accelerator(80 << 30), Accelerator(None)]
    job = job_of(request_)
    assert (job.nproc, job.peak_flops_per_rank, job.peak_source) == (3, PEAK, "measured here")
    with pytest.raises(CannotRunHere, match="--nproc 4: this machine has 3 accelerators"):
        job_of(request_, nproc=4)


def test_zero_belongs_to_deepspeed(view: View, request_: TrainingRequest) -> None:
    assert job_of(request_).zero_stage == 0
    with pytest.raises(UserError, match="--zero 2: ddp has no ZeRO stages"):
        job_of(request_, zero=2)
    assert job_of(request_, model=request_.model.replace("ddp/", "deepspeed/")).zero_stage == 3


def test_runs_of_somewhat_different_length_share_their_data(view: View, request_: TrainingRequest) -> None:
    short, longer = job_of(request_, steps=10), job_of(request_, steps=400)
    assert short.data_tokens == longer.data_tokens == 1 << 23
    assert short.data == longer.data
    # 100,000 steps of 2 ranks of 3 sequences of 32 tokens are 19.2 million.
    assert job_of(request_, steps=100_000).data_tokens == 1 << 25


def test_lost_data_are_made_again_and_changed_data_refused(view: View, request_: TrainingRequest) -> None:
    job = job_of(request_)
    assert with_data_in_place(job, lambda text: None) == job
    tokens = np.load(job.data.train_tokens)
    job.data.train_tokens.unlink()
    again = with_data_in_place(job, lambda text: None)
    assert np.array_equal(np.load(again.data.train_tokens), tokens)
    assert request_.data is not None
    request_.data.write_text(request_.data.read_text().replace("number", "figure"))
    again.data.train_tokens.unlink()
    with pytest.raises(UserError, match="have changed since the run was made"):
        with_data_in_place(again, lambda text: None)


@pytest.fixture
def saved(view: View, request_: TrainingRequest, tmp_path: Path) -> tuple[Path, JobConfig]:
    """A checkpoint after step 6 of 10."""
    folder = tmp_path / "run" / "checkpoints"
    job = job_of(request_, steps=10, save_every=3, dataloader_workers=0, eval_sequences=4)
    checkpoint.prepare_staging(folder, 6)
    (checkpoint.staging_folder(folder, 6) / "state.pt").write_text("weights")
    return checkpoint.complete(folder, 6, job, keep=2), job


def going_on(folder: Path, given: set[str], **options: Any) -> JobConfig:
    request = TrainingRequest(model=options.pop("model", ""), resume=str(folder), **options)
    return resume_job(request, frozenset({"resume", *given}), lambda text: None)


def test_a_resumed_job_is_the_saved_one_but_for_what_may_change(saved: tuple[Path, JobConfig]) -> None:
    folder, job = saved
    resumed = going_on(folder, set())
    differences = {k for k, v in resumed.model_dump().items() if v != job.model_dump()[k]}
    assert differences == {"resume_from", "checkpoint_folder"}
    assert (resumed.resume_from, resumed.checkpoint_folder) == (folder, folder.parent)
    changed = going_on(
        folder.parent.parent,
        {"steps", "save_every", "dataloader_workers", "seed", "micro_batch"},
        steps=20, save_every=5, dataloader_workers=2, seed=job.seed, micro_batch=job.micro_batch,
    )  # fmt: skip
    assert (changed.steps, changed.save_every, changed.dataloader_workers) == (20, 5, 2)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"seed": 7}, "--seed 7: the checkpoint was made with 42"),
        ({"zero": 1}, "--zero 1: the checkpoint was made with 0"),
        ({"dtype": "fp32"}, "--dtype fp32: the checkpoint was made with bf16"),
        ({"packing": False}, "--no-packing: the checkpoint was made with packing"),
        ({"gradient_checkpointing": True}, "--gradient-checkpointing: the checkpoint was made without"),
        ({"layers": 1}, "--layers 1: the checkpoint was made with 2"),
        ({"scale": "proxy"}, "--scale proxy: the checkpoint was made with full"),
        ({"nproc": 1}, "--nproc 1: the checkpoint was made with 2"),
        ({"data": Path("other.txt")}, "--data .*/other.txt: the checkpoint was made with .*text.jsonl"),
        ({"eval_sequences": 8}, "--eval-sequences 8: the checkpoint was made with 4"),
        ({"steps": 6}, "--steps 6: the checkpoint is at step 6 already"),
    ],
)
def test_what_may_not_change_is_refused(saved: tuple[Path, JobConfig], options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        going_on(saved[0], set(options), **options)


def test_a_job_of_several_nodes_needs_its_meeting_point_again(saved: tuple[Path, JobConfig]) -> None:
    folder, job = saved
    job = job.model_copy(update={"nnodes": 2})
    checkpoint.prepare_staging(folder.parent, 9)
    (checkpoint.staging_folder(folder.parent, 9) / "state.pt").write_text("weights")
    later = checkpoint.complete(folder.parent, 9, job, keep=2)
    with pytest.raises(UserError, match="2 nodes, which needs --rdzv-endpoint"):
        going_on(later, set())
    assert going_on(later, {"rdzv_endpoint"}, rdzv_endpoint="a:1").nnodes == 2


def test_every_option_of_a_request_is_fixed_by_a_checkpoint_or_may_change() -> None:
    """A new option must not be forgotten silently when a run is resumed."""
    may_change = {
        "steps", "save", "save_every", "keep_checkpoints", "resume", "save_model", "report_to",
        "dataloader_workers", "live_bytes", "memory_budget", "node_rank", "rdzv_endpoint", "rdzv_id", "layers", "scale",
    }  # fmt: skip
    options = {field.name for field in dataclasses.fields(TrainingRequest)}
    assert options == may_change | set(resume.FIXED)
    assert set(resume.FIXED.values()) <= set(JobConfig.model_fields)
    assert limits.SCALES == ("auto", "full", "proxy")


def test_a_folder_is_checked_as_it_stands_and_a_checkpoint_s_model_too(
    view: View, request_: TrainingRequest, saved: tuple[Path, JobConfig]
) -> None:
    (config, where, weights), *_ = view.models_checked
    assert config["hidden_size"] == 64
    assert where == f"{request_.model.partition('/')[2]}/config.json"
    assert weights is None
    view.models_checked.clear()
    going_on(saved[0], set())
    ((config, *_),) = view.models_checked
    assert config == saved[1].model


def test_a_wrong_column_is_refused_before_a_tokenizer_is_trained(view: View, request_: TrainingRequest) -> None:
    said: list[str] = []
    with pytest.raises(UserError, match="has no field 'txt'") as caught:
        resolve(dataclasses.replace(request_, data_field="txt"), 40, said.append)
    assert caught.value.remedy == "Did you mean text?"
    assert said == []


def test_what_the_options_ask_for_together_must_fit(view: View, request_: TrainingRequest) -> None:
    # 65,536 x 64 x 256 tokens of 24 bytes are 24 GiB; a quarter of 8 GiB is what a rank may take.
    with pytest.raises(UserError, match=r"tokens of one step .* take 24 GiB of a rank's 8 GiB") as caught:
        job_of(request_, gradient_accumulation=1 << 16, micro_batch=64, seq_len=256)
    assert caught.value.remedy.startswith("Use --gradient-accumulation 5461 or less")
    assert job_of(request_, gradient_accumulation=5461, micro_batch=1, seq_len=32).gradient_accumulation == 5461


@pytest.fixture
def runs(saved: tuple[Path, JobConfig], tmp_path: Path) -> Path:
    """Three runs, oldest first: with a checkpoint, without one, and one that is still running, with a checkpoint."""
    folder = tmp_path / "runs"
    checkpoint_, job = saved
    for number, (has_checkpoint, status) in enumerate(((True, "completed"), (False, "failed"), (True, "running"))):
        name = f"2026030{number + 1}-000000-ddp-model-base"
        run = folder / name
        run.mkdir(parents=True)
        job.write(run / JOB_FILE)
        RunRecord(
            name=name,
            created=datetime(2026, 3, number + 1, tzinfo=UTC),
            command=[],
            workload=job.workload,
            arm="base",
            features=[],
            status=status,
            **(store.owner() if status == "running" else {}),
        ).write(run / RUN_FILE)
        if has_checkpoint:
            shutil.copytree(checkpoint_, run / "checkpoints" / checkpoint_.name)
    return folder


def test_a_run_is_resumed_by_its_name_or_as_the_latest(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = runs / "20260301-000000-ddp-model-base" / "checkpoints" / "step-0000006"
    for asked in ("latest", "20260301-000000-ddp-model-base", "20260301", str(first), str(first.parent.parent)):
        assert resume.checkpoint_of(asked, runs) == first
    monkeypatch.chdir(first.parent)
    assert resume.checkpoint_of(first.name, runs) == Path(first.name)
    assert resume.checkpoint_of(".", runs) == Path("step-0000006")
    for asked, problem, remedy in (
        ("2026", "3 runs begin so", "Write more of the name"),
        ("20260302-000000-ddp-model-base", "no complete checkpoint", ""),
        ("20260301-000000-ddp-modl-base", "no such folder, and no run of that name", "Did you mean 20260301"),
        ("", "the path is empty", "latest"),
        (" ", "the path is empty", "latest"),
    ):
        with pytest.raises(UserError) as caught:
            resume.checkpoint_of(asked, runs)
        assert problem in caught.value.problem
        assert remedy in caught.value.remedy
    with pytest.raises(UserError, match=r"no run in .* has ended and has a complete checkpoint"):
        resume.checkpoint_of("latest", runs / "empty")


def test_where_a_resumed_job_saves(saved: tuple[Path, JobConfig], tmp_path: Path) -> None:
    folder, job = saved
    elsewhere = tmp_path / "elsewhere"
    resumed = going_on(folder, {"save"}, save=elsewhere)
    assert (resumed.checkpoint_folder, resumed.save_every) == (elsewhere, job.save_every)
    with pytest.raises(UserError, match="--save names a folder, but not how often"):
        going_on(folder, {"save", "save_every"}, save=elsewhere, save_every=0)
    shutil.copytree(folder, elsewhere / folder.name)
    with pytest.raises(UserError, match="holds checkpoints of another run"):
        going_on(folder, {"save"}, save=elsewhere)
    assert going_on(folder, {"save"}, save=folder.parent).checkpoint_folder == folder.parent


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"micro_batch": 10**9}, "--micro-batch 1000000000: must be 1 to 65536"),
        ({"warmup_steps": 10**12}, "--warmup-steps"),
        ({"initial_weights": "/nowhere"}, "the weights /nowhere, which are gone"),
    ],
)
def test_a_job_in_a_marker_is_checked_like_a_command_line(
    saved: tuple[Path, JobConfig], changes: dict[str, Any], word: str
) -> None:
    marker = saved[0] / checkpoint.MARKER
    content = json.loads(marker.read_text())
    marker.write_text(json.dumps({**content, "job": {**content["job"], **changes}}))
    with pytest.raises(UserError) as caught:
        going_on(saved[0], set())
    assert str(marker) in caught.value.problem
    assert word in caught.value.problem
