"""Builds the HF model that an engine wraps: the same weights on every engine and every rank for the same seed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


def hf_config(config: dict[str, Any]) -> Any:
    """The transformers config object of a config dict; `model_type` names its class."""
    from transformers import AutoConfig

    settings = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    return AutoConfig.for_model(config["model_type"], **settings)


def build_model(config: dict[str, Any], weights: Path | None, seed: int) -> torch.nn.Module:
    """A causal LM in fp32 on the current default device, with random weights from the seed or those of a checkpoint.

    Args:
        config: HF config as a dict.
        weights: folder of a local HF checkpoint, or None.
        seed: of torch's generators; set here, so that what ran before does not matter.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    auto: Any = AutoModelForCausalLM
    if weights is not None:
        model: torch.nn.Module = auto.from_pretrained(weights, dtype=torch.float32, local_files_only=True)
    else:
        model = auto.from_config(hf_config(config), dtype=torch.float32)
    model.config.use_cache = False  # type: ignore[union-attr]
    model.train()
    return model


@contextmanager
def evaluation_mode(module: torch.nn.Module) -> Iterator[None]:
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train(was_training)


def checkpoint_activations(model: torch.nn.Module) -> None:
    """Switches on the model's own activation checkpointing, under the newer or the older name of the method."""
    switch = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    switch()  # type: ignore[operator]


def autocast(dtype: str, device_type: str) -> torch.autocast:
    """The autocast context of a training dtype; does nothing for fp32."""
    low = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.bfloat16}[dtype]
    return torch.autocast(device_type, dtype=low, enabled=dtype != "fp32")


def compute_device(local_rank: int) -> torch.device:
    """The accelerator of this rank, or the CPU."""
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        torch.accelerator.set_device_index(local_rank)
        return torch.device(kind.type, local_rank)
    return torch.device("cpu")
