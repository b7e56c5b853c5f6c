"""One decision for all ranks, where different ones would leave them waiting for each other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def must_agree(model: torch.nn.Module) -> bool:
    """Whether ranks that recompute different blocks would deadlock: under ZeRO-3, whose gathers follow the blocks.

    A recomputed block gathers its weights once more. DDP, ZeRO 1 and 2, and FSDP2 exchange the same whatever is
    recomputed.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return False
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def agree_on_most(levels: Sequence[int], device: torch.device) -> list[int]:
    """The element-wise maximum over all ranks; every rank must call it.

    Args:
        levels: one number per block, larger where less memory is kept. So the result is within every rank's budget.
    """
    shared = torch.tensor(levels, dtype=torch.int32, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return [int(level) for level in shared.tolist()]
