"""What a training job is told: one record, resolved and checked by the launcher before any rank starts."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from training_xpu.records import Record

JOB_FILE = "job.json"
STEPS_FILE = "steps.jsonl"
EVENTS_FILE = "events.jsonl"


class EngineName(StrEnum):
    DEEPSPEED = "deepspeed"
    FSDP = "fsdp"
    DDP = "ddp"
    TRANSFORMERS = "transformers"


class Dtype(StrEnum):
    """The dtype of matrix multiplications; weights in the optimizer stay fp32 in each of them."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


class FlopShares(Record):
    """Which part of the forward model FLOPs each part of the model has; the parts add up to 1."""

    attention: float  # projections and scores
    mlp: float  # dense or active experts, router included
    head: float


class Scale(Record):
    """Whether the model is trained as published or scaled down, and how."""

    kind: Literal["full", "proxy"]
    reason: str  # one sentence for the user: why this scale
    parameters_full: int
    parameters: int
    width_factor: float = 1.0  # hidden size of the trained model / published hidden size
    layers_full: int
    layers: int
    sequence_full: int
    sequence: int
    vocabulary_full: int
    vocabulary: int
    shares_full: FlopShares
    shares: FlopShares
    target_device: str  # e.g. "nvidia-h100-80gb"
    target_world_size: int


class PreparedData(Record):
    """Tokens ready for memory mapping, see `workloads.data.prepare`."""

    source: str  # what the user named, or "python standard library"
    train_tokens: Path  # .npy, one-dimensional, uint16 or uint32
    train_offsets: Path  # .npy int64: document i is train_tokens[offsets[i]:offsets[i + 1]]
    eval_tokens: Path
    eval_offsets: Path
    tokenizer: Path  # folder of a saved HF fast tokenizer
    vocabulary_size: int
    eos_token_id: int
    pad_token_id: int
    train_token_count: int
    eval_token_count: int
    document_count: int
    digest: str  # hash over content and settings: equal digests, equal tokens


class JobConfig(Record):
    """Everything a rank needs; the same file for all ranks."""

    workload: str  # engine/model, as asked for
    engine: EngineName
    model: dict[str, Any]  # a HF model config as a dict, after scaling; has "model_type"
    initial_weights: Path | None = None  # a local HF checkpoint to start from; None: random from the seed
    scale: Scale
    data: PreparedData
    data_path: Path | None = None  # what the user named; None: the standard library's source
    data_field: str | None = None
    data_tokens: int | None = None  # training tokens after which preparing stopped
    tokenizer_path: Path | None = None  # None: trained on the data

    dtype: Dtype = Dtype.BF16
    zero_stage: int = Field(default=3, ge=0, le=3)  # deepspeed only
    micro_batch: int = Field(default=2, ge=1)  # sequences per rank and forward
    gradient_accumulation: int = Field(default=1, ge=1)
    sequence_length: int = Field(ge=2)  # tokens per sequence
    packing: bool = True
    dataloader_workers: int = Field(default=0, ge=0)
    gradient_checkpointing: bool = False
    memory_budget: str | None = None  # of a rank, as TRAINING_XPU_MEMORY_BUDGET takes it; None: the machine's limit

    steps: int = Field(default=40, ge=1)  # optimizer steps of the whole schedule
    learning_rate: float = Field(default=1e-3, gt=0)
    warmup_steps: int = Field(default=5, ge=0)
    min_learning_rate_ratio: float = Field(default=0.1, ge=0, le=1)
    weight_decay: float = Field(default=0.1, ge=0)
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_epsilon: float = 1e-8
    gradient_clipping: float = Field(default=1.0, ge=0)  # 0: none
    seed: int = 42

    eval_sequences: int = Field(default=16, ge=0)  # in all, over all ranks; 0: no evaluation
    save_every: int = Field(default=0, ge=0)  # steps between checkpoints; 0: none
    checkpoint_folder: Path | None = None
    keep_checkpoints: int = Field(default=2, ge=1)
    resume_from: Path | None = None  # a checkpoint folder of this project, complete
    model_folder: Path | None = None  # where the trained HF model goes
    measure_live_bytes: bool = True  # one extra, unmeasured step at the end
    report_to: list[Literal["tensorboard", "mlflow", "wandb"]] = Field(default_factory=list)

    nproc: int = Field(default=1, ge=1)  # ranks on this node
    nnodes: int = Field(default=1, ge=1)
    peak_flops_per_rank: float | None = None  # FLOP/s in `dtype`, measured or known
    peak_source: str = ""  # e.g. "measured: best of 9 bf16 GEMMs 2048^3 on 2 cores, divided among 2 ranks"

    def saves_after(self, step: int) -> bool:
        """Whether a checkpoint follows this step: every `save_every` steps, and at the end of the schedule."""
        return self.save_every > 0 and (step % self.save_every == 0 or step == self.steps)

    @property
    def world_size(self) -> int:
        return self.nproc * self.nnodes
