"""Modules around the blocks that have a say in recompute: they make caches, or checkpoint their blocks themselves.

A transformers model hands its layers a cache of keys and values where `use_cache` says so, and a layer that is
recomputed would fill it twice. The layers therefore drop the cache, and the model makes none while its own flag is set.
"""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from training_xpu.instances import ABSENT
from training_xpu.recompute.switching.handles import FLAGS, BlockHandle, FlagHandle, put_back
from training_xpu.recompute.switching.policies import Mode
from training_xpu.recompute.switching.runner import Shared, cache_among


@dataclass
class _Container:
    module: torch.nn.Module
    flag: str
    checkpoints: bool  # its blocks, in its own forward
    before: Any = ABSENT
    left: bool | None = None  # as this project has left the flag; None: not touched


class _Hook:
    """A hook that copies and files of the model take along as one that does nothing, and is none of this project's."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")


class Containers:
    """The modules with a flag that hold blocks, and are none."""

    def __init__(self, model: torch.nn.Module, blocks: set[int], shared: Shared, hooks: bool) -> None:
        """
        Args:
            blocks: ids of the blocks.
            shared: of the switch.
            hooks: look out for caches that the script hands in.
        """
        self._shared = shared
        self._watch = hooks
        self._containers: list[_Container] = []
        self._recomputed: set[int] = set()
        self._hooks: list[Any] = []
        self._paused: list[tuple[torch.nn.Module, str]] = []
        for module in model.modules():
            flag = next((name for name in FLAGS if hasattr(module, name)), None)
            if flag is None or id(module) in blocks:
                continue
            inside = {id(m) for m in module.modules()} & blocks
            if inside:
                self._containers.append(_Container(module, flag, _checkpoints_its_blocks(module)))
                if self._containers[-1].checkpoints and getattr(module, flag):
                    self._recomputed |= inside

    def recomputes(self, block: torch.nn.Module) -> bool:
        """Whether a module around the block was recomputing it in its own forward when this was made."""
        return id(block) in self._recomputed

    def follow(self, handles: Sequence[BlockHandle]) -> None:
        """Sets the flags as the modes of the blocks need them."""
        recomputing = any(handle.mode is not Mode.KEEP for handle in handles)
        for container in self._containers:
            own = container.module.__dict__
            if container.left is None:
                container.before = own.get(container.flag, ABSENT)
                if self._watch and not container.checkpoints:
                    self._look_out(container.module, handles)
            asked = container.before is not ABSENT and bool(container.before)
            container.left = not container.checkpoints and (recomputing or asked)
            own[container.flag] = container.left

    def restore(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for container in self._containers:
            if container.left is not None and bool(getattr(container.module, container.flag)) == container.left:
                put_back(container.module, {container.flag: container.before})
            container.left = None

    def _look_out(self, module: torch.nn.Module, handles: Sequence[BlockHandle]) -> None:
        """Keeps the module's blocks as they are in a forward that is handed a cache, such as a learned prefix.

        transformers' layers would drop it, and the loss would be another.
        """
        inside = {id(m) for m in module.modules()}
        flagged = [handle for handle in handles if isinstance(handle, FlagHandle) and id(handle.block) in inside]

        def before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not (module.training and torch.is_grad_enabled() and cache_among(args, kwargs)):
                return
            if any(handle.mode is not Mode.KEEP for handle in flagged):
                self._shared.caches_seen += 1
            for handle in flagged:
                if handle.installed and not handle.overruled and handle.mode is not Mode.KEEP:
                    handle.block.__dict__[handle.flag] = False
                    self._paused.append((handle.block, handle.flag))

        def after(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
            for block, flag in self._paused:
                block.__dict__[flag] = True
            self._paused.clear()

        self._hooks.append(module.register_forward_pre_hook(_Hook(before), with_kwargs=True))
        self._hooks.append(module.register_forward_hook(_Hook(after), always_call=True))


def _checkpoints_its_blocks(module: torch.nn.Module) -> bool:
    """Whether the module's own forward calls a checkpoint function, as models did before layers carried the flag."""
    names = set(_names(getattr(inspect.unwrap(type(module).forward), "__code__", None)))
    return bool(names & {f"_{flag}_func" for flag in FLAGS} | names & {"checkpoint", "checkpoint_sequential"})


def _names(code: types.CodeType | None) -> Iterator[str]:
    if code is None:
        return
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
