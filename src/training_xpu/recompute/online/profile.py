"""What a measured step says about steps with other modes of the blocks and other batches."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from training_xpu.recompute.choose import Base, BlockCost, ModeCost
from training_xpu.recompute.online.amounts import Amount, BatchShape
from training_xpu.recompute.online.dispatch_cost import dispatch_cost
from training_xpu.recompute.online.measure import MeasuredStep, MicroBatch, Phase, Stretch
from training_xpu.recompute.switching.policies import Mode

_ALIKE = 0.01  # blocks of one kind whose bytes differ less cost the same


@dataclass(frozen=True)
class BlockProfile:
    """What a block's activations take, against recomputing all of them."""

    in_forward: Amount  # kept: alive in addition until the root's forward ends
    saved: Amount  # kept: and from then on to the block's own backward
    selective: Amount  # kept by the selective mode, all the time
    forward_peak: Amount  # highest point of its forward above its start
    seconds: float  # of recomputing all
    selective_seconds: float  # of recomputing what the selective mode does not keep


@dataclass(frozen=True)
class _Event:
    """A stretch of a micro batch of one shape, in bytes."""

    phase: Phase
    block: int | None
    start: int
    peak: int  # as measured, with every block recomputed
    kept_peak: int  # of a forward whose block is kept
    kept: int  # alive from here on, if the block is kept, beyond what was measured
    selective: int  # the same for the selective mode


class MemoryProfile:
    """Predicts peaks of live bytes from one step in which every block was recomputed."""

    def __init__(self, measured: MeasuredStep) -> None:
        self.measured = measured
        self.order = _order(measured)
        self.blocks = {index: profile for index in self.order if (profile := _block(measured, index)) is not None}
        self._events = lru_cache(maxsize=64)(self._events_at)

    @property
    def largest(self) -> BatchShape:
        """The measured batch with the most tokens."""
        return max((m.shape for m in self.measured.micro_batches), key=_by_size)

    def peak(self, modes: Sequence[Mode], batch: BatchShape | None = None) -> int:
        """The highest point of a step in bytes.

        Args:
            modes: of every block of the model.
            batch: of all micro batches; None: as measured.
        """
        return _highest([(events, modes) for events in self._events(batch)])

    def step(self, micro_batches: Sequence[tuple[Sequence[Mode], BatchShape]]) -> tuple[int, int]:
        """The highest point of one step, and the most that is alive when a forward has returned.

        Args:
            micro_batches: modes and shape of each, in their order.
        """
        timeline = [
            (self._events(shape)[min(number, len(self.measured.micro_batches) - 1)], modes)
            for number, (modes, shape) in enumerate(micro_batches)
        ]
        after = [_alive_after_forward(events, modes) or 0 for events, modes in timeline]
        return _highest(timeline), max(after, default=0)

    def costs(
        self, offered: Sequence[frozenset[Mode]], kinds: Sequence[str], batch: BatchShape
    ) -> tuple[list[BlockCost], Base, int]:
        """The choice of modes for `choose`: blocks in the order of their forwards, what is alive beside them, and the
        peak of what no choice changes.

        Args:
            offered: modes that each block of the model has.
            kinds: of each block of the model; those of a kind that need as much cost the same.
            batch: of all micro batches.
        """
        events = [event for micro_batch in self._events(batch) for event in micro_batch]
        blocks, forward, backward = [], [], []
        for index in self.order:
            own = [e for e in events if e.block == index]
            starts = {phase: max((e.start for e in own if e.phase == phase), default=0) for phase in _PHASES}
            first = max((e.start for e in own if e.phase == "backward"), default=0)
            if index in self.blocks:
                # The stretch before the recompute is the first of the two called "backward".
                first = min((e.start for e in own if e.phase == "backward"), default=0)
            forward.append(starts["forward"])
            backward.append(first)
            blocks.append(self._cost(index, own, starts["forward"], first, offered[index], kinds[index], batch))
        head = max((e.peak for e in events if e.block is None and e.phase in ("between", "after")), default=0)
        fixed = max((e.peak for e in events if e.block is None and e.phase in ("before", "rest")), default=0)
        return _levelled(blocks), Base(tuple(forward), head, tuple(backward)), fixed

    def _cost(
        self,
        index: int,
        own: Sequence[_Event],
        forward: int,
        backward: int,
        offered: frozenset[Mode],
        kind: str,
        batch: BatchShape,
    ) -> BlockCost:
        def highest(phases: tuple[Phase, ...], start: int) -> int:
            return max((e.peak - start for e in own if e.phase in phases), default=0)

        plain_forward = highest(("forward",), forward)
        all_backward = highest(("backward", "recompute"), backward)
        profile = self.blocks.get(index)
        if profile is None:
            return BlockCost(kind, {Mode.RECOMPUTE: ModeCost(0, plain_forward, all_backward)})
        largest = self.largest
        kept_forward = max(plain_forward, profile.forward_peak.at(largest, batch))
        saved = max(profile.saved.at(largest, batch), profile.in_forward.at(largest, batch))
        selective = min(profile.selective.at(largest, batch), saved)
        modes = {
            Mode.RECOMPUTE: ModeCost(0, plain_forward, all_backward, profile.seconds),
            Mode.KEEP: ModeCost(saved, kept_forward, max(highest(("backward",), backward), saved)),
        }
        if Mode.SELECTIVE in offered and 0 < selective < saved and profile.selective_seconds < profile.seconds:
            modes[Mode.SELECTIVE] = ModeCost(selective, kept_forward, all_backward, profile.selective_seconds)
        return BlockCost(kind, modes)

    def _events_at(self, batch: BatchShape | None) -> list[list[_Event]]:
        return [list(self._events_of(m, m.shape if batch is None else batch)) for m in self.measured.micro_batches]

    def _events_of(self, micro_batch: MicroBatch, asked: BatchShape) -> Iterator[_Event]:
        shape = micro_batch.shape
        pending: dict[int, int] = {}  # what a forward's end changes: copies of weights that autocast held become saved
        for stretch, ends_forward in _with_end_of_forward(micro_batch.stretches):
            start, peak = stretch.start.at(shape, asked), stretch.peak.at(shape, asked)
            kept_peak, kept, selective = peak, 0, 0
            block = self.blocks.get(stretch.block) if stretch.block is not None else None
            if block is not None and stretch.block is not None and stretch.phase in ("forward", "recompute"):
                sign = 1 if stretch.phase == "forward" else -1  # measured from the recompute on
                kept = sign * block.saved.at(self.largest, asked)
                selective = sign * block.selective.at(self.largest, asked)
                if stretch.phase == "forward":
                    kept_peak = max(peak, start + block.forward_peak.at(self.largest, asked))
                    in_forward = block.in_forward.at(self.largest, asked)
                    pending[stretch.block] = kept - in_forward
                    kept = in_forward
            if ends_forward:
                for index, more in pending.items():
                    yield _Event("between", index, 0, 0, 0, more, 0)
            yield _Event(stretch.phase, stretch.block, start, peak, kept_peak, kept, selective)


_PHASES: tuple[Phase, ...] = ("forward", "backward", "recompute")


def _by_size(shape: BatchShape) -> tuple[int, int]:
    return shape.tokens, shape.length


def _highest(timeline: Sequence[tuple[Sequence[_Event], Sequence[Mode]]]) -> int:
    """Over micro batches one after the other: a script may run several forwards before their backwards."""
    more = highest = 0
    for events, modes in timeline:
        for event in events:
            mode = Mode.RECOMPUTE if event.block is None else modes[event.block]
            if mode is Mode.KEEP:
                if event.phase != "recompute" and event.peak:
                    highest = max(highest, more + event.kept_peak)
                more += event.kept
            elif mode is Mode.SELECTIVE:
                if event.phase == "recompute":
                    more += event.selective
                if event.peak:
                    highest = max(highest, more + (event.kept_peak if event.phase == "forward" else event.peak))
                if event.phase != "recompute":
                    more += event.selective
            elif event.peak:
                highest = max(highest, more + event.peak)
    return highest


def _alive_after_forward(events: Sequence[_Event], modes: Sequence[Mode]) -> int | None:
    more = 0
    for event in events:
        if event.phase == "after":
            return event.start + more
        mode = Mode.RECOMPUTE if event.block is None else modes[event.block]
        more += event.kept if mode is Mode.KEEP else event.selective if mode is Mode.SELECTIVE else 0
    return None


def _levelled(blocks: list[BlockCost]) -> list[BlockCost]:
    """Gives blocks of one kind that need as much the same costs: the most bytes, the median time of any of them."""
    groups: list[list[int]] = []
    for index, block in enumerate(blocks):
        like = next((g for g in groups if _alike(blocks[g[0]], block)), None)
        if like is None:
            groups.append([index])
        else:
            like.append(index)
    result = list(blocks)
    for group in groups:
        modes = {}
        for mode in blocks[group[0]].modes:
            costs = [blocks[i].modes[mode] for i in group]
            modes[mode] = ModeCost(
                max(c.saved_bytes for c in costs),
                max(c.forward_peak for c in costs),
                max(c.backward_peak for c in costs),
                statistics.median(c.extra_seconds for c in costs),
            )
        for i in group:
            result[i] = BlockCost(blocks[i].kind, modes)
    return result


def _alike(one: BlockCost, other: BlockCost) -> bool:
    if one.kind != other.kind or one.modes.keys() != other.modes.keys():
        return False
    pairs = [(one.modes[m].saved_bytes, other.modes[m].saved_bytes) for m in one.modes]
    return all(abs(a - b) <= _ALIKE * max(a, b) for a, b in pairs)


def _with_end_of_forward(stretches: Sequence[Stretch]) -> Iterator[tuple[Stretch, bool]]:
    ended = False
    for stretch in stretches:
        first = not ended and stretch.phase in ("after", "backward", "recompute", "rest")
        ended = ended or first
        yield stretch, first


def _order(measured: MeasuredStep) -> tuple[int, ...]:
    """Blocks in the order of their first forwards."""
    seen: dict[int, None] = {}
    for micro_batch in measured.micro_batches:
        for stretch in micro_batch.stretches:
            if stretch.phase == "forward" and stretch.block is not None:
                seen.setdefault(stretch.block)
    return tuple(seen)


def _block(measured: MeasuredStep, index: int) -> BlockProfile | None:
    """Its forward in the largest micro batch and its largest recompute; None where it never was recomputed.

    With several forwards before one backward, the recomputes of all of them come after the last forward.
    """
    largest = max(
        (m for m in measured.micro_batches if any(s.block == index for s in m.stretches)),
        key=lambda m: _by_size(m.shape),
    )
    forward = [s for s in largest.stretches if s.block == index and s.phase == "forward"]
    again = [s for m in measured.micro_batches for s in m.stretches if s.block == index and s.phase == "recompute"]
    if not forward or not again:
        return None
    again.sort(key=lambda s: s.end.total - s.start.total)
    stopped_early = any(index in m.stopped_early for m in measured.micro_batches)
    recomputed, plain = again[-1].end.minus(again[-1].start), forward[-1].end.minus(forward[-1].start)
    output = largest.outputs.get(index, plain)
    saved = recomputed if stopped_early else recomputed.minus(output)
    # Keeping matrix products pays where they take longer than it takes Python to look at every operation, twice.
    cost = dispatch_cost()
    seconds = max(0.0, again[-1].seconds - again[-1].operations * cost.counting)
    return BlockProfile(
        in_forward=saved.plus(output).minus(plain),
        saved=saved,
        selective=again[-1].selective,
        forward_peak=again[-1].peak.minus(again[-1].start),
        seconds=seconds,
        selective_seconds=seconds - again[-1].selective_seconds + again[-1].operations * cost.selective,
    )
