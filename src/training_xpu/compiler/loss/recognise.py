"""Whether a model's loss is the standard one, by its class and in each forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from training_xpu.blocks import class_names, kind_of
from training_xpu.compiler.loss.attached import LossFunction

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PLAIN_TENSORS = ("Tensor", "Parameter", "FakeTensor")
_KNOWN_HOOKS = ("deepspeed.", "torch.", "training_xpu.")


@dataclass
class Expected:
    """What the loss function will be called with, by the forward's own arguments."""

    labels: torch.Tensor
    version: int | None  # of the labels' values
    shift_labels: torch.Tensor | None
    divisor: torch.Tensor | float | None
    ignore_index: int
    calls: int = 0  # of the head


def not_standard(model: torch.nn.Module) -> str | None:
    """Why a model's loss is not the one that can be computed in chunks; None: it is."""
    name = kind_of(model)
    if not isinstance(getattr(type(model), "loss_function", None), property) or not hasattr(model, "config"):
        return f"{name} is no transformers model with a loss function"
    from transformers.loss.loss_utils import ForCausalLMLoss

    if original(model) is not ForCausalLMLoss:
        return f"the loss function of {name} is not the standard one of causal language models"
    try:
        source = _source_of(model)
        head = model.get_output_embeddings()  # type: ignore[operator]
    except (OSError, TypeError, AttributeError, NotImplementedError) as error:
        return f"{name} does not tell its head or its forward: {error}"
    if "self.loss_function(" not in source:
        return f"the forward of {name} does not call its loss function"
    if not isinstance(head, torch.nn.Module) or kind_of(head) != "Linear":
        return f"the head of {name} is no linear layer but {'none' if head is None else kind_of(head)}"
    if set(head._parameters) != {"weight", "bias"} or head._buffers or head._modules:
        return f"the head of {name} has other parameters than weight and bias"
    return None


def _source_of(model: torch.nn.Module) -> str:
    return inspect.getsource(inspect.unwrap(type(model).forward))


def original(model: torch.nn.Module) -> Callable[..., torch.Tensor]:
    found: Any = model.loss_function
    return found.original if isinstance(found, LossFunction) else found


def guessed(model: torch.nn.Module) -> tuple[float, float | None]:
    """`logit_scale` and `softcap` as far as the model's class and configuration tell; checked in each forward."""
    source, config = _source_of(model), model.config
    scale: Any = 1.0
    cap: Any = None
    if "final_logit_softcapping" in source:
        cap = getattr(config, "final_logit_softcapping", None)
    if "* self.logit_scale" in source:
        scale = getattr(model, "logit_scale", None) or getattr(config, "logit_scale", 1.0)
    if "/ self.config.logits_scaling" in source:
        scale = 1.0 / getattr(config, "logits_scaling", 1.0)
    return float(scale), None if cap is None else float(cap)


def usable(model: torch.nn.Module | None, head: torch.nn.Module, hidden: Any, expected: Expected) -> bool:
    """Whether the loss can be computed from what the head has been given."""
    weight: Any = head.weight
    labels = expected.labels if expected.shift_labels is None else expected.shift_labels
    if not isinstance(hidden, torch.Tensor) or hidden.dtype not in _DTYPES or labels.dtype != torch.int64:
        return False
    if any(type(t).__name__ not in _PLAIN_TENSORS for t in (hidden, weight, labels)) or weight.ndim != 2:
        return False
    if hidden.shape[:-1] != labels.shape or hidden.shape[-1] != weight.shape[1]:
        return False
    if autocast_dtype(hidden) is None and hidden.dtype != weight.dtype:
        return False
    if head._backward_hooks or head._backward_pre_hooks or _output_is_rounded(head) or _root_is_sharded(model, head):
        return False
    # Somebody else's hook has a right to see logits.
    return all(_known(hook) for hook in head._forward_hooks.values())


def _output_is_rounded(head: Any) -> bool:
    """Whether FSDP2 casts what the head returns, which would be the loss, to less than fp32."""
    if "FSDPModule" not in class_names(head):
        return False
    policy = getattr(head._get_fsdp_state(), "_mp_policy", None)
    return getattr(policy, "output_dtype", None) not in (None, torch.float32)


def _root_is_sharded(model: Any, head: torch.nn.Module) -> bool:
    """Whether FSDP2 shards a head in the root's group before backward: nothing would gather it for a second call."""
    if model is None or "FSDPModule" not in class_names(model) or "FSDPModule" in class_names(head):
        return False
    state = model._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # before torch 2.13 there was one
    groups = [getattr(state, "_fsdp_param_group", None)] if groups is None else groups
    return any(getattr(group, "post_forward_mesh_info", None) is not None for group in groups)


def sharded(head: torch.nn.Module) -> bool:
    """Whether a head without FSDP2 hooks of its own has an FSDP2 shard for its weight now."""
    return hasattr(head.weight, "full_tensor") and "FSDPModule" not in class_names(head)


def _known(hook: Any) -> bool:
    hook = getattr(hook, "func", hook)
    return str(getattr(hook, "__module__", "")).startswith(_KNOWN_HOOKS)


def autocast_dtype(hidden: torch.Tensor) -> torch.dtype | None:
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def version_of(tensor: torch.Tensor) -> int | None:
    """Grows with each change in place; None for tensors of the inference mode, which have none."""
    return None if tensor.is_inference() else tensor._version


def close(a: tuple[float, float | None], b: tuple[float, float | None]) -> bool:
    """Whether two pairs of scale and softcap are the same to rounding."""
    pairs = zip(a, b, strict=True)
    return all(x == y or (x is not None and y is not None and abs(x - y) <= 1e-6 * abs(y)) for x, y in pairs)
