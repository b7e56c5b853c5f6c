"""Makes a job as `ljperf` would, and starts scripts as its ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from training_xpu import envs
from training_xpu.perf.environment import job_environment
from training_xpu.perf.request import TrainingRequest
from training_xpu.perf.resolve import resolve
from training_xpu.perf.runner import build_operations
from training_xpu.workloads.config import JOB_FILE, EngineName, JobConfig


def write_job(folder: Path, model: str, nproc: int, steps: int, **more: object) -> JobConfig:
    """Resolves the request that `ljperf benchmark --model MODEL` would make and writes `job.json` into the folder."""
    request = TrainingRequest(model=model, nproc=nproc, steps=steps, eval_sequences=0, live_bytes=False, **more)  # type: ignore[arg-type]
    job = resolve(request, steps, lambda text: print(text, file=sys.stderr))
    job.write(folder / JOB_FILE)
    return job


def start_ranks(job: JobConfig, folder: Path, script: list[str]) -> str:
    """Runs a script on every rank under torchrun, in the environment the ranks of `ljperf` get; returns its stdout."""
    environment = envs.child_environment(job_environment(job, [], folder, has_accelerator=False))
    if job.engine is EngineName.DEEPSPEED:
        build_operations(environment, lambda text: print(text, file=sys.stderr))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(job.nproc), *script]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return done.stdout
