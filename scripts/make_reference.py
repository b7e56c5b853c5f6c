"""Writes the reference pages made from the code: `python scripts/make_reference.py`; `--check` only compares."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import reference_cli
import reference_records

from training_xpu import envs

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "reference"

SECTIONS = {
    "feature": ("Features", "Each takes `true`, `false` or `auto`. Not set is the same as `false`."),
    "project": ("The package and `ljperf`", ""),
    "launcher": (
        "Set by launchers",
        "Read to find a process's place among the ranks. torchrun, accelerate and DeepSpeed set the first group; the "
        "MPI launchers their own.",
    ),
    "system": ("Of the system", ""),
}


def environment_page() -> str:
    """Every environment variable that the project reads, from the declarations in envs.py."""
    lines = [
        "# Environment variables",
        "",
        "Made from `training_xpu/envs.py` by `scripts/make_reference.py`; do not edit.",
        "",
        "An empty variable counts as not set. Booleans are `true` or `false`, also `1`/`0`, `yes`/`no`, `on`/`off`, in",
        "any case. A value that a variable cannot have switches the package off in a training process, which says so",
        "in one line on stderr and trains on; `ljperf` refuses it.",
    ]
    for section, (title, text) in SECTIONS.items():
        variables = [v for v in envs.VARIABLES.values() if v.section == section]
        if not variables:
            continue
        lines += ["", f"## {title}", ""]
        if text:
            lines += [text, ""]
        lines += ["| variable | type | default | meaning | since |", "|---|---|---|---|---|"]
        for v in variables:
            default = f"`{v.default}`" if v.default else "not set"
            lines.append(f"| `{v.name}` | {v.kind} | {default} | {v.meaning} | {v.since} |")
    return "\n".join(lines) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "environment.md": environment_page,
    "cli.md": reference_cli.page,
    "run-record.md": reference_records.records_page,
    "python-api.md": reference_records.api_page,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page is out of date")
    check = parser.parse_args().check
    stale = []
    for name, make in PAGES.items():
        path, text = FOLDER / name, make()
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if not check:
            FOLDER.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    for name in stale:
        print(f"{name} {'is out of date: run scripts/make_reference.py' if check else 'written'}", file=sys.stderr)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
