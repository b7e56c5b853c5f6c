"""How much longer a step takes when blocks are recomputed: their forward runs once more.

By FLOPs it is (forward + backward + forward of the recomputed blocks) / (forward + backward). What a step spends on
the optimizer, on data and on communication that nothing hides is not in it, so the true slow-down is usually smaller.
Where steps of the same workload have been measured, their seconds are taken instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training_xpu.workloads.flops import ModelFlops, attended_pairs

if TYPE_CHECKING:
    import torch

    from training_xpu.perf.plan_subject import Subject
    from training_xpu.perf.records import RunRecord

FROM_FLOPS = "FLOPs of forward and backward; usually less, for the optimizer and communication take no longer"


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of one micro batch, or of one sequence: only their ratios are used."""

    blocks: tuple[float, ...]  # forward of each block, in the order of the model
    total: float  # forward and backward, nothing recomputed
    forward: float

    def time_ratio(self, recomputed: int) -> float:
        """Step time with the first blocks recomputed over that without."""
        return (self.total + sum(self.blocks[:recomputed])) / self.total


@dataclass(frozen=True)
class MeasuredStep:
    """Medians of runs of the same workload, nothing recomputed."""

    step_s: float
    forward_s: float
    run: str


def flops_from_counts(counts: ModelFlops, length: int) -> StepFlops:
    """For one sequence, counted from the config as `ModelFlops.parts` does."""
    arch = counts.architecture
    blocks = []
    for window, sparse in zip(arch.windows, arch.sparse, strict=True):
        weights = counts.attention_weights + (counts.sparse_mlp_weights if sparse else counts.dense_mlp_weights)
        pairs = attended_pairs(length, window, counts.causal)
        blocks.append(float(2 * length * weights + 4 * arch.attention_width * pairs))
    forward = counts.parts(length).total
    return StepFlops(tuple(blocks), 3.0 * forward, forward)


def flops_from_trace(
    model: torch.nn.Module, inputs: dict[str, torch.Tensor], blocks: Sequence[str]
) -> StepFlops | None:
    """For one forward and backward on fake tensors, counted by torch: matrix products, convolutions and attention.

    Args:
        model: on any device; it is neither run nor changed.
        inputs: of its forward.
        blocks: names of its blocks, in the order they run.

    Returns:
        None where the model does not run on fake tensors, or no product was counted in its blocks.
    """
    try:
        return _traced(model, inputs, blocks)
    except Exception:  # whatever a foreign forward does not like about tensors without data
        return None


def _traced(model: torch.nn.Module, inputs: dict[str, torch.Tensor], blocks: Sequence[str]) -> StepFlops | None:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    from training_xpu.recompute.prediction.fake_model import fake_copy, use_causal_attention
    from training_xpu.recompute.prediction.live_bytes import LiveBytes

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    copy = fake_copy(model, mode)
    copy.train()
    if hasattr(copy, "config"):
        use_causal_attention(copy)
    aten = torch.ops.aten
    mapping: Any = {
        aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
        aten._grouped_mm: _grouped_flops,
    }
    counter = FlopCounterMode(display=False, custom_mapping=mapping)
    with mode, LiveBytes(), counter:  # LiveBytes knows fake kernels that torch lacks
        output = copy(**{name: torch.empty(t.shape, dtype=t.dtype) for name, t in inputs.items()})
        by_module: Any = counter.get_flop_counts()
        forward = float(counter.get_total_flops())
        of_blocks = tuple(float(sum(_of(by_module, name).values())) for name in blocks)
        scalar = sum(t.float().sum() for t in _differentiable(output))
        if isinstance(scalar, torch.Tensor):
            torch.autograd.backward(scalar)
    total = float(counter.get_total_flops())
    return StepFlops(of_blocks, total, forward) if any(of_blocks) else None


def _attention_flops(
    query: Sequence[int],
    key: Sequence[int],
    value: Sequence[int],
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *rest: Any,
    **more: Any,
) -> int:
    """Two products for each (query, key) pair that a mask lets through; shapes are (batch, heads, length, channels)."""
    batch, heads, queries, channels = query
    pairs = attended_pairs(queries) if is_causal and key[2] == queries else queries * key[2]
    return 2 * batch * heads * pairs * (channels + value[3])


def _attention_backward_flops(
    gradient: Sequence[int],
    query: Sequence[int],
    key: Sequence[int],
    value: Sequence[int],
    out: Sequence[int],
    logsumexp: Sequence[int],
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *rest: Any,
    **more: Any,
) -> int:
    """Twice the forward, as `ModelFlops` counts it; the scores that a fused kernel computes again are left out."""
    return 2 * _attention_flops(query, key, value, dropout_p, is_causal)


def _grouped_flops(a: Sequence[int], b: Sequence[int], *rest: Any, **more: Any) -> int:
    """Each row meets one group's matrix: (rows, k) x (groups, k, n), or rows are what is summed over."""
    return 2 * math.prod(a) * b[-1]


def _of(by_module: dict[str, dict[Any, int]], name: str) -> dict[Any, int]:
    """A module's counts; torch calls it by the class of the root and the path from there."""
    return next((ops for key, ops in by_module.items() if key.partition(".")[2] == name), {})


def _differentiable(output: Any) -> list[torch.Tensor]:
    import torch
    from torch.utils._pytree import tree_leaves

    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return [loss]
    return [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]


def measured_step(subject: Subject, dtype: str, gradient_accumulation: int, runs_folder: Path) -> MeasuredStep | None:
    """The newest completed run of exactly this workload without recompute; None where there is none.

    The full model, its batch, its engine and its number of ranks must be the same: the share of the forward in a step
    depends on all of them.
    """
    from training_xpu.perf.store import list_runs

    for folder, record in list_runs(runs_folder):
        if isinstance(record, str) or not _same(record, subject, dtype, gradient_accumulation):
            continue
        summary = record.summary
        forward = summary.phases_s.get("forward") if summary is not None else None
        if summary is None or summary.step_time_s is None or not forward:
            continue
        return MeasuredStep(summary.step_time_s.median, forward, folder.name)
    return None


def _same(record: RunRecord, subject: Subject, dtype: str, gradient_accumulation: int) -> bool:
    config = record.config
    return (
        config is not None
        and record.status == "completed"
        and config.workload == subject.name
        and config.scale.kind == "full"
        and config.scale.parameters == sum(p.numel() for p in subject.model.parameters())
        and not record.features
        and not config.gradient_checkpointing
        and config.world_size == subject.world_size
        and config.micro_batch == subject.micro_batch
        and config.sequence_length == subject.sequence_length
        and config.gradient_accumulation == gradient_accumulation
        and config.dtype == dtype
        and (subject.zero_stage is None or config.zero_stage == subject.zero_stage)
        and record.fingerprint.get("hardware", {}).get("kind", "cpu") == "cpu" == subject.device_kind
    )


def time_ratios(layers: int, flops: StepFlops | None, measured: MeasuredStep | None) -> tuple[list[float | None], str]:
    """The step time ratio for 0 to all blocks recomputed, and what it rests on."""
    if flops is None or len(flops.blocks) != layers:
        return [None] * (layers + 1), "unknown: the FLOPs of this model could not be counted"
    if measured is None:
        return [flops.time_ratio(n) for n in range(layers + 1)], FROM_FLOPS
    share = measured.forward_s / measured.step_s / flops.forward
    ratios: list[float | None] = [1.0 + share * sum(flops.blocks[:n]) for n in range(layers + 1)]
    return ratios, f"the forward measured in {measured.run}, {measured.forward_s:.3g} s of {measured.step_s:.3g} s"
