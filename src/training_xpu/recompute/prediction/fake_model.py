"""A copy of a model on fake tensors: the same modules and shapes, no memory, none of the original's hooks."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

_HOOKS = (
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)
ATTENTION = "training_xpu_causal_sdpa"


def fake_copy(
    model: torch.nn.Module,
    mode: FakeTensorMode,
    dtype: torch.dtype | None = None,
    cast_buffers: bool = True,
    leave_out: Collection[torch.nn.Module] = (),
) -> torch.nn.Module:
    """Copies a model onto fake CPU tensors.

    Hooks, forwards replaced on an instance and anything an engine hung on a module are left behind; a parameter that
    ZeRO-3 has partitioned gets its full shape. Parameters shared in the original are shared in the copy.

    Args:
        model: real, meta or fake; unwrapped.
        mode: the mode the copy's tensors belong to; must not be active.
        dtype: of floating-point parameters and buffers; None: as they are.
        cast_buffers: whether `dtype` holds for buffers too.
        leave_out: members of ModuleLists that the copy does without; the others are counted anew.
    """
    made: dict[int, Any] = {}
    dropped = {id(m) for m in leave_out}

    def tensor(source: torch.Tensor, cast: bool = cast_buffers) -> torch.Tensor:
        shape = tuple(getattr(source, "ds_shape", source.shape))
        wanted = dtype if dtype is not None and cast and source.is_floating_point() else source.dtype
        with mode:
            return torch.empty(shape, dtype=wanted, device="cpu")

    def parameter(source: torch.nn.Parameter) -> torch.nn.Parameter:
        if id(source) not in made:
            with mode:
                made[id(source)] = torch.nn.Parameter(tensor(source, True), requires_grad=source.requires_grad)
        return made[id(source)]  # type: ignore[no-any-return]

    def module(source: torch.nn.Module) -> torch.nn.Module:
        if id(source) in made:
            return made[id(source)]  # type: ignore[no-any-return]
        target = copy.copy(source)
        made[id(source)] = target
        state = dict(source.__dict__)
        state.pop("forward", None)
        state.pop("_compiled_call_impl", None)
        for name in _HOOKS:
            if name in state:
                state[name] = OrderedDict()
        state["_parameters"] = {n: None if p is None else parameter(p) for n, p in source._parameters.items()}
        state["_buffers"] = {n: None if b is None else tensor(b) for n, b in source._buffers.items()}
        members = {n: m for n, m in source._modules.items() if id(m) not in dropped}
        if len(members) < len(source._modules):
            members = {str(n): m for n, m in enumerate(members.values())}
        state["_modules"] = {n: None if m is None else module(m) for n, m in members.items()}
        for name, value in list(state.items()):
            if isinstance(value, torch.nn.Module):
                state[name] = module(value)
            elif isinstance(value, torch.Tensor):
                state[name] = tensor(value)
        target.__dict__ = state
        return target

    return module(model)


def use_causal_attention(model: Any) -> None:
    """Has a HF model make the attention masks it makes on real tensors without padding: none where SDPA needs none.

    Under fake tensors transformers cannot look whether a batch has padding and makes a mask, which would be counted.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(ATTENTION, sdpa_attention_forward)
    AttentionMaskInterface.register(ATTENTION, _mask_without_padding)
    # The copy shares its configs with the original, which must not change: every module gets one of its own.
    copies: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        # The others make the same mask on real and on fake tensors.
        if config is None or getattr(config, "_attn_implementation", None) != "sdpa":
            continue
        if id(config) not in copies:
            copies[id(config)] = copy.deepcopy(config)
            copies[id(config)]._attn_implementation = ATTENTION
        module.config = copies[id(config)]


def _mask_without_padding(*arguments: Any, **keywords: Any) -> Any:
    from transformers.masking_utils import sdpa_mask

    # Nor can transformers tell under fake tensors that a row holds one sequence alone: it would make a mask for that.
    return sdpa_mask(*arguments, **{**keywords, "attention_mask": None, "allow_is_causal_skip": True})
