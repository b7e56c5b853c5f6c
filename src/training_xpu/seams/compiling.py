"""The seams at torch.compile and nn.Module.compile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from training_xpu.seams.base import Patch, Seam, in_subscriber


@dataclass
class CompileCall:
    """A call of torch.compile about to be made; a subscriber may change both fields."""

    model: Callable[..., Any]  # nn.Module, function or bound method
    arguments: dict[str, Any] = field(default_factory=dict)  # fullgraph, dynamic, backend, mode, options, ...


class CompileSeam(Seam[CompileCall]):
    """Calls of torch.compile, as a function and as a decorator.

    What a subscriber returns, if not None, is the result of the call; later subscribers and torch are not asked then.
    The call that nn.Module.compile makes is left to its own seam.
    """

    def _install(self) -> None:
        COMPILE_PATCH.install()

    def _uninstall(self) -> None:
        COMPILE_PATCH.uninstall()

    def ask(self, call: CompileCall) -> object | None:
        for subscription in self.subscriptions:
            attempt = CompileCall(call.model, dict(call.arguments))
            came_through, result = self.call(subscription, attempt)
            if came_through:
                call.model, call.arguments = attempt.model, attempt.arguments
            if result is not None:
                return result
        return None


@dataclass
class ModuleCompileCall:
    """A call of nn.Module.compile about to be made; a subscriber may change the arguments."""

    module: torch.nn.Module
    arguments: dict[str, Any] = field(default_factory=dict)  # as for torch.compile


class ModuleCompileSeam(Seam[ModuleCompileCall]):
    """Calls of nn.Module.compile, as DeepSpeed's `engine.compile` makes them.

    A subscriber that returns something true has compiled the module itself: later subscribers and torch are not asked.
    """

    def _install(self) -> None:
        MODULE_COMPILE_PATCH.install()

    def _uninstall(self) -> None:
        MODULE_COMPILE_PATCH.uninstall()

    def ask(self, call: ModuleCompileCall) -> bool:
        for subscription in self.subscriptions:
            attempt = ModuleCompileCall(call.module, dict(call.arguments))
            came_through, done = self.call(subscription, attempt)
            if came_through:
                call.arguments = attempt.arguments
            if done:
                return True
        return False


COMPILE = CompileSeam("compile")
MODULE_COMPILE = ModuleCompileSeam("module-compile")

# Told of every result, a subscriber's own compilations included: the root-forward seam has to step around them.
result_watchers: list[Callable[[object], None]] = []
module_watchers: list[Callable[[torch.nn.Module], None]] = []


def _wrap_compile(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def compile(model: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        if model is None or args or torch.compiler.is_compiling():
            return original(model, *args, **kwargs)  # the decorator form comes back here with its function
        call = CompileCall(model, kwargs)
        from_module = getattr(model, "__name__", "") == "_call_impl"
        result = None if from_module or in_subscriber() else COMPILE.ask(call)
        if result is None:
            result = original(call.model, **call.arguments)
        for watcher in tuple(result_watchers):
            watcher(result)
        return result

    return compile


def _wrap_module_compile(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def compile(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        call = ModuleCompileCall(self, kwargs)
        if args or in_subscriber() or not MODULE_COMPILE.ask(call):
            original(self, *args, **call.arguments)
        for watcher in tuple(module_watchers):
            watcher(self)

    return compile


COMPILE_PATCH = Patch(lambda: [(torch, "compile")], _wrap_compile)
MODULE_COMPILE_PATCH = Patch(lambda: [(torch.nn.Module, "compile")], _wrap_module_compile)
