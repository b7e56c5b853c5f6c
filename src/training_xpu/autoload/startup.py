"""What a training process does with what its environment asks for; `autoload` calls it once anything is asked."""

from __future__ import annotations

import sys
from typing import Any

from training_xpu import envs, features, report, roles


def start() -> None:
    """Finds out what this process is, and subscribes the features asked for.

    Raises:
        BadValue: a variable holds something it cannot mean.
    """
    if envs.disabled():
        return
    asked = features.asked_for()
    folder = envs.report_folder()
    if not asked and folder is None:
        return
    report.set_up_logging(envs.log_level())
    role = roles.role_of(sys.orig_argv, sys.argv)
    if role == "helper":
        if asked and roles.is_spawned(sys.orig_argv):
            _wait_for_process_group()
        return
    _begin(role)


def _begin(role: report.Role) -> None:
    place = envs.distributed()
    report.begin(envs.report_folder(), role, place.rank if role == "rank" else 0)
    program = sys.argv[0].rpartition("/")[2] if sys.argv else ""
    report.write("", "process", **_told(place), program=program)
    features.activate(role, print_warnings=role != "rank" or place.local_rank == 0)


def _told(place: envs.Distributed) -> dict[str, Any]:
    """What each process says of itself; ranks of one job share `job`."""
    address = f"{place.master_address}:{place.master_port}" if place.master_address else ""
    return {"asked_for": features.asked_for(), "world_size": place.world_size, "job": address or place.run_id or ""}


def _wait_for_process_group() -> None:
    """A spawned child may be a dataloader's worker or a trainer of torch.multiprocessing.spawn: only the trainer joins
    a process group, and from then on is a rank."""
    from training_xpu import seams

    def become_rank(call: seams.ProcessGroupCall) -> None:
        subscription.cancel()
        rank, size = call.arguments.get("rank", -1), call.arguments.get("world_size", -1)
        place = envs.distributed()
        report.begin(envs.report_folder(), "rank", place.rank if rank < 0 else rank)
        told = {**_told(place), "world_size": place.world_size if size < 0 else size}
        report.write("", "process", **told, program="spawned by " + sys.argv[0].rpartition("/")[2])
        features.activate("rank", print_warnings=max(rank, place.local_rank) == 0)

    subscription = seams.PROCESS_GROUP.subscribe(become_rank, owner="autoload")
