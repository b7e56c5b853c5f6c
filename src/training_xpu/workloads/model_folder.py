"""Saves the trained model as a local HF checkpoint that `from_pretrained` loads."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from training_xpu.workloads.saving import saving


def save_model(weights: dict[str, torch.Tensor] | None, model: torch.nn.Module, tokenizer: Path, folder: Path) -> None:
    """Writes config, weights and tokenizer on the rank that has the weights; the others return at once.

    Args:
        weights: full state dict on rank 0, None elsewhere.
        model: the HF model inside the engine's wrappers.
        tokenizer: folder of the tokenizer the data was made with.
        folder: replaced as a whole once everything is written.
    """
    if weights is None:
        return
    staging = folder.with_name(f".{folder.name}.partial")
    with saving("the trained model", folder.parent, staging, "or leave the model out with --no-save-model."):
        shutil.rmtree(staging, ignore_errors=True)
        hf_model: Any = model
        hf_model.save_pretrained(staging, state_dict=weights)
        for file in tokenizer.iterdir():
            if file.is_file():
                shutil.copy2(file, staging / file.name)
        if folder.exists():
            shutil.rmtree(folder)
        staging.rename(folder)
