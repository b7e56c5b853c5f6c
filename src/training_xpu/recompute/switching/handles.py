"""How one block is switched: by its own flag, by a forward of ours in front of its own, or by the wrapper around it."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from typing import Any

import torch

from training_xpu.blocks import class_names
from training_xpu.instances import ABSENT, ForwardInFront
from training_xpu.recompute.switching.policies import Mode
from training_xpu.recompute.switching.runner import Runner, Shared, cache_among

FLAGS = ("gradient_checkpointing", "activation_checkpointing")


class Forward(ForwardInFront):
    """Gives a module's calls to the runner of its block."""

    def __init__(self, module: torch.nn.Module, runner: Runner, before: Any) -> None:
        super().__init__(module, before)
        self._runner = runner
        self._gone = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module()
        own = self.before
        if own is ABSENT:
            own = type(module).forward  # asked for each time, for FSDP2 changes the class
            args = (module, *args)
        runner = self._runner
        if self._gone or runner.mode is Mode.KEEP or not (module.training and torch.is_grad_enabled()):
            return own(*args, **kwargs)
        if cache_among(args, kwargs):
            runner.shared.caches_seen += 1
            return own(*args, **kwargs)
        return runner(own, *args, **kwargs)

    def detach(self) -> None:
        """Calls through from now on, for where somebody has put a forward of theirs in front and holds this one."""
        self._gone = True


class BlockHandle(ABC):
    """The switch of one block."""

    how = ""
    possible: frozenset[Mode] = frozenset(Mode)

    def __init__(self, block: torch.nn.Module, shared: Shared) -> None:
        self.block = block
        self.runner = Runner(shared)
        self.runner.module = weakref.ref(block)
        self.installed = False

    def number(self, index: int) -> None:
        """Tells it its place in the switch."""
        self.runner.block = index

    @property
    def requested(self) -> Mode:
        """What the script asked for."""
        return Mode.KEEP

    @property
    def offered(self) -> frozenset[Mode]:
        """The modes it has on this machine."""
        return self.possible if torch.accelerator.is_available() else self.possible - {Mode.OFFLOAD}

    @property
    def selective_matched(self) -> bool | None:
        return self.runner.policy.matched

    @property
    def mode(self) -> Mode:
        """What the block does now, whoever has set it."""
        return self.runner.mode if self.installed else self.requested

    @property
    def overruled(self) -> bool:
        """Whether the script has changed the switch since this project has set it."""
        return False

    @abstractmethod
    def set(self, mode: Mode) -> None:
        """Has the block do this from its next forward on."""

    def commit(self) -> None:  # noqa: B027 - most have nothing to do
        """Called on all blocks after all have been set."""

    @abstractmethod
    def restore(self) -> None:
        """Gives the block back as the script had it."""


class FlagHandle(BlockHandle):
    """A transformers `GradientCheckpointingLayer`: its flag and the checkpoint function it calls."""

    how = "flag"

    def __init__(self, block: torch.nn.Module, shared: Shared) -> None:
        super().__init__(block, shared)
        self.flag = next(name for name in FLAGS if hasattr(block, name))
        self.function = f"_{self.flag}_func"
        self._before: dict[str, Any] = {}

    @property
    def requested(self) -> Mode:
        before = self._before.get(self.flag, ABSENT)
        if not self.installed or self.overruled:
            asked = bool(getattr(self.block, self.flag))
        elif before is ABSENT:
            asked = bool(getattr(type(self.block), self.flag, False))
        else:
            asked = bool(before)
        return Mode.RECOMPUTE if asked else Mode.KEEP

    @property
    def mode(self) -> Mode:
        if not self.installed or self.overruled:
            return self.requested
        return self.runner.mode

    @property
    def overruled(self) -> bool:
        if not self.installed:
            return False
        own = self.block.__dict__
        return own.get(self.function) is not self.runner or bool(own.get(self.flag)) != (
            self.runner.mode is not Mode.KEEP
        )

    def set(self, mode: Mode) -> None:
        own = self.block.__dict__
        if not self.installed:
            self._before = {name: own.get(name, ABSENT) for name in (self.flag, self.function)}
            function = getattr(self.block, self.function, None)
            self.runner.use(function if self.requested is Mode.RECOMPUTE else None)
            own[self.function] = self.runner
            self.installed = True
        self.runner.mode = mode
        own[self.flag] = mode is not Mode.KEEP

    def restore(self) -> None:
        if self.installed and not self.overruled:
            put_back(self.block, self._before)
        self.installed = False


class ForwardHandle(BlockHandle):
    """Any block: a forward of ours in front of its own, on the instance."""

    how = "wrapped"

    def __init__(
        self,
        block: torch.nn.Module,
        shared: Shared,
        host: torch.nn.Module | None = None,
        name: str = "forward",
        requested: Mode = Mode.KEEP,
    ) -> None:
        """
        Args:
            host: the module whose attribute is replaced, where it is not the block itself.
            name: the attribute.
            requested: what the script had asked for by other means.
        """
        super().__init__(block, shared)
        self.host = host if host is not None else block
        self.name = name
        self._requested = requested
        self._forward: Forward | None = None
        self._flag = next((f for f in FLAGS if f in block.__dict__), None)
        self._had_flag = bool(self._flag and getattr(block, self._flag))

    @property
    def requested(self) -> Mode:
        return Mode.RECOMPUTE if self._had_flag else self._requested

    def set(self, mode: Mode) -> None:
        if self._forward is None:
            before = self.host.__dict__.get(self.name, ABSENT)
            self._forward = Forward(self.host, self.runner, before)
            self.host.__dict__[self.name] = self._forward
            if self._had_flag and self._flag:
                self.block.__dict__[self._flag] = False  # the block's own checkpointing would come on top
            self.installed = True
        self.runner.mode = mode

    def restore(self) -> None:
        forward = self._forward
        if forward is None:
            return
        forward.detach()
        in_place = self.host.__dict__.get(self.name) is forward
        if in_place:
            put_back(self.host, {self.name: forward.before})
        if self._had_flag and self._flag:
            self.block.__dict__[self._flag] = True
        self._forward = None
        self.installed = False


class WrapperHandle(BlockHandle):
    """A block inside torch's `CheckpointWrapper`: the wrapper's checkpoint function."""

    how = "checkpoint wrapper"

    def __init__(
        self, block: torch.nn.Module, shared: Shared, wrapper: torch.nn.Module, around_compiled: bool = False
    ) -> None:
        """
        Args:
            around_compiled: what it wraps is compiled, so that a selective policy would see nothing it knows.
        """
        super().__init__(block, shared)
        self.wrapper = wrapper
        if around_compiled:
            self.possible = self.possible - {Mode.SELECTIVE}

    @property
    def requested(self) -> Mode:
        return Mode.RECOMPUTE

    @property
    def overruled(self) -> bool:
        return self.installed and self.wrapper.__dict__.get("checkpoint_fn") is not self.runner

    def set(self, mode: Mode) -> None:
        if not self.installed:
            self._before = self.wrapper.__dict__["checkpoint_fn"]
            self.runner.use(self._before)
            self.wrapper.__dict__["checkpoint_fn"] = self.runner
            self.installed = True
        self.runner.mode = mode

    def restore(self) -> None:
        if self.installed and not self.overruled:
            self.wrapper.__dict__["checkpoint_fn"] = self._before
        self.installed = False


def put_back(module: torch.nn.Module, before: dict[str, Any]) -> None:
    """Gives an instance its own attributes back, or takes away those it did not have (`ABSENT`)."""
    for name, value in before.items():
        if value is ABSENT:
            module.__dict__.pop(name, None)
        else:
            module.__dict__[name] = value


def has_flag(block: torch.nn.Module) -> bool:
    """Whether the block is a transformers layer that checkpoints itself by its flag."""
    return "GradientCheckpointingLayer" in class_names(block) and any(hasattr(block, name) for name in FLAGS)
