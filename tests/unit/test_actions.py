"""The newer form of the command line, rewritten."""

from __future__ import annotations

import pytest

from training_xpu.cli.actions import action_form
from training_xpu.errors import UserError


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--action train --model_name ddp/./my_model", "train --model ddp/./my_model"),
        ("--action=train --model_name=ddp/./my_model", "train --model=ddp/./my_model"),
        ("--model_name ddp/./a_b --action train --no_packing", "train --model ddp/./a_b --no-packing"),
        ("--action benchmark --data_field my_text --seq_len 64", "benchmark --data-field my_text --seq-len 64"),
        ("train --model ddp/x --action_is_no_option", "train --model ddp/x --action_is_no_option"),
        ("--version", "--version"),
        ("models", "models"),
        ("", ""),
    ],
)  # fmt: skip
def test_options_get_dashes_and_values_stay(typed: str, meant: str) -> None:
    assert action_form(typed.split()) == meant.split()


@pytest.mark.parametrize(
    ("typed", "problem", "remedy"),
    [
        ("--action", "--action needs a value", "benchmark, train"),
        ("--action trian", "unknown action 'trian'", "Did you mean train?"),
        ("--action=", "unknown action ''", "benchmark, train"),
    ],
)
def test_a_wrong_action_is_refused(typed: str, problem: str, remedy: str) -> None:
    with pytest.raises(UserError) as caught:
        action_form(typed.split())
    assert caught.value.problem == problem
    assert remedy in caught.value.remedy
