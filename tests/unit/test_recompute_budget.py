"""Amounts of memory as users write them, and as they are shown."""

from __future__ import annotations

import pytest

from training_xpu.errors import UserError
from training_xpu.recompute.budget import Budget, parse_size, read_budget, size_text, unit_for

GIB = 2**30
LIMIT = Budget(10 * GIB, "all of a test")


@pytest.mark.parametrize("text", ["80", " 80 ", "1048575", "live:80", "6.5"])
def test_a_number_too_small_for_bytes_lacks_a_unit(text: str) -> None:
    with pytest.raises(UserError, match="is a unit missing") as refused:
        read_budget(text, LIMIT)
    assert refused.value.remedy == f"Such as: {text.strip()}GiB"
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(("text", "size"), [("80B", 80), ("80kB", 80_000), ("1048576", 1 << 20), ("80%", 8 * GIB)])
def test_small_amounts_with_a_unit_are_meant(text: str, size: int) -> None:
    assert parse_size(text, 10 * GIB) == size


@pytest.mark.parametrize(
    ("text", "size"), [("live:6GiB", 6 * GIB), (" LIVE:512MiB ", 512 << 20), ("live:50%", 5 * GIB)]
)
def test_live_amounts_are_of_tensors_alone(text: str, size: int) -> None:
    budget = read_budget(text, LIMIT)
    assert (budget.bytes, budget.live) == (size, True)


def test_a_share_says_of_what() -> None:
    assert read_budget("80%", LIMIT, "--x").source == "--x=80% of 10.00 GiB, all of a test"
    assert read_budget("live:80%", LIMIT, "--x").source == "--x=live:80% of 10.00 GiB, all of a test"
    assert read_budget("6GiB", LIMIT, "--x").source == "--x=6GiB"


@pytest.mark.parametrize("text", ["lots", "live:lots", "live:", "live:live:6GiB", "live:0", "0%"])
def test_what_is_refused_is_shown_as_it_was_written_with_all_forms(text: str) -> None:
    with pytest.raises(UserError) as refused:
        read_budget(text, LIMIT, "--x")
    assert f"--x is {text!r}" in refused.value.problem
    for form in ("6442450944", "6GiB", "80%", "live:6GiB"):
        assert form in refused.value.remedy


def test_where_there_is_nothing_to_share_no_share_is_offered() -> None:
    with pytest.raises(UserError, match="a share of what") as refused:
        read_budget("live:80%", None)
    assert "live:6GiB" in refused.value.remedy
    assert "%" not in refused.value.remedy
    assert read_budget("live:6GiB", None).bytes == 6 * GIB


def test_amounts_below_a_gibibyte_are_in_mebibytes() -> None:
    assert [unit_for(size).name for size in (0, GIB - 1, GIB, -GIB)] == ["MiB", "MiB", "GiB", "GiB"]
    assert unit_for(3 * GIB).amount(GIB // 2) == "0.50 GiB"
    assert size_text(GIB // 2) == "512.00 MiB"
