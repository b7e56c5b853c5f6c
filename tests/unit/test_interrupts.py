"""Ctrl-C before there is any work to close is answered in one line."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from training_xpu.cli import entry
from training_xpu.cli.main import run
from training_xpu.perf import store
from training_xpu.perf.children import Interrupted


def interrupt_with(error: BaseException) -> object:
    def interrupt(*arguments: object) -> None:
        raise error

    return interrupt


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Interrupted("SIGTERM")])
def test_while_a_verb_works(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(store, "list_runs", interrupt_with(error))
    assert run(["runs"]) == 130
    assert capsys.readouterr() == ("", "ljperf: interrupted\n")


def test_while_modules_are_imported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "training_xpu.cli.main", SimpleNamespace(run=interrupt_with(KeyboardInterrupt())))
    assert entry.main() == 130
    assert capsys.readouterr() == ("", "ljperf: interrupted\n")
