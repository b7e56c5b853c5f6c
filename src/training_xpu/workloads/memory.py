"""How much memory a training step needs on one rank, estimated from the config before anything is built."""

from __future__ import annotations

from dataclasses import dataclass

from training_xpu.workloads.flops import ModelFlops

RESERVE = 0.9  # the share of a rank's memory that may be planned for: allocators fragment, libraries hold some


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank at the peak of a step."""

    states: int  # weights, gradients, fp32 master weights and two Adam moments
    gathered: int  # weights of two blocks in full while the states are sharded
    activations: int  # kept for the backward pass
    logits: int

    @property
    def total(self) -> int:
        return self.states + self.gathered + self.activations + self.logits


def estimate_memory(
    model: ModelFlops,
    *,
    engine: str,
    zero_stage: int,
    dtype: str,
    world_size: int,
    micro_batch: int,
    sequence_length: int,
    gradient_checkpointing: bool = False,
) -> MemoryEstimate:
    """Estimates the peak memory of one training step with AdamW.

    States take 16 bytes per parameter (ZeRO, arXiv:1910.02054, section 3.1), of which stage 1 shards 12, stage 2
    another 2, stage 3 and FSDP all; DDP and the HF Trainer shard nothing. Activations assume a fused attention kernel:
    per token and block about 10 vectors of hidden_size and 4 of the MLP's width in the compute dtype, and 2 of
    hidden_size in fp32 (norms); recomputed blocks keep their input alone, and one of them all. Logits are held in
    the compute dtype, in fp32 and as log-softmax or its gradient. An upper estimate: these peaks do not all coincide.

    Args:
        model: the counts of the model.
        engine: deepspeed, fsdp, ddp or transformers.
        zero_stage: 0 to 3, heeded for deepspeed alone.
        dtype: bf16, fp16 or fp32.
        world_size: ranks that share sharded states.
        micro_batch: sequences per rank and forward pass.
        sequence_length: tokens per sequence.
        gradient_checkpointing: every block is recomputed.
    """
    arch = model.architecture
    width = 4 if dtype == "fp32" else 2
    stage = {"deepspeed": zero_stage, "fsdp": 3}.get(engine, 0)
    weights, gradients = model.parameters * width, model.parameters * width
    optimizer = model.parameters * (16 - 2 * width)
    states = sum(
        size // world_size if stage >= first else size for size, first in ((optimizer, 1), (gradients, 2), (weights, 3))
    )
    sparse = any(arch.sparse)
    experts = arch.experts * (3 if arch.family.gated_mlp else 2) * arch.hidden * arch.expert_ffn if sparse else 0
    block = model.attention_weights + max(model.dense_mlp_weights, experts)
    gathered = 2 * block * width if stage == 3 and world_size > 1 else 0

    tokens = micro_batch * sequence_length
    sparse_mlp = arch.active_experts * arch.expert_ffn + arch.shared_ffn
    mlp_widths = sum(sparse_mlp if is_sparse else arch.ffn for is_sparse in arch.sparse)
    channels = arch.layers * (8 * arch.hidden + 2 * arch.attention_width) + 4 * mlp_widths
    activations = tokens * (width * channels + 4 * 2 * arch.hidden * arch.layers)
    if gradient_checkpointing:
        activations = activations // arch.layers + tokens * width * arch.hidden * arch.layers
    logits = tokens * arch.vocabulary * (12 if dtype == "fp32" else 10)
    return MemoryEstimate(states=states, gathered=gathered, activations=activations, logits=logits)
