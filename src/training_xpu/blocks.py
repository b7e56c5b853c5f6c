"""Finds the repeated blocks of any model, and holds what features publish about a model."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

# Class of a wrapper -> the attribute with what it wraps. By name: the package may never have been imported.
_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "DeepSpeedEngine": "module",
    "OptimizedModule": "_orig_mod",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
    "PeftModel": "base_model",
    "BaseTuner": "model",  # what stands between a PeftModel and the model itself
}
_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)
_SWITCHES = ("gradient_checkpointing", "activation_checkpointing")
# Key of `publish`: how a model's output and loss are computed instead of by its own forward, such as in chunks. The
# value is a function of the model, or of a copy of it, and the forward's keyword arguments.
LOSS = "loss"


@dataclass(frozen=True)
class BlockGroup:
    """Blocks of one kind in one place, in the order of the model."""

    kind: str  # class name, e.g. "LlamaDecoderLayer"
    container: str  # path of the module that holds them, "" for the model itself
    names: tuple[str, ...]  # paths from the model that was asked about, for model.get_submodule
    modules: tuple[torch.nn.Module, ...]  # without wrappers of their own


def class_names(module: torch.nn.Module) -> list[str]:
    """Names of the module's class and all its bases."""
    return [c.__name__ for c in type(module).__mro__]


def wrapped(module: torch.nn.Module) -> tuple[str, torch.nn.Module] | None:
    """The attribute and module one wrapper further in; None where the module is no wrapper this project knows."""
    for name in class_names(module):
        attribute = _WRAPPERS.get(name)
        inner = module._modules.get(attribute) if attribute else None
        if attribute and inner is not None:
            return attribute, inner
    return None


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """The user's own model inside all wrappers: DDP, DeepSpeed, FSDP 1, torch.compile, PEFT, checkpoint wrappers."""
    while (further := wrapped(module)) is not None:
        module = further[1]
    return module


def kind_of(module: torch.nn.Module) -> str:
    """Class name as its author wrote it: FSDP2 and composable replication change the class of what they shard."""
    cls = type(module)
    while len(cls.__bases__) == 2 and cls.__bases__[0].__name__ in ("FSDPModule", "ReplicateModule"):
        cls = cls.__bases__[1]
    return cls.__name__


def find_blocks(model: torch.nn.Module) -> list[BlockGroup]:
    """The repeated layers, by kind and place, in the order of the model.

    Every transformers `GradientCheckpointingLayer` is a block. Beside these, where a ModuleList, ModuleDict or
    Sequential holds at least two modules of one class, with children and parameters of their own, and at least two of
    these have parameters of the same names and shapes, they are blocks. So stages that differ in width are no blocks
    but what they repeat inside is, and a dense layer among layers with experts is one. Blocks inside blocks, such as
    experts, are not looked for. Wrappers around the model or around a block are looked through.
    """
    found: dict[tuple[str, str], list[tuple[str, torch.nn.Module]]] = {}
    for container, name, module in _blocks(model, "", set()):
        found.setdefault((container, kind_of(module)), []).append((name, module))
    return [
        BlockGroup(kind, container, tuple(n for n, _ in blocks), tuple(m for _, m in blocks))
        for (container, kind), blocks in found.items()
    ]


def _blocks(module: torch.nn.Module, path: str, seen: set[int]) -> Iterator[tuple[str, str, torch.nn.Module]]:
    """(container, name, block) of all blocks below a module."""
    children = [_looked_through(child, _join(path, n)) for n, child in module._modules.items() if child is not None]
    repeated = _repeated([c for _, c in children]) if isinstance(module, _CONTAINERS) else set()
    for name, child in children:
        if id(child) in seen:
            continue
        if id(child) in repeated or "GradientCheckpointingLayer" in class_names(child):
            seen.add(id(child))
            yield path, name, child
        else:
            yield from _blocks(child, name, seen)


def _looked_through(module: torch.nn.Module, path: str) -> tuple[str, torch.nn.Module]:
    while (further := wrapped(module)) is not None:
        path, module = _join(path, further[0]), further[1]
    return path, module


def _repeated(children: list[torch.nn.Module]) -> set[int]:
    """ids of those children that are blocks by repetition."""
    composite = [c for c in children if c._modules and next(c.parameters(), None) is not None]
    by_class: dict[str, list[torch.nn.Module]] = {}
    for child in composite:
        by_class.setdefault(kind_of(child), []).append(child)
    repeated: set[int] = set()
    for alike in by_class.values():
        if len(alike) < 2 or max(Counter(map(_structure, alike)).values()) < 2:
            continue
        # Bare containers are only taken when there is nothing better inside them.
        if type(alike[0]) in _CONTAINERS and any(True for c in alike for _ in _blocks(c, "", set())):
            continue
        repeated.update(id(c) for c in alike)
    return repeated


def _structure(module: torch.nn.Module) -> tuple[Any, ...]:
    # ZeRO-3 leaves empty parameters behind and keeps the whole shape beside them.
    return tuple(
        (n.replace("_orig_mod.", ""), tuple(getattr(p, "ds_shape", p.shape))) for n, p in module.named_parameters()
    )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def recomputed_blocks(model: torch.nn.Module) -> tuple[int, int]:
    """How many blocks recompute their activations in backward, and how many blocks there are.

    Seen are the switch that each block of a transformers model carries, under either of its names, and torch's
    checkpoint wrappers. A forward that calls torch.utils.checkpoint by itself is not seen.
    """
    wrapped_blocks = {id(unwrap(m)) for m in model.modules() if "CheckpointWrapper" in class_names(m)}
    blocks = [module for group in find_blocks(model) for module in group.modules]
    recomputed = sum(id(b) in wrapped_blocks or any(getattr(b, s, False) is True for s in _SWITCHES) for b in blocks)
    return recomputed, len(blocks)


_published: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()
_published_lock = threading.Lock()


def publish(model: torch.nn.Module, key: str, value: Any) -> None:
    """Tells the other features something about a model, such as "loss is chunked"; forgotten with the model.

    It is the same model with and without its wrappers. A later value for the same key replaces the earlier one.
    """
    with _published_lock:
        _published.setdefault(unwrap(model), {})[key] = value


def published(model: torch.nn.Module, key: str, default: Any = None) -> Any:
    """What was published about a model under this key."""
    with _published_lock:
        return _published.get(unwrap(model), {}).get(key, default)


def withdraw(model: torch.nn.Module, key: str) -> None:
    """Takes back what was published about a model under this key; nothing happens where nothing was."""
    with _published_lock:
        _published.get(unwrap(model), {}).pop(key, None)
