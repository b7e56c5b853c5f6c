"""What a user may ask of `ljperf benchmark` and `ljperf train`; None means the default that fits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TrainingRequest:
    model: str
    scale: str = "auto"
    data: Path | None = None
    data_field: str | None = None
    tokenizer: Path | None = None
    packing: bool = True
    zero: int | None = None  # 3 under DeepSpeed; other engines have none
    dtype: str | None = None
    micro_batch: int | None = None
    gradient_accumulation: int = 1
    seq_len: int | None = None
    layers: int | None = None
    gradient_checkpointing: bool = False
    memory_budget: str | None = None
    steps: int | None = None
    learning_rate: float | None = None
    warmup_steps: int | None = None
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 42
    eval_sequences: int = 16
    dataloader_workers: int = 0
    live_bytes: bool = True
    nproc: int | None = None
    nnodes: int = 1
    node_rank: int | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str = ""
    # only `ljperf train`
    save: Path | None = None
    save_every: int = 0
    keep_checkpoints: int = 2
    resume: str | None = None  # a run's name, latest, or a path
    save_model: bool = False
    report_to: tuple[str, ...] = ()
