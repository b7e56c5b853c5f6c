"""The training loop for deepspeed, fsdp and ddp."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from training_xpu.blocks import recomputed_blocks
from training_xpu.engines.base import AdamWSettings, EngineSettings, TrainingEngine
from training_xpu.engines.model import build_model
from training_xpu.workloads import checkpoint
from training_xpu.workloads.config import EngineName, JobConfig
from training_xpu.workloads.data.batches import Batch, evaluation_batches, training_batches
from training_xpu.workloads.evaluation import evaluate
from training_xpu.workloads.flops import ModelFlops
from training_xpu.workloads.live_bytes import measure_live_bytes
from training_xpu.workloads.metrics import RunWriter, StepMeter, TokenCounts
from training_xpu.workloads.model_folder import save_model
from training_xpu.workloads.reporting import log_step, open_trackers
from training_xpu.workloads.schedule import learning_rate_ratio

RNG_FILE = "rng-{rank}.pt"


def engine_settings(config: JobConfig) -> EngineSettings:
    return EngineSettings(
        dtype=config.dtype,
        micro_batch=config.micro_batch,
        gradient_accumulation=config.gradient_accumulation,
        zero_stage=config.zero_stage,
        optimizer=AdamWSettings(
            learning_rate=config.learning_rate,
            beta1=config.adam_beta1,
            beta2=config.adam_beta2,
            epsilon=config.adam_epsilon,
            weight_decay=config.weight_decay,
            gradient_clipping=config.gradient_clipping,
        ),
        checkpoint_activations=config.gradient_checkpointing,
    )


def make_engine(config: JobConfig, device: torch.device, partition_while_building: bool = False) -> TrainingEngine:
    """The engine of a job with its model; needs an initialised process group."""

    def build() -> torch.nn.Module:
        return build_model(config.model, config.initial_weights, config.seed)

    settings = engine_settings(config)
    if config.engine is EngineName.DEEPSPEED:
        from training_xpu.engines.deepspeed import DeepSpeedTraining

        return DeepSpeedTraining(build, settings, device, partition_while_building)
    if config.engine is EngineName.FSDP:
        from training_xpu.engines.fsdp import FsdpTraining

        return FsdpTraining(build, lambda: build_model(config.model, None, config.seed), settings, device)
    if config.engine is EngineName.DDP:
        from training_xpu.engines.ddp import DdpTraining

        return DdpTraining(build, settings, device)
    raise ValueError(f"the {config.engine} engine brings its own loop")


class TrainingLoop:
    """One rank of a job under an engine that leaves the loop to us."""

    def __init__(
        self,
        config: JobConfig,
        run_folder: Path,
        writer: RunWriter,
        device: torch.device,
        partition_while_building: bool,
    ) -> None:
        self.config = config
        self.run_folder = run_folder
        self.writer = writer
        self.device = device
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.engine = make_engine(config, device, partition_while_building)
        note_optimizer(writer, self.engine)
        self.meter = StepMeter(writer, ModelFlops.from_config(config.model), device)
        recomputed, blocks = recomputed_blocks(self.engine.model)
        self.meter.recomputed_share = recomputed / blocks if blocks else 0.0
        self.done_steps = 0
        if config.resume_from is not None:
            self._resume(config.resume_from)
        self.trackers = open_trackers(config, run_folder, writer)
        self._batches = training_batches(
            config.data,
            rank=self.rank,
            world_size=self.world_size,
            micro_batch=config.micro_batch,
            gradient_accumulation=config.gradient_accumulation,
            sequence_length=config.sequence_length,
            packing=config.packing,
            seed=config.seed,
            workers=config.dataloader_workers,
            start_step=self.done_steps,
        )

    def run(self) -> None:
        with self.trackers.closing():
            self._train()
        config = self.config
        if config.model_folder is not None:
            self.writer.event("phase", "saving")
            save_model(self.engine.full_state_dict(), self.engine.model, config.data.tokenizer, config.model_folder)
        if config.measure_live_bytes and self.device.type == "cpu":
            self.writer.event("phase", "live-bytes")
            measured = measure_live_bytes(lambda: self._plain_step(config.steps + 1))
            self.writer.event("live-bytes", value=measured.peak_bytes, seconds=measured.communication_seconds)

    def _train(self) -> None:
        config = self.config
        self.evaluate("before")
        self.writer.event("phase", "training")
        self.meter.start()
        for step in range(self.done_steps + 1, config.steps + 1):
            self.step(step)
            if config.saves_after(step):
                self.save_checkpoint(step)
                self.meter.start()
            else:
                self.meter.go_on()
        self.evaluate("after")

    def step(self, step: int) -> None:
        """One measured step, from the end of the one before."""
        config, clock = self.config, self.meter.clock
        batches = [batch.to(self.device) for batch in next(self._batches)]
        clock.mark("data")
        tokens = TokenCounts()
        losses = self._forward_backward(batches, tokens, clock.mark)
        learning_rate = config.learning_rate * self._ratio(step)
        norm = self.engine.update(learning_rate)
        clock.mark("optimizer")
        loss = mean_over_ranks(losses)
        clock.end()
        seconds, phases = clock.stop()
        record = self.meter.finish(step, loss, norm, learning_rate, tokens, seconds, phases)
        self.done_steps = step
        log_step(self.trackers, record)

    def evaluate(self, when: str) -> None:
        config = self.config
        if not config.eval_sequences:
            return
        self.writer.event("phase", "evaluation")
        batches = evaluation_batches(
            config.data,
            rank=self.rank,
            world_size=self.world_size,
            micro_batch=config.micro_batch,
            sequence_length=config.sequence_length,
            packing=config.packing,
            count=config.eval_sequences,
        )
        begun = time.perf_counter()
        with self.engine.evaluating():
            loss = evaluate(self.engine.forward, batches, self.device)
        seconds = time.perf_counter() - begun
        self.writer.event("evaluation", when, step=self.done_steps, value=loss, seconds=seconds)
        self.trackers.log({"eval/loss": loss}, self.done_steps)

    def save_checkpoint(self, step: int) -> None:
        config = self.config
        assert config.checkpoint_folder is not None
        begun = time.perf_counter()
        staging = checkpoint.staging_folder(config.checkpoint_folder, step)
        with checkpoint.saving(config.checkpoint_folder, step):
            if self.rank == 0:
                checkpoint.prepare_staging(config.checkpoint_folder, step)
            dist.barrier()
            checkpoint.check_shared(staging)
            self.engine.save_state(staging)
            torch.save(random_state(), staging / RNG_FILE.format(rank=self.rank))
            dist.barrier()
            if self.rank == 0:
                saved = checkpoint.complete(config.checkpoint_folder, step, config, config.keep_checkpoints)
                self.writer.event("checkpoint", str(saved), step=step, seconds=time.perf_counter() - begun)
        dist.barrier()

    def _resume(self, folder: Path) -> None:
        record = checkpoint.read_complete(folder)
        self.engine.load_state(folder)
        random = folder / RNG_FILE.format(rank=self.rank)
        if random.exists():
            restore_random_state(torch.load(random, weights_only=True))
        self.done_steps = record.step
        self.writer.event("note", "resumed", detail=str(folder), step=record.step)

    def _plain_step(self, step: int) -> None:
        self._forward_backward([b.to(self.device) for b in next(self._batches)], TokenCounts(), lambda phase: None)
        self.engine.update(self.config.learning_rate * self._ratio(step))

    def _forward_backward(self, batches: list[Batch], tokens: TokenCounts, mark: Callable[[Any], None]) -> torch.Tensor:
        """All micro batches of a step; returns the mean of their losses. Averaged over ranks it is the global mean."""
        share = self._tokens_per_micro_batch(batches)
        total = torch.zeros((), device=self.device)
        for index, batch in enumerate(batches):
            with self.engine.micro_batch(last=index == len(batches) - 1):
                loss = self.engine.forward(batch.inputs()).loss
                if share is not None:
                    loss = loss * (batch.loss_tokens / share)
                mark("forward")
                self.engine.backward(loss)
                mark("backward")
            total += loss.detach().float()
            tokens.add(batch.real_tokens, batch.padded_tokens, batch.loss_tokens, batch.lengths)
        return total / len(batches)

    def _tokens_per_micro_batch(self, batches: list[Batch]) -> float | None:
        """Mean loss tokens per micro batch over all ranks; None where packing makes all of them equal.

        Weighing by it makes the average over micro batches and ranks the mean over tokens, whatever the padding.
        """
        if self.config.packing:
            return None
        count = torch.tensor(float(sum(b.loss_tokens for b in batches)), device=self.device)
        dist.all_reduce(count)
        return float(count) / (self.world_size * len(batches))

    def _ratio(self, step: int) -> float:
        config = self.config
        return learning_rate_ratio(step, config.steps, config.warmup_steps, config.min_learning_rate_ratio)


def note_optimizer(writer: RunWriter, engine: TrainingEngine) -> None:
    """Says which optimizer really runs, since DeepSpeed's fused one needs a compiler."""
    optimizer: Any = getattr(engine, "optimizer", None)
    inner = getattr(optimizer, "optimizer", optimizer)
    kind = f"{type(inner).__module__}.{type(inner).__name__}"
    if getattr(engine, "fused", True) is False:
        kind += " (DeepSpeed's fused AdamW could not be built: is g++ installed?)"
    writer.event("note", "optimizer", detail=kind)


def mean_over_ranks(value: torch.Tensor) -> float:
    if dist.get_world_size() > 1:
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return float(value)


def random_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        assert device is not None
        state["accelerator"] = torch.get_device_module(device).get_rng_state()
    return state


def restore_random_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "accelerator" in state and torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        assert device is not None
        torch.get_device_module(device).set_rng_state(state["accelerator"])
