"""The rules of the house that no linter knows. Patches of foreign code have a test of their own."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

import training_xpu
from training_xpu.cli.main import app, run

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "training_xpu"
MODULES = sorted(PACKAGE.rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
GROUP: Any = typer.main.get_command(app)
VERBS = [name for name, command in GROUP.commands.items() if not command.hidden]

MOST_LINES = 500
NOT_FOR_HELP = {"torch", "numpy", "yaml", "rich", "training_xpu.records"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_modules_are_short_and_say_what_they_are_for(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= MOST_LINES
    assert ast.get_docstring(ast.parse(text))


def environment_reads(source: str) -> list[int]:
    """Lines that reach for the process environment."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        direct = isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT
        imported = isinstance(node, ast.ImportFrom) and node.module == "os"
        if (direct and isinstance(node.value, ast.Name) and node.value.id in ("os", "posix")) or (
            imported and ENVIRONMENT & {alias.name for alias in node.names}
        ):
            lines.append(node.lineno)
    return lines


def test_only_envs_touches_the_process_environment() -> None:
    # autoload looks at names alone, before it can afford to import envs inside every `import torch`.
    others = [path for path in MODULES if path not in (PACKAGE / "envs.py", PACKAGE / "autoload" / "__init__.py")]
    found = {relative(p): lines for p in others if (lines := environment_reads(p.read_text(encoding="utf-8")))}
    assert found == {}


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("import os\nx = os.environ['A']", [2]),
        ("import os\nos.getenv('A')", [2]),
        ("from os import environ as e", [1]),
        ("import os\nos.getpid()\nlocal.environ = 3", []),
    ],
)
def test_the_check_of_the_environment_sees_every_form(source: str, lines: list[int]) -> None:
    assert environment_reads(source) == lines


@pytest.mark.parametrize(
    ("code", "unwanted"),
    [
        ("import training_xpu", {"torch", "pydantic", "numpy", "typer"}),
        ("import training_xpu.autoload", {"torch", "pydantic", "numpy", "typer", "logging", "dataclasses"}),
        # typer may load pydantic itself; what costs time is defining the records.
        ("from training_xpu.cli.main import run; run(['--help'])", NOT_FOR_HELP),
        ("from training_xpu.cli.main import run; run(['train', '--help'])", NOT_FOR_HELP),
        ("from training_xpu.cli.main import run; run(['train', '--no-such-option'])", NOT_FOR_HELP),
    ],
)
def test_what_must_start_fast_imports_little(code: str, unwanted: set[str]) -> None:
    tell = (
        f"import sys; before = set(sys.modules); {code}; print('loaded:', *({unwanted!r} & {{*sys.modules}} - before))"
    )
    told = subprocess.run([sys.executable, "-c", tell], capture_output=True, text=True, check=True)
    assert told.stdout.splitlines()[-1].strip() == "loaded:"


def test_every_public_name_has_a_home() -> None:
    assert set(training_xpu.__all__) == {"__version__", *training_xpu._HOMES}
    for name, module in training_xpu._HOMES.items():
        assert getattr(training_xpu, name) is getattr(sys.modules[module], name)


def test_help_lists_the_verbs_with_a_word_on_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    listed = re.findall(r"^  ([a-z]+)  +(\S.*)$", shown.partition("Commands:")[2], re.MULTILINE)
    assert [name for name, _ in listed] == VERBS


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([verb, "--help"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith(f"Usage: ljperf {verb}")
    assert shown.err == ""
    undescribed = [p.name for p in GROUP.commands[verb].params if not getattr(p, "help", None) and p.name != "help"]
    assert undescribed == []


@pytest.mark.parametrize("verb", VERBS)
def test_a_wrong_option_is_one_line_and_exit_2(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([verb, "--no-such-option"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert 1 <= len(shown.err.strip().splitlines()) <= 2
    assert "--no-such-option" in shown.err


def test_nothing_is_left_to_do() -> None:
    for path in MODULES:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"\b(TODO|FIXME|XXX)\b", text), relative(path)


def indented_commands(text: str) -> list[list[str]]:
    """The `ljperf` commands of a page's code blocks, as words; lines that end in a backslash are joined."""
    text = text.replace("\\\n", " ")
    blocks = re.findall(r"^    (.*)$", text, re.MULTILINE)
    for fence in re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        blocks += fence.splitlines()
    commands = []
    for line in blocks:
        found = re.search(r"(?:^|\s)ljperf (?=[a-z-])(?!.*\[OPTIONS\])", line)
        if found:
            commands.append(shlex.split(line[found.end() :], comments=True))
    return commands


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_commands_in_the_documentation_exist(page: Path) -> None:
    for words in indented_commands(page.read_text(encoding="utf-8")):
        own = words[: words.index("--")] if "--" in words else words
        if own[0] == "--action":
            own = own[1:]
        if own[0].startswith("-"):
            assert own[0] in ("--version", "--help", "--install-completion", "--show-completion")
            continue
        assert own[0] in VERBS, f"{relative(page)}: ljperf {own[0]}"
        known = {o for p in GROUP.commands[own[0]].params for o in (*p.opts, *p.secondary_opts)}
        known |= {"--debug", "--help", "--model-name"}
        for word in own[1:]:
            if word.startswith("--"):
                option = word.partition("=")[0].replace("_", "-")
                assert option in known, f"{relative(page)}: ljperf {own[0]} {word}"


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_in_the_documentation_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://", "#")):
            assert (page.parent / target.partition("#")[0]).exists(), f"{relative(page)}: {target}"
