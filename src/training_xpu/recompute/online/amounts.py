"""Amounts of memory split by how they grow with a batch, so that one measured batch tells about others."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple


class BatchShape(NamedTuple):
    """Sequences of a micro batch and tokens per sequence, padding included."""

    sequences: int
    length: int

    @property
    def tokens(self) -> int:
        return self.sequences * self.length

    def rounded(self) -> BatchShape:
        """A shape no smaller, of which there are few: the length rounded up by at most an eighth."""
        step = max(1, (1 << max(0, self.length.bit_length() - 1)) // 8)
        return BatchShape(self.sequences, -(-self.length // step) * step)


class Amount(NamedTuple):
    """Bytes, by what they depend on. Parts may be negative where an amount is a difference."""

    constant: int = 0  # weights, gradients, optimizer states
    linear: int = 0  # grows with the tokens of the batch
    quadratic: int = 0  # grows with tokens times length, as a matrix of attention scores does
    unclear: int = 0  # a shape that would be right for either: taken as whichever is larger

    @property
    def total(self) -> int:
        return self.constant + self.linear + self.quadratic + self.unclear

    def plus(self, other: Amount) -> Amount:
        return Amount(*(a + b for a, b in zip(self, other, strict=True)))

    def minus(self, other: Amount) -> Amount:
        return Amount(*(a - b for a, b in zip(self, other, strict=True)))

    def at(self, measured: BatchShape, asked: BatchShape) -> int:
        """Bytes for another batch than the one it was measured with; rather too many than too few."""
        if measured == asked:
            return self.total
        tokens = asked.tokens / max(1, measured.tokens)
        square = tokens * asked.length / max(1, measured.length)
        return round(self.constant + self.linear * tokens + self.quadratic * square + self.unclear * max(1.0, tokens))


def classify(shape: Sequence[int], batch: BatchShape, weights: Collection[tuple[int, ...]]) -> str:
    """Which part of an `Amount` a tensor of this shape belongs to.

    Args:
        shape: of the tensor.
        batch: the micro batch it was made for.
        weights: shapes of the model's parameters and their transposes: gradients look like them.
    """
    dims = tuple(shape)
    tokens, length = batch.tokens, batch.length
    predicted = tokens - batch.sequences  # tokens that have a next one
    numel = math.prod(dims)
    if tokens <= 1 or numel < tokens or not (numel % tokens == 0 or (predicted > 0 and numel % predicted == 0)):
        return "constant"
    if len(dims) == 1 and numel > 8 * tokens:
        return "constant"  # a flat buffer of gradients or weights
    if dims in weights:
        return "unclear" if dims[0] in (tokens, predicted, batch.sequences) else "constant"
    if length == 1 or numel % (tokens * length) != 0:
        return "linear"
    lengths = sum(dim in (length, length - 1) for dim in dims)
    # Hidden states (sequences, length, width) of a width that equals the length are no matrix of scores.
    return "quadratic" if lengths >= 2 and not (len(dims) == 3 and dims[0] == batch.sequences) else "linear"
