"""Predicts the peak of live tensor bytes of a training step for every number of recomputed blocks, without running it.

Recomputed are the first blocks of the model: their turn in the backward comes last, when the activations of the others
are gone, so that what recomputing brings back for a moment meets the emptiest memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from training_xpu.blocks import BlockGroup, find_blocks, unwrap
from training_xpu.errors import UserError
from training_xpu.recompute.fake_model import fake_copy, use_causal_attention
from training_xpu.recompute.live_bytes import walk
from training_xpu.recompute.trace import StepTrace, trace_step

TRACED_BLOCKS = 3  # the first one also makes what all share; the others are typical
_LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class PeakPrediction:
    """Live tensor bytes of one rank. What the allocator holds beyond them is not in it."""

    blocks: int
    state_bytes: int  # weights, optimizer states, gradient buckets, buffers, inputs: alive all the time
    peaks: tuple[int, ...]  # element n: with the first n blocks recomputed
    phases: tuple[str, ...]  # where each peak is: "head-backward", "block-2-backward", ...

    def fewest_recomputed(self, budget: int) -> int | None:
        """The smallest number of recomputed blocks whose peak is within a budget in bytes; None where none is."""
        return next((n for n, peak in enumerate(self.peaks) if peak <= budget), None)


def predict_peaks(
    model: torch.nn.Module,
    batch_size: int,
    sequence_length: int,
    *,
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32",
    optimizer_bytes: int = 8,
    gradient_buckets: bool = False,
) -> PeakPrediction:
    """Predicts for a HF causal language model trained with full sequences: plain, under DDP, or by the HF Trainer.

    Args:
        model: with real or meta weights, wrapped or not; it is neither run nor changed.
        batch_size: sequences per rank and forward.
        sequence_length: tokens per sequence.
        dtype: fp32, or that of autocast.
        optimizer_bytes: states per trained parameter; 8 for AdamW on fp32 weights.
        gradient_buckets: DDP's buckets beside the gradients, as by its default `gradient_as_bucket_view=False`.

    Raises:
        UserError: the model has no repeated blocks that can be recomputed, or cannot be traced.
    """
    model = unwrap(model)
    groups = find_blocks(model)
    if len(groups) != 1 or not all(hasattr(b, "gradient_checkpointing") for b in groups[0].modules):
        kinds = ", ".join(group.kind for group in groups) or "none"
        raise UserError(
            f"the memory of {type(model).__name__} cannot be predicted: its blocks are {kinds}",
            "One kind of transformers decoder layers is needed.",
        )
    trace = _trace(model, groups[0], batch_size, sequence_length, dtype)
    blocks = len(groups[0].modules)
    state = _state_bytes(model, optimizer_bytes, gradient_buckets) + 2 * 8 * batch_size * sequence_length
    found = [_peak(trace, groups[0].kind, blocks, n, state) for n in range(blocks + 1)]
    return PeakPrediction(blocks, state, tuple(p for p, _ in found), tuple(w for _, w in found))


def _peak(trace: StepTrace, kind: str, blocks: int, recomputed: int, state: int) -> tuple[int, str]:
    return walk(state, trace.segments([kind] * blocks, [i < recomputed for i in range(blocks)]))


def _state_bytes(model: torch.nn.Module, optimizer_bytes: int, gradient_buckets: bool) -> int:
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    trained = [p for p in model.parameters() if p.requires_grad]
    buckets = sum(p.numel() * p.element_size() for p in trained) if gradient_buckets else 0
    return weights + buffers + buckets + optimizer_bytes * sum(p.numel() for p in trained)


def _trace(model: torch.nn.Module, group: BlockGroup, batch: int, length: int, dtype: str) -> StepTrace:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    small: Any = fake_copy(model, mode)
    _shorten(small, group)
    small.train()
    use_causal_attention(small)
    with mode:
        tokens = torch.zeros(batch, length, dtype=torch.long)
    blocks: list[Any] = list(small.get_submodule(group.container))
    switch = getattr(small, "activation_checkpointing_enable", None) or small.gradient_checkpointing_enable
    switch()

    def set_recompute(flags: Sequence[bool]) -> None:
        for block, flag in zip(blocks, flags, strict=True):
            block.gradient_checkpointing = flag

    def autocast() -> AbstractContextManager[Any]:
        return nullcontext() if dtype == "fp32" else torch.autocast("cpu", dtype=_LOW[dtype])

    try:
        return trace_step(
            small,
            blocks,
            [group.kind] * len(blocks),
            lambda: small(input_ids=tokens, labels=tokens, use_cache=False).loss,
            mode,
            set_recompute,
            autocast,
        )
    except (RuntimeError, ValueError, NotImplementedError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(f"the memory of {type(model).__name__} cannot be predicted: {first}") from error


def _shorten(model: torch.nn.Module, group: BlockGroup) -> None:
    """Leaves a few blocks, in a copy, where all are alike."""
    container = model.get_submodule(group.container)
    shapes = {tuple(tuple(p.shape) for p in block.parameters()) for block in group.modules}
    if isinstance(container, torch.nn.ModuleList) and len(shapes) == 1:
        kept = dict(list(container._modules.items())[:TRACED_BLOCKS])
        container._modules.clear()
        container._modules.update(kept)
