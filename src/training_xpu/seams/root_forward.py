"""The seam at the first training forward of the root module."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from training_xpu.seams import compiling
from training_xpu.seams.base import Patch, Seam, in_subscriber, lock


@dataclass(frozen=True)
class RootForward:
    """The root module, about to run its first training forward."""

    module: torch.nn.Module  # with its wrappers: DDP, DeepSpeedEngine, OptimizedModule, ...


class RootForwardSeam(Seam[RootForward]):
    """The first training forward of the root module; each subscriber hears of one, and is then unsubscribed.

    The root is the first module called in training mode, with gradients enabled, that has a parameter to train. So
    forwards of evaluation, of frozen teachers and encoders, of parameterless transforms, on the meta device, and under
    torch.jit tracing or torch.export do not count; neither does an `nn.Embedding` alone, which scripts look up
    before they call the model with `inputs_embeds`. Where a script never calls its model as a whole but part by part,
    the first part is given.

    Works through one global forward pre-hook that goes with the event. torch has already chosen the root's own forward
    function and hooks then: what a subscriber does to them shows from the second forward on; what it does to
    submodules shows at once.

    A model that is only called inside a compiled function (`@torch.compile def step(batch): model(batch)...`) is not
    seen; nor is one whose `Module.compile` was called before the seam was subscribed.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._handle: RemovableHandle | None = None
        self._optimized_patched = False
        self._watched: dict[weakref.ref[torch.nn.Module], tuple[Callable[..., Any], Callable[..., Any]]] = {}

    def _install(self) -> None:
        compiling.COMPILE_PATCH.install()
        compiling.MODULE_COMPILE_PATCH.install()
        compiling.result_watchers.append(self._watch_result)
        compiling.module_watchers.append(self._watch_module)
        self._patch_optimized_module()
        self._handle = register_module_forward_pre_hook(_before_forward)

    def _uninstall(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        for reference, (compiled, watcher) in self._watched.items():
            module = reference()
            if module is not None and module._compiled_call_impl is watcher:
                module._compiled_call_impl = compiled
        self._watched.clear()
        if self._optimized_patched:
            _OPTIMIZED_MODULE_PATCH.uninstall()
            self._optimized_patched = False
        compiling.result_watchers.remove(self._watch_result)
        compiling.module_watchers.remove(self._watch_module)
        compiling.COMPILE_PATCH.uninstall()
        compiling.MODULE_COMPILE_PATCH.uninstall()

    def consider(self, module: torch.nn.Module) -> None:
        """Gives the module to all subscribers if this forward of it is the one."""
        if in_subscriber() or not torch.is_grad_enabled() or not _in_training(module) or torch._C._is_tracing():
            return
        if not any(p.requires_grad and not p.is_meta for p in module.parameters()):
            return
        with lock:
            subscriptions, self.subscriptions = self.subscriptions, ()
            if not subscriptions:
                return
            self._uninstall()
        for subscription in subscriptions:
            self.call(subscription, RootForward(module))

    def _watch_result(self, result: object) -> None:
        if type(result).__name__ == "OptimizedModule":
            self._patch_optimized_module()

    def _patch_optimized_module(self) -> None:
        """An OptimizedModule warns of global hooks when it is called: it must be seen before it looks."""
        if not self._optimized_patched and "torch._dynamo.eval_frame" in sys.modules:
            _OPTIMIZED_MODULE_PATCH.install()
            self._optimized_patched = True

    def _watch_module(self, module: torch.nn.Module) -> None:
        """A module compiled in place runs its hooks inside the compiled region, where they must not be found."""
        compiled = module._compiled_call_impl
        if compiled is None:
            return
        reference = weakref.ref(module)

        def consider_first(*args: Any, **kwargs: Any) -> Any:
            called = reference()
            if called is not None and not torch.compiler.is_compiling():
                self.consider(called)
            with self.hook_hidden():
                return compiled(*args, **kwargs)

        with lock:
            self._watched[reference] = (compiled, consider_first)
            module._compiled_call_impl = consider_first

    @contextmanager
    def hook_hidden(self) -> Iterator[None]:
        """Takes the global hook out for a while, if it is still there."""
        with lock:
            hidden = self._handle
            if hidden is not None:
                hidden.remove()
                self._handle = None
        try:
            yield
        finally:
            with lock:
                if hidden is not None and self.subscriptions and self._handle is None:
                    self._handle = register_module_forward_pre_hook(_before_forward)


ROOT_FORWARD = RootForwardSeam("root-forward")

# Wrappers whose own flag does not follow train() and eval(): the module inside tells.
_FLAG_INSIDE = {"DeepSpeedEngine": "module", "PipelineEngine": "module"}


def _in_training(module: torch.nn.Module) -> bool:
    # A parametrization is called while the model is being built, see torch.nn.utils.parametrize.
    if isinstance(module, torch.nn.Embedding) or type(module).__name__ == "ParametrizationList":
        return False
    inside = next((_FLAG_INSIDE[c.__name__] for c in type(module).__mro__ if c.__name__ in _FLAG_INSIDE), None)
    flagged = module if inside is None else module._modules.get(inside) or module
    return flagged.training


def _before_forward(module: torch.nn.Module, args: Any) -> None:
    # Dynamo may trace this hook: it understands the first line, and stops there.
    if not torch.compiler.is_compiling():
        ROOT_FORWARD.consider(module)


def _find_optimized_module() -> list[tuple[Any, str]]:
    return [(sys.modules["torch._dynamo.eval_frame"].OptimizedModule, "__call__")]


def _wrap_optimized_call(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __call__(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not ROOT_FORWARD.subscriptions:
            return original(self, *args, **kwargs)
        ROOT_FORWARD.consider(self)
        with ROOT_FORWARD.hook_hidden():
            return original(self, *args, **kwargs)

    return __call__


_OPTIMIZED_MODULE_PATCH = Patch(_find_optimized_module, _wrap_optimized_call)
