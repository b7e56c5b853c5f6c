"""Runs many small jobs in one set of processes, since importing costs more than training: `run_jobs.py FOLDER`.

Each subfolder with a `job.json` is trained in the order of their names, as a rank of a real run would train it. Beside
the usual files, rank 0 writes `weights.json`: the digests of the weights before the first step, where the engine leaves
the loop to us and the folder's name asks for it.
"""

import hashlib
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState

from training_xpu import envs
from training_xpu.workloads.config import JOB_FILE, EngineName, JobConfig
from training_xpu.workloads.loop import make_engine
from training_xpu.workloads.metrics import RunWriter
from training_xpu.workloads.worker import train


def digests(weights: dict[str, torch.Tensor]) -> dict[str, list]:
    """Name -> digest of the bytes, mean and standard deviation."""
    return {
        name: [
            hashlib.sha256(tensor.float().contiguous().numpy().tobytes()).hexdigest(),
            float(tensor.float().mean()),
            float(tensor.float().std()),
        ]
        for name, tensor in weights.items()
    }


def write_initial_weights(job: JobConfig, folder: Path, partitioned: bool) -> None:
    engine = make_engine(job, torch.device("cpu"), partition_while_building=partitioned)
    weights = engine.full_state_dict()
    if weights is not None:
        (folder / "weights.json").write_text(json.dumps(digests(weights)))


def main(root: Path) -> None:
    dist.init_process_group()
    for folder in sorted(root.iterdir()):
        job = JobConfig.read(folder / JOB_FILE)
        AcceleratorState._reset_state(reset_partial_state=True)
        partitioned = "partitioned" in folder.name
        if partitioned:
            import training_xpu.workloads.worker as worker

            worker.must_partition_while_building = lambda config: True
        if job.engine is not EngineName.TRANSFORMERS and "weights" in folder.name:
            write_initial_weights(job, folder, partitioned)
        train(job, folder, RunWriter(folder, envs.distributed().rank))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
