"""Starts the ranks of one node with torch.distributed's elastic launcher: `python -m training_xpu.workloads.launch`.

Runs as a process of its own, so that `ljperf` stays free to show progress and to end everything on Ctrl-C.
"""

from __future__ import annotations

import argparse
import dataclasses
import socket
import sys
from pathlib import Path

from pydantic import Field

from training_xpu.errors import CannotRunHere, ExitCode
from training_xpu.records import Record
from training_xpu.workloads.config import JOB_FILE, JobConfig
from training_xpu.workloads.process import die_with_parent

LAUNCH_FILE = "launch.json"
SHUTDOWN_SECONDS = 5


class EndedRank(Record):
    """A rank that the launcher saw failing before it ended the others."""

    rank: int
    pid: int
    exit_code: int  # negative: the signal that ended it
    timestamp: int


class LaunchRecord(Record):
    """How a launch ended; the first of `failed` is the one that failed first."""

    failed: list[EndedRank] = Field(default_factory=list)
    error: str = ""  # the launcher's own, such as a rendezvous that timed out


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="training_xpu.workloads.launch")
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--parent", type=int, default=None, help="process that this launch ends with")
    parser.add_argument("--node-rank", type=int, default=None)
    parser.add_argument("--rdzv-endpoint", default="localhost:0")
    parser.add_argument("--rdzv-id", default="")
    options = parser.parse_args(arguments)
    if options.parent is not None:
        die_with_parent(options.parent)
    job = JobConfig.read(options.run_folder / JOB_FILE)
    return launch(job, options.run_folder, options.node_rank, options.rdzv_endpoint, options.rdzv_id)


def check_loopback() -> None:
    """The ranks of a node meet over the loopback interface; where it is down, they would wait for ever.

    Raises:
        CannotRunHere: nobody can be reached at 127.0.0.1.
    """
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(1)
            socket.create_connection(listener.getsockname(), timeout=5).close()
    except OSError as error:
        raise CannotRunHere(
            f"the loopback network interface does not work: {error.strerror or error}",
            "Ranks meet at 127.0.0.1; switch it on with: ip link set lo up",
        ) from error


def launch(job: JobConfig, run_folder: Path, node_rank: int | None, endpoint: str, run_id: str) -> int:
    """Runs all ranks of this node to their end; what failed is in `launch.json` of the run folder.

    Args:
        node_rank: with it the nodes are ranked as told (static rendezvous), without it in the order of their arrival.
        endpoint: host:port of the rendezvous; port 0 takes a free one, for a single node.
        run_id: the same on all nodes of one job. Where it is empty, jobs on several nodes are told apart by their
            endpoints alone.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    static = node_rank is not None and job.nnodes > 1
    options = {
        "min_nodes": job.nnodes,
        "max_nodes": job.nnodes,
        "nproc_per_node": job.nproc,
        "run_id": run_id or ("training-xpu" if job.nnodes > 1 else run_folder.name),
        "rdzv_endpoint": endpoint,
        "rdzv_backend": "static" if static else "c10d",
        "rdzv_configs": {"rank": node_rank} if static else {},
        "max_restarts": 0,
        "monitor_interval": 0.1,
        "local_addr": "127.0.0.1" if job.nnodes == 1 else None,
    }
    if "shutdown_timeout" in {field.name for field in dataclasses.fields(LaunchConfig)}:
        options["shutdown_timeout"] = SHUTDOWN_SECONDS
    worker = ["-u", "-m", "training_xpu.workloads.worker", str(run_folder)]
    record = LaunchRecord()
    try:
        elastic_launch(LaunchConfig(**options), sys.executable)(*worker)  # type: ignore[arg-type]
    except ChildFailedError as error:
        ended = [
            EndedRank(rank=rank, pid=f.pid, exit_code=f.exitcode, timestamp=f.timestamp)
            for rank, f in error.failures.items()
        ]
        record.failed = sorted(ended, key=lambda e: e.timestamp)
    except Exception as error:
        record.error = f"{type(error).__name__}: {error}"
    record.write(run_folder / LAUNCH_FILE)
    return int(ExitCode.FAILED if record.failed or record.error else ExitCode.DONE)


if __name__ == "__main__":
    sys.exit(main())
