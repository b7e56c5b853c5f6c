"""Cuts memory-mapped tokens into sequences and puts these into an endless shuffled order. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


class Sequences:
    """The sequences of one side of prepared data.

    With packing, sequence i is tokens `i * sequence_length` up to the next one's, across documents; the rest at the end
    that fills no sequence is left out. Without, each document gives its tokens in pieces of at most sequence_length; a
    piece of a single token has nothing to predict and is left out.
    """

    def __init__(self, tokens: Path, offsets: Path, sequence_length: int, packing: bool) -> None:
        """
        Args:
            tokens: .npy, one-dimensional.
            offsets: .npy int64, where documents begin, and the end of the last one.
            sequence_length: tokens.
            packing: whether sequences run across documents.
        """
        self.sequence_length = sequence_length
        self._tokens: npt.NDArray[Any] = np.load(tokens, mmap_mode="r")
        self._starts: npt.NDArray[np.int64] | None = None
        self._lengths: npt.NDArray[np.int64] | None = None
        if packing:
            self._count = len(self._tokens) // sequence_length
        else:
            self._starts, self._lengths = pieces(np.load(offsets), sequence_length)
            self._count = len(self._starts)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> npt.NDArray[Any]:
        """The real tokens of a sequence, a view of the file."""
        if self._starts is None or self._lengths is None:
            start, length = index * self.sequence_length, self.sequence_length
        else:
            start, length = int(self._starts[index]), int(self._lengths[index])
        return self._tokens[start : start + length]


def pieces(offsets: npt.NDArray[np.int64], sequence_length: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Starts and lengths of the pieces of at most sequence_length tokens, in order; those of one token left out."""
    sizes = np.diff(offsets)
    counts = -(-sizes // sequence_length)
    document = np.repeat(np.arange(len(sizes)), counts)
    place = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = offsets[document] + place * sequence_length
    lengths = np.minimum(sequence_length, offsets[document + 1] - starts)
    kept = lengths > 1
    return starts[kept].astype(np.int64), lengths[kept].astype(np.int64)


class GlobalOrder:
    """Which sequence stands at each place of an endless order: one shuffled epoch after the other.

    Item `place` depends on the seed and the place alone, so that any rank, worker or resumed run finds it by itself.
    """

    def __init__(self, count: int, seed: int) -> None:
        if count < 1:
            raise ValueError("there are no sequences to put in order")
        self._count = count
        self._seed = seed
        self._epoch = -1
        self._permutation: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def __getitem__(self, place: int) -> int:
        epoch, position = divmod(place, self._count)
        if epoch != self._epoch:
            self._permutation = np.random.default_rng([self._seed, epoch]).permutation(self._count)
            self._epoch = epoch
        return int(self._permutation[position])


def sequence_count(tokens: Path, offsets: Path, sequence_length: int, packing: bool) -> int:
    """How many sequences there are, which is one epoch."""
    return len(Sequences(tokens, offsets, sequence_length, packing))
