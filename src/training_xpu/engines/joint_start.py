"""A feature begins on all ranks or on none, where ranks that differ would wait for each other for ever."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from training_xpu.errors import UserError

START_TIMEOUT_S = 120.0  # for the slowest rank's way to its first training forward
_YES = "yes"
_models: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)  # asked about, in every rank's order


class NothingToDo(Exception):
    """This model cannot be helped; the message says why."""


class Closeable(Protocol):
    def close(self) -> None:
        """Takes everything back."""


ControllerT = TypeVar("ControllerT", bound=Closeable)


def start_together(
    feature: str, variable: str, root: torch.nn.Module, make: Callable[[], ControllerT]
) -> ControllerT | str:
    """What `make` gives, or why the feature steps aside; under ZeRO-3 the same kind of answer on all ranks.

    Args:
        variable: that switches the feature.
        root: the model with its wrappers, about to run its first training forward.
        make: takes the model in hand; may raise anything.
    """
    made, reason = None, None
    try:
        made = make()
    except NothingToDo as nothing:
        reason = str(nothing)
    except UserError as error:
        reason = f"{error.problem}. {error.remedy}"
    except Exception as error:  # the other ranks must hear of it, whatever it is
        reason = f"{type(error).__name__}: {error}"
    if must_agree(root):
        try:
            reason = why_not_all_start(feature, variable, reason)
        except Exception as error:
            reason = f"the ranks could not tell each other that they can begin: {type(error).__name__}: {error}"
    if reason is None and made is not None:
        return made
    if made is not None:
        made.close()
    return reason or "it could not begin"


def must_agree(model: torch.nn.Module) -> bool:
    """Whether ranks that treat their blocks differently would deadlock: under ZeRO-3, whose gathers follow the blocks.

    A recomputed block gathers its weights once more, and a leaf gathers them at once. DDP, ZeRO 1 and 2, and FSDP2
    exchange the same whatever is recomputed or compiled.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return False
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def why_not_all_start(
    feature: str, variable: str, reason: str | None, timeout_s: float = START_TIMEOUT_S
) -> str | None:
    """None where every rank can begin; else the same reason on all ranks.

    A collective would wait for ever for a rank that does not know of the feature, such as one whose environment
    differs. So the ranks write to the store that they met through, and whoever waits too long ends it for all.

    Args:
        variable: that switches the feature.
        reason: why this rank cannot; None where it can.
    """
    met: Any = dist.distributed_c10d._get_default_store()
    store = PrefixStore(f"training_xpu/{feature}/{next(_models[feature])}", met)
    return decide(store, dist.get_rank(), dist.get_world_size(), reason, timeout_s, variable)


def decide(store: Store, rank: int, world_size: int, reason: str | None, timeout_s: float, variable: str) -> str | None:
    """As `why_not_all_start`, of the ranks that meet at a store: the first verdict that reaches it holds for all."""
    store.set(str(rank), reason or _YES)
    verdict = _YES
    for other in range(world_size):
        try:
            store.wait([str(other)], timedelta(seconds=timeout_s))
            said = store.get(str(other)).decode()
        except RuntimeError:
            said = f"not heard of within {timeout_s:.0f} s; is {variable} set on all ranks alike?"
        if said != _YES:
            verdict = f"rank {other}: {said}"
            break
    decided = store.compare_set("verdict", "", verdict).decode()
    return None if decided == _YES else decided
