"""What a block may do with its activations, and which operations the selective way keeps."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts


class Mode(StrEnum):
    """What a block does between its forward and its backward."""

    KEEP = "keep"  # holds every activation
    SELECTIVE = "selective"  # holds the results of attention and of matrix products, computes the rest anew
    RECOMPUTE = "recompute"  # holds its inputs alone
    OFFLOAD = "offload"  # holds every activation in the host's memory; on accelerators


# By name: which of them exist depends on torch's version and build.
_KEPT = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::linear",
    "aten::_grouped_mm",
    "aten::_scaled_mm",
    "aten::_scaled_grouped_mm",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "aten::_scaled_dot_product_attention_math",
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
    "aten::convolution",
    "mkldnn::_linear_pointwise",
    "flash_attn::_flash_attn_forward",
    "flash_attn::_flash_attn_varlen_forward",
    "flash_attn_3::fwd",
    "transformer_engine::linear",
)
_KEPT_HIGHER_ORDER = ("flex_attention",)


def is_kept(operation: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> bool:
    """Whether the selective way keeps the result of this call of an operator: attention and matrix products.

    Attention that drops out is computed anew: to leave it out would leave the random generator where it was, and what
    comes after it in the block would draw other numbers than in the forward.
    """
    if not isinstance(operation, torch._ops.OpOverload):
        return getattr(operation, "__name__", None) in _KEPT_HIGHER_ORDER
    if operation._schema.name not in _KEPT:
        return False
    for place, argument in enumerate(operation._schema.arguments):
        if argument.name in ("dropout_p", "p_dropout"):
            value = args[place] if place < len(args) else (kwargs or {}).get(argument.name, argument.default_value)
            return not value
    return True


def offloading(pin_memory: bool = True) -> torch.autograd.graph.saved_tensors_hooks:
    """Keeps what is saved for the backward in the host's memory, the weights aside, which are alive anyway.

    Copies go in the order of the current stream, from and to pinned memory, so that they overlap with the host's work
    and no tensor is reused before its copy is done.
    """

    def pack(tensor: torch.Tensor) -> torch.Tensor | tuple[torch.device, torch.Tensor]:
        origin = tensor if tensor._base is None else tensor._base
        if isinstance(origin, torch.nn.Parameter):
            return tensor
        host = torch.empty(tensor.size(), dtype=tensor.dtype, layout=tensor.layout, pin_memory=pin_memory)
        host.copy_(tensor, non_blocking=pin_memory)
        return tensor.device, host

    def unpack(packed: torch.Tensor | tuple[torch.device, torch.Tensor]) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        device, host = packed
        return host.to(device, non_blocking=pin_memory)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


class SelectivePolicy:
    """The policy of one block; remembers whether there was anything for it to keep."""

    def __init__(self) -> None:
        self.matched: bool | None = None  # None: not run yet

        def decide(context: SelectiveCheckpointContext, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            kept = self.decide(operation, args, kwargs)
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        # Plain functions: torch.compile takes no others as `context_fn`.
        def compiled_contexts() -> tuple[Any, Any]:
            return create_selective_checkpoint_contexts(decide)  # type: ignore[no-untyped-call,no-any-return]

        self.compiled_contexts = compiled_contexts
        """`context_fn` of `torch.utils.checkpoint.checkpoint` inside a compiled region."""

    def contexts(self) -> tuple[Any, Any]:
        """`context_fn` of `torch.utils.checkpoint.checkpoint` elsewhere.

        torch's own contexts want the same operators in forward and recompute. ZeRO-3 gathers weights in between.
        """
        forward = _Keeping(self)
        return forward, _GivingBack(forward)

    def decide(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether to keep the result of this call."""
        kept = is_kept(operation, args, kwargs)
        self.matched = bool(self.matched) or kept
        return kept


class _Keeping(TorchDispatchMode):
    """The forward: keeps results by operator and number of the call."""

    def __init__(self, policy: SelectivePolicy) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.policy = policy
        self.results: dict[tuple[Any, int], Any] = {}
        self._calls: Counter[Any] = Counter()
        self._in_storage: dict[int, list[tuple[Any, int]]] = {}  # storage -> the kept results in it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.policy.decide(func, args, kwargs):
            place = (func, self._calls[func])
            self._calls[func] += 1
            self.results[place] = tree_map_only(torch.Tensor, torch.Tensor.detach, result)
            for tensor in tree_iter(result):
                if isinstance(tensor, torch.Tensor):
                    self._in_storage.setdefault(tensor.untyped_storage()._cdata, []).append(place)
        elif isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
            self._forget_overwritten(func, args, kwargs)
        return result

    def _forget_overwritten(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Gives up what an operator overwrites, such as an in-place activation: the recompute overwrites it again."""
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for tensor in tree_iter(args[number] if number < len(args) else kwargs.get(argument.name)):
                if isinstance(tensor, torch.Tensor):
                    for place in self._in_storage.pop(tensor.untyped_storage()._cdata, []):
                        del self.results[place]


class _GivingBack(TorchDispatchMode):
    """The recompute: what was kept takes the place of being computed, and is let go of."""

    def __init__(self, forward: _Keeping) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._forward = forward
        self._calls: Counter[Any] = Counter()

    def __enter__(self) -> Any:
        self._calls.clear()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_kept(func, args, kwargs):
            return func(*args, **kwargs)
        place = (func, self._calls[func])
        self._calls[func] += 1
        if place not in self._forward.results:  # overwritten, or a second backward through the same graph
            return func(*args, **kwargs)
        return self._forward.results.pop(place)
