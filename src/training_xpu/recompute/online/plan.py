"""From a measured step to the modes of the blocks for a batch, and how its predictions are corrected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from training_xpu.recompute.choose import choose
from training_xpu.recompute.online.amounts import BatchShape
from training_xpu.recompute.online.measure import MeasuredStep
from training_xpu.recompute.online.overhead import Overhead
from training_xpu.recompute.online.profile import MemoryProfile
from training_xpu.recompute.policies import Mode

TOLERANCE = 0.05


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
        if self.at_least == 0:
            chosen = self._chosen(shape)
            if chosen is not None:
                return chosen
        plan = None
        order = self.profile.order
        for count in range(min(self.at_least, len(order)), len(order) + 1):
            kept = set(order[count:]) & set(self.profile.blocks)
            modes = tuple(Mode.KEEP if i in kept else Mode.RECOMPUTE for i in range(len(self.offered)))
            plan = self.with_modes(modes, shape)
            if plan.fits:
                break
        assert plan is not None
        return plan

    def _chosen(self, shape: BatchShape) -> Plan | None:
        """The fastest modes that fit, if they are found and their peak is right once looked at step by step."""
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
        modes = tuple(by_block.get(i, Mode.RECOMPUTE) for i in range(len(self.offered)))
        plan = self.with_modes(modes, shape)
        return plan if plan.fits else None
