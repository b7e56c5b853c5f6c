"""Whether a model can be built and trained, and whether stored weights are its own, found out before any rank starts.

A process of its own answers (`model_probe`), so that `ljperf` loads neither torch nor what torch's packages print. A
model that has passed is remembered in the cache: asking again costs nothing until a file or a package changes.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import Field

from training_xpu import envs
from training_xpu.errors import UserError
from training_xpu.records import Record
from training_xpu.workloads.weight_files import weight_files

FORMAT = 1  # raise it when more is checked than before


class Question(Record):
    """What `model_probe` is asked."""

    config: dict[str, Any]  # the fields of a config.json
    where: str  # what to call it in errors
    weights: Path | None = None  # folder of weights to start from


class Answer(Record):
    """What `model_probe` answers: what is wrong, or nothing."""

    problem: str = Field(default="")
    remedy: str = ""


def check_model(config: Mapping[str, Any], where: str, weights: Path | None = None) -> None:
    """
    Args:
        config: the fields of a config.json, complete.
        where: what to call it in errors.
        weights: folder of weights to start from.

    Raises:
        UserError: transformers cannot build the model, its forward pass fails, or the weights are damaged or not its.
    """
    passed = envs.cache_folder() / "models" / f"{_key(config, weights)}.passed"
    if passed.is_file():
        return
    answer = _ask(Question(config=dict(config), where=where, weights=weights))
    if answer.problem:
        raise UserError(answer.problem, answer.remedy)
    try:
        passed.parent.mkdir(parents=True, exist_ok=True)
        passed.touch()
    except OSError:
        return  # then it is asked again


def _ask(question: Question) -> Answer:
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "question.json"), Path(folder, "answer.json")
        question.write(asked)
        done = subprocess.run(
            [sys.executable, "-m", "training_xpu.workloads.model_probe", str(asked), str(answered)],
            env=envs.child_environment({"TRAINING_XPU_DISABLE": "1", "HF_HUB_OFFLINE": "1"}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if not answered.is_file():
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise UserError(
                f"{question.where}: the process that builds the model to check it ended with exit code "
                f"{done.returncode}: {last}",
                "Correct config.json, or see whether this machine has memory left.",
            )
        return Answer.read(answered)


def _key(config: Mapping[str, Any], weights: Path | None) -> str:
    """Over the config, the sizes and times of the files, and the packages that build the model."""
    files = [] if weights is None else weight_files(weights)
    if weights is not None and (weights / "generation_config.json").exists():
        files.append(weights / "generation_config.json")
    stats = [(str(file.absolute()), file.stat()) for file in files]
    parts = [
        FORMAT,
        dict(config),
        [(name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in stats],
        [version(package) for package in ("torch", "transformers", "safetensors")],
    ]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()
