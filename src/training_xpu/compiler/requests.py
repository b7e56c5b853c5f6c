"""What a script asks of torch.compile itself: its calls for a model with blocks get this project's path instead."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from training_xpu.blocks import find_blocks, unwrap
from training_xpu.seams import CompileCall, ModuleCompileCall

_OURS = frozenset({None, "inductor"})
# Inductor's own generator draws other dropout masks than plain Python does from the same seed.
SAME_RANDOM_NUMBERS = {"fallback_random": True}


@dataclass(frozen=True)
class Request:
    """How the script wants it compiled."""

    options: dict[str, Any] = field(default_factory=SAME_RANDOM_NUMBERS.copy)  # Inductor's
    dynamic: bool | None = None


_requests: weakref.WeakKeyDictionary[torch.nn.Module, Request] = weakref.WeakKeyDictionary()


def request_of(model: torch.nn.Module) -> Request:
    return _requests.get(unwrap(model), Request())


def take_compile(call: CompileCall) -> torch.nn.Module | None:
    """Answers torch.compile(model) with the model itself, which is compiled in its first training forward.

    Left to torch: whatever is no model with blocks in training, and other backends than Inductor.
    """
    if isinstance(call.model, torch.nn.Module) and _take(call.model, call.arguments):
        return call.model
    return None


def take_module_compile(call: ModuleCompileCall) -> bool:
    """The same for model.compile(), which DeepSpeed's engine.compile() calls too."""
    return _take(call.module, call.arguments)


def _take(model: torch.nn.Module, arguments: dict[str, Any]) -> bool:
    if arguments.get("backend") not in _OURS or arguments.get("disable"):
        return False
    trains = model.training and any(p.requires_grad for p in model.parameters())
    if not trains or not find_blocks(model):
        return False
    _requests[unwrap(model)] = Request(_options(arguments), arguments.get("dynamic"))
    return True


def _options(arguments: dict[str, Any]) -> dict[str, Any]:
    """Inductor's options, those of a mode included."""
    options = {**SAME_RANDOM_NUMBERS, **(arguments.get("options") or {})}
    mode = arguments.get("mode")
    if mode not in (None, "default"):
        options = {**torch._inductor.list_mode_options(mode), **options}
    return options
