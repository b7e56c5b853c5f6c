"""Checkpoints are whole or not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from training_xpu.errors import UserError
from training_xpu.workloads import checkpoint
from training_xpu.workloads.config import JOB_FILE, EngineName, FlopShares, JobConfig, PreparedData, Scale


@pytest.fixture
def job() -> JobConfig:
    shares = FlopShares(attention=0.3, mlp=0.5, head=0.2)
    sizes = dict.fromkeys(("parameters", "layers", "sequence", "vocabulary"), 8)
    full = {f"{name}_full": size for name, size in sizes.items()}
    return JobConfig(
        workload="ddp/tiny",
        engine=EngineName.DDP,
        model={"model_type": "llama"},
        scale=Scale(
            kind="full",
            reason="fits",
            shares_full=shares,
            shares=shares,
            target_device="none",
            target_world_size=1,
            **sizes,
            **full,
        ),
        data=PreparedData(
            source="words",
            **dict.fromkeys(("train_tokens", "train_offsets", "eval_tokens", "eval_offsets", "tokenizer"), Path("a")),
            **dict.fromkeys(("vocabulary_size", "train_token_count", "eval_token_count", "document_count"), 8),
            eos_token_id=0,
            pad_token_id=0,
            digest="1",
        ),
        sequence_length=8,
    )


def save(folder: Path, step: int, job: JobConfig, keep: int = 2, content: str = "weights") -> Path:
    checkpoint.prepare_staging(folder, step)
    staging = checkpoint.staging_folder(folder, step)
    (staging / "inner").mkdir()
    (staging / "inner" / "state.pt").write_text(content)
    (staging / "rng-0.pt").write_text("random")
    return checkpoint.complete(folder, step, job, keep)


def test_a_saved_checkpoint_is_found_from_wherever_a_user_points(tmp_path: Path, job: JobConfig) -> None:
    run = tmp_path / "run"
    saved = save(run / "checkpoints", 3, job)
    assert saved == run / "checkpoints" / "step-0000003"
    assert [checkpoint.find_checkpoint(p) for p in (run, run / "checkpoints", saved)] == [saved] * 3
    record = checkpoint.read_complete(saved)
    assert (record.step, record.world_size, record.job) == (3, 1, job)
    assert record.files == {"inner/state.pt": 7, "rng-0.pt": 6}


def test_the_newest_are_kept_by_number_not_by_name_or_time(tmp_path: Path, job: JobConfig) -> None:
    long = job.model_copy(update={"steps": 20_000_000})
    for step in (9_999_999, 8, 10_000_000):
        save(tmp_path, step, long)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-10000000", "step-9999999"]
    assert checkpoint.find_checkpoint(tmp_path).name == "step-10000000"


def test_saving_a_step_again_replaces_it(tmp_path: Path, job: JobConfig) -> None:
    save(tmp_path, 2, job)
    again = save(tmp_path, 2, job, content="other weights")
    assert (again / "inner" / "state.pt").read_text() == "other weights"
    assert [p.name for p in tmp_path.iterdir()] == ["step-0000002"]


def test_what_a_killed_save_left_is_never_loaded_and_makes_way(tmp_path: Path, job: JobConfig) -> None:
    older = save(tmp_path, 2, job)
    checkpoint.prepare_staging(tmp_path, 4)
    half = checkpoint.staging_folder(tmp_path, 4)
    (half / "leftover").write_text("half of the wei")
    assert checkpoint.find_checkpoint(tmp_path) == older
    with pytest.raises(UserError):
        checkpoint.read_complete(half)
    whole = save(tmp_path, 4, job)
    assert not half.exists()
    assert "leftover" not in checkpoint.read_complete(whole).files


def damage_size(folder: Path) -> None:
    (folder / "inner" / "state.pt").write_text("wei")


def damage_missing(folder: Path) -> None:
    (folder / "rng-0.pt").unlink()


def damage_marker(folder: Path) -> None:
    marker = folder / checkpoint.MARKER
    marker.write_text(marker.read_text()[:50])


def remove_marker(folder: Path) -> None:
    (folder / checkpoint.MARKER).unlink()


@pytest.mark.parametrize("damage", [damage_size, damage_missing, damage_marker, remove_marker])
def test_a_damaged_checkpoint_is_refused_and_an_older_one_used(tmp_path: Path, job: JobConfig, damage: Any) -> None:
    older, newer = save(tmp_path, 2, job), save(tmp_path, 4, job)
    damage(newer)
    with pytest.raises(UserError):
        checkpoint.find_checkpoint(newer)
    assert checkpoint.find_checkpoint(tmp_path) == older
    damage(older)
    with pytest.raises(UserError, match="no complete checkpoint"):
        checkpoint.find_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"world_size": 3}, "of 3 ranks, and its job of 1"),
        ({"engine": "fsdp"}, "of fsdp, and its job of ddp"),
        ({"step": 41}, "at step 41 of a job of 40"),
        ({"step": 0}, "at step 0"),
        ({"step": 5}, "of step 5, and its folder of step 4"),
        ({"files": {}}, "lists no files"),
        ({"files": {"../../secret": 3}}, "outside the checkpoint, ../../secret"),
        ({"files": {"/etc/hostname": 3}}, "outside the checkpoint, /etc/hostname"),
        ({"files": {"gone.pt": 3}}, "gone.pt is missing"),
        ({"files": {"rng-0.pt": 3}}, "rng-0.pt has 6 bytes and not 3"),
        ({"job": {}}, "is not a CheckpointRecord"),
        ({"job": 7}, "is not a CheckpointRecord"),
    ],
)
def test_a_marker_that_contradicts_itself_is_refused_by_name(
    tmp_path: Path, job: JobConfig, changes: dict[str, Any], word: str
) -> None:
    saved = save(tmp_path, 4, job)
    marker = saved / checkpoint.MARKER
    marker.write_text(json.dumps({**json.loads(marker.read_text()), **changes}))
    with pytest.raises(UserError) as caught:
        checkpoint.find_checkpoint(saved)
    assert word in caught.value.problem
    assert str(saved) in caught.value.problem
    with pytest.raises(UserError, match="no complete checkpoint there: ") as of_folder:
        checkpoint.find_checkpoint(tmp_path)
    assert word in of_folder.value.problem


def test_a_job_that_names_itself_as_its_checkpoints_does_not_lead_in_circles(tmp_path: Path, job: JobConfig) -> None:
    job.model_copy(update={"checkpoint_folder": tmp_path}).write(tmp_path / JOB_FILE)
    with pytest.raises(UserError, match="no complete checkpoint"):
        checkpoint.find_checkpoint(tmp_path)


def test_wrong_places_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        checkpoint.find_checkpoint(tmp_path / "nowhere")
    with pytest.raises(UserError, match="no complete checkpoint"):
        checkpoint.find_checkpoint(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is no folder"):
        checkpoint.find_checkpoint(tmp_path / "file")
    with pytest.raises(UserError, match="not the same folder on all nodes"):
        checkpoint.check_shared(checkpoint.staging_folder(tmp_path, 1))


def test_a_folder_with_checkpoints_of_another_run_is_refused_for_a_new_one(tmp_path: Path, job: JobConfig) -> None:
    checkpoint.check_unused(tmp_path / "not there yet")
    checkpoint.check_unused(tmp_path)
    save(tmp_path, 2, job)
    with pytest.raises(UserError, match="holds checkpoints of another run"):
        checkpoint.check_unused(tmp_path)


def test_a_resumed_run_without_a_checkpoint_of_its_own_stands_for_the_one_it_came_from(
    tmp_path: Path, job: JobConfig
) -> None:
    origin = save(tmp_path / "first" / "checkpoints", 2, job)
    resumed = tmp_path / "second"
    resumed.mkdir()
    job.model_copy(update={"resume_from": origin}).write(resumed / JOB_FILE)
    assert checkpoint.find_checkpoint(resumed) == origin


def test_a_run_that_saved_elsewhere_is_found_there(tmp_path: Path, job: JobConfig) -> None:
    saved = save(tmp_path / "elsewhere", 2, job)
    run = tmp_path / "run"
    run.mkdir()
    job.model_copy(update={"checkpoint_folder": tmp_path / "elsewhere"}).write(run / JOB_FILE)
    assert checkpoint.find_checkpoint(run) == saved


def test_the_last_step_is_saved_too(job: JobConfig) -> None:
    saving = job.model_copy(update={"steps": 12, "save_every": 5})
    assert [step for step in range(1, 13) if saving.saves_after(step)] == [5, 10, 12]
    assert not any(job.saves_after(step) for step in range(1, 13))
