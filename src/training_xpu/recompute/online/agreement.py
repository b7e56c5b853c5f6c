"""One plan for all ranks, where different ones would leave them waiting for each other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def agree_on_most(levels: Sequence[int], device: torch.device) -> list[int]:
    """The element-wise maximum over all ranks; every rank must call it.

    Args:
        levels: one number per block, larger where less memory is kept. So the result is within every rank's budget.
    """
    shared = torch.tensor(levels, dtype=torch.int32, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return [int(level) for level in shared.tolist()]
