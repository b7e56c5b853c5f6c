"""The blocks of a model by kind, and a copy of the model with a few of each kind, which stand for all."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from training_xpu.blocks import BlockGroup, kind_of

REPRESENTATIVES = 3  # of each kind: the first and the last block of a model may differ from those between


@dataclass(frozen=True)
class Block:
    """One block of a model and what kind it is."""

    name: str  # path of the module
    container: str
    kind: str  # class name; with more behind it where blocks of one class differ
    module: torch.nn.Module


def blocks_of(groups: Sequence[BlockGroup], model: torch.nn.Module) -> list[Block]:
    """All blocks of the groups, container after container, each in the order of the model.

    Blocks of one class are of one kind when their parameters have the same names, shapes and `requires_grad` and their
    attention is of the same type.
    """
    found = [(name, group, module) for group in groups for name, module in zip(group.names, group.modules, strict=True)]
    by_container: dict[str, list[tuple[str, BlockGroup, torch.nn.Module]]] = {}
    for item in found:
        by_container.setdefault(item[1].container, []).append(item)
    types = _layer_types(model)
    known: dict[str, dict[Any, str]] = {}
    result = []
    for container, items in by_container.items():
        members = list(model.get_submodule(container)._modules) if container else list(model._modules)
        order = {f"{container}.{m}" if container else m: i for i, m in enumerate(members)}
        items.sort(key=lambda item: order.get(item[0].removesuffix("._orig_mod"), len(order)))
        for index, (name, group, module) in enumerate(items):
            attention = _attention_type(module, types, index, len(items))
            signature = (attention, _signature(module))
            kinds = known.setdefault(group.kind, {})
            if signature not in kinds:
                label = attention or f"form {len(kinds) + 1}"
                taken = set(kinds.values())
                plain = group.kind if not kinds else f"{group.kind} ({label})"
                kinds[signature] = plain if plain not in taken else f"{group.kind} ({label}, form {len(kinds) + 1})"
            result.append(Block(name, container, kinds[signature], module))
    return [_named_fully(block, known) for block in result]


def _named_fully(block: Block, known: dict[str, dict[Any, str]]) -> Block:
    """The first kind of a class is called by its attention too where that is what tells it from the others."""
    kinds = known.get(block.kind, {})
    attention = {signature[0] for signature in kinds}
    if len(kinds) > 1 and len(attention) > 1:
        first = next(iter(kinds))
        if first[0]:
            return Block(block.name, block.container, f"{block.kind} ({first[0]})", block.module)
    return block


def _signature(module: torch.nn.Module) -> tuple[Any, ...]:
    return tuple(
        (n, tuple(getattr(p, "ds_shape", p.shape)), p.requires_grad) for n, p in module.named_parameters()
    ) + tuple(kind_of(m) for m in module.modules())


def _layer_types(model: torch.nn.Module) -> list[str] | None:
    config: Any = getattr(model, "config", None)
    for holder in (config, getattr(config, "text_config", None)):
        types = getattr(holder, "layer_types", None)
        if types:
            return list(types)
    return None


def _attention_type(module: torch.nn.Module, types: list[str] | None, index: int, count: int) -> str:
    for attribute in ("attention_type", "layer_type"):
        value = getattr(module, attribute, None)
        if isinstance(value, str):
            return value
    return types[index] if types and len(types) == count else ""


@dataclass(frozen=True)
class Selection:
    """The blocks of a model that stand for all of them."""

    kept: list[int]  # in the model's order
    left_out: list[torch.nn.Module]  # members of ModuleLists
    shortened: dict[str, list[int]]  # container -> which of its members stay


def select(model: torch.nn.Module, blocks: Sequence[Block]) -> Selection:
    """A few blocks of each kind. Only containers that are ModuleLists of nothing but blocks lose any."""
    kept: list[int] = []
    left_out: list[torch.nn.Module] = []
    shortened: dict[str, list[int]] = {}
    by_container: dict[str, list[int]] = {}
    for index, block in enumerate(blocks):
        by_container.setdefault(block.container, []).append(index)
    for container, indices in by_container.items():
        holder = model.get_submodule(container)
        if not isinstance(holder, torch.nn.ModuleList) or len(holder) != len(indices):
            kept += indices
            continue
        stay = _representatives([blocks[i].kind for i in indices])
        kept += [indices[k] for k in stay]
        if len(stay) < len(indices):
            shortened[container] = stay
            left_out += [member for k, member in enumerate(holder) if k not in stay]
    return Selection(sorted(kept), left_out, shortened)


def adapt_configs(copied: torch.nn.Module, selection: Selection, original: torch.nn.Module) -> None:
    """Tells a copy without the blocks left out how many there are: configs that list layers' types or their number."""
    for container, stay in selection.shortened.items():
        _shorten_configs(_owner(copied, container), len(original.get_submodule(container)._modules), stay)


def _representatives(kinds: Sequence[str]) -> list[int]:
    """The first block, the last one, and of each kind one between, preferably with the same neighbour before it."""
    count = len(kinds)
    chosen = {0, count - 1}
    for kind in dict.fromkeys(kinds):
        mine = [i for i, k in enumerate(kinds) if k == kind]
        between = [i for i in mine if 0 < i < count - 1]
        chosen.add(between[0] if between else mine[0])
    for index in range(count):  # a model of a few blocks is traced whole
        if len(chosen) >= min(count, REPRESENTATIVES):
            break
        chosen.add(index)
    return sorted(chosen)


def _owner(model: torch.nn.Module, container: str) -> torch.nn.Module:
    """The module whose forward calls the blocks: the nearest one above that has a config, or the model."""
    path = container
    while path:
        path = path.rpartition(".")[0]
        module = model.get_submodule(path)
        if getattr(module, "config", None) is not None:
            return module
    return model


def _shorten_configs(owner: torch.nn.Module, count: int, kept: Sequence[int]) -> None:
    """The config of the module that calls the blocks, wherever below it the same one is used."""
    config: Any = getattr(owner, "config", None)
    if not hasattr(config, "to_dict"):
        return
    shortened = copy.deepcopy(config)
    _shorten_config(shortened, count, kept)
    for module in owner.modules():
        if getattr(module, "config", None) is config:
            module.config = shortened


def _shorten_config(config: Any, count: int, kept: Sequence[int]) -> None:
    values = vars(config)
    for name, value in list(values.items()):
        if isinstance(value, list) and len(value) == count and name.endswith(("_types", "_layers")):
            values[name] = [value[k] for k in kept]
    for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
        if values.get(name) == count:
            values[name] = len(kept)
