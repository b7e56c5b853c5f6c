"""Which engine a module runs under; imports no engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from training_xpu.blocks import class_names, unwrap, wrapped

if TYPE_CHECKING:
    import torch

__all__ = ["Engine", "identify", "unwrap"]

Engine = Literal["deepspeed", "fsdp", "ddp", "transformers", "plain"]

_BY_CLASS: dict[str, Engine] = {
    "DeepSpeedEngine": "deepspeed",
    "FSDPModule": "fsdp",
    "FullyShardedDataParallel": "fsdp",
    "DistributedDataParallel": "ddp",
}


def identify(module: torch.nn.Module) -> Engine:
    """The engine, by the classes of the module, of all wrappers inside it, and of its submodules for FSDP.

    "transformers" is a Hugging Face model that no engine wraps. An inner module of a DeepSpeed engine is recognised
    under ZeRO-3 only, by the marks on its parameters.
    """
    layer: torch.nn.Module | None = module
    while layer is not None:
        for name in class_names(layer):
            if name in _BY_CLASS:
                return _BY_CLASS[name]
        further = wrapped(layer)
        layer = None if further is None else further[1]
    for submodule in module.modules():
        if {"FSDPModule", "FullyShardedDataParallel"} & set(class_names(submodule)):
            return "fsdp"
    if any(hasattr(p, "ds_id") for p in module.parameters()):
        return "deepspeed"
    return "transformers" if "PreTrainedModel" in class_names(unwrap(module)) else "plain"
