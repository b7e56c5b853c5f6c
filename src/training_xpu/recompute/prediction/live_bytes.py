"""Live tensor bytes of code that runs on fake tensors: when storages come, when they go, and the peak in between."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Stretch(NamedTuple):
    """What happens between two events, in bytes relative to what is alive when it starts."""

    peak: int  # the highest point, at least 0
    net: int  # what is left at its end


class Event(NamedTuple):
    """A point at which a training engine acts: a parameter's gradient is there, a module is entered or left."""

    kind: str
    subject: Any


@dataclass(frozen=True)
class Segment:
    """A stretch of a training step, cut by the events in it."""

    name: str
    steps: tuple[Stretch | Event, ...]

    @property
    def peak(self) -> int:
        """The highest point, relative to the start."""
        return _peak(self.steps)

    @property
    def net(self) -> int:
        """What is left at the end."""
        return sum(step.net for step in self.steps if isinstance(step, Stretch))


def _peak(steps: tuple[Stretch | Event, ...]) -> int:
    live = peak = 0
    for step in steps:
        if isinstance(step, Stretch):
            peak = max(peak, live + step.peak)
            live += step.net
    return peak


class LiveBytes(TorchDispatchMode):
    """Counts every storage once, from the operation that makes it until its last user lets go.

    A storage's Python object lives as long as the storage itself, so that a finalizer on it sees what autograd keeps.
    What kernels allocate inside themselves is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self.segments: list[Segment] = []
        self._sizes: dict[int, int] = {}
        self._name: str | None = None
        self._start = 0
        self._steps: list[Stretch | Event] = []

    def know(self, tensor: torch.Tensor) -> None:
        """Leaves out a tensor that is there already, so that views of it do not count."""
        storage = tensor.untyped_storage()
        if self._sizes.setdefault(storage._cdata, 0) == 0:
            weakref.finalize(storage, self._release, storage._cdata)

    def mark(self, name: str) -> None:
        """Ends the running segment and starts one of this name."""
        if self._name is not None:
            self._end_stretch()
            self.segments.append(Segment(self._name, tuple(self._steps)))
        self._name = name
        self._steps = []
        self._start = self.peak = self.live

    def note(self, kind: str, subject: Any) -> None:
        """Records an event in the running segment."""
        self._end_stretch()
        self._steps.append(Event(kind, subject))

    def restart(self) -> None:
        """Forgets the segments so far; what is alive stays counted."""
        self.segments = []
        self._name = None
        self._steps = []
        self._start = self.peak = self.live

    def _end_stretch(self) -> None:
        stretch = Stretch(self.peak - self._start, self.live - self._start)
        if stretch != (0, 0):
            self._steps.append(stretch)
        self._start = self.peak = self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default:
            result = _grouped_mm(*args, **(kwargs or {}))
        else:
            result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        self.live -= self._sizes.pop(key, 0)


def _grouped_mm(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """The shape of torch's grouped matrix product; its own fake kernel knows bf16 alone, the real one other dtypes too.

    Args:
        a: (tokens, k), (groups, tokens, k), or (k, tokens) for products over the tokens of each group.
        b: (groups, k, n), or two-dimensional alike.
        offs: where each group ends, for whichever side has no group dimension.
    """
    if a.dim() == 2 and b.dim() == 2:
        assert offs is not None
        return a.new_empty(offs.shape[0], a.shape[0], b.shape[1])
    if a.dim() == 3 and b.dim() == 3:
        return a.new_empty(a.shape[0], a.shape[1], b.shape[2])
    return a.new_empty(a.shape[-2], b.shape[-1])
