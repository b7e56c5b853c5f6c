"""Which rank keeps a silent job from moving: from the states of the processes and the steps they have reached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

HELD = ("stopped", "stopped by a debugger", "uninterruptible", "ended", "gone")  # states in which nothing can be done


@dataclass(frozen=True, slots=True)
class StalledRank:
    rank: int
    pid: int
    state: str  # a word of `device.processes.state`
    quiet_s: float  # how long the job has been silent


def stalled(
    found: Mapping[int, tuple[int, str]], reached: Mapping[int, int], in_steps: bool, quiet_s: float
) -> tuple[StalledRank, ...]:
    """The ranks to look at.

    Those whose process cannot go on, if there are any: all others wait for them. Otherwise, between steps, those that
    are behind the foremost one, or all, if none is. While a job does something whose length nobody knows, such as
    building a model, being busy or asleep is nothing unusual.

    Args:
        found: rank -> process id and state.
        reached: rank -> the last step it has finished.
        in_steps: steps are being trained, and their usual length is known.
        quiet_s: how long no rank has written anything.
    """
    chosen = [rank for rank, (_, state) in found.items() if state in HELD]
    if not chosen and in_steps:
        foremost = max(reached.values(), default=0)
        chosen = [rank for rank in found if reached.get(rank, 0) < foremost] or list(found)
    return tuple(StalledRank(rank, *found[rank], quiet_s) for rank in chosen)


def hint(rank: StalledRank) -> str:
    """What the state means, to be put behind it."""
    if rank.state == "stopped":
        return f" (by a signal; kill -CONT {rank.pid} lets it go on)"
    if rank.state == "uninterruptible":
        return " (it waits for a disk, a network file system or a driver)"
    return ""
