"""What a training engine keeps and moves during a step, as a simulation: the interface, and engines that shard nothing.

Each engine has a class that hears of the same points as the real engine's hooks do, and books on a ledger what the real
one allocates and frees there. The formulas name the file they were read from.
"""

from __future__ import annotations

import torch

from training_xpu.recompute.prediction.ledger import Ledger
from training_xpu.recompute.prediction.optimizers import OptimizerBytes, optimizer_bytes
from training_xpu.recompute.prediction.setting import TrainingSetting
from training_xpu.recompute.prediction.weights import Weights


class EngineMemory:
    """Plain PyTorch: fp32 or other weights as they are, gradients beside them until the update has been made."""

    watches_modules = False

    def __init__(self, weights: Weights, setting: TrainingSetting, ledger: Ledger, rank: int = 0) -> None:
        self.weights = weights
        self.rank = rank
        self.setting = setting
        self.ledger = ledger
        self.first = self.last = True  # of the micro batches of a step
        self.gradients = 0  # bytes of gradients that wait for the update
        ledger.keep(weights.buffer_bytes + weights.inputs_bytes)
        self.set_up()

    @classmethod
    def ranks(cls, weights: Weights, setting: TrainingSetting) -> set[int]:
        """Ranks one of which needs most."""
        return {0}

    @classmethod
    def adapt(cls, model: torch.nn.Module, setting: TrainingSetting) -> None:
        """Changes a copy of the model as the engine changes the model."""

    @classmethod
    def untouched_bytes(cls, weights: Weights, setting: TrainingSetting) -> int:
        """Live bytes that nothing is ever written to: on CPUs they do not become resident."""
        return 0

    def set_up(self) -> None:
        """Books what is alive between two steps."""
        self.ledger.keep(sum(w.nbytes for w in self.weights.all))
        self.optimizer = self.optimizer_of([self.weights.all[i].shape for i in self.weights.trained])
        self.ledger.keep(self.optimizer.states)

    def optimizer_of(self, shapes: list[tuple[int, ...]]) -> OptimizerBytes:
        return optimizer_bytes(self.setting.optimizer, shapes, self.setting.engine, self.setting.device_type)

    def gloo_copies(self, size: int) -> None:
        """Gloo works on a copy: of what an all-gather makes, of what a reduce-scatter takes.

        torch 2.13, csrc/distributed/c10d/ProcessGroupGloo.cpp; NCCL needs none.
        """
        if self.setting.device_type == "cpu" and self.setting.world_size > 1:
            self.ledger.briefly_communicate(size)

    def start_micro_batch(self, first: bool, last: bool) -> None:
        self.first, self.last = first, last

    def before_block(self, index: int) -> None: ...

    def after_block(self, index: int) -> None: ...

    def end_forward(self) -> None: ...

    def before_block_backward(self, index: int) -> None: ...

    def after_block_backward(self, index: int) -> None: ...

    def module_event(self, kind: str, module: int, parameters: tuple[int, ...]) -> None:
        """Only for engines that watch modules; `module` tells it from all others of the model."""

    def gradient(self, index: int) -> None:
        """A parameter's gradient is complete; the model's own activity lets go of it right after."""
        if self.first:
            self.ledger.take_over(self.weights.all[index].nbytes)
            self.gradients += self.weights.all[index].nbytes

    def end_backward(self) -> None: ...

    def update(self) -> None:
        """Clips, updates and clears the gradients."""
        self.ledger.briefly(self.optimizer.transient)
        self.free_gradients()

    def free_gradients(self) -> None:
        self.ledger.keep(-self.gradients)
        self.gradients = 0


class DdpMemory(EngineMemory):
    """DistributedDataParallel: buckets as large as all gradients (torch 2.13, csrc/distributed/c10d/reducer.cpp).

    They live from the constructor on. With `gradient_as_bucket_view` the gradients are views of them.
    """

    def set_up(self) -> None:
        super().set_up()
        self.ledger.communicate(sum(self.weights.all[i].nbytes for i in self.weights.trained))

    def gradient(self, index: int) -> None:
        if not self.setting.gradient_as_bucket_view:
            super().gradient(index)


class Zero0Memory(EngineMemory):
    """DeepSpeed without ZeRO; bf16 and fp16 with fp32 masters (DeepSpeed 0.19, runtime/fp16/fused_optimizer.py)."""

    reduced_at_once = 500_000_000  # runtime/engine.py, MEMORY_OPT_ALLREDUCE_SIZE

    def set_up(self) -> None:
        weights = self.weights
        self.low = self.setting.element_bytes == 2
        self.elements = sum(weights.all[i].numel for i in weights.trained)
        self.ledger.keep(sum(w.nbytes for w in weights.all))
        if self.low:
            self.ledger.keep(4 * self.elements)
            self.optimizer = self.optimizer_of([(self.elements,)])
        else:
            self.optimizer = self.optimizer_of([weights.all[i].shape for i in weights.trained])
        self.ledger.keep(self.optimizer.states)

    def end_backward(self) -> None:
        """Gradients are flattened and reduced together (runtime/engine.py, `allreduce_no_retain`)."""
        if not self.last:
            return
        together = count = 0
        for index in self.weights.trained:
            together += self.weights.all[index].numel
            count += 1
            if together > self.reduced_at_once:
                self._reduce(together, count)
                together = count = 0
        self._reduce(together, count)

    def _reduce(self, elements: int, tensors: int) -> None:
        if tensors > 1:
            self.ledger.briefly_communicate(elements * self.setting.element_bytes)

    def update(self) -> None:
        if not self.low:
            super().update()
            return
        # Every gradient in fp32, then all of them flat, while the first are still there.
        self.ledger.keep(4 * self.elements)
        self.ledger.keep(4 * self.elements)
        self.ledger.keep(-4 * self.elements)
        self.free_gradients()
        self.ledger.briefly(self.optimizer.transient)
        self.ledger.keep(-4 * self.elements)
