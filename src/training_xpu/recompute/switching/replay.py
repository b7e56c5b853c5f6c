"""What a block's forward reads and changes beside its tensors, so that a recompute sees the same and changes nothing.

torch's checkpoint restores torch's default generators and autocast. Here come training flags, generators of the block's
own, Python's and NumPy's random numbers, and buffers: a second forward would update BatchNorm's statistics twice.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.modules.batchnorm import _NormBase

_Buffers = list[tuple[torch.nn.Module, str, torch.Tensor, int]]


class Replay:
    """One forward of a block, and its recompute."""

    def __init__(self, block: torch.nn.Module) -> None:
        """Called right before the forward."""
        self._modules = list(block.modules())
        self._training = [module.training for module in self._modules]
        self._random = _random_states(self._modules)
        self._buffers = _buffers(self._modules)
        self._changed: list[torch.nn.Module] = []

    def forward_ended(self) -> None:
        """Sees which modules have changed a buffer in place, or replaced one.

        Running statistics of norms count as changed: kernels update them behind autograd's back.
        """
        changed = [
            module
            for module, name, buffer, version in self._buffers
            if isinstance(module, _NormBase) or module._buffers.get(name) is not buffer or buffer._version != version
        ]
        self._changed = list(dict.fromkeys(changed))
        self._buffers = []

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Around the recompute."""
        flags = [module.training for module in self._modules]
        states = _random_states(self._modules)
        kept = [
            (module, name, buffer, buffer.clone())
            for module in self._changed
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._set(self._training, self._random)
        try:
            yield
        finally:
            self._set(flags, states)
            for module, name, buffer, value in kept:
                module._buffers[name] = buffer
                # Whoever saved it for backward must not take this for a change.
                with torch.no_grad(), _unsafe_preserve_version_counter(buffer):
                    buffer.copy_(value)

    def _set(self, flags: list[bool], states: list[tuple[Any, Any]]) -> None:
        for module, flag in zip(self._modules, flags, strict=True):
            if module.training != flag:
                module.training = flag
        for set_state, state in states:
            set_state(state)


def _buffers(modules: list[torch.nn.Module]) -> _Buffers:
    return [
        (module, name, buffer, buffer._version)
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None and not buffer.is_inference()
    ]


def _random_states(modules: list[torch.nn.Module]) -> list[tuple[Any, Any]]:
    """(what sets it, state) of every source of random numbers that torch's checkpoint leaves alone."""
    states: list[tuple[Any, Any]] = [(random.setstate, random.getstate())]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states.append((numpy.random.set_state, numpy.random.get_state()))
    for module in modules:
        for value in module.__dict__.values():
            if isinstance(value, torch.Generator):
                states.append((value.set_state, value.get_state()))
    return states
