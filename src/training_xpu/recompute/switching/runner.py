"""Runs a block's forward under its mode: as it is, checkpointed whole or in part, or with its activations offloaded."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from training_xpu.recompute.switching.policies import Mode, SelectivePolicy, offloading
from training_xpu.recompute.switching.replay import Replay


class RecomputeListener(Protocol):
    """Hears of every recompute, inside the backward; blocks are counted in the order of the switch."""

    def recompute_begins(self, block: int) -> None: ...

    def recompute_ends(self, block: int) -> None: ...


@dataclass
class Shared:
    """What all blocks of a switch have in common."""

    measuring: bool = False
    listener: RecomputeListener | None = None
    caches_seen: int = 0  # calls left alone because a cache of keys and values was handed in


class Runner:
    """Runs a block's forward under its mode. Stands wherever a checkpoint function is called: `runner(function, ...)`.

    Pickled and copied as the plain checkpoint function, so that a model saved whole needs nothing of this project.
    """

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self.block = 0  # its number in the switch
        self.module: weakref.ref[torch.nn.Module] | None = None  # the block
        self.mode = Mode.KEEP
        self.policy = SelectivePolicy()
        self.function: Callable[..., Any] = functools.partial(checkpoint, use_reentrant=False)
        self.was_reentrant = False
        self.again: Callable[[], AbstractContextManager[None]] | None = None  # around every recompute
        self.by_script = False  # the script recomputes the block itself, by a call in its own forward

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if isinstance(function, functools.partial):
            # transformers hides keyword arguments in a partial, where torch would not see whose device's generators
            # have to be restored.
            bound: functools.partial[Any] = function
            function, args, kwargs = bound.func, bound.args + args, {**bound.keywords, **kwargs}
        if self.mode is Mode.KEEP:
            return function(*args, **kwargs)
        compiling = torch.compiler.is_compiling()
        if not compiling and _in_checkpoint():
            self.by_script = True
            return function(*args, **kwargs)
        if not compiling and torch._C._functorch.peek_interpreter_stack() is not None:
            return function(*args, **kwargs)  # vmap and grad of torch.func know no saved-tensor hooks
        if self.mode is Mode.OFFLOAD:
            with offloading():
                return function(*args, **kwargs)
        # Flat: torch saves tensors only where they are arguments themselves.
        call: Callable[..., Any] = functools.partial(_call, function, len(args), tuple(kwargs))
        if self.shared.listener is not None:
            call = functools.partial(self._heard, call)
        if self.again is not None:
            call = functools.partial(self._recomputing, self.again, call)
        module = self.module() if self.module is not None else None
        if module is not None and not compiling:
            call = functools.partial(_replayed, Replay(module), call)
        run = self.function
        if self.mode is Mode.SELECTIVE:
            contexts = self.policy.compiled_contexts if torch.compiler.is_compiling() else self.policy.contexts
            run = functools.partial(checkpoint, use_reentrant=False, context_fn=contexts)
        if not self.shared.measuring:
            return run(call, *args, *kwargs.values())
        with set_checkpoint_early_stop(False):
            return run(call, *args, *kwargs.values())

    def use(self, function: Callable[..., Any] | None) -> None:
        """Goes on using the script's own checkpoint function, with its settings, unless it is reentrant."""
        self.function, self.was_reentrant = _non_reentrant(function)

    def _heard(self, call: Callable[..., Any], *flat: Any) -> Any:
        listener = self.shared.listener
        if listener is None or not in_backward():
            return call(*flat)
        listener.recompute_begins(self.block)
        try:
            return call(*flat)
        finally:
            listener.recompute_ends(self.block)

    @staticmethod
    def _recomputing(around: Callable[[], AbstractContextManager[None]], call: Callable[..., Any], *flat: Any) -> Any:
        if not in_backward():
            return call(*flat)
        with around():
            return call(*flat)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(checkpoint, use_reentrant=False).__reduce__()  # type: ignore[return-value]


def _replayed(replay: Replay, call: Callable[..., Any], *flat: Any) -> Any:
    if in_backward():
        with replay.again():
            return call(*flat)
    result = call(*flat)
    replay.forward_ended()
    return result


def _call(function: Callable[..., Any], positional: int, names: tuple[str, ...], *flat: Any) -> Any:
    return function(*flat[:positional], **dict(zip(names, flat[positional:], strict=True)))


def _non_reentrant(function: Callable[..., Any] | None) -> tuple[Callable[..., Any], bool]:
    """The function, non-reentrant where it is torch's, and whether it was the reentrant one.

    Reentrant checkpointing loses the gradients of blocks whose inputs need none, as below frozen embeddings, and fails
    with unused parameters under DDP.
    """
    keywords: dict[str, Any] = {}
    inner = function
    while isinstance(inner, functools.partial) and not inner.args:
        keywords = {**inner.keywords, **keywords}
        inner = inner.func
    if function is None or inner is checkpoint:
        reentrant = function is not None and keywords.get("use_reentrant") is not False
        return functools.partial(checkpoint, **{**keywords, "use_reentrant": False}), reentrant
    return function, False


def in_backward() -> bool:
    """Whether autograd runs a backward on this thread."""
    return torch._C._current_graph_task_id() != -1


def _in_checkpoint() -> bool:
    """Whether somebody else's checkpoint runs this, first or again.

    A reentrant one runs it first without gradients, where nothing is switched, and again inside the backward. Both
    times have to be alike.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return in_backward() or (hooks is not None and getattr(hooks[0], "__module__", None) == checkpoint.__module__)


def cache_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a cache of keys and values is handed in; by what it can do, since its name has changed often."""
    return any(hasattr(v, "get_seq_length") for v in (*args, *kwargs.values()))
