"""Two ranks under DeepSpeed ZeRO-3 with several sub-groups: three steps by hand, then two through accelerate."""

import os

import deepspeed
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin

ZERO = {"stage": 3, "sub_group_size": 1000}


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)])


def by_hand() -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "zero_optimization": ZERO,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(model=make_model(), config=config)
    assert len(engine.optimizer.fp16_groups) > 1, "one sub-group tests nothing"
    engine.eval()
    engine(torch.ones(2, 32, dtype=torch.bfloat16))
    engine.train()
    for _ in range(6):
        engine.backward(engine(torch.ones(2, 32, dtype=torch.bfloat16)).float().sum())
        engine.step()


def through_accelerate() -> None:
    config = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": ZERO}
    config["zero_allow_untested_optimizer"] = True
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    assert accelerator.distributed_type == "DEEPSPEED"
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for _ in range(2):
        accelerator.backward(model(torch.ones(2, 32, dtype=torch.bfloat16)).float().sum())
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    by_hand()
    through_accelerate()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(0)  # Gloo's threads abort the interpreter's own end now and then
