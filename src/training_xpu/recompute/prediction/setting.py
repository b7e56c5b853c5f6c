"""How a model is trained, as far as it decides how much memory a step needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from training_xpu.errors import UserError

EngineKind = Literal["plain", "ddp", "deepspeed", "fsdp"]
Dtype = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class TrainingSetting:
    """One way to train a model. Sizes are per rank; the defaults are those of each engine.

    The DeepSpeed fields are named after `zero_optimization`'s keys (DeepSpeed 0.19, runtime/zero/config.py); those of
    DDP and FSDP2 after their constructors' arguments.
    """

    engine: EngineKind = "plain"
    zero_stage: int = 0
    world_size: int = 1
    dtype: Dtype = "fp32"
    batch_size: int = 1  # sequences per rank and forward
    sequence_length: int = 512  # tokens per sequence
    gradient_accumulation: int = 1
    optimizer: str = "adamw"  # a key of optimizers.KINDS
    device_type: str = "cpu"

    reduce_bucket_elements: int = 500_000_000
    allgather_bucket_elements: int = 500_000_000
    prefetch_bucket_elements: int = 50_000_000
    param_persistence_threshold: int = 100_000
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    sub_group_elements: int = 1_000_000_000
    overlap_comm: bool | None = None  # None: on for stage 3 alone
    contiguous_gradients: bool = True
    memory_efficient_linear: bool = True

    bucket_cap_mb: int = 25
    gradient_as_bucket_view: bool = False

    reshard_after_forward: bool = True
    reduce_dtype: Dtype = "fp32"

    def __post_init__(self) -> None:
        for name in ("world_size", "batch_size", "sequence_length", "gradient_accumulation", "reduce_bucket_elements"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}", "It must be at least 1.")
        if self.engine not in ("plain", "ddp", "deepspeed", "fsdp"):
            raise UserError(f"there is no engine {self.engine!r}", "Engines are plain, ddp, deepspeed and fsdp.")
        if self.zero_stage not in (0, 1, 2, 3):
            raise UserError(f"there is no ZeRO stage {self.zero_stage}", "Stages are 0, 1, 2 and 3.")
        if self.dtype not in ("fp32", "bf16", "fp16") or self.reduce_dtype not in ("fp32", "bf16", "fp16"):
            raise UserError(f"there is no training dtype {self.dtype!r}", "Dtypes are fp32, bf16 and fp16.")
        if self.zero_stage and self.engine != "deepspeed":
            raise UserError(f"ZeRO stage {self.zero_stage} belongs to DeepSpeed, not to {self.engine}")

    @property
    def element_bytes(self) -> int:
        """Bytes of one element in the training dtype."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def overlaps(self) -> bool:
        """DeepSpeed's `overlap_comm` with its own default (config.py, `overlap_comm_valid`)."""
        return self.zero_stage == 3 if self.overlap_comm is None else self.overlap_comm
