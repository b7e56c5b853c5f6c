"""Where words for people go: errors and progress to stderr, results to stdout."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import typer

from training_xpu.errors import JobFailed


def open_closed_streams() -> None:
    """Puts /dev/null where stdin, stdout or stderr was closed, so that no file opened later takes its place."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, "r", closefd=False)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


def error(problem: str, remedy: str = "") -> None:
    note(f"ljperf: {problem}")
    if remedy:
        note(f"  {remedy}")


def note(text: str) -> None:
    """Progress and remarks; never part of the result, and not worth failing for where stderr cannot be written."""
    with contextlib.suppress(OSError):
        typer.echo(text, err=True)


def count(number: int, one: str, many: str = "") -> str:
    """`1 step`, `2 steps`, `10,000 steps`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def result(text: str) -> None:
    """
    Raises:
        JobFailed: stdout cannot be written.
    """
    with _to_stdout():
        typer.echo(text)


@contextlib.contextmanager
def _to_stdout() -> Iterator[None]:
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the interpreter fails on it again while it ends
        raise JobFailed(
            f"cannot write to stdout: {error.strerror}", "What was measured is in the run's record; see ljperf runs."
        ) from error


def table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Prints a table on stdout; columns after the first are aligned to the right when all their cells are numeric."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    drawn = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        cells = [row[index] for row in rows]
        numeric = index > 0 and all(c[:1].isdigit() or c[:1] in "-+." or c in ("", "?") for c in cells)
        drawn.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*row)
    width: dict[str, Any] = {} if sys.stdout.isatty() else {"width": 160}
    with _to_stdout():
        Console(file=sys.stdout, highlight=False, markup=False, **width).print(drawn)
