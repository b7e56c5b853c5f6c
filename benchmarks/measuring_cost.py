"""What measuring adds to a step: the training loop with its metering against the same steps without, interleaved.

Both arms run in the same processes, on the same model and engine, in turn; the bare arm does what a minimal script
does: next batch, forward, backward, update, read the loss. A percent of a step is less than what two steps of a shared
machine differ by, so that the time spent inside the metering's own calls is summed up too, exact to microseconds.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import finish, paired_ratio, parser, rounds_of

LIMIT = 1.01


def rank_main(job_folder: Path, rounds: int) -> None:
    """Runs on every rank; rank 0 prints the seconds of each arm, round by round."""
    import json

    import torch.distributed as dist

    from training_xpu import envs
    from training_xpu.engines.model import compute_device
    from training_xpu.workloads.config import JOB_FILE, JobConfig
    from training_xpu.workloads.loop import TrainingLoop
    from training_xpu.workloads.metrics import RunWriter, TokenCounts
    from training_xpu.workloads.process import leave
    from training_xpu.workloads.worker import init_process_group

    place = envs.distributed()
    config = JobConfig.read(job_folder / JOB_FILE)
    device = compute_device(place.local_rank)
    init_process_group(config)
    loop = TrainingLoop(config, job_folder, RunWriter(job_folder, place.rank), device, False)
    step = 0

    spent = 0.0

    def timed(owner: Any, name: str) -> None:
        """Sums up the time in a method of the metering; none of these calls another."""
        own = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal spent
            begun = time.perf_counter()
            try:
                return own(*args, **kwargs)
            finally:
                spent += time.perf_counter() - begun

        setattr(owner, name, call)

    timed(loop.meter, "finish")
    timed(loop.meter, "start")
    for name in ("mark", "end", "stop"):
        timed(loop.meter.clock, name)

    def metered() -> None:
        nonlocal step
        step += 1
        loop.meter.start()
        loop.step(step)

    def bare() -> None:
        nonlocal step
        step += 1
        batches = [b.to(device) for b in next(loop._batches)]
        loss = loop._forward_backward(batches, TokenCounts(), lambda phase: None)
        loop.engine.update(config.learning_rate * loop._ratio(step))
        float(loss)

    seconds: dict[str, list[float]] = {"metered": [], "bare": [], "inside the metering": []}
    for number in range(rounds + 2):
        for name, run in (("metered", metered), ("bare", bare))[:: 1 if number % 2 else -1]:
            dist.barrier()
            spent = 0.0
            begun = time.perf_counter()
            run()
            dist.barrier()
            if number >= 2:
                seconds[name].append(time.perf_counter() - begun)
                if name == "metered":
                    seconds["inside the metering"].append(spent)
    if place.rank == 0:
        (job_folder / "seconds.json").write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()
    leave(0)


def main() -> int:
    options = parser(__doc__ or "", rounds=60, quick_rounds=12)
    options.add_argument("--model", default="deepspeed/llama3-8b")
    options.add_argument("--nproc", type=int, default=2)
    options.add_argument("--rank-of", type=Path, default=None, help="internal: the job folder of a rank")
    asked = options.parse_args()
    if asked.rank_of is not None:
        rank_main(asked.rank_of, rounds_of(asked))
        return 0
    import json

    from job import start_ranks, write_job

    with tempfile.TemporaryDirectory() as folder:
        job = write_job(Path(folder), asked.model, asked.nproc, steps=4 * rounds_of(asked) + 8)
        command = [__file__, "--rank-of", folder, "--rounds", str(rounds_of(asked))]
        try:
            start_ranks(job, Path(folder), command)
        except subprocess.CalledProcessError as error:
            print(error.stderr[-2000:], file=sys.stderr)
            raise
        seconds = json.loads((Path(folder) / "seconds.json").read_text())
    ratio = paired_ratio(seconds["metered"], seconds["bare"])
    low, high = ratio.ci95
    share = paired_ratio(seconds["inside the metering"], seconds["metered"])
    finish(
        asked,
        {
            "workload": asked.model,
            "ranks": asked.nproc,
            "ratio": ratio.model_dump(),
            "share": share.model_dump(),
            "seconds": seconds,
        },
        f"{asked.model}, {asked.nproc} ranks: the metering's calls take {share.median:.3%} of a step (95 % "
        f"{share.ci95[0]:.3%} to {share.ci95[1]:.3%}; limit {LIMIT - 1:.0%}); a metered step takes {ratio.median:.4f} "
        f"of a bare one (95 % {low:.4f} to {high:.4f})",
    )
    return 0 if share.ci95[1] <= LIMIT - 1 and low <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
