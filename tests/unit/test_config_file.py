"""`--config FILE`, on a verb of its own with every kind of option."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from training_xpu.cli.config_file import ConfigOption
from training_xpu.errors import UserError

app = typer.Typer()
seen: dict[str, Any] = {}


@app.command()
def verb(
    context: typer.Context,
    steps: int | None = None,
    learning_rate: float = 1.0,
    model: str = "none",
    data: Path | None = None,
    packing: Annotated[bool, typer.Option("--packing/--no-packing")] = True,
    as_json: Annotated[bool, typer.Option("--json")] = False,
    report_to: list[str] | None = None,
    config: ConfigOption = None,
) -> None:
    seen.clear()
    seen.update(context.params)
    seen["given"] = {
        n for n in context.params if context.get_parameter_source(n).name in ("COMMANDLINE", "DEFAULT_MAP")
    }


def run(file: Path, *more: str) -> dict[str, Any]:
    app(["--config", str(file), *more], standalone_mode=False)
    return seen


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "job.yaml"


def test_every_kind_of_option_and_both_spellings(file: Path) -> None:
    file.write_text(
        "steps: 20\nlearning_rate: 1e-3\n--model: 7b\ndata: ./my text\njson: true\nreport-to: [wandb, mlflow]\n"
    )
    got = run(file)
    assert (got["steps"], got["learning_rate"], got["model"], got["data"]) == (20, 1e-3, "7b", Path("my text"))
    assert (got["as_json"], got["report_to"], got["packing"]) == (True, ["wandb", "mlflow"], True)
    assert got["given"] >= {"steps", "learning_rate", "model", "data", "as_json", "report_to"}
    assert "packing" not in got["given"]


def test_the_command_line_wins_wherever_it_stands(file: Path) -> None:
    file.write_text("steps: 20\npacking: false\nreport-to: wandb")
    app(["--steps", "3", "--config", str(file), "--packing", "--report-to", "mlflow"], standalone_mode=False)
    assert (seen["steps"], seen["packing"], seen["report_to"]) == (3, True, ["mlflow"])


@pytest.mark.parametrize(
    ("text", "packing"),
    [("packing: false", False), ("no-packing: true", False), ("no_packing: false", True), ("", True)],
)
def test_a_flag_s_negative_form_means_what_it_says(file: Path, text: str, packing: bool) -> None:
    file.write_text(text)
    assert run(file)["packing"] is packing


def test_null_means_the_default_and_a_number_can_be_text(file: Path) -> None:
    file.write_text("steps: null\nlearning-rate: 2\nmodel: 2024")
    got = run(file)
    assert (got["steps"], got["learning_rate"], got["model"]) == (None, 2.0, "2024")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("stepz: 3", "unknown option 'stepz'"),
        ("config: other.yaml", "unknown option 'config'"),
        ("steps: [1, 2]", "steps cannot be [1, 2]"),
        ("steps: {a: 1}", "steps cannot be {'a': 1}"),
        ("model: yes", "model cannot be True"),
        ("model: 2024-01-01", "model cannot be datetime.date"),
        ("packing: 1", "packing must be true or false"),
        ("json: 'true'", "json must be true or false"),
        ("report-to: [[a]]", "report-to cannot be ['a']"),
        ("seq: [", "not valid YAML"),
        ("steps: 1\nlearning-rate: 1\nlearning_rate: 2", "learning_rate is there twice"),
        ("- steps", "must be a mapping"),
        ("just words", "must be a mapping"),
    ],
)
def test_what_cannot_be_meant_is_refused(file: Path, text: str, problem: str) -> None:
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        run(file)
    assert problem in caught.value.problem
    assert str(file) in caught.value.problem
    assert "\n" not in caught.value.problem + caught.value.remedy


@pytest.mark.parametrize("text", ["steps: many", "steps: 3.5", "learning-rate: fast"])
def test_a_value_of_the_wrong_type_is_refused_as_on_the_command_line(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(typer.TyperException) as caught:
        run(file)
    assert f"--{text.split(':')[0]}" in caught.value.format_message()
    assert caught.value.exit_code == 2


def test_a_file_that_cannot_be_read(file: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        run(file)
    with pytest.raises(UserError, match="Is a directory"):
        run(tmp_path)
    file.write_bytes(b"model: \xff\xfe")
    with pytest.raises(UserError, match="not valid YAML"):
        run(file)
