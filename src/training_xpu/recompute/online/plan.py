"""From a measured step to the modes of the blocks for a batch, and how its predictions are corrected."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from training_xpu.recompute.choose import choose
from training_xpu.recompute.online.amounts import BatchShape
from training_xpu.recompute.online.measure import MeasuredStep
from training_xpu.recompute.online.overhead import Overhead
from training_xpu.recompute.online.profile import MemoryProfile
from training_xpu.recompute.switching.policies import Mode

TOLERANCE = 0.05
_MOST_TRIES = 48  # of single changes to a plan


@dataclass(frozen=True)
class Plan:
    """The modes of all blocks for batches up to a shape."""

    modes: tuple[Mode, ...]
    live_peak: int  # predicted, bytes
    fits: bool

    @property
    def recomputed(self) -> int:
        """Blocks that do not keep all of their activations."""
        return sum(mode is not Mode.KEEP for mode in self.modes)

    @property
    def policy(self) -> str:
        """ "none", "full", "selective", or "full + selective"."""
        used = [name for name, mode in (("full", Mode.RECOMPUTE), ("selective", Mode.SELECTIVE)) if mode in self.modes]
        return " + ".join(used) or "none"


@dataclass(frozen=True)
class StepCheck:
    """A measured step against its prediction, in bytes and as shares."""

    predicted_peak: int
    measured_peak: int
    off_peak: float
    off_saving: float  # of what the plan adds to the end of the forward; 0 where it is too little to matter
    growth_ratio: float  # real over uncorrected growth above a step with every block recomputed

    @property
    def holds(self) -> bool:
        return max(self.off_peak, self.off_saving) <= TOLERANCE


class Planner:
    """Makes plans within a budget from what one step has shown."""

    def __init__(
        self,
        profile: MemoryProfile,
        overhead: Overhead,
        budget: int,
        offered: Sequence[frozenset[Mode]],
        kinds: Sequence[str],
    ) -> None:
        """
        Args:
            budget: of the process, in bytes.
            offered: modes that each block has.
            kinds: of each block.
        """
        self.profile = profile
        self.overhead = overhead
        self.budget = budget
        self.offered = offered
        self.kinds = kinds
        self.at_least = 0  # of the first blocks to recompute wholly
        self.correction = 1.0  # real over predicted growth above a step with every block recomputed
        self.plans: dict[BatchShape, Plan] = {}
        self._all = (Mode.RECOMPUTE,) * len(offered)
        self._times: dict[str, tuple[float, float]] = {}

    def plan_for(self, shape: BatchShape) -> Plan:
        """The plan for a batch, made when one of its size is first seen."""
        if shape not in self.plans and shape not in self._measured_shapes():
            shape = shape.rounded()  # else batches of ever new lengths would each be planned
        if shape not in self.plans:
            self.plans[shape] = self._make(shape)
        return self.plans[shape]

    def with_modes(self, modes: tuple[Mode, ...], shape: BatchShape) -> Plan:
        """The predictions for given modes."""
        least = self.profile.peak(self._all, shape)
        peak = least + round(self.correction * (self.profile.peak(modes, shape) - least))
        return Plan(modes, peak, peak <= self.live_budget)

    @property
    def live_budget(self) -> int:
        return self.overhead.live_budget(self.budget)

    def check(self, micro_batches: Sequence[tuple[Plan, BatchShape]], measured: MeasuredStep) -> StepCheck:
        """Compares a step with what was predicted of its micro batches."""
        least = self.profile.step([(self._all, shape) for _, shape in micro_batches])
        plain = self.profile.step([(plan.modes, shape) for plan, shape in micro_batches])
        found = (measured.peak, measured.after_forward)
        predicted = [low + round(self.correction * (high - low)) for low, high in zip(least, plain, strict=True)]
        grown = found[1] - least[1]
        material = found[1] > 0 and max(abs(grown), predicted[1] - least[1]) > TOLERANCE * found[0]
        off_saving = abs(found[1] - predicted[1]) / max(1, predicted[1] - least[1]) if material else 0.0
        ratios = [
            (real - low) / (high - low)
            for real, low, high in zip(found, least, plain, strict=True)
            if high > low and real > 0
        ]
        return StepCheck(
            predicted[0], found[0], abs(found[0] - predicted[0]) / found[0], off_saving, max(ratios, default=1.0)
        )

    def correct(self, check: StepCheck) -> None:
        """Heeds what a step under a plan has shown: all plans are made anew."""
        self.correction = min(10.0, max(0.1, check.growth_ratio))
        self.plans.clear()

    def _measured_shapes(self) -> set[BatchShape]:
        return {micro_batch.shape for micro_batch in self.profile.measured.micro_batches}

    def _make(self, shape: BatchShape) -> Plan:
        first = self._first_blocks(shape)
        if self.at_least or not first.fits or first.recomputed == 0:
            return first
        chosen = self._chosen(shape)
        return chosen if chosen is not None and self._seconds(chosen) < self._seconds(first) else first

    def _first_blocks(self, shape: BatchShape) -> Plan:
        """The fewest of the first blocks recomputed wholly, or all of them where nothing less fits."""
        order = self.profile.order
        for count in range(min(self.at_least, len(order)), len(order) + 1):
            kept = set(order[count:]) & set(self.profile.blocks)
            modes = tuple(Mode.KEEP if i in kept else Mode.RECOMPUTE for i in range(len(self.offered)))
            plan = self.with_modes(modes, shape)
            if plan.fits:
                break
        return plan

    def _chosen(self, shape: BatchShape) -> Plan | None:
        """The fastest modes that fit by the costs of each kind of block, then looked at step by step and bettered."""
        blocks, base, fixed = self.profile.costs(self.offered, self.kinds, shape)
        budget = self.live_budget
        if fixed > budget:
            return None
        if self.correction != 1.0:
            least = self.profile.peak(self._all, shape)
            budget = least + int((budget - least) / self.correction)
        choice = choose(blocks, base, budget)
        if choice.modes is None:
            return None
        by_block = dict(zip(self.profile.order, choice.modes, strict=True))
        plan = self.with_modes(tuple(by_block.get(i, Mode.RECOMPUTE) for i in range(len(self.offered))), shape)
        return self._bettered(plan, shape) if plan.fits else None

    def _bettered(self, plan: Plan, shape: BatchShape) -> Plan:
        """Keeps more where the exact timeline has room that the costs of a kind, its largest block's, did not show."""
        tried = 0
        for index in reversed(self.profile.order):
            if plan.modes[index] is Mode.KEEP or index not in self.profile.blocks:
                continue
            for mode in (Mode.KEEP, Mode.SELECTIVE):
                if mode is plan.modes[index] or mode not in self.offered[index]:
                    continue
                tried += 1
                better = self.with_modes((*plan.modes[:index], mode, *plan.modes[index + 1 :]), shape)
                if better.fits and self._seconds(better) < self._seconds(plan):
                    plan = better
                    break
            if tried >= _MOST_TRIES:
                break
        return plan

    def _seconds(self, plan: Plan) -> float:
        """What a plan costs beyond keeping everything, per micro batch; blocks of a kind cost the same."""
        total = 0.0
        for index in self.profile.blocks:
            if plan.modes[index] is not Mode.KEEP:
                full, selective = self._kind_seconds(self.kinds[index])
                total += selective if plan.modes[index] is Mode.SELECTIVE else full
        return total

    def _kind_seconds(self, kind: str) -> tuple[float, float]:
        if kind not in self._times:
            own = [block for index, block in self.profile.blocks.items() if self.kinds[index] == kind]
            full = statistics.median(block.seconds for block in own)
            self._times[kind] = full, statistics.median(block.selective_seconds for block in own)
        return self._times[kind]
