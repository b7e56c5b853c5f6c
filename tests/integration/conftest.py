"""Fixtures of the tests of the training path; `training_harness` has what they are made of."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from training_harness import Ljperf, resolve_job, write_model, write_text

from training_xpu.workloads.config import JobConfig


@pytest.fixture(scope="session")
def training_environment(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, str]:
    """The variables of a user who has set nothing but where caches and records go.

    Native operations, which take a minute to build, are kept between test sessions.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("TRAINING_XPU_", "CHECKPOINT_OPTIM"))}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTHONPATH", "TORCH_EXTENSIONS_DIR", "OMP_NUM_THREADS"):
        inherited.pop(name, None)
    cache = request.config.cache
    assert cache is not None
    folder = tmp_path_factory.mktemp("training")
    return {
        **inherited,
        "TRAINING_XPU_CACHE": str(folder / "cache"),
        "TRAINING_XPU_RUNS": str(folder / "runs"),
        "TORCH_EXTENSIONS_DIR": str(cache.mkdir("torch_extensions")),
        "COLUMNS": "160",
        # As ljperf sets it for its ranks: with another ninja first, native operations are built again.
        "PATH": str(Path(sys.executable).parent) + os.pathsep + inherited.get("PATH", os.defpath),
    }


@pytest.fixture(scope="session")
def ljperf(tmp_path_factory: pytest.TempPathFactory, training_environment: dict[str, str]) -> Ljperf:
    folder = tmp_path_factory.mktemp("user")
    write_model(folder / "tiny")
    write_text(folder / "text.jsonl")
    return Ljperf(folder, training_environment)


@pytest.fixture
def own_runs(ljperf: Ljperf, tmp_path: Path) -> Ljperf:
    """The same, with an empty runs folder of the test's own."""
    return Ljperf(ljperf.folder, {**ljperf.environment, "TRAINING_XPU_RUNS": str(tmp_path / "runs")})


@pytest.fixture(scope="session")
def base_job(ljperf: Ljperf) -> JobConfig:
    """DDP in fp32, micro batch 4 on one rank, packed, four steps."""
    return resolve_job(ljperf)
