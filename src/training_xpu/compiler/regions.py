"""Which modules of a model are compiled, each by itself: the blocks, and what stands beside them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from training_xpu.blocks import class_names, find_blocks, unwrap, wrapped

_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)
# One operator of a library: a graph of it would call that operator again, and cost its own overhead on top.
_SINGLE_OPERATORS = (torch.nn.Embedding, torch.nn.Linear)


@dataclass(frozen=True)
class Region:
    """Modules that run the same code: one graph serves them all."""

    name: str  # class name of a block, or path of a single module
    modules: tuple[torch.nn.Module, ...]
    is_block: bool


def find_regions(model: torch.nn.Module) -> list[Region]:
    """The blocks by kind, then the modules beside them, such as the final norm and the rotary embedding.

    What is compiled already, or has a forward of the script's own, is left out, and so is what is a single operator.

    Args:
        model: with or without its wrappers.
    """
    inner = unwrap(model)
    groups = find_blocks(inner)
    blocks: dict[tuple[str, Callable[..., Any]], list[torch.nn.Module]] = {}
    for group in groups:
        for block in group.modules:
            blocks.setdefault((group.kind, type(block).forward), []).append(block)
    regions = [Region(name, tuple(modules), True) for (name, _), modules in blocks.items()]
    taken = {id(m) for region in regions for block in region.modules for m in block.modules()}
    holders = {group.container for group in groups}
    beside: dict[int, tuple[str, torch.nn.Module]] = {}
    for container in holders:
        for parent in _parents(container):
            for name, child in inner.get_submodule(parent).named_children():
                path = f"{parent}.{name}" if parent else name
                if not any(m is not child and id(m) in taken for m in child.modules()) and id(child) not in taken:
                    beside.setdefault(id(child), (path, child))
    regions += [
        Region(path, (module,), False)
        for path, module in beside.values()
        if not isinstance(module, (*_CONTAINERS, *_SINGLE_OPERATORS)) and _has_forward(module)
    ]
    return [region for region in map(_not_compiled, regions) if region.modules]


def is_compiled(root: torch.nn.Module) -> bool:
    """Whether the model, or a wrapper of it, is compiled as a whole."""
    layer: torch.nn.Module | None = root
    while layer is not None:
        if layer._compiled_call_impl is not None or "OptimizedModule" in class_names(layer):
            return True
        further = wrapped(layer)
        layer = None if further is None else further[1]
    return False


def _has_forward(module: torch.nn.Module) -> bool:
    return type(module).forward is not torch.nn.Module.forward


def _parents(path: str) -> list[str]:
    """The modules around a container, from the nearest to the model itself.

    >>> _parents("model.layers")
    ['model', '']
    """
    parts = path.split(".") if path else []
    return [".".join(parts[:depth]) for depth in range(len(parts) - 1, -1, -1)]


def _not_compiled(region: Region) -> Region:
    kept = tuple(m for m in region.modules if m._compiled_call_impl is None and "forward" not in m.__dict__)
    return Region(region.name, kept, region.is_block)
