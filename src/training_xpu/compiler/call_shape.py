"""What of a call decides which graph it needs: its structure, and the sizes that may change from batch to batch."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

_PLAIN = (bool, str, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class CallShape:
    """A call's arguments without their values."""

    structure: Hashable  # what a graph is made for, whatever the sizes
    sizes: tuple[Hashable, ...]  # of tensors, and plain numbers
    tensors: tuple[torch.Tensor, ...]


class NotCompilable(Exception):
    """An argument that changes state of its own, such as a cache of keys and values."""


def call_shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallShape:
    """
    Raises:
        NotCompilable: the call is one for plain Python.
    """
    structure: list[Hashable] = [torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        structure += [torch.is_autocast_enabled(kind.type), torch.get_autocast_dtype(kind.type)]
    sizes: list[Hashable] = []
    tensors: list[torch.Tensor] = []
    _look(args, structure, sizes, tensors)
    _look(kwargs, structure, sizes, tensors)
    return CallShape(tuple(structure), tuple(sizes), tuple(tensors))


def _look(value: Any, structure: list[Hashable], sizes: list[Hashable], tensors: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        structure.append((value.dtype, value.dim(), value.requires_grad, value.is_contiguous(), value.device))
        sizes.append(tuple(value.shape))
        tensors.append(value)
    elif isinstance(value, _PLAIN):
        structure.append(value)
    elif isinstance(value, (int, float)):
        structure.append(type(value).__name__)
        sizes.append(value)
    elif isinstance(value, (tuple, list)):
        structure.append((type(value), len(value)))
        for inner in value:
            _look(inner, structure, sizes, tensors)
    elif isinstance(value, dict):
        structure.append((dict, tuple(value)))
        for inner in value.values():
            _look(inner, structure, sizes, tensors)
    elif hasattr(value, "get_seq_length") or hasattr(value, "update"):
        raise NotCompilable(f"a {type(value).__name__} among the arguments")
    else:
        structure.append(type(value).__qualname__)


def mark_changing_sizes(shape: CallShape, before: tuple[Hashable, ...]) -> None:
    """Tells torch which sizes to leave open, before a graph for all sizes is made.

    Open are those that differ from an earlier call, and every size in the call that equals one of these: a mask has
    the sequence length twice, and batch and length tend to change together. Others stay fixed, so that kernels know
    them.

    Args:
        before: the sizes of the earlier call, of the same structure.
    """
    changed: set[int] = set()
    own = [s for s in shape.sizes if isinstance(s, tuple)]
    earlier = [s for s in before if isinstance(s, tuple)]
    for now, then in zip(own, earlier, strict=True):
        changed |= {a for a, b in zip(now, then, strict=True) if a != b}
    first = own[0] if own else ()
    for index, tensor in enumerate(shape.tensors):
        for dimension, size in enumerate(tensor.shape):
            batch_or_length = index == 0 and len(first) >= 3 and dimension < len(first) - 1
            if size in changed or batch_or_length or (len(first) >= 3 and size in first[:-1] and size > 1):
                torch._dynamo.maybe_mark_dynamic(tensor, dimension)
