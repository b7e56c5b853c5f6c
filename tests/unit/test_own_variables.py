"""The project's variables, as `ljperf` checks them before it starts a process."""

from __future__ import annotations

import os

import pytest

from training_xpu import envs, features
from training_xpu.cli.main import run
from training_xpu.errors import UserError
from training_xpu.perf.variables import check_ours


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(envs.PREFIXES) or name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name)


def said() -> list[str]:
    lines: list[str] = []
    check_ours(lines.append)
    return lines


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("TRAINING_XPU_DISABLE", "maybe", "true or false"),
        ("TRAINING_XPU_LOG", "loud", "warning"),
        ("TRAINING_XPU_RUNS", "~nobody-of-that-name/runs", "whole path"),
        ("TRAINING_XPU_CACHE", "~nobody-of-that-name", "whole path"),
        ("TRAINING_XPU_MEMORY_BUDGET", "much", "6GiB"),
        *((feature.variable, "perhaps", "auto") for feature in features.known()),
    ],
)
@pytest.mark.parametrize(
    "command",
    [["benchmark", "--model", "ddp/llama3-8b"], ["train", "--model", "ddp/llama3-8b"], ["run", "--", "true"],
     ["reproduce", "latest"]],
)  # fmt: skip
def test_a_value_that_cannot_be_is_refused_by_every_verb_that_starts_processes(
    name: str, value: str, remedy: str, command: list[str], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv(name, value)
    assert run(command) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"ljperf: {name} is {value!r}")
    assert remedy in second


def test_right_values_and_unset_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said() == []
    monkeypatch.setenv("TRAINING_XPU_DISABLE", "on")
    monkeypatch.setenv("TRAINING_XPU_LOG", "")
    monkeypatch.setenv("TRAINING_XPU_MEMORY_BUDGET", "80%")
    assert said() == []


def test_a_misspelt_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINING_XPU_RUNNS", "x")
    monkeypatch.setenv("TRAINING_XPU_ZZZZZZZZZZZZ", "x")
    assert said() == [
        "TRAINING_XPU_RUNNS is set, and no variable of that name is known. Did you mean TRAINING_XPU_RUNS?",
        "TRAINING_XPU_ZZZZZZZZZZZZ is set, and no variable of that name is known.",
    ]


@pytest.mark.parametrize(
    ("variables", "problem", "remedy"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "but not MASTER_ADDR and MASTER_PORT", "free port of rank 0"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "but not MASTER_PORT", "free port of rank 0"),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "0"}, "MASTER_PORT is 0", "1 to 65535"),
        ({"RANK": "0"}, "RANK is set, as by a launcher, but not WORLD_SIZE", "unset RANK"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x', which is no whole number", ""),
    ],
)
def test_half_a_launcher(
    variables: dict[str, str], problem: str, remedy: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert run(["train", "--model", "ddp/llama3-8b", "--steps", "2"]) == 2
    shown = capsys.readouterr().err
    assert problem in shown.splitlines()[0]
    assert remedy in shown


def test_no_verb_starts_ranks_inside_a_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for verb in (["benchmark", "--model", "ddp/llama3-8b"], ["reproduce", "latest"]):
        assert run(verb) == 2
        assert f"ljperf {verb[0]} starts its own ranks" in capsys.readouterr().err


def test_errors_of_variables_are_errors_of_the_user() -> None:
    assert issubclass(envs.BadValue, UserError)
