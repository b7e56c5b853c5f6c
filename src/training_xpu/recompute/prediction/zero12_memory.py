"""Memory of DeepSpeed's ZeRO stages 1 and 2 (DeepSpeed 0.19, runtime/zero/stage_1_and_2.py)."""

from __future__ import annotations

from training_xpu.recompute.prediction.engine_memory import EngineMemory
from training_xpu.recompute.prediction.setting import TrainingSetting
from training_xpu.recompute.prediction.weights import Weights


def part_of(elements: int, world_size: int) -> int:
    """Elements of each rank's part: 16-bit elements are aligned to 4 bytes (`flatten_dense_tensors_aligned`)."""
    return -(-elements // (2 * world_size)) * 2


def pieces_of(weights: Weights, part: int) -> dict[int, list[tuple[int, int]]]:
    """For each trained parameter: (rank, elements) of what lies in whose part, in order."""
    found: dict[int, list[tuple[int, int]]] = weights.worked_out.setdefault(("pieces", part), {})
    if found:
        return found
    offset = 0
    for index in weights.trained:
        end = offset + weights.all[index].numel
        pieces = []
        position = offset
        while position < end:
            rank = position // part
            stop = min(end, (rank + 1) * part)
            pieces.append((rank, stop - position))
            position = stop
        found[index] = pieces
        offset = end
    return found


def untouched_of_buckets(weights: Weights, setting: TrainingSetting, count: int) -> int:
    """Bytes of a number of gradient buckets that gradients never reach, because the model has fewer."""
    if not setting.contiguous_gradients:
        return 0
    elements = sum(weights.all[i].numel for i in weights.trained)
    return max(0, count * setting.reduce_bucket_elements - elements) * setting.element_bytes


class Zero12Memory(EngineMemory):
    """Weights in one flat buffer, of which each rank updates one part with fp32 masters.

    Gradients go through a bucket that lives during the backward; those of the rank's own part are copied out of it.
    Stage 2 does so as gradients come, stage 1 after the last backward of a step.
    """

    def set_up(self) -> None:
        weights, setting = self.weights, self.setting
        self.stage2 = setting.zero_stage == 2
        self.width = setting.element_bytes
        self.size = setting.reduce_bucket_elements
        elements = sum(weights.all[i].numel for i in weights.trained)
        self.part = part_of(elements, setting.world_size)
        padded = self.part * setting.world_size
        self.pieces = pieces_of(weights, self.part)
        self.own = {i for i, pieces in self.pieces.items() if self.rank in dict(pieces)}
        self.own_bytes = sum(weights.all[i].numel for i in self.own) * self.width
        self.ledger.keep(padded * self.width + sum(weights.all[i].nbytes for i in weights.frozen))
        self.ledger.keep(4 * self.part)
        self.optimizer = self.optimizer_of([(self.part,)])
        self.ledger.keep(self.optimizer.states)
        self.waiting: list[int] = []  # parameters in the bucket
        self.filled = 0
        self.bucket = 0  # bytes of it
        self.separate: dict[int, int] = {}  # gradients outside the bucket
        self.accumulated = 0  # bytes of this rank's gradients of earlier micro batches
        self.copied = 0  # and of this one

    @classmethod
    def ranks(cls, weights: Weights, setting: TrainingSetting) -> set[int]:
        """The first, the last, the one with most gradients and the one with the largest.

        Parameters that lie across two parts are kept whole by both ranks.
        """
        part = part_of(sum(weights.all[i].numel for i in weights.trained), setting.world_size)
        totals: dict[int, int] = {}
        largest: dict[int, int] = {}
        for index, pieces in pieces_of(weights, part).items():
            for rank, elements in pieces:
                totals[rank] = totals.get(rank, 0) + weights.all[index].numel
                largest[rank] = max(largest.get(rank, 0), elements)
        if not totals:
            return {0}
        most = max(totals, key=lambda rank: totals[rank])
        return {0, max(totals), most, max(largest, key=lambda rank: largest[rank])}

    @classmethod
    def untouched_bytes(cls, weights: Weights, setting: TrainingSetting) -> int:
        return untouched_of_buckets(weights, setting, 2 if setting.overlaps else 1)

    def gradient(self, index: int) -> None:
        self._open_bucket()
        if self.stage2:
            self._add(index, fresh=True)
        else:
            super().gradient(index)

    def _open_bucket(self) -> None:
        if not self.bucket and self.setting.contiguous_gradients:
            self.bucket = self.size * self.width * (2 if self.setting.overlaps else 1)
            self.ledger.communicate(self.bucket)

    def _add(self, index: int, fresh: bool) -> None:
        """`reduce_independent_p_g_buckets_and_remove_grads`"""
        weight = self.weights.all[index]
        size = weight.numel * self.width
        if self.filled + weight.numel > self.size:
            self._reduce()
        if self.setting.contiguous_gradients and weight.numel <= self.size:
            if not fresh:
                self.ledger.keep(-size)
        else:
            self.separate[index] = size
            if fresh:
                self.ledger.take_over(size)
        self.filled += weight.numel
        self.waiting.append(index)

    def _reduce(self) -> None:
        """`reduce_ipg_grads`: the slices of each rank are flattened together, reduced and copied back."""
        if self.setting.contiguous_gradients:
            self._reduce_slices()
        elif len(self.waiting) > 1:
            self.ledger.briefly_communicate(self.filled * self.width)
        for index in self.waiting:
            if index in self.own:
                if not self.setting.contiguous_gradients:
                    continue
                if not self.copied:
                    self.copied = self.own_bytes
                    self.ledger.keep(self.copied)
            elif not self.stage2:
                continue
            self.ledger.keep(-self.separate.pop(index, 0))
        self.waiting = []
        self.filled = 0

    def _reduce_slices(self) -> None:
        slices: list[int] = []
        previous = -1
        for index in self.waiting:
            for rank, elements in self.pieces[index]:
                if rank == previous:
                    slices[-1] += elements
                else:
                    slices.append(elements)
                previous = rank
        together = count = 0
        for elements in [*slices, 0]:
            together += elements
            count += 1 if elements else 0
            if together > self.size or not elements:
                if count > 1:  # one slice alone needs no copy
                    self.ledger.briefly_communicate(together * self.width)
                together = count = 0

    def end_backward(self) -> None:
        """`independent_gradient_partition_epilogue`"""
        if not self.stage2:
            if not self.last:
                return
            self.gradients = 0
            for index in self.weights.trained:
                self._add(index, fresh=False)
        self._reduce()
        kept = sum(self.separate.pop(i, 0) for i in list(self.separate) if i in self.own)
        self.ledger.keep(-sum(self.separate.values()))
        self.separate = {}
        copied = self.copied + kept
        self.copied = 0
        if self.accumulated:
            self.ledger.keep(-copied)  # added to what earlier micro batches left
        else:
            self.accumulated = copied
        self.ledger.communicate(-self.bucket)
        self.bucket = 0

    def update(self) -> None:
        """`step`: norms in double precision, this rank's gradients flat and in fp32, then the optimizer."""
        largest = max((n for pieces in self.pieces.values() for rank, n in pieces if rank == self.rank), default=0)
        self.ledger.briefly(8 * largest)
        self.ledger.keep(self.width * self.part)
        if self.width == 2:
            self.ledger.keep(4 * self.part)
            self.ledger.keep(-2 * self.part)
        self.ledger.keep(-self.accumulated)
        self.accumulated = 0
        self.ledger.briefly(self.optimizer.transient)
        self.ledger.keep(-4 * self.part)
        self.gloo_copies(self.width * self.part * self.setting.world_size)  # all weights are gathered
