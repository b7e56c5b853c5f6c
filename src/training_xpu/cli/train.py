"""`ljperf train`: one arm, real training, the measured summary and a saved model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from training_xpu.cli.completion import complete_run
from training_xpu.cli.training_options import request_from, with_training_options
from training_xpu.errors import UserError

DEFAULT_STEPS = 100
SAVING = "Saving and resuming"


@with_training_options
def train(
    context: typer.Context,
    settings: dict[str, Any],
    features: Annotated[str | None, typer.Option(help="Features to switch on, such as a,b.")] = None,
    save: Annotated[
        Path | None, typer.Option(help="Folder for checkpoints. Default: in the run.", rich_help_panel=SAVING)
    ] = None,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints; 0: none.", rich_help_panel=SAVING)] = 0,
    keep_checkpoints: Annotated[int, typer.Option(help="Newest ones to keep.", rich_help_panel=SAVING)] = 2,
    resume: Annotated[
        str | None,
        typer.Option(
            help="Go on from a run (its name, its folder, or latest) or a checkpoint, with that run's settings.",
            autocompletion=complete_run,
            rich_help_panel=SAVING,
        ),
    ] = None,
    save_model: Annotated[
        bool,
        typer.Option("--save-model/--no-save-model", help="Save the trained HF model.", rich_help_panel=SAVING),
    ] = True,
    report_to: Annotated[list[str] | None, typer.Option(help="tensorboard, mlflow or wandb; may be repeated.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for the run record. Default: ./runs.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the environment and the command; start nothing.")
    ] = False,
) -> int:
    """Train a workload: loss curve, measured summary, saved model. Also under torchrun, which then gives the ranks."""
    from training_xpu.cli.launching import check_variables, launch_and_show, train_under_launcher
    from training_xpu.perf.experiment import parse_arms
    from training_xpu.perf.resume import given_options

    if settings["model"] is None and resume is None:
        raise UserError("--model is missing", "Such as: ljperf train --model deepspeed/llama3-8b")
    check_variables()
    trackers = tuple(name.strip() for value in report_to or [] for name in value.split(",") if name.strip())
    request = request_from(
        {**settings, "model": settings["model"] or ""},
        save=save,
        save_every=save_every,
        keep_checkpoints=keep_checkpoints,
        resume=resume,
        save_model=save_model,
        report_to=trackers,
    )
    given = given_options(context)
    arms = parse_arms(features, None)
    outside = train_under_launcher(request, arms[0], DEFAULT_STEPS, output, as_json, dry_run, given)
    if outside is not None:
        return outside
    return launch_and_show(request, arms, DEFAULT_STEPS, output, as_json, dry_run, given)
