"""One decision for all ranks, where different ones would leave them waiting for each other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store


def must_agree(model: torch.nn.Module) -> bool:
    """Whether ranks that recompute different blocks would deadlock: under ZeRO-3, whose gathers follow the blocks.

    A recomputed block gathers its weights once more. DDP, ZeRO 1 and 2, and FSDP2 exchange the same whatever is
    recomputed.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return False
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


START_TIMEOUT_S = 120.0  # for the slowest rank's way to its first training forward
_YES = "yes"
_models = itertools.count()  # that have been asked about, in the order in which every rank trains them


def why_not_all_start(reason: str | None, timeout_s: float = START_TIMEOUT_S) -> str | None:
    """None where every rank can begin; else the same reason on all ranks.

    A collective would wait for ever for a rank that does not know of the feature, such as one whose environment
    differs. So the ranks write to the store that they met through, and whoever waits too long ends it for all.

    Args:
        reason: why this rank cannot; None where it can.
    """
    met: Any = dist.distributed_c10d._get_default_store()
    store = PrefixStore(f"training_xpu/recompute/{next(_models)}", met)
    return decide(store, dist.get_rank(), dist.get_world_size(), reason, timeout_s)


def decide(store: Store, rank: int, world_size: int, reason: str | None, timeout_s: float) -> str | None:
    """As `why_not_all_start`, of the ranks that meet at a store: the first verdict that reaches it holds for all."""
    store.set(str(rank), reason or _YES)
    verdict = _YES
    for other in range(world_size):
        try:
            store.wait([str(other)], timedelta(seconds=timeout_s))
            said = store.get(str(other)).decode()
        except RuntimeError:
            said = f"not heard of within {timeout_s:.0f} s; is CHECKPOINT_OPTIMIZATION set on all ranks alike?"
        if said != _YES:
            verdict = f"rank {other}: {said}"
            break
    decided = store.compare_set("verdict", "", verdict).decode()
    return None if decided == _YES else decided


def agree_on_most(levels: Sequence[int], device: torch.device) -> list[int]:
    """The element-wise maximum over all ranks; every rank must call it.

    Args:
        levels: one number per block, larger where less memory is kept. So the result is within every rank's budget.
    """
    shared = torch.tensor(levels, dtype=torch.int32, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return [int(level) for level in shared.tolist()]
