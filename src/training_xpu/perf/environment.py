"""The environment a job's processes get: what the user has set stays, and what we add is known by name."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from training_xpu import envs, features, report
from training_xpu.device import usable_cores
from training_xpu.workloads.config import EngineName, JobConfig


def job_environment(job: JobConfig, features_on: list[str], run_folder: Path, has_accelerator: bool) -> dict[str, str]:
    """The variables to set for the ranks of a job, beside those the user has.

    Features are switched on in the only way a user can, by their variables; every other known feature is switched off,
    so that no arm inherits one.
    """
    ours: dict[str, str] = dict(features.environment_for(features_on))
    ours["TRAINING_XPU_REPORT"] = str(run_folder / report.FOLDER_NAME)
    if job.memory_budget is not None:
        ours["TRAINING_XPU_MEMORY_BUDGET"] = job.memory_budget
    present = envs.snapshot()
    for name, value in defaults(job, has_accelerator).items():
        if name not in present:
            ours[name] = value
    # Native operations are rebuilt when another ninja is found first: it must be the one installed beside this Python.
    tools, path = str(Path(sys.executable).parent), present.get("PATH", os.defpath)
    if path.split(os.pathsep)[0] != tools:
        ours["PATH"] = tools + os.pathsep + path
    return ours


def defaults(job: JobConfig, has_accelerator: bool) -> Mapping[str, str]:
    """What a competent user would set before such a job; a user's own setting wins."""
    threads = max(1, int(usable_cores()) // job.nproc)
    chosen = {
        "OMP_NUM_THREADS": str(threads),  # each rank its share of the cores, as torchrun's documentation asks for
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",  # everything is local; a look-up would wait for a network that may not be there
        "TORCH_EXTENSIONS_DIR": str(extensions_folder()),
    }
    if job.engine is EngineName.DEEPSPEED and not has_accelerator:
        chosen["DS_ACCELERATOR"] = "cpu"
    return chosen


def extensions_folder() -> Path:
    """Where native operations are built, apart for every torch and DeepSpeed that may share the cache."""
    from importlib.metadata import version

    return envs.cache_folder() / "torch_extensions" / f"torch-{version('torch')}-deepspeed-{version('deepspeed')}"
