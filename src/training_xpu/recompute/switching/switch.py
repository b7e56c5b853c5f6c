"""Switches the blocks of a model between keeping their activations and recomputing them, before any forward.

Each block is switched where it has a switch of its own: transformers layers by their flag, blocks in torch's checkpoint
wrapper by the wrapper, Megatron's by the settings of their container; all others by a forward of ours in front of
theirs. Nothing is added to the module tree or the state dict. Losses and gradients are those of the model without
recompute: checkpointing is non-reentrant and restores random generators and autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from training_xpu.blocks import class_names, unwrap, wrapped
from training_xpu.recompute.switching.compiled import CompiledHandle, inside_compiled, is_compiled
from training_xpu.recompute.switching.containers import Containers
from training_xpu.recompute.switching.handles import (
    BlockHandle,
    FlagHandle,
    ForwardHandle,
    WrapperHandle,
    has_flag,
)
from training_xpu.recompute.switching.megatron import check_order, megatron_handles
from training_xpu.recompute.switching.policies import Mode
from training_xpu.recompute.switching.runner import RecomputeListener, Shared

__all__ = ["BlockSwitch", "Mode"]


class BlockSwitch:
    """The switches of a model's blocks.

    Made when the model is complete: wrapped, compiled, its own checkpointing switched on or not. Blocks called without
    gradients, in evaluation mode, or inside a checkpoint of the script's own run as they are, and so do blocks that are
    handed a cache of keys and values, which recomputing would fill twice.
    """

    def __init__(self, model: torch.nn.Module, blocks: Sequence[torch.nn.Module]) -> None:
        """
        Args:
            model: the root, with its wrappers: DDP, DeepSpeed, FSDP, PEFT, torch.compile.
            blocks: its blocks without wrappers of their own, in the order in which they run, as `find_blocks` has them.
        """
        self._shared = Shared()
        self._model = model
        ids = {id(block) for block in blocks}
        fixed = inside_compiled(model, ids)
        self.can_change = not fixed
        """False where a block is part of a larger compiled region, which every change of mode compiles anew."""
        around: dict[int, list[torch.nn.Module]] = {}  # block -> its own wrappers, outermost first
        for module in model.modules():
            if wrapped(module) is not None and id(unwrap(module)) in ids:
                around.setdefault(id(unwrap(module)), []).append(module)
        self._containers = Containers(model, ids, self._shared, hooks=self.can_change)
        megatron = megatron_handles(model, blocks, self._shared)
        self._handles = [megatron.get(id(block)) or self._handle(block, around.get(id(block), [])) for block in blocks]
        for index, handle in enumerate(self._handles):
            handle.number(index)
        self._offered = tuple(handle.offered for handle in self._handles)
        self._told: tuple[Mode, ...] | None = None
        self.on_request: Callable[[tuple[Mode, ...]], None] | None = None
        """Called by `apply` with what the script has asked for since, once each time it has asked for something."""

    def _handle(self, block: torch.nn.Module, around: Sequence[torch.nn.Module]) -> BlockHandle:
        requested = Mode.RECOMPUTE if self._containers.recomputes(block) else Mode.KEEP
        chain = [*around, block]
        checkpointing = next((m for m in around if "CheckpointWrapper" in class_names(m)), None)
        host = next((m for m in chain if is_compiled(m)), None)
        if checkpointing is not None and (host is None or chain.index(checkpointing) < chain.index(host)):
            return WrapperHandle(block, self._shared, checkpointing, around_compiled=host is not None)
        if host is not None:
            return CompiledHandle(block, self._shared, host, requested, checkpointing)
        if has_flag(block):
            return FlagHandle(block, self._shared)
        return ForwardHandle(block, self._shared, requested=requested)

    @property
    def how(self) -> tuple[str, ...]:
        """How each block is switched: "flag", "wrapped", "checkpoint wrapper", "compiled", "megatron"."""
        return tuple(handle.how for handle in self._handles)

    @property
    def modes(self) -> tuple[Mode, ...]:
        """What each block does now, whoever has set it."""
        return tuple(handle.mode for handle in self._handles)

    @property
    def requested(self) -> tuple[Mode, ...]:
        """What the script itself has asked for: before this switch, or since, where `overruled`."""
        return tuple(handle.requested for handle in self._handles)

    @property
    def offered(self) -> tuple[frozenset[Mode], ...]:
        """The modes that each block has here."""
        return self._offered

    @property
    def overruled(self) -> bool:
        """Whether the script has set a switch since `apply` did. Its word holds, and `apply` does nothing any more."""
        return any(handle.overruled for handle in self._handles)

    @property
    def by_script(self) -> tuple[bool, ...]:
        """Which blocks were seen inside a checkpoint that the script's own forward calls; these stay as they are."""
        return tuple(handle.runner.by_script for handle in self._handles)

    @property
    def selective_matched(self) -> tuple[bool | None, ...]:
        """Whether each block had something for the selective mode to keep; None where it has not run so."""
        return tuple(handle.selective_matched for handle in self._handles)

    @property
    def reentrant_replaced(self) -> bool:
        """Whether the script had asked for reentrant checkpointing, instead of which the other kind is used."""
        return any(handle.runner.was_reentrant for handle in self._handles)

    @property
    def caches_seen(self) -> int:
        """Forwards that ran without recompute because the script handed in a cache of keys and values."""
        return self._shared.caches_seen

    @property
    def measuring(self) -> bool:
        """While true, recomputing goes on to the end of each block, so that hooks there fire; otherwise it stops once
        the last tensor that the backward needs is there."""
        return self._shared.measuring

    @measuring.setter
    def measuring(self, value: bool) -> None:
        self._shared.measuring = value

    @property
    def listener(self) -> RecomputeListener | None:
        """Hears of the recomputes of forwards that ran while it was set."""
        return self._shared.listener

    @listener.setter
    def listener(self, value: RecomputeListener | None) -> None:
        self._shared.listener = value

    def apply(self, modes: Sequence[Mode]) -> bool:
        """Sets the modes for forwards that begin from now on; backwards of earlier ones are not affected.

        Args:
            modes: one for each block, of those in `offered`.

        Returns:
            False where the script has set a switch itself since the last call; then nothing is changed.

        Raises:
            ValueError: the number of modes is not that of the blocks, or a block does not offer its mode, or other
                than the first blocks of a Megatron transformer block are to be recomputed; nothing is changed.
        """
        if len(modes) != len(self._handles):
            raise ValueError(f"{len(modes)} modes for {len(self._handles)} blocks")
        if self.overruled:
            self._tell()
            return False
        for handle, mode, offered in zip(self._handles, modes, self._offered, strict=True):
            if mode not in offered:
                raise ValueError(f"a block that is switched by {handle.how} has no mode {mode} here")
        check_order(self._handles, modes)
        for handle, mode in zip(self._handles, modes, strict=True):
            if not (handle.installed and handle.mode is mode):
                handle.set(mode)
        for handle in self._handles:
            handle.commit()
        self._containers.follow(self._handles)
        return True

    def restore(self) -> None:
        """Puts every switch back to where the script had it; what it has changed since stays."""
        for handle in self._handles:
            handle.restore()
        self._containers.restore()

    def _tell(self) -> None:
        asked = self.requested
        if self.on_request is not None and asked != self._told:
            self._told = asked
            self.on_request(asked)
