"""How large a micro batch is, from what a model is called with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from training_xpu.recompute.online.amounts import BatchShape

# The names under which models of this field are given their tokens, most telling first.
_NAMES = ("input_ids", "inputs_embeds", "decoder_input_ids", "tokens", "input_values", "pixel_values")


def batch_shape(args: Sequence[Any], kwargs: Mapping[str, Any]) -> BatchShape:
    """Sequences and length of the first tensor that holds tokens, or else of the largest tensor with a batch.

    A batch without tensors counts as one token. Of a tensor of hidden states or pixels all dimensions between the
    first and the last count as length.
    """
    named = [kwargs[name] for name in _NAMES if isinstance(kwargs.get(name), torch.Tensor)]
    tensors = named[:1] or list(_tensors((*args, *kwargs.values())))
    shapes = [_shape(tensor) for tensor in tensors if tensor.dim() > 0]
    return max(shapes, key=lambda shape: shape.tokens, default=BatchShape(1, 1))


def _shape(tensor: torch.Tensor) -> BatchShape:
    dims = list(tensor.shape)
    if tensor.is_floating_point() and len(dims) > 1:
        dims = dims[:-1]
    length = 1
    for dim in dims[1:]:
        length *= dim
    return BatchShape(int(dims[0]), int(length))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from _tensors(value.values())
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
