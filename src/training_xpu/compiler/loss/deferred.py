"""Logits that are computed when somebody reads them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_map

_Tensor = torch.Tensor
Recorded = tuple[str, Any]

# What can be told without the values.
_METADATA = {
    _Tensor.size,
    _Tensor.dim,
    _Tensor.numel,
    _Tensor.nelement,
    _Tensor.stride,
    _Tensor.is_floating_point,
    _Tensor.is_complex,
    _Tensor.element_size,
    _Tensor.get_device,
    _Tensor.__len__,
    _Tensor.is_contiguous,
    _Tensor._is_view,
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
} | {
    getattr(_Tensor, name).__get__
    for name in (
        "shape",
        "dtype",
        "device",
        "ndim",
        "layout",
        "requires_grad",
        "is_leaf",
        "is_cuda",
        "is_cpu",
        "is_meta",
        "is_sparse",
        "is_quantized",
        "is_nested",
        "itemsize",
        "nbytes",
        "grad_fn",
        "_base",
        "_version",
        "output_nr",
        "names",
        "is_mkldnn",
        "is_xpu",
        "is_mps",
    )
    if hasattr(getattr(_Tensor, name, None), "__get__")
}
_MULTIPLY = {torch.mul, torch.multiply, _Tensor.mul, _Tensor.multiply, _Tensor.__mul__, _Tensor.__rmul__}
_DIVIDE = {torch.div, torch.true_divide, _Tensor.div, _Tensor.true_divide, _Tensor.__truediv__}
_TANH = {torch.tanh, _Tensor.tanh}
_CAST = {_Tensor.float: torch.float32, _Tensor.double: torch.float64, _Tensor.half: torch.float16}
_CAST[_Tensor.bfloat16] = torch.bfloat16
_DETACH = {torch.detach, _Tensor.detach}
_SAME_VALUES = {torch.clone, _Tensor.clone, *_DETACH}
_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.view.default)


@dataclass
class Source:
    """What the logits are made of, and what became of them."""

    head: Callable[[torch.Tensor], torch.Tensor]  # called as any module is, so that engines gather its weight
    hidden: torch.Tensor
    stale: Callable[[], bool]  # whether the head's weight is no longer what it was in the forward
    autocast: torch.dtype | None  # in which the forward ran
    sharded: Callable[[], bool] | None = None  # whether calling the head would not gather its weight
    loss: torch.Tensor | None = None  # taken by the loss function, once
    expected: Any = None
    on_read: list[Callable[[], None]] = field(default_factory=list)  # called when they have to be computed
    with_grad: bool = field(default_factory=torch.is_grad_enabled)  # whether the forward recorded a graph

    def compute(self) -> torch.Tensor:
        """The head's output, as the forward would have had it."""
        if self.stale():
            warnings.warn(
                "logits were read after the model's weights had changed, and were computed with the new weights; from "
                "the next step on they are computed in the forward",
                RuntimeWarning,
                stacklevel=2,
            )
        for told in self.on_read:
            told()
        device = self.hidden.device.type
        with torch.set_grad_enabled(self.with_grad), _autocast(device, self.autocast):
            if self.sharded is None or not self.sharded():
                return self.head(self.hidden)
            # After backward, where there is no graph any more: FSDP2 has sharded the root's weights, and gathers them
            # for the root alone.
            weight, bias = (getattr(self.head, name) for name in ("weight", "bias"))
            whole = weight.detach().full_tensor().to(self.hidden.dtype)
            addition = None if bias is None else bias.detach().full_tensor().to(self.hidden.dtype)
            return torch.nn.functional.linear(self.hidden, whole, addition)


@contextlib.contextmanager
def _autocast(device: str, dtype: torch.dtype | None) -> Iterator[None]:
    with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
        yield


class DeferredLogits(torch.Tensor):
    """[..., V] logits without values until somebody uses them other than by scaling, tanh or a change of dtype.

    Whatever reads them gets what the head gives, with the graph it would have had. Such a tensor has the shape, dtype
    and device of the logits; autograd functions that pass it on, such as engines put around a module's output, give
    another one of the same values.
    """

    _source: Source
    _parent: DeferredLogits | None
    _operation: Callable[[torch.Tensor], torch.Tensor] | None
    _real: torch.Tensor | None
    _hooks: list[Callable[..., Any]]
    recorded: tuple[Recorded, ...]

    @staticmethod
    def __new__(
        cls: type[DeferredLogits],
        source: Source,
        shape: torch.Size,
        dtype: torch.dtype,
        *,
        parent: DeferredLogits | None = None,
        operation: Callable[[torch.Tensor], torch.Tensor] | None = None,
        recorded: tuple[Recorded, ...] = (),
        requires_grad: bool = False,
    ) -> DeferredLogits:
        """
        Args:
            parent: whose values these are, after `operation`; None: the head's.
            recorded: what has been done to the head's output, in order.
        """
        made: DeferredLogits = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=source.hidden.device, requires_grad=requires_grad
        )
        made._source, made._parent, made._operation = source, parent, operation
        made._real, made._hooks, made.recorded = None, [], recorded
        return made

    @property
    def source(self) -> Source:
        return self._source

    def values(self) -> torch.Tensor:
        """The logits themselves, computed at the first call."""
        with torch._C.DisableTorchFunctionSubclass():
            if self._real is None:
                with_grad = self.requires_grad
                if self._parent is None:
                    values = self._source.compute()
                else:
                    with torch.set_grad_enabled(with_grad):
                        values = self._parent.values()
                        values = values if self._operation is None else self._operation(values)
                if with_grad and values.requires_grad:
                    for hook in self._hooks:
                        values.register_hook(hook)  # type: ignore[no-untyped-call]
                else:
                    values = values.detach()
                self._real = values
            return self._real

    def derive(
        self, operation: Callable[[torch.Tensor], torch.Tensor], *recorded: Recorded, dtype: torch.dtype | None = None
    ) -> DeferredLogits:
        """Logits after an operation, which is not done yet."""
        with torch._C.DisableTorchFunctionSubclass():
            return DeferredLogits(
                self._source,
                self.shape,
                dtype or self.dtype,
                parent=self,
                operation=operation,
                recorded=(*self.recorded, *recorded),
                requires_grad=self.requires_grad and torch.is_grad_enabled(),
            )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args and isinstance(args[0], DeferredLogits) else None
        if first is not None and first._real is None:
            with torch._C.DisableTorchFunctionSubclass():
                deferred = first._deferred(func, args[1:], kwargs)
            if deferred is not NotImplemented:
                return deferred
        with torch._C.DisableTorchFunctionSubclass():
            return func(*tree_map(_read, args), **tree_map(_read, kwargs))

    def _deferred(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number = args[0] if len(args) == 1 and not kwargs and isinstance(args[0], int | float) else None
        # Operations are done in the dtype the logits have at that point, as they would have been.
        if number is not None and func in _MULTIPLY:
            return self.derive(lambda x: x * number, ("multiply", float(number)))
        if number is not None and func in _DIVIDE:
            return self.derive(lambda x: x / number, ("multiply", 1.0 / number)) if number else NotImplemented
        if func in _TANH and not args and not kwargs:
            return self.derive(torch.tanh, ("tanh", None))
        dtype = _CAST.get(func) if not args and not kwargs else None
        if func is _Tensor.to and len(args) == 1 and not kwargs and isinstance(args[0], torch.dtype):
            dtype = args[0] if args[0].is_floating_point else None
        if dtype is not None:
            return self if dtype == self.dtype else self.derive(lambda x: x.to(dtype), dtype=dtype)
        if func is _Tensor.register_hook and len(args) == 1:
            self._hooks.append(args[0])
            return _Handle(self._hooks, args[0])
        if func is _Tensor.contiguous and not args and not kwargs:
            return self
        # In an autograd function, which engines put around outputs; anybody else means to keep the values as they are.
        if func in _SAME_VALUES and not args and not kwargs and not torch.is_grad_enabled():
            return self.detach() if func in _DETACH else self.derive(torch.clone)
        return NotImplemented

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first = args[0] if args else None
        if (
            func in _ALIASES
            and isinstance(first, DeferredLogits)
            and first._real is None
            and (len(args) == 1 or tuple(args[1]) == tuple(first.shape))
        ):
            return DeferredLogits(first._source, first.shape, first.dtype, parent=first, recorded=first.recorded)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*tree_map(_read, args), **tree_map(_read, kwargs or {}))


class _Handle:
    """Takes a hook away again."""

    def __init__(self, hooks: list[Callable[..., Any]], hook: Callable[..., Any]) -> None:
        self._hooks, self._hook = hooks, hook

    def remove(self) -> None:
        with contextlib.suppress(ValueError):
            self._hooks.remove(self._hook)


def _read(value: Any) -> Any:
    return value.values() if isinstance(value, DeferredLogits) else value


def scale_and_softcap(recorded: tuple[Recorded, ...]) -> tuple[float, float | None] | None:
    """Which `logit_scale` and `softcap` of `linear_cross_entropy` do what was recorded; None: none does."""
    scale, cap = 1.0, None
    for name, number in recorded:
        if name == "tanh":
            if cap is not None:
                return None
            cap = 1.0
        elif cap is None:
            scale *= number
        else:
            cap *= number
    if cap is None:
        return scale, None
    return (scale * cap, cap) if cap > 0 else None
