"""`ljperf`: the entry point, what all verbs share, and the newer form `ljperf --action VERB`."""

from __future__ import annotations

import errno
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import training_xpu
from training_xpu.cli import console
from training_xpu.cli.actions import action_form
from training_xpu.cli.benchmark import benchmark
from training_xpu.cli.env import env
from training_xpu.cli.explain import explain
from training_xpu.cli.models import models
from training_xpu.cli.paths import check_paths_of
from training_xpu.cli.plan import plan
from training_xpu.cli.reproduce import reproduce
from training_xpu.cli.run import run_command
from training_xpu.cli.runs import runs
from training_xpu.cli.train import train
from training_xpu.errors import ExitCode, UserError


class Interrupt(UserError):
    """Ctrl-C or SIGTERM before there was any work whose record could tell of it."""

    exit_code = ExitCode.INTERRUPTED


class Verbs(TyperGroup):
    """What all verbs share. typer itself turns Ctrl-C into exit code 130 without a word."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for command in self.commands.values():
            check_paths_of(command)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            raise Interrupt("interrupted") from interrupt


app = typer.Typer(
    name="ljperf",
    cls=Verbs,
    help="Train large models and measure what each part of the stack gains.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"ljperf {training_xpu.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


for verb in (benchmark, train, models, plan, env, runs, reproduce):
    app.command()(verb)
app.command("run")(run_command)
app.command()(explain)


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code; errors become one or two lines on stderr."""
    console.open_closed_streams()
    given = list(sys.argv[1:] if arguments is None else arguments)
    own, separator, foreign = _split_foreign(given)
    debug = "--debug" in own
    own = [a for a in own if a != "--debug"] or ([] if separator else ["--help"])
    try:
        outcome = app(args=[*action_form(own), *separator, *foreign], prog_name="ljperf", standalone_mode=False)
        return outcome if isinstance(outcome, int) else int(ExitCode.DONE)
    except UserError as error:
        console.error(error.problem, error.remedy)
        _show_traceback(debug)
        return int(error.exit_code)
    except typer.TyperException as error:
        message = error.format_message().strip()
        if message:
            console.error(message, "" if "Did you mean" in message else _help_for(error, bool(separator)))
        _show_traceback(debug)
        return int(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        console.error("interrupted")
        return int(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()  # the reader left; the interpreter would complain while it flushes
        return int(ExitCode.FAILED)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            console.error(f"a path is too long: {str(error.filename)[:60]}...", "Use a shorter one.")
            _show_traceback(debug)
            return int(ExitCode.USAGE)
        where = f" {error.filename}" if error.filename else ""
        console.error(f"{error.strerror or error}:{where}", "Free space or choose another folder with --output.")
        _show_traceback(debug)
        return int(ExitCode.FAILED)
    except Exception as error:
        console.error(
            f"{type(error).__name__}: {error}", "This is a fault of ljperf; run again with --debug to see where."
        )
        _show_traceback(debug)
        return int(ExitCode.FAILED)


def _help_for(error: Exception, has_separator: bool) -> str:
    """Where to look after a wrong command line."""
    context: Any = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "ljperf"
    if path == "ljperf run" and not has_separator:
        return "Your own command goes after --, such as: ljperf run -- python train.py"
    return f"See {path} --help."


def _split_foreign(arguments: list[str]) -> tuple[list[str], list[str], list[str]]:
    """What stands after `--` belongs to the user's own command and is never looked at."""
    if "--" not in arguments:
        return arguments, [], []
    at = arguments.index("--")
    return arguments[:at], ["--"], arguments[at + 1 :]


def _show_traceback(debug: bool) -> None:
    if debug:
        traceback.print_exc()
