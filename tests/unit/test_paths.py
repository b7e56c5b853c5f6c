"""Paths on the command line of every verb."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import typer

from training_xpu.cli import main
from training_xpu.cli.paths import check_path
from training_xpu.errors import UserError

GROUP: Any = typer.main.get_command(main.app)
PATH_OPTIONS = [
    (verb, max(parameter.opts, key=len))
    for verb, command in GROUP.commands.items()
    for parameter in command.params
    if parameter.type_descriptor.annotation is Path
]


def test_the_verbs_have_paths() -> None:
    assert {("train", "--save"), ("benchmark", "--data"), ("runs", "--output"), ("run", "--config")} <= {*PATH_OPTIONS}


@pytest.mark.parametrize(("verb", "option"), PATH_OPTIONS)
def test_an_empty_path_is_not_the_current_folder(
    verb: str, option: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for text in ("", "  "):
        assert main.run([verb, f"{option}={text}"]) == 2
        assert capsys.readouterr().err.splitlines() == [
            f"ljperf: {option}: the path is empty", f"  Name a path, or leave {option} out.",
        ]  # fmt: skip
    assert main.run([verb, option, "x" * 256]) == 2
    assert capsys.readouterr().err.splitlines()[0] == f"ljperf: {option}: a name in the path has 256 bytes"
    assert list(tmp_path.iterdir()) == []


def test_in_a_config_file_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("output: ''\nmodel: ddp/llama3.2-1b\n")
    assert main.run(["train", "--config", str(file)]) == 2
    assert capsys.readouterr().err.startswith("ljperf: --output: the path is empty\n")


def test_what_the_kernel_takes() -> None:
    check_path("--data", "a" * 255)
    check_path("--data", "/".join(["a" * 100] * 40))
    with pytest.raises(UserError, match="has 256 bytes"):
        check_path("--data", "ä" * 128)
    with pytest.raises(UserError, match="the path has 5049 bytes"):
        check_path("--data", "/".join(["a" * 100] * 50))


def test_names_that_are_too_long_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["runs", "x" * 300], ["models", "./" + "x" * 300], ["explain", "x" * 300]):
        assert main.run(arguments) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 2
        assert len(lines[0]) < 400
    assert errno.ENAMETOOLONG == 36
