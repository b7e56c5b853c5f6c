"""`ljperf explain`: which features applied to a job, which stepped aside, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from training_xpu import envs
from training_xpu.cli import console
from training_xpu.errors import UserError

if TYPE_CHECKING:
    from training_xpu.perf.explain import Explanation


def explain(
    run: Annotated[
        str | None,
        typer.Argument(help="A run folder, a run's name or the beginning of it, or latest.", show_default=False),
    ] = None,
    pid: Annotated[int | None, typer.Option(help="A running process instead of a run.", show_default=False)] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder with the runs. Default: ./runs.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Say which features applied to a job, which stepped aside, and why."""
    if (run is None) == (pid is None):
        raise UserError(
            "name either a run or a process", "Such as: ljperf explain latest, or: ljperf explain --pid 4711"
        )
    from training_xpu.perf.explain import explain_process, explain_run

    if pid is not None:
        found = explain_process(pid)
    else:
        found = explain_run(str(run), (output or envs.runs_folder()).absolute())
    if as_json:
        console.result(found.to_json(indent=2))
    else:
        _print(found)


def _print(found: Explanation) -> None:
    from training_xpu.perf.explain import sentence

    if found.run is not None:
        console.result(f"run {found.run.name}: {found.status}")
    if found.features:
        for outcome in found.features:
            console.result(sentence(outcome))
    elif found.processes or not found.reports.is_dir():
        console.result("No feature was asked for: the job ran as without this package.")
    else:
        console.result("No feature was asked for, and no process of the job imported torch.")
    if found.processes:
        rows = [
            [p.role, str(p.rank), str(p.pid), p.program, ", ".join(f"{k}={v}" for k, v in p.asked_for.items()) or "-"]
            for p in found.processes
        ]
        console.table("", ["role", "rank", "pid", "program", "asked for"], rows)
    console.result(f"reports: {found.reports}")
