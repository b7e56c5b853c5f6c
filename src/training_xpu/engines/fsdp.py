"""FSDP2: `fully_shard` per block and at the root, mixed precision by its policy, torch's fused AdamW."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from training_xpu.blocks import find_blocks
from training_xpu.engines.base import EngineSettings
from training_xpu.engines.ddp import clipped_update, torch_adamw
from training_xpu.engines.model import checkpoint_activations, evaluation_mode


class FsdpTraining:
    """See `TrainingEngine`. Only rank 0 ever holds the whole model; the others build it without storage."""

    name = "fsdp"

    def __init__(
        self,
        build: Callable[[], torch.nn.Module],
        build_empty: Callable[[], torch.nn.Module],
        settings: EngineSettings,
        device: torch.device,
    ) -> None:
        """
        Args:
            build: makes the model with its weights.
            build_empty: makes the same model without weights, on the default device.
        """
        self.settings = settings
        whole: dict[str, Any] = {}
        buffers: dict[str, torch.Tensor] = {}
        if torch.distributed.get_rank() == 0:
            original = build()
            whole = original.state_dict()
            buffers = {name: buffer.to(device) for name, buffer in original.named_buffers()}
            del original
        with torch.device("meta"):
            self.model = build_empty()
        if settings.checkpoint_activations:
            checkpoint_activations(self.model)

        mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
        low = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[settings.dtype]
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
        for group in find_blocks(self.model):
            for block in group.modules:
                fully_shard(block, mesh=mesh, mp_policy=policy)
        self.sharded: Any = fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.model.to_empty(device=device)
        _tie_weights(self.model)  # giving them storage has separated them
        set_model_state_dict(
            self.model, whole, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        )
        _share_buffers(self.model, buffers)
        self.optimizer = torch_adamw(self.model, settings)
        self.scaler = torch.amp.GradScaler(device.type, enabled=settings.dtype == "fp16")

    def forward(self, inputs: dict[str, torch.Tensor]) -> Any:
        return self.model(**inputs)

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        self.sharded.set_requires_gradient_sync(last)
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        torch.autograd.backward(self.scaler.scale(loss / self.settings.gradient_accumulation))

    def update(self, learning_rate: float) -> float | None:
        clipping = self.settings.optimizer.gradient_clipping
        return clipped_update(self.model, self.optimizer, self.scaler, clipping, learning_rate)

    def evaluating(self) -> AbstractContextManager[None]:
        return evaluation_mode(self.model)

    def save_state(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer, "scaler": self.scaler.state_dict()}
        state_dict_saver.save(state, checkpoint_id=folder)

    def load_state(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "scaler": self.scaler.state_dict()}
        state_dict_loader.load(state, checkpoint_id=folder)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.scaler.load_state_dict(state["scaler"])

    def full_state_dict(self) -> dict[str, torch.Tensor] | None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        gathered: dict[str, Any] = get_model_state_dict(self.model, options=options)
        return gathered if torch.distributed.get_rank() == 0 else None


def _tie_weights(model: torch.nn.Module) -> None:
    """Makes the weights one again that the model's config says are one, such as embedding and head."""
    tie = getattr(model, "tie_weights", None)
    if tie is not None:
        tie()


def _share_buffers(model: torch.nn.Module, of_rank_0: dict[str, torch.Tensor]) -> None:
    """Gives every rank the buffers of rank 0: those that are not saved, such as rotary frequencies, were left empty."""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in of_rank_0:
                buffer.copy_(of_rank_0[name])
            torch.distributed.broadcast(buffer, src=0)
