"""`ljperf run`: the user's own job with the features on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from training_xpu import envs, features
from training_xpu.cli import console
from training_xpu.cli.config_file import ConfigOption


def run_command(
    context: typer.Context,
    command: Annotated[
        list[str] | None, typer.Argument(help="The command, after --, such as: -- python train.py", show_default=False)
    ] = None,
    features_on: Annotated[
        str | None,
        typer.Option(
            "--features",
            help="Features to switch on, all others off; base: none. Default: as your own variables say.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder for the run record. Default: ./runs.", show_default=False)
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the environment and the command; start nothing.")
    ] = False,
    config: ConfigOption = None,
) -> int:
    """Run your own training command with features on.

    Its input, output, signals and exit code pass through untouched. Afterwards stderr says which features applied, and
    the record lies in the run folder. Exit code 3: the command succeeded, but a feature asked for did not apply.
    """
    from training_xpu.cli.launching import check_variables
    from training_xpu.perf import userjob
    from training_xpu.perf.store import check_runs_folder

    check_variables()
    names = None if features_on is None else features.parse_names(features_on)
    runs_folder = (output or envs.runs_folder()).absolute()
    words = list(command or [])
    userjob.check_command(words)
    check_runs_folder(runs_folder)
    if dry_run:
        console.result(userjob.dry_run(words, names, runs_folder))
        return 0
    result = userjob.run_user_job(words, names, runs_folder)
    from training_xpu.perf.explain import sentence

    for outcome in result.features:
        console.note(f"ljperf: {sentence(outcome)}")
    if not result.features:
        console.note("ljperf: no feature was asked for")
    console.note(f"ljperf: record of this run: {result.folder / 'run.json'}")
    return result.final_exit_code
