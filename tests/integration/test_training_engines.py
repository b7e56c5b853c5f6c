"""The four engines train alike: same seed, data and settings, same weights, losses, norms and learning rates.

All jobs of one world size run in one set of processes, see `jobs/run_jobs.py`; each has four steps.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from training_harness import TINY, Ljperf, Run, for_engine, run_jobs

from training_xpu.workloads.config import Dtype, JobConfig

ENGINES = ("ddp", "fsdp", "zero0", "zero1", "zero2", "zero3", "transformers")
OWN_LOOP = tuple(e for e in ENGINES if e != "transformers")
# Other orders of summation, over 4 steps of a model with 0.16 million parameters.
FP32 = 2e-6
BF16 = 5e-3


def tied(job: JobConfig) -> JobConfig:
    """With one weight for embedding and head, and none decayed, which engines do differently."""
    return job.model_copy(update={"model": {**job.model, "tie_word_embeddings": True}, "weight_decay": 0.0})


@pytest.fixture(scope="module")
def one_rank(base_job: JobConfig, ljperf: Ljperf, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    jobs: dict[str, JobConfig] = {}
    for engine in ENGINES:
        packed = base_job if engine != "transformers" else base_job.model_copy(update={"weight_decay": 0.0})
        padded = packed.model_copy(update={"packing": False})
        accumulating = {"micro_batch": 2, "gradient_accumulation": 2}
        jobs[f"{engine} packed"] = for_engine(packed, engine)
        jobs[f"{engine} accumulating"] = for_engine(packed, engine, **accumulating)
        jobs[f"{engine} padded"] = for_engine(padded, engine)
        jobs[f"{engine} padded accumulating"] = for_engine(padded, engine, **accumulating)
        jobs[f"{engine} unclipped"] = for_engine(packed, engine, gradient_clipping=0.0)
        jobs[f"{engine} recomputed"] = for_engine(packed, engine, gradient_checkpointing=True)
        jobs[f"{engine} tied"] = for_engine(tied(base_job), engine)
    for kind in ("packed", "padded"):
        jobs[f"ddp {kind} undecayed"] = jobs[f"ddp {kind}"].model_copy(update={"weight_decay": 0.0})
    # DeepSpeed's ZeRO 0 counts its first update in low precision as the second, so that it lags behind.
    for engine in ("ddp", "fsdp", "zero2", "zero3", "transformers"):
        jobs[f"{engine} bf16"] = for_engine(base_job, engine, dtype=Dtype.BF16)
    for engine in OWN_LOOP:
        jobs[f"{engine} weights"] = for_engine(base_job, engine, steps=1)
    jobs["zero3 partitioned weights"] = for_engine(base_job, "zero3", steps=30)
    return run_jobs(jobs, 1, tmp_path_factory.mktemp("engines") / "one", ljperf)


@pytest.fixture(scope="module")
def two_ranks(base_job: JobConfig, ljperf: Ljperf, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    jobs: dict[str, JobConfig] = {}
    for engine in ENGINES:
        packed = base_job.model_copy(update={"micro_batch": 2})
        if engine == "transformers":
            packed = packed.model_copy(update={"weight_decay": 0.0})
        padded = packed.model_copy(update={"packing": False})
        jobs[f"{engine} packed"] = for_engine(packed, engine)
        jobs[f"{engine} padded"] = for_engine(padded, engine)
        jobs[f"{engine} padded accumulating"] = for_engine(padded, engine, micro_batch=1, gradient_accumulation=2)
        jobs[f"{engine} tied"] = for_engine(tied(base_job), engine, micro_batch=2)
        if engine in OWN_LOOP:
            jobs[f"{engine} weights"] = for_engine(packed, engine, steps=1)
    jobs["zero3 partitioned weights"] = for_engine(base_job, "zero3")
    return run_jobs(jobs, 2, tmp_path_factory.mktemp("engines") / "two", ljperf)


def near(run: Run, other: Run, tolerance: float) -> None:
    """Losses, evaluation losses, gradient norms and learning rates of both runs agree, relative.

    DeepSpeed computes no gradient norm that it tells under ZeRO 0 in fp32.
    """
    mine, theirs = run.steps(rank=0), other.steps(rank=0)
    assert [s["step"] for s in mine] == [s["step"] for s in theirs]
    for step, expected in zip(mine, theirs, strict=True):
        assert step["loss"] == pytest.approx(expected["loss"], rel=tolerance), (run.folder.name, step["step"])
        assert step["learning_rate"] == pytest.approx(expected["learning_rate"], rel=1e-6)
        if "zero0" in run.folder.name and "bf16" not in run.folder.name:
            assert step["gradient_norm"] is None
        else:
            assert step["gradient_norm"] == pytest.approx(expected["gradient_norm"], rel=20 * tolerance)
    for when in ("before", "after"):
        assert run.evaluation(when) == pytest.approx(other.evaluation(when), rel=tolerance)


def reference_of(one_rank: dict[str, Run], engine: str, kind: str) -> Run:
    """DDP on one rank without accumulation. The HF Trainer decays no norm weights, the other engines decay all."""
    decayed = " undecayed" if engine == "transformers" else ""
    return one_rank[f"ddp {'padded' if 'padded' in kind else 'packed'}{decayed}"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["packed", "accumulating", "padded", "padded accumulating"])
def test_one_rank_trains_alike_on_every_engine(one_rank: dict[str, Run], engine: str, kind: str) -> None:
    near(one_rank[f"{engine} {kind}"], reference_of(one_rank, engine, kind), FP32)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["packed", "padded", "padded accumulating"])
def test_two_ranks_train_as_one_does(
    one_rank: dict[str, Run], two_ranks: dict[str, Run], engine: str, kind: str
) -> None:
    run = two_ranks[f"{engine} {kind}"]
    near(run, reference_of(one_rank, engine, kind), FP32)
    first, second = run.steps(rank=0), run.steps(rank=1)
    for name in ("step", "loss", "gradient_norm", "learning_rate"):
        assert [s[name] for s in first] == [s[name] for s in second]


@pytest.mark.parametrize("engine", ENGINES)
def test_tied_weights_stay_tied(one_rank: dict[str, Run], two_ranks: dict[str, Run], engine: str) -> None:
    near(one_rank[f"{engine} tied"], one_rank["ddp tied"], FP32)
    near(two_ranks[f"{engine} tied"], one_rank["ddp tied"], FP32)


@pytest.mark.parametrize("engine", ENGINES)
def test_recomputing_changes_no_loss_and_no_clipping_changes_the_norm_only(
    one_rank: dict[str, Run], engine: str
) -> None:
    expected = one_rank[f"{engine} packed"]
    near(one_rank[f"{engine} recomputed"], expected, 1e-6)
    unclipped = one_rank[f"{engine} unclipped"]
    assert unclipped.losses[0] == expected.losses[0]
    assert unclipped.losses[2] != expected.losses[2]
    assert unclipped.steps()[0]["gradient_norm"] == expected.steps()[0]["gradient_norm"]


@pytest.mark.parametrize("engine", ["ddp", "fsdp", "zero2", "zero3", "transformers"])
def test_bf16_trains_roughly_as_fp32_does(one_rank: dict[str, Run], engine: str) -> None:
    near(one_rank[f"{engine} bf16"], one_rank["ddp packed"], BF16)


def test_the_learning_rate_warms_up_and_falls_on_a_cosine_to_a_tenth(one_rank: dict[str, Run]) -> None:
    # Two warm-up steps, then a half and a whole of the cosine from 1e-3 to 1e-4.
    for engine in ENGINES:
        rates = [s["learning_rate"] for s in one_rank[f"{engine} packed"].steps()]
        assert rates == pytest.approx([5e-4, 1e-3, 5.5e-4, 1e-4])


def test_every_engine_begins_with_the_same_weights(one_rank: dict[str, Run], two_ranks: dict[str, Run]) -> None:
    expected = initial_weights(one_rank["ddp weights"])
    assert len(expected) == 2 * 9 + 3
    for runs in (one_rank, two_ranks):
        for engine in OWN_LOOP:
            found = initial_weights(runs[f"{engine} weights"])
            assert {name: values[0] for name, values in found.items()} == {n: v[0] for n, v in expected.items()}, engine


def test_a_model_partitioned_while_it_is_built_begins_as_any_other_and_learns(
    one_rank: dict[str, Run], two_ranks: dict[str, Run]
) -> None:
    for runs in (one_rank, two_ranks):
        weights = initial_weights(runs["zero3 partitioned weights"])
        assert weights.keys() == initial_weights(runs["zero3 weights"]).keys()
        assert len({values[0] for name, values in weights.items() if "norm" not in name}) == 2 * 7 + 2
        for name, (_, mean, deviation) in weights.items():
            size = 512 * 64 if "embed" in name or "lm_head" in name else 64 * 32
            if "norm" in name:
                assert (mean, deviation) == (1.0, 0.0)
            else:  # four standard errors
                assert abs(mean) < 4 * 0.02 / math.sqrt(size), name
                assert abs(deviation / 0.02 - 1) < 4 / math.sqrt(2 * size) + 1 / TINY["vocab_size"], name
    learned = one_rank["zero3 partitioned weights"]
    assert learned.evaluation("before") == pytest.approx(math.log(512), rel=0.01)
    assert learned.evaluation("after") < learned.evaluation("before") - 1.0


def initial_weights(run: Run) -> dict[str, list[Any]]:
    """Name -> digest, mean, standard deviation before the first step."""
    found: dict[str, list[Any]] = json.loads((run.folder / "weights.json").read_text())
    return found
