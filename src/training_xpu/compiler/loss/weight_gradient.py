"""The gradient of the head's weight, chunk by chunk."""

from __future__ import annotations

import math

import torch


class WeightGradient:
    """The sum over chunks, in fp32 where the GEMMs are in less."""

    def __init__(self, weight: torch.Tensor, compute: torch.dtype, folded: float | None, single: bool) -> None:
        """
        Args:
            folded: what the sum is multiplied with, in fp32 or by a GEMM, which costs nothing; None: not.
            single: whether there is one chunk only.
        """
        self._weight = weight
        self._factor = 1.0 if folded is None else folded
        self._direct = compute.itemsize >= 4 or (single and compute == weight.dtype and compute == torch.bfloat16)
        self._fp16 = compute == torch.float16
        self._sum: torch.Tensor | None = None
        self._product: torch.Tensor | None = None

    def add(self, gradient: torch.Tensor, inputs: torch.Tensor) -> None:
        """Adds the chunk's gradient [rows, V] times its inputs [rows, H]."""
        first = self._sum is None
        if self._sum is None:
            dtype = gradient.dtype if self._direct else torch.float32
            self._sum = torch.empty(self._weight.shape, dtype=dtype, device=gradient.device)
        if self._direct:
            torch.addmm(self._sum, gradient.t(), inputs, beta=0 if first else 1, alpha=self._factor, out=self._sum)
            return
        # A sum over many rows would overflow in fp16, and one that is divided by their number lose small values.
        shrink = 2.0 ** -round(math.log2(max(gradient.shape[0], 1)) / 2) if self._fp16 else 1.0
        if self._product is None:
            self._product = torch.empty(self._weight.shape, dtype=gradient.dtype, device=gradient.device)
        torch.addmm(self._product, gradient.t(), inputs, beta=0, alpha=shrink, out=self._product)
        if first:
            self._sum.copy_(self._product).mul_(self._factor / shrink)
        else:
            self._sum.add_(self._product, alpha=self._factor / shrink)

    def result(self) -> torch.Tensor:
        """[V, H]; of an fp16 weight in fp32, for it has yet to be scaled."""
        if self._sum is None:
            return torch.zeros_like(self._weight)
        self._product = None
        return self._sum if self._weight.dtype == torch.float16 else self._sum.to(self._weight.dtype)
