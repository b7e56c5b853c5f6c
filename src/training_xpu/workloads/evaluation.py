"""Held-out loss, the same way for every engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from training_xpu.workloads.data.batches import Batch


def evaluate(
    forward: Callable[[dict[str, torch.Tensor]], Any], batches: Iterable[Batch], device: torch.device
) -> float:
    """Mean loss over all label tokens of all ranks, natural log.

    Args:
        forward: runs the model on the inputs of one batch; its output has `loss`, the mean over the batch's labels.
        batches: this rank's; every rank has the same number.
    """
    sums = torch.zeros(2, dtype=torch.float64)
    for batch in batches:
        output = forward(batch.to(device).inputs())
        if batch.loss_tokens:
            sums += torch.tensor(
                [float(output.loss) * batch.loss_tokens, float(batch.loss_tokens)], dtype=torch.float64
            )
    if dist.get_world_size() > 1:
        shared = sums.to(device)
        dist.all_reduce(shared)
        sums = shared.cpu()
    return float(sums[0] / sums[1]) if sums[1] else float("nan")
