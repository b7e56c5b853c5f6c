"""Live tensor bytes of a running job's step, stretch by stretch: where its peak is and what each block contributes."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._pytree import tree_iter

from training_xpu.instances import Hook
from training_xpu.recompute.online.amounts import Amount, BatchShape, classify
from training_xpu.recompute.switching.policies import is_kept
from training_xpu.recompute.switching.runner import in_backward

Phase = Literal["before", "forward", "between", "after", "backward", "recompute", "rest"]


@dataclass(frozen=True)
class Stretch:
    """A part of a micro batch; amounts are of everything alive."""

    phase: Phase
    block: int | None  # for forward, recompute and backward (what follows the recompute, or all of it)
    start: Amount
    peak: Amount
    end: Amount
    seconds: float
    selective: Amount  # results of the operations that the selective mode keeps
    selective_seconds: float  # and the time of these operations
    operations: int = 0  # that were dispatched, each of which took longer for being counted


@dataclass
class MicroBatch:
    """One forward and its backward, as they ran."""

    shape: BatchShape
    stretches: list[Stretch] = field(default_factory=list)
    outputs: dict[int, Amount] = field(default_factory=dict)  # block -> what its result takes
    stopped_early: set[int] = field(default_factory=set)  # blocks whose recompute ended before it made the result


@dataclass(frozen=True)
class MeasuredStep:
    """One optimizer step, all of its micro batches; what comes after the last backward is the last one's "rest"."""

    micro_batches: tuple[MicroBatch, ...]

    @property
    def peak(self) -> int:
        return max(s.peak.total for m in self.micro_batches for s in m.stretches)

    @property
    def after_forward(self) -> int:
        """The most that was alive when the root's forward had returned; 0 where that was not seen."""
        stretches = (s for m in self.micro_batches for s in m.stretches)
        return max((s.start.total for s in stretches if s.phase == "after"), default=0)


class LiveTensors(TorchDispatchMode):
    """Counts the storages of real tensors, each once, by how they grow with the batch.

    A storage's Python object lives as long as the storage itself, so that a weak reference to it sees what autograd and
    C++ keep. Sharded engines give storages back by resizing them, which no operation tells: they are looked at again
    when an operation uses them and at every mark. What kernels allocate inside themselves is not seen.
    """

    def __init__(self, weights: frozenset[tuple[int, ...]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.batch = BatchShape(1, 1)
        self._weights = weights
        self._kinds: dict[int, str] = {}
        self._sizes: dict[int, int] = {}
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._lives = [0, 0, 0, 0]
        self._peaks = [0, 0, 0, 0]
        self._total = self._peak_total = 0
        self.selective = Amount()
        self.selective_seconds = 0.0
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        begun = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        if is_kept(func):
            self.selective_seconds += time.perf_counter() - begun
            for tensor in tree_iter(result):
                if isinstance(tensor, torch.Tensor):
                    kind = classify(tensor.shape, self.batch, self._weights)
                    self.selective = self.selective.plus(Amount(**{kind: tensor.numel() * tensor.element_size()}))
        for tensor in tree_iter((result, args)):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor)
        return result

    def count(self, tensor: torch.Tensor) -> None:
        tensor = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
        if tensor.is_meta or type(tensor).__name__ in ("FakeTensor", "FunctionalTensor"):
            return
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):  # sparse and other tensors without one
            return
        key, size = storage._cdata, storage.nbytes()
        known = self._sizes.get(key)
        if known is None:
            self._kinds[key] = classify(tensor.shape, self.batch, self._weights)
            self._storages[key] = weakref.ref(storage, lambda _: self._change(key, None))
        if known != size:
            self._change(key, size)

    def look_again(self) -> None:
        """Sees storages that were resized since."""
        for key, reference in _items(self._storages):
            storage = reference()
            if storage is not None and storage.nbytes() != self._sizes.get(key):
                self._change(key, storage.nbytes())

    def take_peak(self) -> tuple[Amount, Amount]:
        """The highest point since the last call, and what is alive now."""
        peak, live = Amount(*self._peaks), Amount(*self._lives)
        self._peaks, self._peak_total = list(self._lives), self._total
        return peak, live

    def _change(self, key: int, size: int | None) -> None:
        """The storage has this size from now on; None: it is gone."""
        index = Amount._fields.index(self._kinds.get(key, "constant"))
        difference = (size or 0) - self._sizes.get(key, 0)
        if size is None:
            for table in (self._sizes, self._kinds, self._storages):
                table.pop(key, None)
        else:
            self._sizes[key] = size
        self._lives[index] += difference
        self._total += difference
        if self._total > self._peak_total:
            self._peak_total, self._peaks = self._total, list(self._lives)


def somebody_watches() -> bool:
    """Whether a dispatch mode of somebody else is on; one that goes before ours would take ours with it."""
    return bool(_get_current_dispatch_mode_stack())


def _items(table: dict[int, weakref.ref[Any]]) -> list[tuple[int, weakref.ref[Any]]]:
    while True:
        try:
            return list(table.items())
        except RuntimeError:  # the garbage collector has run meanwhile, and storages have gone
            continue


class StepMeasurement:
    """Measures one optimizer step: `start` before its first forward, `stop` after its update.

    Between them the blocks' hooks and `recompute_begins` and `recompute_ends` cut the step into stretches.
    """

    def __init__(self, model: torch.nn.Module, blocks: Sequence[torch.nn.Module]) -> None:
        self._model = model
        self._blocks = blocks
        shapes = {tuple(getattr(p, "ds_shape", p.shape)) for p in model.parameters()}
        self._counter = LiveTensors(frozenset(shapes | {tuple(reversed(s)) for s in shapes}))
        self._handles: list[Any] = []
        self._micro_batches: list[MicroBatch] = []
        self._open: tuple[Phase, int | None, Amount, float] | None = None
        self.fault: Exception | None = None

    def start(self) -> None:
        for tensor in existing_tensors(self._model):
            self._counter.count(tensor)
        for index, block in enumerate(self._blocks):
            self._handles.append(
                block.register_forward_pre_hook(Hook(self._before(index)), with_kwargs=True, prepend=True)
            )
            self._handles.append(block.register_forward_hook(Hook(self._after(index))))
        self._counter.__enter__()  # type: ignore[no-untyped-call]

    def begin_micro_batch(self, shape: BatchShape) -> None:
        self._mark("before", None)  # what came since the last backward belongs to the micro batch before
        self._counter.batch = shape
        self._micro_batches.append(MicroBatch(shape))

    def end_of_forward(self) -> None:
        """The root module has returned; a context around its call, such as autocast's, ends about now."""
        self._mark("after", None)

    def recompute_begins(self, block: int) -> None:
        self._mark("recompute", block)

    def recompute_ends(self, block: int) -> None:
        ending = sys.exc_info()[0]
        if ending is not None and "StopRecomputation" in ending.__name__ and self._micro_batches:
            self._micro_batches[-1].stopped_early.add(block)
        self._mark("backward", block)

    def stop(self) -> MeasuredStep | None:
        """What was measured; None where somebody else's dispatch mode got in between, or after a fault."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._mark("rest", None)
        self._open = None
        if not self._leave():
            return None
        measured = tuple(m for m in self._micro_batches if m.stretches)
        return MeasuredStep(measured) if measured and self.fault is None else None

    def _leave(self) -> bool:
        """Takes the counter off torch's stack of modes, from under any that came later; False where it is gone."""
        later: list[Any] = []
        while self._counter in _get_current_dispatch_mode_stack():
            mode = _pop_mode()
            if mode is self._counter:
                for other in reversed(later):
                    _push_mode(other)
                return not later
            later.append(mode)
        return False

    def _mark(self, phase: Phase, block: int | None) -> None:
        if self.fault is not None:
            return
        try:
            self._cut(phase, block)
        except Exception as error:  # called from inside the user's forward and backward, which must go on
            self.fault = error

    def _cut(self, phase: Phase, block: int | None) -> None:
        counter = self._counter
        counter.look_again()
        peak, live = counter.take_peak()
        now = time.perf_counter()
        if self._open is not None and self._micro_batches:
            before, of, start, begun = self._open
            kept = counter.selective, counter.selective_seconds
            stretch = Stretch(before, of, start, peak, live, now - begun, *kept, counter.operations)
            self._micro_batches[-1].stretches.append(stretch)
        counter.selective, counter.selective_seconds, counter.operations = Amount(), 0.0, 0
        self._open = (phase, block, live, now)

    def _before(self, index: int) -> Any:
        def hook(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            if in_backward() or not torch.is_grad_enabled() or not self._micro_batches:
                return
            if not self._micro_batches[-1].outputs:
                hidden = _first_with_gradient((args, kwargs))
                if hidden is not None:
                    hidden.register_hook(lambda gradient: self._mark("rest", None))  # type: ignore[no-untyped-call]
            self._mark("forward", index)

        return hook

    def _after(self, index: int) -> Any:
        def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
            if in_backward() or not torch.is_grad_enabled() or not self._micro_batches:
                return
            tensors = [t for t in tree_iter(output) if isinstance(t, torch.Tensor)]
            with contextlib.suppress(RuntimeError, NotImplementedError):  # results without a storage
                self._micro_batches[-1].outputs[index] = self._amount(tensors)
            hidden = _first_with_gradient(tensors)
            if hidden is not None:
                hidden.register_hook(lambda gradient: self._mark("backward", index))  # type: ignore[no-untyped-call]
            self._mark("between", None)

        return hook

    def _amount(self, tensors: Iterable[torch.Tensor]) -> Amount:
        amount = Amount()
        for storage, tensor in {t.untyped_storage()._cdata: t for t in tensors}.items():
            kind = self._counter._kinds.get(storage, "constant")
            amount = amount.plus(Amount(**{kind: tensor.untyped_storage().nbytes()}))
        return amount


def _first_with_gradient(values: Any) -> torch.Tensor | None:
    """The hidden states among a block's arguments or results."""
    return next((t for t in tree_iter(values) if isinstance(t, torch.Tensor) and t.requires_grad), None)


def existing_tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    """Every tensor that Python can see in this process, gradients included."""
    found: list[torch.Tensor] = []
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            found.append(thing)
    for parameter in model.parameters():
        if parameter.grad is not None:
            found.append(parameter.grad)
    return found
