"""A plain DeepSpeed training script: what a user without `ljperf` would write, on the job of a folder."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import deepspeed
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from training_xpu.workloads.config import JOB_FILE, JobConfig
from training_xpu.workloads.data.batches import training_batches
from training_xpu.workloads.schedule import learning_rate_ratio

folder = Path(sys.argv[1])
job = JobConfig.read(folder / JOB_FILE)
deepspeed.init_distributed()
rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
settings = {k: v for k, v in job.model.items() if k not in ("model_type", "architectures")}
torch.manual_seed(job.seed)
model = AutoModelForCausalLM.from_config(AutoConfig.for_model(job.model["model_type"], **settings), dtype=torch.float32)
model.config.use_cache = False
engine, optimizer, _, _ = deepspeed.initialize(
    model=model,
    model_parameters=model.parameters(),
    config={
        "train_micro_batch_size_per_gpu": job.micro_batch,
        "gradient_accumulation_steps": job.gradient_accumulation,
        "gradient_clipping": job.gradient_clipping,
        "zero_optimization": {"stage": job.zero_stage},
        "bf16": {"enabled": job.dtype == "bf16"},
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": job.learning_rate,
                "betas": [job.adam_beta1, job.adam_beta2],
                "eps": job.adam_epsilon,
                "weight_decay": job.weight_decay,
            },
        },
        "steps_per_print": 2**31,
    },
)
batches = training_batches(
    job.data,
    rank=rank,
    world_size=world_size,
    micro_batch=job.micro_batch,
    gradient_accumulation=job.gradient_accumulation,
    sequence_length=job.sequence_length,
    packing=job.packing,
    seed=job.seed,
    workers=job.dataloader_workers,
)
seconds, losses = [], []
for step in range(1, job.steps + 1):
    begun = time.perf_counter()
    for group in optimizer.param_groups:
        group["lr"] = job.learning_rate * learning_rate_ratio(
            step, job.steps, job.warmup_steps, job.min_learning_rate_ratio
        )
    total = torch.zeros(())
    for batch in next(batches):
        loss = engine(**batch.inputs()).loss
        engine.backward(loss)
        engine.step()
        total += loss.detach().float() / job.gradient_accumulation
    torch.distributed.all_reduce(total)
    losses.append(float(total) / world_size)
    seconds.append(time.perf_counter() - begun)
if rank == 0:
    (folder / "plain.json").write_text(json.dumps({"seconds": seconds, "losses": losses}))
torch.distributed.destroy_process_group()
os._exit(0)  # Gloo's threads abort the interpreter's own end now and then
