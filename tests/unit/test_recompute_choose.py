"""The choice of modes against trying all of them."""

from __future__ import annotations

import itertools
import random

import pytest

from training_xpu.recompute.choose import Base, BlockCost, Choice, ModeCost, choose
from training_xpu.recompute.switching.policies import Mode

GIB = 2**30


def timeline(blocks: list[BlockCost], base: Base, modes: tuple[Mode, ...]) -> int:
    """The peak, by walking through the step moment by moment."""
    live, peak = 0, 0
    for block, mode, beside in zip(blocks, modes, base.forward, strict=True):
        peak = max(peak, beside + live + block.modes[mode].forward_peak)
        live += block.modes[mode].saved_bytes
    peak = max(peak, base.head + live)
    for block, mode, beside in reversed(list(zip(blocks, modes, base.backward, strict=True))):
        live -= block.modes[mode].saved_bytes
        peak = max(peak, beside + live + block.modes[mode].backward_peak)
    assert live == 0
    return peak


def by_trying(blocks: list[BlockCost], base: Base, budget: int) -> tuple[float | None, int]:
    """The least extra time within the budget, None where nothing fits; and the smallest peak."""
    best: float | None = None
    smallest = None
    for modes in itertools.product(*(tuple(block.modes) for block in blocks)):
        peak = timeline(blocks, base, modes)
        smallest = peak if smallest is None else min(smallest, peak)
        seconds = sum(block.modes[mode].extra_seconds for block, mode in zip(blocks, modes, strict=True))
        if peak <= budget and (best is None or seconds < best):
            best = seconds
    assert smallest is not None
    return best, smallest


def random_block(draw: random.Random, kind: str, modes: int) -> BlockCost:
    saved = draw.randint(20, 200)
    costs = {Mode.KEEP: ModeCost(saved, saved + draw.randint(0, 40), saved + draw.randint(0, 60), 0.0)}
    if modes > 1:
        rest = draw.randint(0, saved // 3)
        costs[Mode.RECOMPUTE] = ModeCost(
            rest, saved + draw.randint(0, 40), saved + draw.randint(0, 90), draw.uniform(0.5, 3)
        )
    if modes > 2:
        part = draw.randint(0, saved)
        costs[Mode.SELECTIVE] = ModeCost(
            part, saved + draw.randint(0, 40), saved + draw.randint(0, 70), draw.uniform(0.1, 1)
        )
    return BlockCost(kind, costs)


def random_base(draw: random.Random, blocks: int) -> Base:
    return Base(
        tuple(draw.randint(0, 100) for _ in range(blocks)),
        draw.randint(0, 300),
        tuple(draw.randint(0, 150) for _ in range(blocks)),
    )


@pytest.mark.parametrize("seed", range(60))
def test_the_choice_is_the_best_of_all(seed: int) -> None:
    draw = random.Random(seed)
    kinds = [random_block(draw, f"kind {k}", draw.choice([1, 2, 3, 3])) for k in range(draw.randint(1, 3))]
    blocks = [draw.choice(kinds) for _ in range(draw.randint(1, 7))]
    base = random_base(draw, len(blocks)) if seed % 2 else Base.constant(len(blocks), 50, 200)
    peaks = [timeline(blocks, base, m) for m in itertools.product(*(tuple(b.modes) for b in blocks))]
    for budget in (min(peaks) - 1, min(peaks), draw.randint(min(peaks), max(peaks)), max(peaks)):
        seconds, smallest = by_trying(blocks, base, budget)
        choice = choose(blocks, base, budget, time_limit=20)
        assert choice.exact
        if seconds is None:
            assert choice.modes is None
            assert choice.peak == smallest
            continue
        assert choice.modes is not None
        assert choice.extra_seconds == pytest.approx(seconds)
        assert choice.peak == timeline(blocks, base, choice.modes) <= budget


def uniform(count: int, saved: int = GIB, rest: int = GIB // 32) -> list[BlockCost]:
    cost = BlockCost(
        "layer",
        {Mode.KEEP: ModeCost(saved, saved, saved + saved // 2), Mode.RECOMPUTE: ModeCost(rest, saved, saved * 2, 0.1)},
    )
    return [cost] * count


def test_of_like_blocks_the_fewest_first_ones_are_recomputed() -> None:
    blocks = uniform(10)
    choice = choose(blocks, Base.constant(10, 0, 0), 6 * GIB)
    # n recomputed leave (10 - n) + n / 32 GiB at the end of the forward: 6.125 for n = 4, 5.156 for n = 5.
    assert choice.modes == (Mode.RECOMPUTE,) * 5 + (Mode.KEEP,) * 5
    assert choice.exact
    assert choice.extra_seconds == pytest.approx(0.5)


def test_nothing_is_recomputed_where_all_fits_and_the_smallest_peak_is_told_where_nothing_does() -> None:
    blocks = uniform(10)
    assert choose(blocks, Base.constant(10, 0), 100 * GIB).modes == (Mode.KEEP,) * 10
    choice = choose(blocks, Base.constant(10, 0), GIB)
    assert choice == Choice(None, by_trying(blocks, Base.constant(10, 0), 0)[1], 0.0)


@pytest.mark.parametrize("kinds", [1, 2, 4])
def test_126_blocks_take_less_than_the_limit_and_a_bit(kinds: int) -> None:
    made = []
    for k in range(kinds):
        saved = (k + 2) * GIB // 4
        made.append(
            BlockCost(
                f"kind {k}",
                {
                    Mode.KEEP: ModeCost(saved, saved, saved * 5 // 4),
                    Mode.SELECTIVE: ModeCost(saved * 2 // 5, saved, saved * 3 // 2, 0.03 + k / 100),
                    Mode.RECOMPUTE: ModeCost(saved // 30, saved, saved * 2, 0.1 + k / 30),
                },
            )
        )
    blocks = [made[i % kinds] for i in range(126)]
    base = Base(tuple(range(126)), 8 * GIB, tuple(range(126, 0, -1)))
    everything = sum(b.modes[Mode.KEEP].saved_bytes for b in blocks)
    choice = choose(blocks, base, everything // 2)
    assert choice.modes is not None
    assert choice.peak <= everything // 2
    # No choice can be better than the fractional one that fills the budget with the cheapest bytes.
    need = everything + 8 * GIB - everything // 2
    per_byte = min(
        c.extra_seconds / (b.modes[Mode.KEEP].saved_bytes - c.saved_bytes)
        for b in blocks
        for m, c in b.modes.items()
        if m is not Mode.KEEP
    )
    assert need * per_byte <= choice.extra_seconds <= 1.3 * need * per_byte


def test_wrong_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="2 blocks"):
        choose(uniform(2), Base.constant(3, 0), GIB)
