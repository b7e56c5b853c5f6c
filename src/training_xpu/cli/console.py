"""Where words for people go: errors and progress to stderr, results to stdout."""

from __future__ import annotations

import sys
from typing import Any

import typer


def error(problem: str, remedy: str = "") -> None:
    typer.echo(f"ljperf: {problem}", err=True)
    if remedy:
        typer.echo(f"  {remedy}", err=True)


def note(text: str) -> None:
    """Progress and remarks; never part of the result."""
    typer.echo(text, err=True)


def result(text: str) -> None:
    typer.echo(text)


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
    Console(file=sys.stdout, highlight=False, markup=False, **width).print(drawn)
