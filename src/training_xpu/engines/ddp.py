"""Plain data parallelism: `DistributedDataParallel`, autocast, torch's fused AdamW."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from training_xpu.engines.base import EngineSettings
from training_xpu.engines.model import autocast, checkpoint_activations, evaluation_mode

STATE_FILE = "state.pt"


class DdpTraining:
    """See `TrainingEngine`."""

    name = "ddp"

    def __init__(self, build: Callable[[], torch.nn.Module], settings: EngineSettings, device: torch.device) -> None:
        self.settings = settings
        self.device = device
        self.model = build().to(device)
        if settings.checkpoint_activations:
            checkpoint_activations(self.model)
        self.wrapped = DistributedDataParallel(
            self.model, device_ids=None if device.type == "cpu" else [device.index], static_graph=False
        )
        self.optimizer = torch_adamw(self.model, settings)
        self.scaler = torch.amp.GradScaler(device.type, enabled=settings.dtype == "fp16")

    def forward(self, inputs: dict[str, torch.Tensor]) -> Any:
        module = self.wrapped if self.wrapped.training else self.model
        with autocast(self.settings.dtype, self.device.type):
            return module(**inputs)

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if last else self.wrapped.no_sync()

    def backward(self, loss: torch.Tensor) -> None:
        torch.autograd.backward(self.scaler.scale(loss / self.settings.gradient_accumulation))

    def update(self, learning_rate: float) -> float | None:
        clipping = self.settings.optimizer.gradient_clipping
        return clipped_update(self.model, self.optimizer, self.scaler, clipping, learning_rate)

    def evaluating(self) -> AbstractContextManager[None]:
        return evaluation_mode(self.wrapped)

    def save_state(self, folder: Path) -> None:
        if torch.distributed.get_rank() == 0:
            state = {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict(),
            }
            torch.save(state, folder / STATE_FILE)

    def load_state(self, folder: Path) -> None:
        state = torch.load(folder / STATE_FILE, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])

    def full_state_dict(self) -> dict[str, torch.Tensor] | None:
        return self.model.state_dict() if torch.distributed.get_rank() == 0 else None


def torch_adamw(model: torch.nn.Module, settings: EngineSettings) -> torch.optim.AdamW:
    """torch's AdamW in its fused form, the default of the HF Trainer too."""
    adam = settings.optimizer
    return torch.optim.AdamW(
        model.parameters(),
        lr=adam.learning_rate,
        betas=(adam.beta1, adam.beta2),
        eps=adam.epsilon,
        weight_decay=adam.weight_decay,
        fused=True,
    )


def clipped_update(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    clipping: float,
    learning_rate: float,
) -> float:
    """Clips, updates and clears the gradients; returns their global norm before clipping."""
    scaler.unscale_(optimizer)
    norm = clip(model, clipping)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return float(norm)


def clip(model: torch.nn.Module, largest: float) -> torch.Tensor:
    """Clips the gradients' global L2 norm and returns what it was; 0 only measures it."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), largest if largest > 0 else float("inf"))
    full = getattr(norm, "full_tensor", None)
    return full() if full is not None else norm
