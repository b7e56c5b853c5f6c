"""A copy of a model on fake tensors: the same modules and shapes, no memory, none of the original's hooks."""

from __future__ import annotations

import copy
from collections import OrderedDict
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


def fake_copy(model: torch.nn.Module, mode: FakeTensorMode, dtype: torch.dtype | None = None) -> torch.nn.Module:
    """Copies a model onto fake CPU tensors.

    Hooks, forwards replaced on an instance and anything an engine hung on a module are left behind; a parameter that
    ZeRO-3 has partitioned gets its full shape. Parameters shared in the original are shared in the copy.

    Args:
        model: real, meta or fake; unwrapped.
        mode: the mode the copy's tensors belong to; must not be active.
        dtype: of floating-point parameters and buffers; None: as they are.
    """
    made: dict[int, Any] = {}

    def tensor(source: torch.Tensor) -> torch.Tensor:
        shape = tuple(getattr(source, "ds_shape", source.shape))
        wanted = dtype if dtype is not None and source.is_floating_point() else source.dtype
        with mode:
            return torch.empty(shape, dtype=wanted, device="cpu")

    def parameter(source: torch.nn.Parameter) -> torch.nn.Parameter:
        if id(source) not in made:
            with mode:
                made[id(source)] = torch.nn.Parameter(tensor(source), requires_grad=source.requires_grad)
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
        state["_modules"] = {n: None if m is None else module(m) for n, m in source._modules.items()}
        for name, value in list(state.items()):
            if isinstance(value, torch.nn.Module):
                state[name] = module(value)
            elif isinstance(value, torch.Tensor):
                state[name] = tensor(value)
        target.__dict__ = state
        return target

    return module(model)


def use_causal_attention(model: Any) -> None:
    """Has a HF model call SDPA with its causal flag and without a mask, as it does on real tensors without padding.

    Under fake tensors transformers cannot look whether a mask is needed and makes one, which would be counted.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(ATTENTION, sdpa_attention_forward)
    AttentionMaskInterface.register(ATTENTION, _no_mask)
    if getattr(model.config, "_attn_implementation", None) != "sdpa":
        return  # the others make the same mask on real and on fake tensors
    # The copy shares its config with the original, which must not change: every module gets one of its own.
    config = copy.deepcopy(model.config)
    config._attn_implementation = ATTENTION
    for module in model.modules():
        if getattr(module, "config", None) is not None:
            module.config = config


def _no_mask(*arguments: Any, **keywords: Any) -> None:
    return None
