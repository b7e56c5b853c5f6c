"""The `transformers` engine: the HF Trainer itself with its own defaults, measured through its callbacks."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

from training_xpu.blocks import recomputed_blocks
from training_xpu.engines.model import autocast, build_model, evaluation_mode
from training_xpu.workloads import checkpoint
from training_xpu.workloads.config import JobConfig
from training_xpu.workloads.data.batches import Batch, evaluation_batches, ordered_dataset
from training_xpu.workloads.evaluation import evaluate
from training_xpu.workloads.flops import ModelFlops
from training_xpu.workloads.live_bytes import LiveBytesProfile
from training_xpu.workloads.metrics import RunWriter, StepMeter, TokenCounts
from training_xpu.workloads.model_folder import save_model
from training_xpu.workloads.reporting import log_step, open_trackers
from training_xpu.workloads.schedule import learning_rate_ratio


def trainer_folder(config: JobConfig, run_folder: Path) -> Path:
    """Where the Trainer itself writes: apart from whatever a user has in the folder of checkpoints."""
    return (config.checkpoint_folder or run_folder) / checkpoint.TRAINER_FOLDER


def training_arguments(config: JobConfig, run_folder: Path, extra_steps: int) -> TrainingArguments:
    """What a user would write: the Trainer's own optimizer and precision, one log line per step.

    Args:
        extra_steps: unmeasured steps after the schedule's end; their learning rate is 0.
    """
    return TrainingArguments(
        output_dir=str(trainer_folder(config, run_folder)),
        max_steps=config.steps + extra_steps,
        per_device_train_batch_size=config.micro_batch,
        gradient_accumulation_steps=config.gradient_accumulation,
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        adam_epsilon=config.adam_epsilon,
        max_grad_norm=config.gradient_clipping,
        bf16=config.dtype == "bf16",
        fp16=config.dtype == "fp16",
        gradient_checkpointing=config.gradient_checkpointing,
        use_cpu=not torch.accelerator.is_available(),
        seed=config.seed,
        train_sampling_strategy="sequential",
        dataloader_num_workers=config.dataloader_workers,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",  # the meter asks for it, so that no extra step is saved
        report_to="none",
        disable_tqdm=True,
    )


class MeasuredTrainer(Trainer):
    """The Trainer with this project's learning-rate schedule, so that all engines train alike."""

    def __init__(self, job: JobConfig, **settings: Any) -> None:
        super().__init__(**settings)
        self.job = job

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LambdaLR:
        scheduler: Any = self.lr_scheduler
        if scheduler is None:
            job = self.job
            wrapped: Any = optimizer or self.optimizer
            scheduler = LambdaLR(
                wrapped,
                lambda done: learning_rate_ratio(done + 1, job.steps, job.warmup_steps, job.min_learning_rate_ratio),
            )
            self.lr_scheduler = scheduler
            self._created_lr_scheduler = True
        return scheduler  # type: ignore[no-any-return]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder, step = self.job.checkpoint_folder, self.state.global_step
        assert folder is not None
        with checkpoint.saving(folder, step, Path(str(self.args.output_dir)) / f"checkpoint-{step}"):
            super()._save_checkpoint(model, trial)


class StepCallback(TrainerCallback):
    """Measures each optimizer step from the end of the one before, and saves checkpoints whole.

    Forward time comes from hooks on the model, backward time from autograd's own end-of-backward callback; the Trainer
    offers no callback for either.
    """

    def __init__(
        self, config: JobConfig, run_folder: Path, writer: RunWriter, meter: StepMeter, model: torch.nn.Module
    ) -> None:
        self.config = config
        self.writer = writer
        self.meter = meter
        self.model = model
        self.trackers = open_trackers(config, run_folder, writer)
        self.profile = LiveBytesProfile()
        self.tokens = TokenCounts()

        # For the phases inside a training step.
        model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        model.register_forward_hook(self._after_forward)

    def evaluate(self, when: str, step: int) -> None:
        config, device = self.config, self.meter.device
        if not config.eval_sequences:
            return
        self.writer.event("phase", "evaluation")
        batches = evaluation_batches(
            config.data,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            micro_batch=config.micro_batch,
            sequence_length=config.sequence_length,
            packing=config.packing,
            count=config.eval_sequences,
        )
        begun = time.perf_counter()
        with evaluation_mode(self.model), autocast(config.dtype, device.type):
            loss = evaluate(lambda inputs: self.model(**inputs), batches, device)
        self.writer.event("evaluation", when, step=step, value=loss, seconds=time.perf_counter() - begun)
        self.trackers.log({"eval/loss": loss}, step)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.evaluate("before", state.global_step)  # here the weights of a checkpoint have been loaded
        self.writer.event("phase", "training")
        self.meter.start()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.meter.clock.mark("data")
        if state.global_step == self.config.steps:
            self.writer.event("phase", "live-bytes")
            self.profile.start()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.meter.clock.end()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.meter.clock.mark("optimizer")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step = state.global_step
        if step > self.config.steps:
            self.profile.stop()
            self.writer.event("live-bytes", value=self.profile.peak_bytes, seconds=self.profile.communication_seconds)
            return
        control.should_save = self.config.saves_after(step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """The Trainer has averaged the step's loss over the ranks, as it does for every logged step."""
        if not logs or "loss" not in logs or state.global_step > self.config.steps:
            return
        self.meter.clock.end()
        seconds, phases = self.meter.clock.stop()
        norm = logs.get("grad_norm")
        record = self.meter.finish(
            step=state.global_step,
            loss=float(logs["loss"]),
            gradient_norm=None if norm is None else float(norm),
            learning_rate=float(logs["learning_rate"]),
            tokens=self.tokens,
            seconds=seconds,
            phases=phases,
        )
        log_step(self.trackers, record)
        self.tokens = TokenCounts()
        self.meter.go_on()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        config, step = self.config, state.global_step
        assert config.checkpoint_folder is not None
        begun = time.perf_counter()
        dist.barrier()
        if self.writer.rank == 0:
            with checkpoint.saving(config.checkpoint_folder, step):
                staging = checkpoint.prepare_staging(config.checkpoint_folder, step)
                staging.rmdir()
                (Path(args.output_dir) / f"checkpoint-{step}").rename(staging)
                saved = checkpoint.complete(config.checkpoint_folder, step, config, config.keep_checkpoints)
                self.writer.event("checkpoint", str(saved), step=step, seconds=time.perf_counter() - begun)
        dist.barrier()
        self.meter.start()

    def _before_forward(self, model: torch.nn.Module, inputs: Any, keywords: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        batch = Batch.from_inputs(keywords)
        self.tokens.add(batch.real_tokens, batch.padded_tokens, batch.loss_tokens, batch.lengths)
        self.meter.clock.end()

    def _after_forward(self, model: torch.nn.Module, inputs: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        self.meter.clock.mark("forward")
        output.loss.register_hook(self._backward_begins)

    def _backward_begins(self, gradient: torch.Tensor) -> None:
        self.meter.clock.end()
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: self.meter.clock.mark("backward"))


def train_with_hf_trainer(config: JobConfig, run_folder: Path, writer: RunWriter, device: torch.device) -> None:
    """The whole training of one rank; needs an initialised process group."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    extra_steps = 1 if config.measure_live_bytes and device.type == "cpu" else 0
    if rank == 0:
        shutil.rmtree(trainer_folder(config, run_folder), ignore_errors=True)  # left by a killed run
    model = build_model(config.model, config.initial_weights, config.seed).to(device)
    meter = StepMeter(writer, ModelFlops.from_config(config.model), device)
    callback = StepCallback(config, run_folder, writer, meter, model)
    data = ordered_dataset(
        config.data,
        sequence_length=config.sequence_length,
        packing=config.packing,
        seed=config.seed,
        length=(config.steps + extra_steps) * world_size * config.gradient_accumulation * config.micro_batch,
    )
    trainer = MeasuredTrainer(
        job=config,
        model=model,
        args=training_arguments(config, run_folder, extra_steps),
        train_dataset=data,
        data_collator=default_data_collator,
        callbacks=[callback],
    )
    if config.gradient_checkpointing:
        meter.recomputed_share = 1.0
    resume = None
    if config.resume_from is not None:
        record = checkpoint.read_complete(config.resume_from)
        writer.event("note", "resumed", detail=str(config.resume_from), step=record.step)
        resume = str(config.resume_from)
    with callback.trackers.closing():
        trainer.train(resume_from_checkpoint=resume)
        recomputed, blocks = recomputed_blocks(model)
        optimizer: Any = trainer.optimizer
        writer.event("note", "optimizer", detail=f"torch.optim.{type(optimizer.optimizer).__name__}")
        writer.event("note", "recomputed", detail=f"{recomputed} of {blocks} blocks")
        callback.evaluate("after", config.steps)
    if rank == 0:
        shutil.rmtree(trainer_folder(config, run_folder), ignore_errors=True)  # the Trainer makes it in any case
    if config.model_folder is not None:
        writer.event("phase", "saving")
        weights = model.state_dict() if rank == 0 else None
        save_model(weights, model, config.data.tokenizer, config.model_folder)
