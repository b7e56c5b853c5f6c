"""A whole training step of a model under an engine, put together from a trace of a few of its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from training_xpu.recompute.prediction.engine_memory import DdpMemory, EngineMemory, Zero0Memory
from training_xpu.recompute.prediction.fsdp_memory import FsdpMemory
from training_xpu.recompute.prediction.ledger import Ledger, Peak
from training_xpu.recompute.prediction.live_bytes import Segment, Stretch
from training_xpu.recompute.prediction.model_blocks import Block
from training_xpu.recompute.prediction.setting import TrainingSetting
from training_xpu.recompute.prediction.trace import BlockTrace, HeadTrace, StepTrace
from training_xpu.recompute.prediction.weights import Weights
from training_xpu.recompute.prediction.zero3_memory import Zero3Memory
from training_xpu.recompute.prediction.zero12_memory import Zero12Memory

# A segment whose events name parameters and modules of the whole model: a stretch, a parameter whose gradient is there,
# or (event, module, its parameters).
Steps = list[Stretch | int | tuple[str, int, tuple[int, ...]]]
_MODULES_PER_BLOCK = 1 << 20


def engine_class(setting: TrainingSetting) -> type[EngineMemory]:
    if setting.engine == "deepspeed":
        return (Zero0Memory, Zero12Memory, Zero12Memory, Zero3Memory)[setting.zero_stage]
    return {"plain": EngineMemory, "ddp": DdpMemory, "fsdp": FsdpMemory}[setting.engine]


class Naming:
    """Tells for parameters and modules of the traced model which ones of the whole model they stand for."""

    def __init__(self, traced: torch.nn.Module, blocks: Sequence[torch.nn.Module], names: dict[str, int]) -> None:
        """
        Args:
            blocks: the traced blocks in the order of execution.
            names: parameter name -> index, of the whole model.
        """
        self.parameters: dict[int, tuple[int | None, int]] = {}
        self.modules: dict[int, tuple[int | None, int]] = {}
        self.direct: dict[int, tuple[int, ...]] = {}
        for place, block in enumerate(blocks):
            for number, parameter in enumerate(block.parameters()):
                self.parameters.setdefault(id(parameter), (place, number))
            for number, module in enumerate(block.modules()):
                self.modules.setdefault(id(module), (place, number))
        for name, parameter in traced.named_parameters():
            self.parameters.setdefault(id(parameter), (None, names.get(name, -1)))
        for number, module in enumerate(traced.modules()):
            self.modules.setdefault(id(module), (None, number))
            self.direct[id(module)] = tuple(id(p) for p in module._parameters.values() if p is not None)

    def steps(self, segment: Segment, weights: Weights, shift: int = 0) -> Steps:
        """The segment for the block that is `shift` places further in the whole model than its trace."""

        def parameter(key: int) -> int:
            place, number = self.parameters[key]
            return number if place is None else weights.blocks[place + shift][number]

        result: Steps = []
        for step in segment.steps:
            if isinstance(step, Stretch):
                result.append(step)
            elif step.kind == "gradient":
                result.append(parameter(step.subject))
            else:
                place, number = self.modules[step.subject]
                module = -1 - number if place is None else (place + shift) * _MODULES_PER_BLOCK + number
                parameters = tuple(dict.fromkeys(parameter(p) for p in self.direct[step.subject]))
                result.append((step.kind, module, parameters))
        return result


class BlockSteps:
    """One block of the whole model, kept or recomputed."""

    def __init__(self, trace: BlockTrace, naming: Naming, weights: Weights, shift: int, beside: int = 0) -> None:
        """
        Args:
            beside: bytes that the block keeps for its backward and that no trace sees.
        """
        self.before = naming.steps(trace.before, weights, shift)
        self.forward = naming.steps(trace.forward, weights, shift)
        self.backward = naming.steps(trace.backward, weights, shift)
        self.before_backward = naming.steps(trace.before_backward, weights, shift)
        self.runs_backward = bool(trace.backward.name)
        if beside and self.runs_backward:
            self.forward.insert(0, Stretch(beside, beside))
            self.backward.append(Stretch(0, -beside))
        self.input_needs_gradient = bool(trace.before_backward.name)
        self.cast_weights = trace.cast_weights


class HeadSteps:
    """Head and loss of the whole model."""

    def __init__(self, trace: HeadTrace, naming: Naming, weights: Weights, shift: int) -> None:
        self.forward = naming.steps(trace.forward, weights, shift)
        self.backward = naming.steps(trace.backward, weights, shift)
        self.cast_weights = trace.cast_weights


class Timeline:
    """The step of a whole model; `peak` simulates it under an engine for a number of recomputed blocks."""

    def __init__(
        self,
        trace: StepTrace,
        traced: Sequence[int],
        blocks: Sequence[Block],
        naming: Naming,
        weights: Weights,
        random_state_bytes: int = 0,
    ) -> None:
        """
        Args:
            traced: which blocks of the whole model were traced, in the order of execution.
            blocks: of the whole model, in the order of execution.
            random_state_bytes: of the generator's state that torch's checkpoint keeps for each recomputed block.
        """
        self.weights = weights
        self.stand_ins = [stand_in(index, traced, blocks) for index in range(len(blocks))]
        self.kept = [BlockSteps(trace.kept[p], naming, weights, i - p) for i, p in enumerate(self.stand_ins)]
        self.recomputed = [
            BlockSteps(trace.recomputed[p], naming, weights, i - p, random_state_bytes)
            for i, p in enumerate(self.stand_ins)
        ]
        shift = len(blocks) - len(trace.kept)
        self.heads = [HeadSteps(head, naming, weights, shift) for head in (trace.head, trace.head_after_recomputed)]

    def peak(self, setting: TrainingSetting, recomputed: Sequence[bool]) -> Peak:
        """The highest point of a step in its steady state, of the rank that needs most."""
        ranks = self.weights.worked_out.get(("ranks", setting))
        if ranks is None:
            ranks = self.weights.worked_out["ranks", setting] = sorted(
                engine_class(setting).ranks(self.weights, setting)
            )
        return max((self._peak(setting, recomputed, rank) for rank in ranks), key=lambda peak: peak.total)

    def _peak(self, setting: TrainingSetting, recomputed: Sequence[bool], rank: int) -> Peak:
        ledger = Ledger()
        ledger.phase = "between steps"
        engine = engine_class(setting)(self.weights, setting, ledger, rank)
        blocks = [(self.recomputed if r else self.kept)[i] for i, r in enumerate(recomputed)]
        head = self.heads[any(recomputed)]
        if isinstance(engine, Zero3Memory):
            engine.expect(_fetches(blocks, head))
        once = setting.gradient_accumulation == 1
        for first, last in [(True, True)] if once else [(True, False), (False, True)]:
            _micro_batch(engine, ledger, blocks, head, first, last)
        ledger.phase = "optimizer-step"
        engine.update()
        return ledger.peak


def _micro_batch(
    engine: EngineMemory, ledger: Ledger, blocks: Sequence[BlockSteps], head: HeadSteps, first: bool, last: bool
) -> None:
    count = len(blocks)
    ledger.phase = "embedding"
    engine.start_micro_batch(first, last)
    for index, block in enumerate(blocks):
        with ledger.segment(f"before-{index}" if index else "embedding"):
            _run(block.before, engine, ledger)
        ledger.phase = f"block-{index}"
        engine.before_block(index)
        with ledger.segment(f"block-{index}"):
            _run(block.forward, engine, ledger)
        engine.after_block(index)
    with ledger.segment("head", head=True):
        _run(head.forward, engine, ledger)
    cast = sum(block.cast_weights for block in blocks)
    with ledger.segment("head", head=True):
        ledger.run(Stretch(0, -head.cast_weights))
    with ledger.segment("head"):
        ledger.run(Stretch(0, -cast))
    ledger.phase = "head-backward"
    engine.end_forward()
    with ledger.segment("head-backward", head=True):
        _run(head.backward, engine, ledger)
    for index in reversed(range(count)):
        block = blocks[index]
        ledger.phase = f"block-{index}-backward"
        if block.runs_backward:
            engine.before_block_backward(index)
        with ledger.segment(f"block-{index}-backward"):
            _run(block.backward, engine, ledger)
        if block.input_needs_gradient:
            engine.after_block_backward(index)
        with ledger.segment(f"before-{index}-backward" if index else "embedding-backward"):
            _run(block.before_backward, engine, ledger)
    ledger.settle()
    ledger.phase = "gradient-reduction"
    engine.end_backward()


def _fetches(blocks: Sequence[BlockSteps], head: HeadSteps) -> list[tuple[int, ...]]:
    parts = [part for block in blocks for part in (block.before, block.forward)]
    parts += [head.forward, head.backward]
    parts += [part for block in reversed(blocks) for part in (block.backward, block.before_backward)]
    return [
        step[2]
        for part in parts
        for step in part
        if isinstance(step, tuple) and not isinstance(step, Stretch) and step[0] in ("enter", "enter-backward")
    ]


def _run(steps: Steps, engine: EngineMemory, ledger: Ledger) -> None:
    for step in steps:
        if isinstance(step, Stretch):
            ledger.run(step)
        elif isinstance(step, int):
            engine.gradient(step)
        else:
            engine.module_event(*step)


def stand_in(index: int, traced: Sequence[int], blocks: Sequence[Block]) -> int:
    """The place in the trace of the block that stands for a block of the whole model.

    Itself where it was traced; otherwise one of its kind and container, if possible one with a block of the same kind
    before it and none of the ends.
    """
    if index in traced:
        return list(traced).index(index)
    wanted = blocks[index]

    def liking(place: int) -> tuple[bool, bool, bool, int]:
        other = traced[place]
        inside = 0 < other < len(blocks) - 1
        same_before = other > 0 and index > 0 and blocks[other - 1].kind == blocks[index - 1].kind
        followed = place > 0 and blocks[traced[place - 1]].kind == blocks[index - 1].kind
        return blocks[other].container == wanted.container, inside, followed and same_before, place

    same = [place for place, other in enumerate(traced) if blocks[other].kind == wanted.kind]
    return max(same, key=liking)


def interpolated(sampled: dict[int, Any], count: int) -> list[tuple[int, int, float]]:
    """For each number of recomputed blocks: the sampled numbers around it and how far it is between them."""
    points = sorted(sampled)
    result = []
    for number in range(count + 1):
        below = max(p for p in points if p <= number)
        above = min(p for p in points if p >= number)
        result.append((below, above, (number - below) / (above - below) if above > below else 0.0))
    return result
