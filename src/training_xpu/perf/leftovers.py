"""Clears away what a run whose `ljperf` was killed could not clear away itself."""

from __future__ import annotations

from pathlib import Path

from training_xpu.errors import UserError
from training_xpu.perf import store

RESERVE_FILE = ".reserve"  # room for a run's closing record; there while the run is going on


def clear_leftovers(runs_folder: Path) -> None:
    """Frees the room that dead runs hold: their reserve and their unfinished checkpoints.

    A run whose process lives, or that is led from another host, is not touched; nor is any record.
    """
    for reserve in runs_folder.glob(f"*/{RESERVE_FILE}"):
        try:
            ended = store.load_run(reserve.parent).status != "running"
        except UserError:
            continue  # unreadable: perhaps of a newer version, whose rules may be others
        if ended:
            from training_xpu.workloads.checkpoint import clear_unfinished

            clear_unfinished(reserve.parent / "checkpoints")
            try:
                reserve.unlink(missing_ok=True)
            except OSError:
                continue  # somebody else's run: they will
