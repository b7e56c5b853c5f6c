"""What the training loop asks of an engine; each adapter file answers in its engine's own, documented way."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class AdamWSettings:
    learning_rate: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    gradient_clipping: float  # largest global L2 norm; 0: no clipping


@dataclass(frozen=True)
class EngineSettings:
    """What an engine needs to know; `dtype` is bf16, fp16 or fp32."""

    dtype: str
    micro_batch: int
    gradient_accumulation: int
    zero_stage: int
    optimizer: AdamWSettings
    checkpoint_activations: bool = False


class TrainingEngine(Protocol):
    """One model under one engine, on one rank.

    A step is `gradient_accumulation` times `forward` and `backward` inside `micro_batch`, then `update`. A loss given
    to `backward` is the mean over a micro batch, or a sum divided so that averaging over micro batches and ranks gives
    the global mean.
    """

    name: str
    model: torch.nn.Module  # the HF model inside all wrappers

    def forward(self, inputs: dict[str, torch.Tensor]) -> Any:
        """Runs the wrapped model in training or evaluation mode, autocast as the engine does it; returns its output."""
        ...

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Around one forward and its backward; ranks exchange gradients in the last micro batch of a step only."""
        ...

    def backward(self, loss: torch.Tensor) -> None: ...

    def update(self, learning_rate: float) -> float | None:
        """Clips, updates the weights and clears the gradients; returns the gradients' global norm before clipping."""
        ...

    def evaluating(self) -> AbstractContextManager[None]:
        """Evaluation mode without gradients."""
        ...

    def save_state(self, folder: Path) -> None:
        """Writes what `load_state` needs into an existing, empty folder that all ranks share; all ranks call it."""
        ...

    def load_state(self, folder: Path) -> None: ...

    def full_state_dict(self) -> dict[str, torch.Tensor] | None:
        """The whole model's weights on rank 0, None on the others; all ranks call it."""
        ...
