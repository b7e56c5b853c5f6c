"""Compile in a running job: compiled from the first training forward on, put on trial, and kept where it gains."""

from __future__ import annotations

import weakref
from enum import Enum
from typing import Any

import torch

from training_xpu.blocks import find_blocks, unwrap
from training_xpu.compiler import said
from training_xpu.compiler.agreement import Question, store_of_job
from training_xpu.compiler.backend import Backend
from training_xpu.compiler.compiled_region import CompiledRegion
from training_xpu.compiler.forward import Forward
from training_xpu.compiler.loss_region import LossRegion
from training_xpu.compiler.optimizer_step import fuse
from training_xpu.compiler.regions import find_regions, is_compiled
from training_xpu.compiler.requests import Request
from training_xpu.compiler.trial import PAIRS, RegionClock, Trial, mean_gain
from training_xpu.engines.joint_start import NothingToDo
from training_xpu.engines.zero3_leaves import Leaves, make_leaves

_in_hand: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # models that have a controller
MOST_WARM_UP_STEPS = 20  # a job whose every step compiles something is judged all the same
MOST_TRIAL_STEPS = 6 * PAIRS  # and one whose blocks do not run in every step


class State(Enum):
    WARMING = "warming"  # graphs are being made
    TRIAL = "trial"
    WAITING = "waiting"  # for what the ranks decide
    SETTLED = "settled"


class Controller:
    """Decides for one model what is compiled."""

    def __init__(self, root: torch.nn.Module, request: Request) -> None:
        """
        Args:
            root: the model with its wrappers, about to run its first training forward.
            request: what the script asked of torch.compile.

        Raises:
            NothingToDo: it has no repeated blocks, or they are compiled already.
        """
        self.root = root
        inner = unwrap(root)
        if inner in _in_hand:
            raise NothingToDo("this model is in hand already, by the variable or an earlier call of optimize")
        if not find_blocks(inner):
            raise NothingToDo(f"{type(inner).__name__} has no repeated blocks")
        if is_compiled(root):
            raise NothingToDo(
                "the script has compiled the whole model, with a backend of its own or in evaluation mode; "
                "call model.train() before torch.compile(model), or leave torch.compile out"
            )
        found = find_regions(inner)
        if not any(region.is_block for region in found):
            raise NothingToDo("its blocks are compiled already, or have a forward of the script's own")
        job = store_of_job()
        compiled = [CompiledRegion(r, Backend(request.options), request.dynamic is True) for r in found]
        for region in compiled:
            region.may_open_sizes = region.may_open_sizes or job is None
            region.owner = self
        self.leaves: Leaves | None = make_leaves(root, [m for r in found if r.is_block for m in r.modules])
        self.regions: list[CompiledRegion | LossRegion] = [*compiled, LossRegion(root)]
        self._forwards = [Forward(m, region) for region in compiled for m in region.region.modules]
        for forward in self._forwards:
            forward.install()
        self._fused: set[int] = set()  # ids of optimizers
        self._compiled_now = True
        self.state = State.WARMING
        self._steps = 0
        self._trial = Trial()
        self._trial_steps = 0
        self._gains: dict[str, float] = {}
        self._open = Question(job, "open", lambda said: True, of_all=False)
        self._verdict = Question(job, "gains", _mean_of_ranks, of_all=True)
        self._opened = job is None
        self._hits_before = _cache_hits()
        _in_hand.add(inner)

    def close(self) -> None:
        """Takes everything back."""
        for forward in self._forwards:
            forward.remove()
        for region in self.regions:
            region.close()
        if self.leaves is not None:
            self.leaves.undo()
        self.state = State.SETTLED
        _in_hand.discard(unwrap(self.root))

    def after_step(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """One optimizer step has been taken.

        Args:
            optimizer: that has taken it.
        """
        self._steps += 1
        if optimizer is not None and fuse(optimizer):
            self._fused.add(id(optimizer))
        self._open_sizes()
        made_graphs = any(region.made_graphs for region in self.regions)
        for region in self.regions:
            region.made_graphs = False
            region.look_again()
        waiting = not self._opened and self._open.has_said  # for the step in which graphs for all sizes are made
        if self.state is State.WARMING and (not (made_graphs or waiting) or self._steps >= MOST_WARM_UP_STEPS):
            self._begin_trial()
        elif self.state is State.TRIAL:
            self._go_on_with_trial(made_graphs)
        elif self.state is State.SETTLED and made_graphs:
            self._say()
        if self.state is State.WAITING:
            self._look_for_verdict()

    def _open_sizes(self) -> None:
        """Graphs for all sizes are made by all ranks in the same step, so that none waits for another's compiler."""
        if self._opened:
            return
        if any(region.sizes_changed for region in self.regions):
            self._open.say(True)
        if self._open.answer(self._steps) is not None:
            self._opened = True
            for region in self.regions:
                if isinstance(region, CompiledRegion):
                    region.may_open_sizes = region.open_next = True

    def _begin_trial(self) -> None:
        self.state = State.TRIAL
        for region in self.regions:
            region.clock = RegionClock()
        self._use(True)
        self._say()

    def _use(self, compiled: bool) -> None:
        self._compiled_now = compiled
        for region in self.regions:
            region.use(compiled)

    def _go_on_with_trial(self, made_graphs: bool) -> None:
        for region in self.regions:
            assert region.clock is not None
            spent = region.clock.take()
            if not made_graphs:
                self._trial.add(region.name, spent, self._compiled_now)
        self._trial_steps += 1
        if self._trial.pairs(self.regions[0].name) >= PAIRS or self._trial_steps >= MOST_TRIAL_STEPS:
            self._end_trial()
        else:
            self._use(not self._compiled_now)

    def _end_trial(self) -> None:
        for region in self.regions:
            region.clock = None
        self._use(True)
        names = [region.name for region in self.regions]
        self._verdict.say({name: gain for name in names if (gain := self._trial.gain(name)) is not None})
        self.state = State.WAITING

    def _look_for_verdict(self) -> None:
        answer = self._verdict.answer(self._steps)
        if answer is None:
            return
        self._gains = answer[0]
        for region in self.regions:
            gain = self._gains.get(region.name)
            region.use(gain is None or gain >= 1.0)
        self.state = State.SETTLED
        self._say()

    def _say(self) -> None:
        hits = _cache_hits() - self._hits_before
        said.outcome(self.regions, self._gains, hits, len(self._fused), self.state is State.SETTLED)


def _mean_of_ranks(said: list[Any]) -> dict[str, float]:
    names = {name for gains in said for name in gains}
    return {name: mean_gain([gains[name] for gains in said if name in gains]) for name in sorted(names)}


def _cache_hits() -> int:
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["fxgraph_cache_hit"]) + int(counters["aot_autograd"]["autograd_cache_hit"])
