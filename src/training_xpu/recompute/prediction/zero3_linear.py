"""What a linear layer keeps under ZeRO-3, where DeepSpeed puts a function of its own in torch's place.

DeepSpeed 0.19, runtime/zero/linear.py: input and weight are kept whichever of them needs a gradient, so that a layer
with frozen weights keeps its input, which torch's own would not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class _KeepsAll(torch.autograd.Function):
    """The same operations forwards and backwards."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        ctx.save_for_backward(input, weight, bias)
        if input.dim() == 2 and bias is not None:
            return torch.addmm(bias, input, weight.t())
        output = input.matmul(weight.t())
        if bias is not None:
            output += bias
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        input, weight, bias = ctx.saved_tensors
        of_input = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_input = gradient.matmul(weight)
        if ctx.needs_input_grad[1]:
            of_weight = gradient.reshape(-1, gradient.shape[-1]).t().matmul(input.reshape(-1, input.shape[-1]))
        if bias is not None and ctx.needs_input_grad[2]:
            of_bias = gradient.sum(list(range(gradient.dim() - 1)))
        return of_input, of_weight, of_bias


def use_zero3_linear(model: torch.nn.Module) -> None:
    """Gives the linear layers of a copy DeepSpeed's function; what calls torch's by itself is left as it is."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and type(module).forward is torch.nn.Linear.forward:
            module.forward = _forward_of(module)  # type: ignore[assignment, method-assign]


def _forward_of(module: torch.nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(input: torch.Tensor) -> torch.Tensor:
        return _KeepsAll.apply(input, module.weight, module.bias)  # type: ignore[no-any-return, no-untyped-call]

    return forward
