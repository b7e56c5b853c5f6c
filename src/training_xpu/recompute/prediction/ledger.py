"""Adds up what is alive during a simulated training step, by part, and remembers the highest point."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from training_xpu.recompute.prediction.live_bytes import Stretch

MODEL_STATES = "model states"  # weights, masters, gradients, optimizer states, buffers, inputs
COMMUNICATION = "communication buffers"  # gathered weights, buckets, what collectives work on
BLOCK_ACTIVATIONS = "block activations"  # kept by embedding and blocks for their backward
HEAD_AND_LOSS = "head and loss"
TRANSIENTS = "transients"  # of the block that runs, or of the optimizer
PARTS = (MODEL_STATES, COMMUNICATION, BLOCK_ACTIVATIONS, HEAD_AND_LOSS, TRANSIENTS)


@dataclass(frozen=True)
class Peak:
    """The highest point of a step, in bytes."""

    total: int
    phase: str
    parts: dict[str, int]


class Ledger:
    """Bytes alive now and at most so far."""

    def __init__(self) -> None:
        self.live = 0
        self.states = 0
        self.communication = 0
        self.blocks = 0
        self.head = 0
        self.phase = ""
        self.in_head = False
        self._peak = (0, "", 0, 0, 0, 0, False)

    def run(self, stretch: Stretch) -> None:
        """Activity of the model itself."""
        high = self.live + stretch.peak
        if high > self._peak[0]:
            self._note(high)
        self.live += stretch.net

    def keep(self, size: int) -> None:
        """Model states come, or go when negative."""
        self.live += size
        self.states += size
        if self.live > self._peak[0]:
            self._note(self.live)

    def take_over(self, size: int) -> None:
        """Model states that were alive already: a gradient that the model's own activity lets go of right after."""
        self.live += size
        self.states += size

    def communicate(self, size: int) -> None:
        """Communication buffers come, or go when negative."""
        self.live += size
        self.communication += size
        if self.live > self._peak[0]:
            self._note(self.live)

    def briefly(self, size: int) -> None:
        """Something that comes and goes at once."""
        if self.live + size > self._peak[0]:
            self._note(self.live + size)

    def briefly_communicate(self, size: int) -> None:
        """A communication buffer that comes and goes at once."""
        self.communicate(size)
        self.communicate(-size)

    @contextmanager
    def segment(self, phase: str, *, head: bool = False, forward: bool = False) -> Iterator[None]:
        """Around a segment; what it leaves behind or lets go is an activation.

        Args:
            head: of the head and loss, not of a block.
            forward: what it leaves is kept for the backward.
        """
        self.phase, self.in_head = phase, head
        before = self.live - self.states - self.communication
        yield
        change = self.live - self.states - self.communication - before
        if head:
            self.head += change
        else:
            self.blocks += change
        self.in_head = False

    def settle(self) -> None:
        """A backward has ended: no activation is left."""
        self.live = self.states + self.communication
        self.blocks = self.head = 0

    def _note(self, high: int) -> None:
        self._peak = (high, self.phase, self.states, self.communication, self.blocks, self.head, self.in_head)

    @property
    def peak(self) -> Peak:
        """The highest point so far; its parts add up to it."""
        high, phase, states, communication, blocks, head, in_head = self._peak
        rest = high - states - communication - blocks - head
        if in_head:
            head, rest = head + rest, 0
        # Each may let go what the other has left, such as the hidden states between them.
        if blocks < 0 or head < 0:
            blocks, head = (0, blocks + head) if blocks < 0 else (blocks + head, 0)
        parts = (states, communication, blocks, head, rest)
        return Peak(high, phase, dict(zip(PARTS, parts, strict=True)))
