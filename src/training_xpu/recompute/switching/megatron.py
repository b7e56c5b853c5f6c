"""Megatron's own recompute: a transformer block reads from its settings how many of its first layers it recomputes.

Its checkpoint function knows Megatron's random generators, which torch's does not restore.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from training_xpu.recompute.switching.handles import BlockHandle
from training_xpu.recompute.switching.policies import Mode
from training_xpu.recompute.switching.runner import Shared

_SETTINGS = ("recompute_granularity", "recompute_method", "recompute_num_layers")


def megatron_handles(
    model: torch.nn.Module, blocks: Sequence[torch.nn.Module], shared: Shared
) -> dict[int, BlockHandle]:
    """The switches of blocks that a Megatron transformer block runs, by id of the block."""
    ids = {id(block) for block in blocks}
    handles: dict[int, BlockHandle] = {}
    for module in model.modules():
        layers = module._modules.get("layers")
        if not isinstance(layers, torch.nn.ModuleList) or not hasattr(module, "_checkpointed_forward"):
            continue
        config = getattr(module, "config", None)
        if all(hasattr(config, name) for name in _SETTINGS) and all(id(layer) in ids for layer in layers):
            stack = _Stack(config, len(layers))
            handles.update({id(layer): MegatronHandle(layer, shared, stack, i) for i, layer in enumerate(layers)})
    return handles


def check_order(handles: Sequence[BlockHandle], modes: Sequence[Mode]) -> None:
    """
    Raises:
        ValueError: others than the first layers of a transformer block are to be recomputed.
    """
    kept: set[_Stack] = set()
    for handle, mode in zip(handles, modes, strict=True):
        if isinstance(handle, MegatronHandle):
            if mode is Mode.KEEP:
                kept.add(handle.stack)
            elif handle.stack in kept:
                raise ValueError("Megatron recomputes the first layers of a transformer block, no others")


class _Stack:
    """The settings of one transformer block, which its layers share."""

    def __init__(self, config: Any, layers: int) -> None:
        self.config = config
        self.wanted = [False] * layers
        self.before: dict[str, Any] | None = None
        self.requested = [_recomputed(config, i) for i in range(layers)]

    def want(self, index: int, recompute: bool) -> None:
        if self.before is None:
            self.before = {name: getattr(self.config, name) for name in _SETTINGS}
            self.wanted = list(self.requested)
        self.wanted[index] = recompute

    def commit(self) -> None:
        if self.before is None:
            return
        count = sum(self.wanted)
        # Its own selective granularity is built into the layers and goes on where none is recomputed whole.
        without = "selective" if self.before["recompute_granularity"] == "selective" else None
        self.config.recompute_granularity = "full" if count else without
        self.config.recompute_method = "block" if count else None
        self.config.recompute_num_layers = count or None

    def restore(self) -> None:
        for name, value in (self.before or {}).items():
            setattr(self.config, name, value)
        self.before = None


def _recomputed(config: Any, index: int) -> bool:
    """Whether the settings as the script has them recompute this layer."""
    if config.recompute_granularity != "full":
        return False
    return config.recompute_method != "block" or index < (config.recompute_num_layers or 0)


class MegatronHandle(BlockHandle):
    """One layer of a Megatron transformer block."""

    how = "megatron"
    possible = frozenset({Mode.KEEP, Mode.RECOMPUTE})

    def __init__(self, block: torch.nn.Module, shared: Shared, stack: _Stack, index: int) -> None:
        super().__init__(block, shared)
        self.stack = stack
        self.index = index

    @property
    def requested(self) -> Mode:
        asked = _recomputed(self.stack.config, self.index) if self.overruled else self.stack.requested[self.index]
        return Mode.RECOMPUTE if asked else Mode.KEEP

    @property
    def mode(self) -> Mode:
        return Mode.RECOMPUTE if _recomputed(self.stack.config, self.index) else Mode.KEEP

    @property
    def overruled(self) -> bool:
        return self.installed and _recomputed(self.stack.config, self.index) != self.stack.wanted[self.index]

    def set(self, mode: Mode) -> None:
        self.stack.want(self.index, mode is Mode.RECOMPUTE)
        self.installed = True

    def commit(self) -> None:
        self.stack.commit()

    def restore(self) -> None:
        if self.installed:
            self.stack.restore()
        self.installed = False
