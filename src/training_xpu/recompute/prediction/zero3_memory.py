"""Memory of DeepSpeed's ZeRO stage 3 (DeepSpeed 0.19, runtime/zero).

Weights, masters, gradients and optimizer states are all partitioned, parameter by parameter. Parameters are gathered as
modules need them, and ahead of that; files named below are in that folder.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

import torch

from training_xpu.recompute.prediction.engine_memory import EngineMemory
from training_xpu.recompute.prediction.setting import TrainingSetting
from training_xpu.recompute.prediction.weights import Weights
from training_xpu.recompute.prediction.zero3_linear import use_zero3_linear
from training_xpu.recompute.prediction.zero12_memory import untouched_of_buckets


class Zero3Memory(EngineMemory):
    """Follows stage3.py for gradients and the update, and partitioned_param_coordinator.py for weights."""

    watches_modules = True

    @classmethod
    def adapt(cls, model: torch.nn.Module, setting: TrainingSetting) -> None:
        if setting.memory_efficient_linear:
            use_zero3_linear(model)

    @classmethod
    def untouched_bytes(cls, weights: Weights, setting: TrainingSetting) -> int:
        return untouched_of_buckets(weights, setting, 1)

    def set_up(self) -> None:
        weights, setting = self.weights, self.setting
        self.width = setting.element_bytes
        world = setting.world_size
        self.parts = [-(-w.numel // world) for w in weights.all]
        self.trained_part = sum(self.parts[i] for i in weights.trained)
        self.ledger.keep(self.width * sum(self.parts))
        self.ledger.keep(4 * self.trained_part)  # masters, of fp32 weights too
        self.groups = self._sub_groups()
        self.optimizer = self.optimizer_of([(sum(self.parts[i] for i in group),) for group in self.groups])
        self.ledger.keep(self.optimizer.states)
        self.ledger.keep(self.width * self.trained_part)  # gradients of this rank's part, always there
        if setting.contiguous_gradients:
            self.ledger.communicate(self.width * setting.reduce_bucket_elements)
        self.persistent = {i for i, w in enumerate(weights.all) if w.numel <= setting.param_persistence_threshold}
        self.waiting: list[int] = []
        self.filled = 0
        self.separate: dict[int, int] = {}
        self.whole: dict[int, int] = {}  # gathered parameter -> bytes
        self.flying: dict[int, _Gather] = {}
        self.users: dict[int, set[int]] = {}
        self._gather_persistent()

    def _sub_groups(self) -> list[list[int]]:
        """stage3.py, `_create_fp16_sub_groups`"""
        groups: list[list[int]] = [[]]
        size = 0
        for index in self.weights.trained:
            groups[-1].append(index)
            size += self.parts[index]
            if size >= self.setting.sub_group_elements:
                groups.append([])
                size = 0
        return [g for g in groups if g] or [[]]

    def _padded(self, index: int) -> int:
        return self.parts[index] * self.setting.world_size * self.width if self.setting.world_size > 1 else 0

    def _gather_persistent(self) -> None:
        for index in sorted(self.persistent):
            self.whole[index] = self._padded(index)
            self.ledger.communicate(self.whole[index])
            self.gloo_copies(self.whole[index])

    # Weights: partitioned_param_coordinator.py

    def expect(self, order: Sequence[tuple[int, ...]]) -> None:
        """The parameters of each module in the order of fetches, as the coordinator has recorded it in steps before."""
        self.order = [(i, step) for step, parameters in enumerate(order) for i in parameters]
        self.traversed = [0]
        self.uses: dict[int, list[int]] = {}
        for step, parameters in enumerate(order):
            self.traversed.append(self.traversed[-1] + sum(self.weights.all[i].numel for i in parameters))
            for index in parameters:
                self.uses.setdefault(index, []).append(step)

    def start_micro_batch(self, first: bool, last: bool) -> None:
        """`reset_step`"""
        super().start_micro_batch(first, last)
        for index in list(self.flying):
            self._wait(index)
        self.step = 0
        self.available = 0
        self.fetched_for: dict[int, int] = {}
        self.queue = deque(self.order)
        self.entered_backward: dict[int, tuple[int, ...]] = {}

    def module_event(self, kind: str, module: int, parameters: tuple[int, ...]) -> None:
        if kind in ("enter", "enter-backward"):
            if kind == "enter-backward":
                self.entered_backward[module] = parameters
            self._fetch(module, parameters)
        else:
            self._release(module, parameters)
            if kind == "leave-backward":
                self.entered_backward.pop(module, None)

    def _fetch(self, module: int, parameters: tuple[int, ...]) -> None:
        """`fetch_sub_module`"""
        self._gather([i for i in parameters if i not in self.whole and i not in self.flying])
        for index in parameters:
            self.users.setdefault(index, set()).add(module)
            self._wait(index)
        self._look_ahead(parameters)
        self.step += 1

    def _look_ahead(self, parameters: tuple[int, ...]) -> None:
        due = {i for i in parameters if self.fetched_for.get(i, -1) < self.step}
        dropped: set[int] = set()
        while self.queue and len(dropped) < len(due):
            index, step = self.queue.popleft()
            self.fetched_for[index] = step
            dropped.add(index)
        most = min(self.setting.max_live_parameters - self.available, self.setting.prefetch_bucket_elements)
        ahead: list[int] = []
        elements = 0
        while self.queue and elements < most:
            index, step = self.queue.popleft()
            wanted = index not in self.whole and index not in self.flying and index not in ahead
            self.fetched_for[index] = max(self.fetched_for.get(index, -1), step)
            if wanted:
                ahead.append(index)
                elements += self.weights.all[index].numel
        self._gather(ahead)

    def _gather(self, wanted: list[int]) -> None:
        """partition_parameters.py, `all_gather_coalesced`: one alone in place, several through a flat buffer."""
        if not wanted:
            return
        self.available += sum(self.weights.all[i].numel for i in wanted)
        size = sum(self._padded(i) for i in wanted)
        self.ledger.communicate(size)
        self.gloo_copies(size)
        gather = _Gather(sorted(wanted), size)
        for index in wanted:
            self.flying[index] = gather

    def _wait(self, index: int) -> None:
        """The first wait copies all of a flat buffer out of it; it goes when the last of its parameters is used."""
        gather = self.flying.pop(index, None)
        if gather is None:
            return
        if not gather.copied:
            gather.copied = True
            for other in gather.parameters:
                if len(gather.parameters) > 1:
                    whole = self.weights.all[other].numel * self.width if self.setting.world_size > 1 else 0
                    self.ledger.communicate(whole)
                    self.whole[other] = whole
                else:
                    self.whole[other] = gather.size
        gather.left -= 1
        if gather.left == 0 and len(gather.parameters) > 1:
            self.ledger.communicate(-gather.size)

    def _release(self, module: int, parameters: tuple[int, ...]) -> None:
        """`release_sub_module`, `__params_to_release`: what is needed again soon stays."""
        for index in parameters:
            self.users.get(index, set()).discard(module)
            if index in self.persistent or self.fetched_for.get(index, -1) > self.step:
                continue
            uses = self.uses.get(index, [])
            following = bisect_left(uses, self.step)
            if following < len(uses):
                distance = self.traversed[uses[following]] - self.traversed[min(self.step, len(self.traversed) - 1)]
                if distance < self.setting.max_reuse_distance:
                    continue
            self._partition(index)

    def _partition(self, index: int) -> None:
        if index in self.whole and not self.users.get(index):
            self.ledger.communicate(-self.whole.pop(index))
            self.available -= self.weights.all[index].numel

    # Gradients and update: stage3.py

    def gradient(self, index: int) -> None:
        """`reduce_independent_p_g_buckets_and_remove_grads`"""
        elements = self.weights.all[index].numel
        if self.filled and self.filled + elements > self.setting.reduce_bucket_elements:
            self._reduce()
        if not (self.setting.contiguous_gradients and self.filled + elements <= self.setting.reduce_bucket_elements):
            self.separate[index] = elements * self.width
            self.ledger.take_over(elements * self.width)
        self.waiting.append(index)
        self.filled += elements

    def _reduce(self) -> None:
        """`__avg_scatter_grads`; ../comm/coalesced_collectives.py, `reduce_scatter_coalesced`"""
        if not self.waiting:
            return
        world = self.setting.world_size
        flat = sum(self.parts[i] for i in self.waiting) * world * self.width
        in_place = len(self.waiting) == 1 and self.weights.all[self.waiting[0]].numel % world == 0
        self.ledger.communicate(0 if in_place else flat)
        self.gloo_copies(flat)
        self.ledger.communicate(0 if in_place else -flat)
        self.ledger.keep(-sum(self.separate.values()))
        self.separate = {}
        self.waiting = []
        self.filled = 0

    def end_backward(self) -> None:
        self._reduce()
        for module, parameters in reversed(list(self.entered_backward.items())):
            for index in parameters:
                self.users.get(index, set()).discard(module)
                if index not in self.persistent:
                    self._partition(index)

    def update(self) -> None:
        for index in list(self.flying):
            self._wait(index)
        self.users = {}
        self.ledger.communicate(-sum(self.whole.values()))
        self.whole = {}
        self.ledger.briefly(8 * max((self.parts[i] for i in self.weights.trained), default=0))
        for group in self.groups:
            elements = sum(self.parts[i] for i in group)
            copied = self.width * elements if len(group) > 1 or self.width == 2 else 0
            self.ledger.keep(copied)
            if self.width == 2:
                self.ledger.keep(4 * elements)
                self.ledger.keep(-copied)
                copied = 4 * elements
            self.ledger.briefly(self.optimizer_of([(elements,)]).transient)
            self.ledger.keep(-copied)
        self._gather_persistent()


class _Gather:
    """One collective of parameters that are on their way."""

    def __init__(self, parameters: list[int], size: int) -> None:
        self.parameters = parameters
        self.size = size
        self.left = len(parameters)
        self.copied = False
