"""Recompute in a running job: safe first steps that are measured, a plan, its check, and a plan for every new batch.

The first optimizer step runs with every block recomputed and lets the optimizer make its states. The second one, still
safe, is measured stretch by stretch. From the third on the plan holds: the fastest modes of the blocks that fit the
budget. That step is measured too; where its peak or its saving is off by more than 5 %, the plan is corrected.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch

from training_xpu import device
from training_xpu.blocks import find_blocks, unwrap
from training_xpu.engines.joint_start import NothingToDo, must_agree
from training_xpu.instances import Hook
from training_xpu.recompute.budget import Budget
from training_xpu.recompute.online import out_of_memory, recovery, said
from training_xpu.recompute.online.agreement import agree_on_most
from training_xpu.recompute.online.amounts import BatchShape
from training_xpu.recompute.online.batch_shape import batch_shape
from training_xpu.recompute.online.hooks import has_hooks_of_a_script
from training_xpu.recompute.online.measure import MeasuredStep, StepMeasurement, somebody_watches
from training_xpu.recompute.online.overhead import Overhead
from training_xpu.recompute.online.plan import Plan, Planner
from training_xpu.recompute.online.profile import MemoryProfile
from training_xpu.recompute.switching.runner import in_backward
from training_xpu.recompute.switching.switch import BlockSwitch, Mode

MOST_REPLANS = 3
MOST_FORWARDS = 256  # that a step may accumulate

_LEVELS = (Mode.KEEP, Mode.SELECTIVE, Mode.RECOMPUTE)  # each keeps less than the one before


_in_hand: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # models that have a controller


class State(Enum):
    WARMING = "warming"
    MEASURING = "measuring"
    CHECKING = "checking"
    STEADY = "steady"
    GIVEN_UP = "given up"


class Controller:
    """Decides for one model which blocks are recomputed at each training forward."""

    def __init__(self, root: torch.nn.Module, budget: Budget) -> None:
        """
        Args:
            root: the model with its wrappers, about to run its first training forward.
            budget: of this rank.

        Raises:
            NothingToDo: it has no repeated blocks, or they cannot be switched from step to step.
        """
        self.root = root
        self.inner = unwrap(root)
        self.budget = budget
        if self.inner in _in_hand:
            raise NothingToDo("this model is in hand already, by the variable or an earlier call of optimize")
        groups = find_blocks(root)
        found = [(block, group.kind) for group in groups for block in group.modules]
        usable = [(block, kind) for block, kind in found if not has_hooks_of_a_script(block)]
        self.blocks = [block for block, _ in usable]
        self.kinds = [kind for _, kind in usable]
        if not self.blocks:
            why = "hooks of its script inside every block" if found else "no repeated blocks"
            raise NothingToDo(f"{type(self.inner).__name__} has {why}")
        self.switch = BlockSwitch(root, self.blocks)
        if not self.switch.can_change:
            raise NothingToDo("the blocks are part of a larger compiled region, which each change would compile anew")
        self.device = next(p.device for p in self.inner.parameters())
        self.agree = must_agree(root)
        # Recomputing to the very end shows best what a block saves. ZeRO-3 then gives the last weights back too early.
        self.complete = not any(hasattr(p, "ds_id") for p in self.inner.parameters())
        self.state = State.WARMING
        self.replans = 0
        self.failed_measurements = 0
        self.forwards_without_step = 0
        self._in_backward = False
        self.key = out_of_memory.job_key(self.inner, self.blocks)
        self.tighter = recovery.heed_last_start(self.key, len(self.blocks))
        self.times_ran_out = 0
        self.planner: Planner | None = None
        self._measurement: StepMeasurement | None = None
        self._process_peak = device.PeakMemory(self.device.type)
        self._expected: list[tuple[Plan, BatchShape]] = []  # of the micro batches of a step that is being checked
        self._handles = [
            self.inner.register_forward_pre_hook(Hook(self._before_forward), with_kwargs=True, prepend=True),
            self.inner.register_forward_hook(Hook(self._after_forward)),
        ]
        self.safe = (Mode.RECOMPUTE,) * len(self.blocks)
        self._apply(self.safe)
        self._guard = recovery.GuardedForward(self.inner, recovery.can_retry(root), self._tighten, self._out_of_memory)
        self.inner.__dict__["forward"] = self._guard
        self._stop_watching = recovery.watch_backward(self._out_of_memory)
        _in_hand.add(self.inner)

    def close(self) -> None:
        """Takes everything back: the blocks are as the script had them."""
        self.state = State.GIVEN_UP
        self._stop_measuring()
        for handle in self._handles:
            handle.remove()
        self._guard.remove()
        self._stop_watching()
        self.switch.restore()
        _in_hand.discard(self.inner)

    def after_step(self) -> None:
        """One optimizer step has been taken."""
        self.forwards_without_step = 0
        if self.state not in (State.STEADY, State.GIVEN_UP) and in_backward():
            self.state = State.WARMING
            self._in_backward = True
            return
        try:
            measured = self._stop_measuring()
            if self.state is State.WARMING:
                self.state = State.MEASURING
            elif self.state is State.MEASURING and measured is not None:
                self._learn(measured)
            elif self.state is State.CHECKING and measured is not None and self._expected:
                self._check(measured)
            elif measured is None and self.state in (State.MEASURING, State.CHECKING):
                self._could_not_measure()
        except Exception as error:
            self._give_up(error)

    def _before_forward(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled() or not module.training:
            return
        if self._in_backward and not self.agree:
            self._in_backward = False
            said.stepped_aside("the optimizer steps inside the backward, where a step cannot be measured")
            self.close()
            return
        self.forwards_without_step += 1
        if self.forwards_without_step == MOST_FORWARDS and self.planner is None and not self.agree:
            said.stepped_aside(f"no optimizer step was seen in {MOST_FORWARDS} forwards")
            self.close()
            return
        modes: Sequence[Mode] = self.safe
        plan = None
        try:
            shape = batch_shape(args, kwargs)
            if self.planner is not None and self.state is not State.GIVEN_UP:
                plan = self.planner.plan_for(shape)
                modes = plan.modes
        except Exception as error:
            self._give_up(error)
        if self.agree:  # whatever happened here, the others wait
            levels = agree_on_most([_LEVELS.index(mode) for mode in modes], self.device)
            modes = tuple(_LEVELS[level] for level in levels)
        if self.state is State.GIVEN_UP and not self.agree:
            return
        try:
            if tuple(modes) != self.switch.modes and not self._apply(modes):
                return
            if self.planner is not None and plan is not None and tuple(modes) != plan.modes:
                plan = self.planner.with_modes(tuple(modes), shape)
            if self.state in (State.MEASURING, State.CHECKING):
                self._measure(shape, plan)
        except Exception as error:
            self._give_up(error)

    def _after_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self._measurement is not None and torch.is_grad_enabled() and module.training:
            self._measurement.end_of_forward()

    def _measure(self, shape: BatchShape, plan: Plan | None) -> None:
        if self._measurement is None:
            if somebody_watches():
                return
            self._process_peak.reset()
            self._expected = []
            self._measurement = StepMeasurement(self.root, self.blocks)
            self.switch.listener = self._measurement
            self.switch.measuring = self.complete
            self._measurement.start()
        if plan is not None:
            self._expected.append((plan, shape))
        self._measurement.begin_micro_batch(shape)

    def _stop_measuring(self) -> MeasuredStep | None:
        if self._measurement is None:
            return None
        measurement, self._measurement = self._measurement, None
        self.switch.listener = None
        self.switch.measuring = False
        return measurement.stop()

    def _could_not_measure(self) -> None:
        self.failed_measurements += 1
        if self.failed_measurements < MOST_REPLANS:
            return
        if self.state is State.CHECKING:
            self.state = State.STEADY
            return
        raise NothingToDo("no step could be measured, because something else watches all operations")

    def _learn(self, measured: MeasuredStep) -> None:
        """Makes the first plan from a step in which every block was recomputed."""
        profile = MemoryProfile(measured)
        if not profile.blocks:
            raise NothingToDo("recompute had no effect: no block was seen to run a second time in the backward")
        held = measured.peak if self.budget.live else self._process_peak.read()
        overhead = Overhead.measured(measured.peak, held, "live" if self.budget.live else self.device.type)
        self.planner = Planner(profile, overhead, self.budget.bytes, self.switch.offered, self.kinds)
        if self.tighter is not None:
            self.planner.at_least = self.tighter.layers_at_least
            said.tighter(self.tighter, str(out_of_memory.record_path(self.key)))
        self.state = State.CHECKING

    def _check(self, measured: MeasuredStep) -> None:
        """Compares a step under the plan with what was predicted of it."""
        planner = self.planner
        assert planner is not None
        plan = max((plan for plan, _ in self._expected), key=lambda expected: expected.live_peak)
        check = planner.check(self._expected, measured)
        self.state = State.STEADY
        beyond_help = plan.modes == self.safe and planner.overhead.total(check.measured_peak) > self.budget.bytes
        if not check.holds and self.replans < MOST_REPLANS and not beyond_help:
            planner.correct(check)
            self.replans += 1
            self.state = State.CHECKING
        else:
            recovery.leave_running_plan(self.key, plan.recomputed, len(self.blocks))
        said.applied(self.budget, planner.overhead, plan, check, self.replans, again=self.state is State.CHECKING)

    def _tighten(self) -> bool:
        """After memory has run out in a forward that can run again: more blocks recomputed, from now on."""
        self._stop_measuring()
        planner, recomputed = self.planner, self._recomputed()
        if planner is None or recomputed == len(self.blocks) or self.state is State.GIVEN_UP:
            return False
        kept = len(self.blocks) - recomputed
        self.times_ran_out += 1
        more = {1: max(1, len(self.blocks) // 8), 2: (kept + 1) // 2}.get(self.times_ran_out, kept)
        planner.at_least = max(planner.at_least, recomputed + min(kept, more))
        planner.plans.clear()
        self.replans += 1
        said.ran_out(recomputed, planner.at_least, len(self.blocks))
        order = planner.profile.order
        keeping = set(order[planner.at_least :]) & set(planner.profile.blocks)
        return self._apply([Mode.KEEP if i in keeping else Mode.RECOMPUTE for i in range(len(self.blocks))])

    def _out_of_memory(self, error: BaseException) -> None:
        """Memory has run out where nothing can be tried again: the job's next start recomputes more."""
        recomputed = self._recomputed()
        if recomputed == len(self.blocks):
            error.add_note("training-xpu: every layer was recomputed already; use a smaller micro batch, or shard more")
            return
        try:
            plan = out_of_memory.remember(self.key, recomputed, len(self.blocks), "it ran out of memory")
        except OSError:
            return
        error.add_note(
            f"training-xpu: {recomputed} of {len(self.blocks)} layers were recomputed; the job's next start will "
            f"recompute at least {plan.layers_at_least}"
        )

    def _recomputed(self) -> int:
        return sum(mode is not Mode.KEEP for mode in self.switch.modes)

    def _apply(self, modes: Sequence[Mode]) -> bool:
        """Sets the modes; where the script has since set a switch itself, its word holds."""
        if self.switch.apply(modes):
            return True
        if self.state is not State.GIVEN_UP:
            self._give_up(NothingToDo("the script has switched checkpointing itself during training"))
        return False

    def _give_up(self, error: Exception) -> None:
        """A fault here must not reach the training."""
        said.stepped_aside(str(error) if isinstance(error, NothingToDo) else f"{type(error).__name__}: {error}")
        if self.agree:  # the other ranks go on asking this one
            self._stop_measuring()
            self.state = State.GIVEN_UP
        else:
            self.close()
