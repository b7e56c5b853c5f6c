"""A model's parameters as memory sees them: how many, of which size, trained or not, and in which block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Weight:
    """One parameter, whole."""

    shape: tuple[int, ...]
    element_bytes: int
    trained: bool

    @property
    def numel(self) -> int:
        total = 1
        for size in self.shape:
            total *= size
        return total

    @property
    def nbytes(self) -> int:
        return self.numel * self.element_bytes


@dataclass(frozen=True)
class Weights:
    """All parameters of a model, each once, in the order of `model.parameters()`."""

    all: tuple[Weight, ...]
    blocks: tuple[tuple[int, ...], ...]  # for each block in the order of execution: indices of its parameters
    buffer_bytes: int
    inputs_bytes: int = 0
    # What engines have worked out about them, by their own keys: a plan simulates hundreds of steps.
    worked_out: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def trained(self) -> list[int]:
        return [i for i, weight in enumerate(self.all) if weight.trained]

    @property
    def frozen(self) -> list[int]:
        return [i for i, weight in enumerate(self.all) if not weight.trained]

    @property
    def elsewhere(self) -> list[int]:
        """Indices of the parameters that are in no block."""
        inside = {i for block in self.blocks for i in block}
        return [i for i in range(len(self.all)) if i not in inside]


def weights_of(
    model: torch.nn.Module, blocks: Sequence[torch.nn.Module], element_bytes: int | None, inputs_bytes: int
) -> Weights:
    """Reads a model's parameters; those that ZeRO-3 has partitioned count with their full shape.

    Args:
        blocks: in the order of execution.
        element_bytes: of a floating-point parameter under the engine; None: as it is.
        inputs_bytes: of the inputs of all micro batches of a step.
    """
    index: dict[int, int] = {}
    found: list[Weight] = []
    for parameter in model.parameters():
        index[id(parameter)] = len(found)
        shape = tuple(int(n) for n in getattr(parameter, "ds_shape", parameter.shape))
        size = parameter.element_size()
        if element_bytes is not None and parameter.is_floating_point():
            size = element_bytes
        found.append(Weight(shape, size, parameter.requires_grad))
    return Weights(
        tuple(found),
        tuple(tuple(index[id(p)] for p in block.parameters()) for block in blocks),
        sum(b.numel() * b.element_size() for b in model.buffers()),
        inputs_bytes,
    )
