"""Saving, dying, resuming: what goes on from a checkpoint is what would have gone on without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from training_harness import Ljperf, Run, for_engine, resolve_job, run_jobs, wait_for

from training_xpu.workloads.config import Dtype, JobConfig

ENGINES = ("ddp", "fsdp", "zero0", "zero1", "zero2", "zero3", "transformers")
# In bf16 those that keep fp32 weights in a way of their own.
OWN_MASTER_WEIGHTS = ("fsdp", "zero1", "zero3")
DTYPES = {engine: (Dtype.FP32, Dtype.BF16) if engine in OWN_MASTER_WEIGHTS else (Dtype.FP32,) for engine in ENGINES}


@pytest.fixture(scope="module")
def resumed(base_job: JobConfig, ljperf: Ljperf, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Per engine on two ranks: a whole run of six steps that saves after three, and one that goes on from there."""
    folder = tmp_path_factory.mktemp("checkpoints")
    jobs: dict[str, JobConfig] = {}
    dropout = {**base_job.model, "attention_dropout": 0.1}
    half = base_job.model_copy(update={"micro_batch": 2, "steps": 6, "model": dropout, "eval_sequences": 4})
    for engine in ENGINES:
        for dtype in DTYPES[engine]:
            saved = folder / f"saved-{engine}-{dtype}"
            whole = for_engine(half, engine, dtype=dtype, save_every=3, checkpoint_folder=saved)
            jobs[f"{engine} {dtype} whole"] = whole
            going_on = {"resume_from": saved / "step-0000003", "checkpoint_folder": folder / "again" / engine / dtype}
            jobs[f"{engine} {dtype} resumed"] = whole.model_copy(update=going_on)
    return run_jobs(jobs, 2, folder / "runs", ljperf)


@pytest.mark.parametrize(("engine", "dtype"), [(engine, dtype) for engine in ENGINES for dtype in DTYPES[engine]])
def test_a_resumed_run_gives_the_losses_of_an_uninterrupted_one(
    resumed: dict[str, Run], engine: str, dtype: str
) -> None:
    whole, later = resumed[f"{engine} {dtype} whole"], resumed[f"{engine} {dtype} resumed"]
    assert [s["step"] for s in later.steps(rank=0)] == [4, 5, 6]
    for name in ("loss", "gradient_norm", "learning_rate", "real_tokens"):
        assert [s[name] for s in later.steps()] == [s[name] for s in whole.steps()][6:], name
    assert later.evaluation("after") == whole.evaluation("after")
    # Evaluated with the weights of the checkpoint, not with those a run begins with.
    assert whole.evaluation("after") < later.evaluation("before") < whole.evaluation("before")
    (note,) = (e for e in later.events("note") if e["name"] == "resumed" and e["rank"] == 0)
    assert note["step"] == 3
    saved = [e["step"] for e in whole.events("checkpoint")]
    assert saved == [3, 6]


def hold_in_save(ljperf: Ljperf, flag: Path, *more: str) -> None:
    """Trains with checkpoints after steps 2 and 4, and is killed with all its processes in the middle of the second."""
    environment = {"TRAINING_TEST_FAULT": "0:save:4:hold", "TRAINING_TEST_HELD": str(flag)}
    arguments = ljperf.training("ddp", "--nproc", "2", "--steps", "6", "--save-every", "2", *more)
    started = ljperf.start(*arguments, plugin="faults", environment=environment)
    wait_for(lambda: flag.exists() or started.process.poll() is not None, "the second save")
    assert started.process.poll() is None, started.done()
    started.kill_all()


@pytest.fixture(scope="module")
def killed(ljperf: Ljperf, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("killed")
    own = Ljperf(ljperf.folder, {**ljperf.environment, "TRAINING_XPU_RUNS": str(folder / "runs")})
    hold_in_save(own, folder / "held")
    (run,) = own.runs.iterdir()
    return Run(run)


def test_kill_9_within_a_save_leaves_the_older_checkpoint_to_go_on_from(ljperf: Ljperf, killed: Run) -> None:
    checkpoints = killed.folder / "checkpoints"
    assert {p.name for p in checkpoints.iterdir()} == {"step-0000002", ".step-0000004.partial"}
    assert (checkpoints / ".step-0000004.partial" / "state.pt").stat().st_size > 1_000_000
    whole = ljperf.train("ddp", "--nproc", "2", "--steps", "6").run

    later = ljperf("train", "--resume", str(killed.folder), "--json", "--no-save-model", "--no-live-bytes").run
    assert later.record["config"]["resume_from"] == str(checkpoints / "step-0000002")
    assert killed.losses == whole.losses[:4]
    assert later.losses == whole.losses[2:]
    assert later.evaluation("after") == whole.evaluation("after")
    # It saves into its own folder, and leaves the killed run's as they are.
    assert {p.name for p in (later.folder / "checkpoints").iterdir()} == {"step-0000004", "step-0000006"}
    assert {p.name for p in checkpoints.iterdir()} == {"step-0000002", ".step-0000004.partial"}


REFUSED = [
    ("--seed 7", "--seed 7: the checkpoint was made with 42"),
    ("--micro-batch 4", "--micro-batch 4: the checkpoint was made with 2"),
    ("--model fsdp/./tiny", "--model fsdp/./tiny: the checkpoint was made with ddp/./tiny"),
    ("--layers 1", "--layers 1: the checkpoint was made with 2"),
    ("--scale proxy", "--scale proxy: the checkpoint was made with full"),
    ("--no-packing", "--no-packing: the checkpoint was made with packing"),
    ("--gradient-checkpointing", "--gradient-checkpointing: the checkpoint was made without gradient checkpointing"),
    ("--steps 2", "--steps 2: the checkpoint is at step"),
]


@pytest.mark.parametrize(("options", "problem"), REFUSED)
def test_an_option_that_contradicts_the_checkpoint_is_refused(
    own_runs: Ljperf, killed: Run, options: str, problem: str
) -> None:
    done = own_runs("train", "--resume", str(killed.folder), *options.split(), expect=2)
    assert done.stderr.startswith(f"ljperf: {problem}")
    assert len(done.stderr.splitlines()) == 2
    assert not own_runs.runs.exists()


@pytest.fixture(scope="module")
def saved_model(ljperf: Ljperf) -> Run:
    arguments = ("--nproc", "2", "--steps", "8", "--save-model", "--zero", "3", "--dtype", "bf16")
    return ljperf.train("deepspeed", *arguments).run


def test_the_saved_model_loads_and_has_the_recorded_evaluation_loss(saved_model: Run) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from training_xpu.workloads.config import PreparedData
    from training_xpu.workloads.data.batches import evaluation_batches

    folder = saved_model.folder / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    text = "the model trains on real text"
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.bfloat16).eval()
    assert sum(p.numel() for p in model.parameters()) == saved_model.record["config"]["scale"]["parameters"]
    data = PreparedData.model_validate(saved_model.record["config"]["data"])
    batches = evaluation_batches(data, rank=0, world_size=1, micro_batch=2, sequence_length=64, count=16)
    with torch.no_grad():
        losses = [float(model(**batch.inputs()).loss) for batch in batches]
    assert sum(losses) / len(losses) == pytest.approx(saved_model.evaluation("after"), rel=2e-3)
    assert saved_model.evaluation("after") < saved_model.evaluation("before") - 0.2


def test_a_saved_model_is_trained_on_by_every_engine(ljperf: Ljperf, saved_model: Run, tmp_path: Path) -> None:
    """Its weights are loaded, under ZeRO-3 partitioned too, and not drawn anew."""
    job = resolve_job(ljperf, saved_model.folder / "model")
    assert job.initial_weights == saved_model.folder / "model"
    job = job.model_copy(update={"steps": 1, "eval_sequences": 16})
    jobs = {engine: for_engine(job, engine) for engine in ("ddp", "fsdp", "zero3", "transformers")}
    runs = run_jobs({**jobs, "zero3 partitioned": jobs["zero3"]}, 1, tmp_path / "runs", ljperf)
    first = runs["ddp"].evaluation("before")
    assert first == pytest.approx(saved_model.evaluation("after"), rel=2e-3)  # that was in bf16
    for run in runs.values():
        assert run.evaluation("before") == pytest.approx(first, rel=2e-6)


def test_a_damaged_checkpoint_is_named(own_runs: Ljperf, tmp_path: Path, resumed: dict[str, Run]) -> None:
    config = json.loads((resumed["ddp fp32 resumed"].folder / "job.json").read_text())
    saved = Path(config["resume_from"])
    state = saved / "state.pt"
    whole = state.read_bytes()
    state.write_bytes(whole[:-1])
    try:
        done = own_runs("train", "--resume", str(saved), expect=2)
    finally:
        state.write_bytes(whole)
    assert done.stderr.splitlines()[0].startswith(f"ljperf: checkpoint {saved} is damaged: state.pt has ")
    assert not own_runs.runs.exists()
