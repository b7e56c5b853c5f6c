"""The fastest modes of a model's blocks whose peak is within a budget.

What a block has saved is alive from its forward to its backward. So at every moment the live bytes are a base, plus
what the blocks before have saved, plus what the running block needs for a moment: linear in the choice of each block's
mode. The peak is at most the budget when all of these moments are, which makes the choice an integer linear program.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix, lil_matrix

from training_xpu.recompute.switching.policies import Mode

TIME_LIMIT = 0.8  # seconds for the solver

MOST_COUNTS = 250_000  # choices looked at one by one before the solver is asked instead
_CHUNK = 512

Array = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, order=True)
class ModeCost:
    """What one block costs in one mode, in bytes and seconds."""

    saved_bytes: int  # alive from the end of its forward to its backward
    forward_peak: int  # highest point of its forward, above what is alive when it begins
    backward_peak: int  # highest point of its backward, above what the blocks before it have saved and the base
    extra_seconds: float = 0.0  # per step, over the fastest mode


@dataclass(frozen=True)
class BlockCost:
    """The modes that a block has."""

    kind: str
    modes: Mapping[Mode, ModeCost]


@dataclass(frozen=True)
class Base:
    """Bytes alive beside what blocks save and need for a moment: model states, inputs, gradients so far."""

    forward: tuple[int, ...]  # when each block runs forward
    head: int  # the most between the last block's forward and its backward, such as logits and loss
    backward: tuple[int, ...]  # when each block runs backward

    @classmethod
    def constant(cls, blocks: int, states: int, head: int = 0) -> Base:
        """The same all the time, and `head` bytes more between forward and backward."""
        return cls((states,) * blocks, states + head, (states,) * blocks)


@dataclass(frozen=True)
class Choice:
    """The answer, and what it costs."""

    modes: tuple[Mode, ...] | None  # None: nothing fits
    peak: int  # bytes; where nothing fits, the smallest that can be reached
    extra_seconds: float
    exact: bool = True  # False: the solver ran out of time, and this is the best that was found


def choose(blocks: Sequence[BlockCost], base: Base, budget: int, time_limit: float = TIME_LIMIT) -> Choice:
    """The modes with the least extra time whose peak is at most the budget.

    Where all blocks are alike and have two modes, the first n blocks are taken in the smaller one, n as small as the
    end of the forward allows, if that fits: no choice of fewer could. All else is solved by scipy's `milp` (HiGHS).
    When its time is over, the best of what it has found and the first n blocks in their smallest mode is the answer.

    Args:
        blocks: in the order of their forwards; at least one.
        base: of as many blocks.
        budget: of live bytes.
        time_limit: of the solver, in seconds.

    Raises:
        ValueError: lengths that differ, or a block without modes.
    """
    if not blocks or not len(blocks) == len(base.forward) == len(base.backward):
        raise ValueError(f"{len(blocks)} blocks, bases of {len(base.forward)} and {len(base.backward)}")
    if not all(block.modes for block in blocks):
        raise ValueError("a block without modes")
    fastest = tuple(min(b.modes, key=lambda m: (b.modes[m].extra_seconds, b.modes[m].saved_bytes)) for b in blocks)
    smallest = tuple(min(b.modes, key=lambda m: (b.modes[m].saved_bytes, b.modes[m].extra_seconds)) for b in blocks)
    prefixes = [smallest[:n] + fastest[n:] for n in range(len(blocks) + 1)]
    if peak_of(blocks, base, fastest) <= budget:
        return _choice(blocks, base, fastest)
    if len({tuple(sorted(b.modes.items())) for b in blocks}) == 1 and len(blocks[0].modes) == 2:
        first = next((p for p in prefixes if _end_of_forward(blocks, base, p) <= budget), None)
        if first is not None and peak_of(blocks, base, first) <= budget:
            return _choice(blocks, base, first)
    counts = _Counts(blocks, base)
    if counts.complete:
        modes, smallest_peak = counts.choose(budget)
        return _choice(blocks, base, modes) if modes is not None else Choice(None, smallest_peak, 0.0)
    return _solved(blocks, base, budget, time_limit, prefixes)


def _solved(
    blocks: Sequence[BlockCost], base: Base, budget: int, time_limit: float, known: Sequence[tuple[Mode, ...]]
) -> Choice:
    """
    Args:
        known: choices to fall back on.
    """
    program = _Program(blocks, base)
    found, proved = program.fastest(budget, time_limit)
    if found is not None and (excess := peak_of(blocks, base, found) - budget) > 0:
        found, _ = program.fastest(budget - excess, time_limit)  # the solver's tolerance is a millionth
        proved = False
    fitting = [m for m in (found, *known) if m is not None and peak_of(blocks, base, m) <= budget]
    if fitting:
        best = min(fitting, key=lambda m: _seconds(blocks, m))
        return _choice(blocks, base, best, exact=proved and best is found)
    least, certain = program.smallest(time_limit)
    peak = min(peak_of(blocks, base, m) for m in (*known, *([least] if least is not None else [])))
    return Choice(None, peak, 0.0, exact=proved and certain)


def peak_of(blocks: Sequence[BlockCost], base: Base, modes: Sequence[Mode]) -> int:
    """Peak of live bytes of a step with these modes."""
    costs = [block.modes[mode] for block, mode in zip(blocks, modes, strict=True)]
    saved = peak = 0
    for cost, forward, backward in zip(costs, base.forward, base.backward, strict=True):
        peak = max(peak, forward + saved + cost.forward_peak, backward + saved + cost.backward_peak)
        saved += cost.saved_bytes
    return max(peak, base.head + saved)


def _end_of_forward(blocks: Sequence[BlockCost], base: Base, modes: Sequence[Mode]) -> int:
    return base.head + sum(block.modes[mode].saved_bytes for block, mode in zip(blocks, modes, strict=True))


def _seconds(blocks: Sequence[BlockCost], modes: Sequence[Mode]) -> float:
    return sum(block.modes[mode].extra_seconds for block, mode in zip(blocks, modes, strict=True))


def _choice(blocks: Sequence[BlockCost], base: Base, modes: tuple[Mode, ...], exact: bool = True) -> Choice:
    return Choice(modes, peak_of(blocks, base, modes), _seconds(blocks, modes), exact)


def _alike(blocks: Sequence[BlockCost]) -> list[list[int]]:
    """Numbers of the blocks, those with the same costs together."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, block in enumerate(blocks):
        groups.setdefault(tuple(sorted(block.modes.items())), []).append(i)
    return list(groups.values())


def _by_saved(block: BlockCost) -> list[Mode]:
    return sorted(block.modes, key=lambda m: (block.modes[m].saved_bytes, -block.modes[m].extra_seconds))


def _exchangeable(block: BlockCost, base: Base, i: int, j: int) -> bool:
    """Whether it never hurts that of two like blocks the earlier one, i, saves less."""
    costs = list(block.modes.values())
    for more in costs:
        for less in costs:
            if more.saved_bytes <= less.saved_bytes:
                continue
            later = base.forward[i] <= base.forward[j] + more.saved_bytes
            later &= base.backward[i] <= base.backward[j] + more.saved_bytes
            room = more.saved_bytes - less.saved_bytes
            if not later or max(more.forward_peak - less.forward_peak, more.backward_peak - less.backward_peak) > room:
                return False
    return len({cost.saved_bytes for cost in costs}) == len(costs)


class _Counts:
    """All choices in which like blocks save less the earlier they come, so that only their numbers are open.

    Where exchanging the modes of two like blocks to that order cannot raise a peak, the best choice is among them.
    """

    def __init__(self, blocks: Sequence[BlockCost], base: Base) -> None:
        self.blocks = blocks
        self.base = base
        self.groups = _alike(blocks)
        self.modes = [_by_saved(blocks[group[0]]) for group in self.groups]
        sizes = [
            math.comb(len(group) + len(modes) - 1, len(modes) - 1)
            for group, modes in zip(self.groups, self.modes, strict=True)
        ]
        self.complete = math.prod(sizes) <= MOST_COUNTS and all(
            _exchangeable(blocks[i], base, i, j) for group in self.groups for i, j in itertools.pairwise(group)
        )

    def choose(self, budget: int) -> tuple[tuple[Mode, ...] | None, int]:
        """The fastest modes within the budget, or None; and the smallest peak of those looked at."""
        combined, seconds, saved = self._all()
        order = np.lexsort((saved, seconds))
        smallest = np.iinfo(np.int64).max
        for start in range(0, len(order), _CHUNK):
            part = order[start : start + _CHUNK]
            peaks = self._peaks(combined[part])
            smallest = min(smallest, int(peaks.min()))
            fitting = np.flatnonzero(peaks <= budget)
            if len(fitting):
                return self._modes(combined[part[fitting[0]]]), smallest
        return None, smallest

    def _all(self) -> tuple[Integers, Array, Integers]:
        """Borders between the modes of each group, one row for each choice; its seconds and all that it saves."""
        tables = []
        for group, modes in zip(self.groups, self.modes, strict=True):
            costs = [self.blocks[group[0]].modes[m] for m in modes]
            ends = range(len(group) + 1)
            listed = list(itertools.combinations_with_replacement(ends, len(modes) - 1))
            borders = np.array(listed, dtype=np.int64).reshape(len(listed), len(modes) - 1)
            counts = np.diff(borders, axis=1, prepend=0, append=len(group))
            seconds = counts @ np.array([c.extra_seconds for c in costs])
            tables.append((borders, seconds, counts @ np.array([c.saved_bytes for c in costs], dtype=np.int64)))
        which = np.indices([len(t[0]) for t in tables]).reshape(len(tables), -1)
        borders = np.hstack([t[0][w] for t, w in zip(tables, which, strict=True)])
        return (
            borders,
            sum((t[1][w] for t, w in zip(tables, which, strict=True)), np.zeros(which.shape[1])),
            sum((t[2][w] for t, w in zip(tables, which, strict=True)), np.zeros(which.shape[1], dtype=np.int64)),
        )

    def _columns(self, borders: Integers) -> Integers:
        """Number of each block's mode among those of its group, for each row of borders."""
        result = np.zeros((len(borders), len(self.blocks)), dtype=np.int64)
        at = 0
        for group, modes in zip(self.groups, self.modes, strict=True):
            own = borders[:, at : at + len(modes) - 1]
            at += len(modes) - 1
            result[:, group] = (np.arange(len(group))[None, :, None] >= own[:, None, :]).sum(axis=2)
        return result

    def _peaks(self, borders: Integers) -> Integers:
        columns = self._columns(borders)
        values = np.zeros((3, *columns.shape), dtype=np.int64)
        for group, modes in zip(self.groups, self.modes, strict=True):
            costs = [self.blocks[group[0]].modes[m] for m in modes]
            table = np.array([[c.saved_bytes, c.forward_peak, c.backward_peak] for c in costs], dtype=np.int64).T
            values[:, :, group] = table[:, columns[:, group]]
        saved, forward, backward = values
        after = saved.cumsum(axis=1)
        before = after - saved
        forward_peak = (before + forward + np.array(self.base.forward, dtype=np.int64)).max(axis=1)
        backward_peak = (before + backward + np.array(self.base.backward, dtype=np.int64)).max(axis=1)
        peaks: Integers = np.maximum(np.maximum(forward_peak, backward_peak), after[:, -1] + self.base.head)
        return peaks

    def _modes(self, borders: Integers) -> tuple[Mode, ...]:
        columns = self._columns(borders[None, :])[0]
        chosen = [Mode.KEEP] * len(self.blocks)
        for group, modes in zip(self.groups, self.modes, strict=True):
            for i in group:
                chosen[i] = modes[columns[i]]
        return tuple(chosen)


class _Program:
    """The choice as an integer linear program: one 0-or-1 variable for each block and mode.

    Further variables are what all blocks up to each one save, so that every row has few entries, and the peak.
    """

    def __init__(self, blocks: Sequence[BlockCost], base: Base) -> None:
        self.pairs = [(i, mode, cost) for i, block in enumerate(blocks) for mode, cost in block.modes.items()]
        count, width = len(blocks), len(self.pairs)
        self.unit = float(max(1, *(cost.saved_bytes for _, _, cost in self.pairs)))  # the solver wants numbers near one
        self.width = width
        self.columns = width + count + 1
        moments = lil_matrix((2 * count + 1, self.columns))
        exactly = lil_matrix((2 * count, self.columns))
        for column, (i, _, cost) in enumerate(self.pairs):
            moments[i, column] = cost.forward_peak / self.unit
            moments[count + i, column] = cost.backward_peak / self.unit
            exactly[i, column] = 1.0
            exactly[count + i, column] = -cost.saved_bytes / self.unit
        for i in range(count):
            exactly[count + i, width + i] = 1.0
            if i:
                exactly[count + i, width + i - 1] = -1.0
                moments[i, width + i - 1] = moments[count + i, width + i - 1] = 1.0
        moments[2 * count, width + count - 1] = 1.0
        moments[:, self.columns - 1] = -1.0
        self.moments, self.exactly = csr_matrix(moments), csr_matrix(exactly)
        self.exact_values = np.append(np.ones(count), np.zeros(count))
        self.bases: Array = np.array([*base.forward, *base.backward, base.head], dtype=float) / self.unit
        self.ordered = csr_matrix(_order_rows(blocks, base, self.pairs, self.columns))
        self.seconds: Array = np.array([c.extra_seconds for _, _, c in self.pairs], dtype=float)

    def fastest(self, budget: int, time_limit: float) -> tuple[tuple[Mode, ...] | None, bool]:
        """The modes with the least extra time within the budget; whether they, or that there are none, is proved."""
        objective = np.zeros(self.columns)
        objective[: self.width] = self.seconds / max(float(self.seconds.max(initial=0)), 1e-12)
        return self._solve(objective, budget / self.unit, time_limit)

    def smallest(self, time_limit: float) -> tuple[tuple[Mode, ...] | None, bool]:
        """The modes with the smallest peak; whether that is proved."""
        objective = np.zeros(self.columns)
        objective[-1] = 1.0
        return self._solve(objective, np.inf, time_limit)

    def _solve(self, objective: Array, most: float, time_limit: float) -> tuple[tuple[Mode, ...] | None, bool]:
        if most < 0:
            return None, True
        constraints = [
            LinearConstraint(self.moments, ub=-self.bases),
            LinearConstraint(self.exactly, self.exact_values, self.exact_values),
        ]
        if self.ordered.shape[0]:
            constraints.append(LinearConstraint(self.ordered, lb=0))
        upper = np.full(self.columns, np.inf)
        upper[: self.width] = 1
        upper[-1] = most
        result = milp(
            objective,
            integrality=(np.arange(self.columns) < self.width).astype(int),
            bounds=Bounds(0, upper),
            constraints=constraints,
            options={"time_limit": time_limit, "mip_rel_gap": 0.0},
        )
        if result.x is None:
            return None, result.status == 2
        chosen = result.x[: self.width] > 0.5
        return tuple(mode for (_, mode, _), taken in zip(self.pairs, chosen, strict=True) if taken), result.status == 0


def _order_rows(
    blocks: Sequence[BlockCost], base: Base, pairs: Sequence[tuple[int, Mode, ModeCost]], width: int
) -> Any:
    """Rows that have like blocks save less the earlier they come; without them the solver tries all permutations."""
    rows = []
    for group in _alike(blocks):
        modes = blocks[group[0]].modes
        for i, j in itertools.pairwise(group):
            if not _exchangeable(blocks[i], base, i, j):
                continue
            for limit in sorted(cost.saved_bytes for cost in modes.values())[:-1]:
                row = np.zeros(width)
                for column, (owner, _, cost) in enumerate(pairs):
                    if owner in (i, j) and cost.saved_bytes <= limit:
                        row[column] = 1.0 if owner == i else -1.0
                rows.append(row)
    return np.array(rows).reshape(-1, width)
