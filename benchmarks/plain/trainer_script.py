"""A plain HF Trainer script: what a user without `ljperf` would write, on the job of a folder."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

from training_xpu.workloads.config import JOB_FILE, JobConfig
from training_xpu.workloads.data.batches import ordered_dataset
from training_xpu.workloads.schedule import learning_rate_ratio

folder = Path(sys.argv[1])
job = JobConfig.read(folder / JOB_FILE)
arguments = TrainingArguments(
    output_dir=str(folder / "plain"),
    max_steps=job.steps,
    per_device_train_batch_size=job.micro_batch,
    gradient_accumulation_steps=job.gradient_accumulation,
    learning_rate=job.learning_rate,
    weight_decay=job.weight_decay,
    adam_beta1=job.adam_beta1,
    adam_beta2=job.adam_beta2,
    adam_epsilon=job.adam_epsilon,
    max_grad_norm=job.gradient_clipping,
    bf16=job.dtype == "bf16",
    use_cpu=not torch.accelerator.is_available(),
    seed=job.seed,
    train_sampling_strategy="sequential",
    dataloader_num_workers=job.dataloader_workers,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
)
settings = {k: v for k, v in job.model.items() if k not in ("model_type", "architectures")}
torch.manual_seed(job.seed)
model = AutoModelForCausalLM.from_config(AutoConfig.for_model(job.model["model_type"], **settings), dtype=torch.float32)
model.config.use_cache = False


class Times(TrainerCallback):
    """The least a user would add to see step times: a look at the clock whenever a step has been logged."""

    def __init__(self) -> None:
        self.marks: list[float] = []
        self.losses: list[float] = []

    def on_train_begin(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        self.marks.append(time.perf_counter())

    def on_log(self, args, state, control, logs=None, **kwargs):  # type: ignore[no-untyped-def]
        if logs and "loss" in logs:
            self.marks.append(time.perf_counter())
            self.losses.append(float(logs["loss"]))


class WithSchedule(Trainer):
    def create_scheduler(self, num_training_steps, optimizer=None):  # type: ignore[no-untyped-def]
        self.lr_scheduler = LambdaLR(
            optimizer or self.optimizer,
            lambda done: learning_rate_ratio(done + 1, job.steps, job.warmup_steps, job.min_learning_rate_ratio),
        )
        return self.lr_scheduler


times = Times()
world_size = arguments.world_size
trainer = WithSchedule(
    model=model,
    args=arguments,
    train_dataset=ordered_dataset(
        job.data,
        sequence_length=job.sequence_length,
        packing=job.packing,
        seed=job.seed,
        length=job.steps * world_size * job.gradient_accumulation * job.micro_batch,
    ),
    data_collator=default_data_collator,
    callbacks=[times],
)
trainer.train()
if arguments.process_index == 0:
    seconds = [b - a for a, b in zip(times.marks, times.marks[1:], strict=False)]
    (folder / "plain.json").write_text(json.dumps({"seconds": seconds, "losses": times.losses}))
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
os._exit(0)  # Gloo's threads abort the interpreter's own end now and then
