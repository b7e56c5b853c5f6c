"""The page docs/reference/cli.md, made from the typer application: every verb with its arguments and options."""

from __future__ import annotations

import inspect
from typing import Any

import typer

from training_xpu.cli.main import app
from training_xpu.errors import ExitCode

KINDS = {"str": "text", "int": "whole number", "float": "number", "Path": "path"}

MEANINGS = {
    ExitCode.DONE: "done",
    ExitCode.FAILED: "the job or one of its arms failed, or a reproduction left its tolerance",
    ExitCode.USAGE: "wrong usage or input; nothing was started",
    ExitCode.CANNOT_RUN: "it cannot run here, or a feature that was asked for stepped aside (it is named)",
    ExitCode.INTERRUPTED: "interrupted by Ctrl-C, SIGTERM or SIGHUP; what was measured is kept",
}

INTRODUCTION = """\
# Command line

Made from the command line itself by `scripts/make_reference.py`; do not edit.

    ljperf VERB [OPTIONS] [ARGUMENTS]
    ljperf --action VERB [OPTIONS]

The second form is for `benchmark` and `train`; there options may be written with underscores, and `--model_name` stands
for `--model`.

For every verb:

- With `--json`, stdout holds one JSON document and nothing else. Progress and remarks always go to stderr.
- `-h` or `--help` prints the help of the verb. `--debug` shows the traceback behind an error, which is otherwise one or
  two lines: what is wrong, and what to do.
- Where `--config FILE` is listed, the YAML file may hold any option of the verb, such as `steps: 20`; the command line
  wins.
- What follows `--` is a command of your own and is never looked at.

`ljperf --version` prints the version. `ljperf --install-completion` sets up completion for your shell: verbs, options,
workloads and run names.
"""


def page() -> str:
    """Markdown with one section per verb, in the order of the help."""
    group: Any = typer.main.get_command(app)
    sections = [INTRODUCTION, _exit_codes()]
    sections += [_verb(name, command) for name, command in group.commands.items() if not command.hidden]
    return "\n".join(sections)


def _exit_codes() -> str:
    rows = [f"| {int(code)} | {MEANINGS[code]} |" for code in ExitCode]
    return "\n".join(["## Exit codes", "", "| code | meaning |", "|---|---|", *rows, ""])


def _verb(name: str, command: Any) -> str:
    arguments = [p for p in command.params if _is_argument(p)]
    options = [p for p in command.params if not _is_argument(p) and not p.hidden and p.name != "help"]
    usage = " ".join(["ljperf", name, *(["[OPTIONS]"] if options else []), *map(_metavar, arguments)])
    lines = [f"## ljperf {name}", "", f"    {usage}", "", inspect.cleandoc(command.help or ""), ""]
    if arguments:
        lines += ["| argument | meaning |", "|---|---|"]
        lines += [f"| `{_metavar(a)}` | {_text(a.help)} |" for a in arguments]
        lines.append("")
    for title, members in _panels(options).items():
        lines += [f"### {title}" if title else "### Options", ""]
        lines += ["| option | value | default | meaning |", "|---|---|---|---|"]
        lines += [f"| {_spelling(o)} | {_kind(o)} | {_default(o)} | {_text(o.help)} |" for o in members]
        lines.append("")
    return "\n".join(lines)


def _panels(options: list[Any]) -> dict[str, list[Any]]:
    """Options by the panel they belong to, those without one last."""
    panels: dict[str, list[Any]] = {}
    for option in sorted(options, key=lambda o: o.rich_help_panel is None):
        panels.setdefault(option.rich_help_panel or "", []).append(option)
    if set(panels) != {""} and "" in panels:
        panels["Other"] = panels.pop("")
    return panels


def _is_argument(parameter: Any) -> bool:
    return not any(name.startswith("-") for name in parameter.opts)


def _metavar(argument: Any) -> str:
    name = argument.metavar or (argument.name or "").upper()
    name = name if argument.required or name.startswith("[") else f"[{name}]"
    return f"{name}..." if argument.nargs != 1 or argument.multiple else name


def _spelling(option: Any) -> str:
    names = ", ".join(f"`{name}`" for name in option.opts)
    opposite = ", ".join(f"`{name}`" for name in option.secondary_opts)
    return f"{names} / {opposite}" if opposite else names


def _kind(option: Any) -> str:
    if option.is_flag:
        return ""
    if option.multiple:
        return "text, may be repeated"
    return KINDS[option.type_descriptor.annotation.__name__]


def _default(option: Any) -> str:
    default = option.default
    if option.is_flag and option.secondary_opts:
        return f"`{(option.opts if default else option.secondary_opts)[0]}`"
    if default in (None, "") or option.is_flag or callable(default):
        return ""
    return f"`{default}`"


def _text(help_text: str | None) -> str:
    return " ".join((help_text or "").split()).replace("|", "\\|")
