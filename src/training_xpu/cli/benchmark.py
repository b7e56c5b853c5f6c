"""`ljperf benchmark`: trains on real text, measures, compares arms."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from training_xpu.cli.training_options import request_from, with_training_options
from training_xpu.errors import UserError

DEFAULT_STEPS = 40


@with_training_options
def benchmark(
    settings: dict[str, Any],
    features: Annotated[
        str | None, typer.Option(help="One arm with these features on, such as a,b; base: none.")
    ] = None,
    arms: Annotated[str | None, typer.Option(help="Several arms, such as base,a,a+b.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for the run records. Default: ./runs.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the environment and the command of each arm; start nothing.")
    ] = False,
) -> int:
    """Train a workload on real text, measure it, and compare arms (sets of features).

    Ends with a table and the path of each run's record.
    """
    from training_xpu.cli.launching import check_variables, launch_and_show, refuse_existing_launcher
    from training_xpu.perf.experiment import parse_arms

    if settings["model"] is None:
        raise UserError("--model is missing", "Such as: ljperf benchmark --model deepspeed/llama3-8b")
    check_variables()
    refuse_existing_launcher("benchmark")
    wanted = parse_arms(features, arms)
    return launch_and_show(request_from(settings), wanted, DEFAULT_STEPS, output, as_json, dry_run)
