"""What all ranks do in the same step, agreed through the store that they met through: no collective, nobody waits."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

AHEAD = 2  # steps: a rank is less than one step ahead of another, for gradients meet in each
_models = itertools.count()  # that were taken in hand, in the order in which every rank trains them


def store_of_job() -> tuple[Store, int, int] | None:
    """A store for the next model, this rank and the number of ranks; None where there is no other rank."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    met: Any = dist.distributed_c10d._get_default_store()
    return PrefixStore(f"training_xpu/compile/{next(_models)}", met), dist.get_rank(), dist.get_world_size()


class Question:
    """Every rank, or any of them, says something once; rank 0 makes an answer of it, which holds from one step on.

    One object per question and rank; alone, the answer holds at once.
    """

    def __init__(
        self, job: tuple[Store, int, int] | None, name: str, decide: Callable[[list[Any]], Any], of_all: bool
    ) -> None:
        """
        Args:
            decide: makes the answer from what was said.
            of_all: the answer waits for all ranks; else the first that says something is enough.
        """
        self._job = job
        self._name = name
        self._decide = decide
        self._of_all = of_all
        self._said: Any = None
        self.has_said = False
        self._answered: tuple[int, Any] | None = None  # from which step on, what

    def say(self, value: Any) -> None:
        """Once; JSON."""
        if self.has_said:
            return
        self.has_said, self._said = True, value
        if self._job is not None:
            store, rank, _ = self._job
            store.set(f"{self._name}/{rank}", json.dumps(value))

    def answer(self, step: int) -> tuple[Any] | None:
        """The answer in a tuple from the step on in which it holds on all ranks; None before. Once per step."""
        if self._job is None:
            return (self._decide([self._said]),) if self.has_said else None
        if self._answered is None:
            self._answered = self._look(step)
        if self._answered is not None and step >= self._answered[0]:
            return (self._answered[1],)
        return None

    def _look(self, step: int) -> tuple[int, Any] | None:
        assert self._job is not None
        store, rank, size = self._job
        key = f"{self._name}/answer"
        if rank == 0 and not store.check([key]):
            there = [r for r in range(size) if store.check([f"{self._name}/{r}"])]
            if there and (len(there) == size or not self._of_all):
                said = [json.loads(store.get(f"{self._name}/{r}")) for r in there]
                store.set(key, json.dumps([step + AHEAD, self._decide(said)]))
        if not store.check([key]):
            return None
        begin, answer = json.loads(store.get(key))
        return int(begin), answer
