"""A user's training script that knows nothing of this project: one engine, batches of different lengths on each rank.

Usage: training_job.py ENGINE STEPS OUT [--accumulate N] [--fixed]. Writes OUT.<rank>.json with the losses and a
checksum of the weights.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig


def model_of(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        num_hidden_layers=6,
        hidden_size=64,
        intermediate_size=192,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        attention_dropout=0.1,
        use_cache=False,
    )
    return AutoModelForCausalLM.from_config(config)


def engine_of(name: str, accumulate: int) -> tuple[Any, Any, Any]:
    """The callable model, its backward, and its update."""
    model = model_of()
    if name.startswith("zero"):
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": accumulate,
            "zero_optimization": {
                "stage": int(name[-1]),
                "reduce_bucket_size": 100_000,
                "allgather_bucket_size": 100_000,
                "stage3_prefetch_bucket_size": 20_000,
                "stage3_param_persistence_threshold": 100,
            },
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "steps_per_print": 10**9,
        }
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        return engine, engine.backward, lambda last: engine.step()
    if name == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        wrapped = model
    elif name == "ddp":
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
    else:
        wrapped = model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def update(last: bool) -> None:
        if last:
            optimizer.step()
            optimizer.zero_grad()

    return wrapped, lambda loss: (loss / accumulate).backward(), update


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("engine")
    parser.add_argument("steps", type=int)
    parser.add_argument("out", type=Path)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--fixed", action="store_true")
    asked = parser.parse_args()
    rank = int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    model, backward, update = engine_of(asked.engine, asked.accumulate)
    model.train()
    torch.manual_seed(10 + rank)
    generator = torch.Generator().manual_seed(20 + rank)
    losses = []
    for _ in range(asked.steps):
        for micro in range(asked.accumulate):
            last = micro == asked.accumulate - 1
            length = 256 if asked.fixed else int(torch.randint(16, 384, (1,), generator=generator))
            tokens = torch.randint(0, 512, (2, length), generator=generator)
            hold = model.no_sync() if asked.engine == "ddp" and not last else contextlib.nullcontext()
            with hold:
                loss = model(input_ids=tokens, labels=tokens).loss
                backward(loss)
            update(last)
            losses.append(float(loss.detach()))
        if _ == 3:
            with torch.no_grad():
                model(input_ids=tokens)
    inner = getattr(model, "module", model)
    total = torch.zeros((), dtype=torch.float64)
    for parameter in inner.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else getattr(parameter, "ds_tensor", parameter)
        total += local.detach().double().abs().sum()
    Path(f"{asked.out}.{rank}.json").write_text(json.dumps({"losses": losses, "weights": float(total)}))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    os._exit(0)  # Gloo sometimes aborts an interpreter that ends by itself


if __name__ == "__main__":
    main()
