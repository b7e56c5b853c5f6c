"""The training loop of `ljperf` against a plain script of the same engine and configuration, in fresh processes.

The plain scripts (`benchmarks/plain/`) are what the engine's documentation shows: no metering, no records. Both read
the same job, so that model, data, order and settings are equal; the losses must agree. Arms alternate, and each round
gives one ratio of median step times.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from common import finish, interleaved, paired_ratio, parser, rounds_of
from job import start_ranks, write_job
from training_xpu.perf.store import load_steps
from training_xpu.workloads.config import STEPS_FILE, EngineName, JobConfig

PLAIN = {
    EngineName.DEEPSPEED: "deepspeed_script.py",
    EngineName.TRANSFORMERS: "trainer_script.py",
}
WARM_UP = 3


def ours(job: JobConfig, folder: Path, losses: dict[str, list[float]]) -> Callable[[], float]:
    def run() -> float:
        (folder / STEPS_FILE).unlink(missing_ok=True)
        start_ranks(job, folder, ["-m", "training_xpu.workloads.worker", str(folder)])
        steps = load_steps(folder)
        losses["ljperf"] = [s.loss for s in sorted(steps, key=lambda s: s.step) if s.rank == 0]
        by_step: dict[int, float] = {}
        for step in steps:
            by_step[step.step] = max(step.step_s, by_step.get(step.step, 0.0))
        return statistics.median([by_step[k] for k in sorted(by_step)][WARM_UP:])

    return run


def plain(job: JobConfig, folder: Path, losses: dict[str, list[float]]) -> Callable[[], float]:
    script = str(Path(__file__).parent / "plain" / PLAIN[job.engine])

    def run() -> float:
        start_ranks(job, folder, [script, str(folder)])
        told = json.loads((folder / "plain.json").read_text())
        losses["plain"] = told["losses"]
        return statistics.median(told["seconds"][WARM_UP:])

    return run


def main() -> int:
    options = parser(__doc__ or "", rounds=8, quick_rounds=2)
    options.add_argument("--model", default="deepspeed/llama3-8b", help="of the deepspeed or transformers engine")
    options.add_argument("--nproc", type=int, default=2)
    options.add_argument("--steps", type=int, default=16)
    asked = options.parse_args()
    losses: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = write_job(folder, asked.model, asked.nproc, asked.steps)
        try:
            values = interleaved(
                {"ljperf": ours(job, folder, losses), "plain": plain(job, folder, losses)}, rounds_of(asked)
            )
        except subprocess.CalledProcessError as error:
            print(error.stderr[-3000:], file=sys.stderr)
            raise
    ratio = paired_ratio(values["ljperf"], values["plain"])
    low, high = ratio.ci95
    apart = max(abs(a - b) for a, b in zip(losses["ljperf"], losses["plain"], strict=True))
    finish(
        asked,
        {
            "workload": asked.model,
            "ranks": asked.nproc,
            "steps": asked.steps,
            "ratio": ratio.model_dump(),
            "seconds": values,
            "largest_loss_difference": apart,
        },
        f"{asked.model}, {asked.nproc} ranks: step time of ljperf / plain script {ratio.median:.4f} "
        f"(95 % {low:.4f} to {high:.4f}), losses at most {apart:.2g} apart",
    )
    return 0 if low <= 1.0 and apart < 1e-2 else 1


if __name__ == "__main__":
    sys.exit(main())
