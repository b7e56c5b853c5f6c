"""The configurations of the memory benchmark: models, engines and settings, as a stated fraction of their product."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, Qwen3Config

from training_xpu.recompute.prediction.setting import TrainingSetting

FAMILIES: dict[str, Any] = {"llama": LlamaConfig, "qwen3": Qwen3Config, "mixtral": MixtralConfig, "gpt2": GPT2Config}
ENGINES = ("ddp", "zero1", "zero2", "zero3", "fsdp")
LEVELS: dict[str, list[Any]] = {
    "engine": list(ENGINES),
    "family": list(FAMILIES),
    "dtype": ["fp32", "bf16"],
    "layers": [2, 4, 6],
    "width": [128, 256],
    "vocabulary": [1024, 4096],
    "sequence": [64, 128, 256],
    "batch": [1, 2, 4],
    "recomputed_share": [0.0, 0.5, 1.0],
    "optimizer": ["adamw", "adamw", "adamw", "sgd-momentum"],
    "lora": [False, False, False, True],
    "accumulation": [1, 1, 2],
    "bucket": [100_000, 300_000, 1_000_000],
    "persistence": [1000, 100_000],
    "prefetch": [50_000, 50_000_000],
    "reuse": [200_000, 1_000_000_000],
}


@dataclass(frozen=True)
class Case:
    """One configuration; `bucket`, `persistence`, `prefetch` and `reuse` are DeepSpeed's, in elements."""

    engine: str
    family: str
    dtype: str
    layers: int
    width: int
    vocabulary: int
    sequence: int
    batch: int
    recomputed_share: float
    optimizer: str
    lora: bool
    accumulation: int
    bucket: int
    persistence: int
    prefetch: int
    reuse: int

    @property
    def recomputed(self) -> int:
        return round(self.recomputed_share * self.layers)

    @property
    def zero_stage(self) -> int:
        return int(self.engine[-1]) if self.engine.startswith("zero") else 0

    def setting(self, world_size: int) -> TrainingSetting:
        deepspeed = self.engine.startswith("zero")
        return TrainingSetting(
            engine="deepspeed" if deepspeed else self.engine,  # type: ignore[arg-type]
            zero_stage=self.zero_stage,
            world_size=world_size,
            dtype=self.dtype,  # type: ignore[arg-type]
            batch_size=self.batch,
            sequence_length=self.sequence,
            gradient_accumulation=self.accumulation,
            optimizer=self.optimizer,
            reduce_bucket_elements=self.bucket,
            param_persistence_threshold=self.persistence,
            prefetch_bucket_elements=self.prefetch,
            max_reuse_distance=self.reuse,
        )

    def label(self) -> str:
        extra = " LoRA" if self.lora else ""
        return (
            f"{self.engine:5} {self.family:7} {self.dtype} L{self.layers} h{self.width} v{self.vocabulary} "
            f"B{self.batch}x{self.accumulation} S{self.sequence} {self.optimizer}{extra} recompute {self.recomputed}"
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def sample(count: int, seed: int = 0) -> list[Case]:
    """Cases in which each factor's levels come equally often, in an order of their own per factor."""
    generator = random.Random(seed)
    columns = {}
    for name, levels in LEVELS.items():
        column = [levels[i % len(levels)] for i in range(count)]
        generator.shuffle(column)
        columns[name] = column
    return [Case(**{name: column[i] for name, column in columns.items()}) for i in range(count)]


def config_of(case: Case) -> Any:
    width = case.width
    if case.family == "gpt2":
        return GPT2Config(
            n_layer=case.layers, n_embd=width, n_head=width // 32, vocab_size=case.vocabulary, n_positions=256
        )
    more = {"qwen3": {"head_dim": 32}, "mixtral": {"num_local_experts": 4}}.get(case.family, {})
    return FAMILIES[case.family](
        num_hidden_layers=case.layers,
        hidden_size=width,
        intermediate_size=3 * width,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64,
        vocab_size=case.vocabulary,
        **more,
    )


class LoraLinear(torch.nn.Module):
    """A frozen linear layer with a trained low-rank update beside it."""

    def __init__(self, base: torch.nn.Module, inputs: int, outputs: int, rank: int = 8) -> None:
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(inputs, rank, bias=False)
        self.up = torch.nn.Linear(rank, outputs, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.base(hidden) + self.up(self.down(hidden))


def build(case: Case, dtype: torch.dtype = torch.float32) -> Any:
    """On the current default device; under LoRA all but the low-rank updates of the attention is frozen."""
    model = AutoModelForCausalLM.from_config(config_of(case), dtype=dtype)
    model.config.use_cache = False
    model.train()
    if case.lora:
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        width = case.width
        for module in list(model.modules()):
            for name, outputs in (("q_proj", None), ("v_proj", None), ("c_attn", 3 * width)):
                base = getattr(module, name, None)
                if isinstance(base, torch.nn.Module):
                    size = base.out_features if outputs is None else outputs  # type: ignore[union-attr]
                    setattr(module, name, LoraLinear(base, width, size))
    return model
