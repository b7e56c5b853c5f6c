"""Chooses whether a model is trained as published or as a proxy, scaled down to what a rank can do."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from training_xpu.errors import UserError
from training_xpu.workloads import rescale
from training_xpu.workloads.architecture import Architecture
from training_xpu.workloads.flops import ModelFlops, PartFlops
from training_xpu.workloads.memory import RESERVE, MemoryEstimate, estimate_memory
from training_xpu.workloads.shapes import (
    EXPECTED_UTILISATION,
    LARGEST_SHARE_ERROR,
    Budget,
    Setting,
    cost,
    shapes,
    share_error,
)

if TYPE_CHECKING:
    from training_xpu.workloads.catalogue import Model, Workload
    from training_xpu.workloads.config import Scale

__all__ = [
    "Budget",
    "Mode",
    "ScalePlan",
    "ScaledModel",
    "Setting",
    "choose_scale",
    "gibibytes",
    "plan_scale",
    "scale_record",
    "share_error",
]

Mode = Literal["full", "proxy", "auto"]

LONGEST_FULL_STEP_S = 20.0


class ScaledModel(NamedTuple):
    config: dict[str, Any]
    micro_batch: int
    sequence_length: int
    vocabulary: int
    scale: Scale


@dataclass(frozen=True)
class ScalePlan:
    """A choice of size. `choose_scale` turns it into the records of a job."""

    kind: Literal["full", "proxy"]
    reason: str
    config: dict[str, Any]
    micro_batch: int
    sequence_length: int
    published: ModelFlops
    trained: ModelFlops
    memory: MemoryEstimate
    width_factor: float


@dataclass(frozen=True)
class _Given:
    """What the user fixed."""

    micro_batch: int | None
    sequence_length: int | None
    layers: int | None
    vocabulary: int | None


def choose_scale(
    workload: Workload,
    mode: Mode,
    budget: Budget,
    *,
    zero_stage: int = 3,
    dtype: str = "bf16",
    gradient_checkpointing: bool = False,
    micro_batch: int | None = None,
    sequence_length: int | None = None,
    layers: int | None = None,
    vocabulary: int | None = None,
) -> ScaledModel:
    """Decides how large the trained model is.

    Args:
        workload: what was asked for.
        mode: full, proxy, or auto: full where it fits and a step is bearable, else proxy.
        budget: what a rank has.
        zero_stage: 0 to 3, for deepspeed.
        dtype: bf16, fp16 or fp32.
        gradient_checkpointing: every block is recomputed, which takes less memory.
        micro_batch: sequences per rank and forward pass; None: chosen.
        sequence_length: tokens per sequence; None: the default of the model, or that of the proxy.
        layers: layers of the proxy; None: chosen.
        vocabulary: tokens of a tokenizer that is given; None: that of the model, or scaled with the proxy.

    Raises:
        UserError: full was asked for and does not fit; nothing small enough exists; a setting contradicts the model.
    """
    setting = Setting(str(workload.engine), zero_stage, dtype, gradient_checkpointing)
    plan = plan_scale(
        workload.model,
        mode,
        budget,
        setting,
        micro_batch=micro_batch,
        sequence_length=sequence_length,
        layers=layers,
        vocabulary=vocabulary,
    )
    scale = scale_record(workload.model, plan)
    return ScaledModel(plan.config, plan.micro_batch, plan.sequence_length, scale.vocabulary, scale)


def scale_record(model: Model, plan: ScalePlan) -> Scale:
    """The plan as it is recorded with a run."""
    from training_xpu.workloads.config import Scale

    published, trained = plan.published.architecture, plan.trained.architecture
    return Scale(
        kind=plan.kind,
        reason=plan.reason,
        parameters_full=plan.published.parameters,
        parameters=plan.trained.parameters,
        width_factor=plan.width_factor,
        layers_full=published.layers,
        layers=trained.layers,
        sequence_full=model.sequence_length,
        sequence=plan.sequence_length,
        vocabulary_full=published.vocabulary,
        vocabulary=trained.vocabulary,
        shares_full=plan.published.shares(model.sequence_length),
        shares=plan.trained.shares(plan.sequence_length),
        target_device=model.target_device,
        target_world_size=model.target_world_size,
    )


def plan_scale(
    model: Model,
    mode: Mode,
    budget: Budget,
    setting: Setting,
    *,
    micro_batch: int | None = None,
    sequence_length: int | None = None,
    layers: int | None = None,
    vocabulary: int | None = None,
) -> ScalePlan:
    """Like `choose_scale`, without the records of a job (and without importing what they need)."""
    published = ModelFlops.from_config(model.config)
    arch = published.architecture
    given = _Given(micro_batch, sequence_length, layers, vocabulary)
    _check_given(arch, given, mode)
    if mode == "proxy" or (mode == "auto" and layers not in (None, arch.layers)):
        return _proxy(model, published, budget, setting, given, "a proxy was asked for")
    full, obstacle = _full(model, published, budget, setting, given)
    if full is not None and (mode == "full" or not obstacle):
        return full
    if mode == "full":
        raise UserError(
            f"{model.name} cannot be trained in full here: {obstacle}",
            "Use --scale proxy, more ranks with deepspeed --zero 3 or fsdp, or a smaller --micro-batch or --seq-len.",
        )
    return _proxy(model, published, budget, setting, given, obstacle)


def _check_given(arch: Architecture, given: _Given, mode: Mode) -> None:
    layers, vocabulary, length = given.layers, given.vocabulary, given.sequence_length
    if layers is not None and not 1 <= layers <= arch.layers:
        raise UserError(f"--layers {layers}: the model has {arch.layers} layers", "Choose 1 to that many.")
    if mode == "full" and layers not in (None, arch.layers):
        raise UserError(
            f"--layers {layers} is not the full model of {arch.layers} layers", "Use --scale proxy or leave out one."
        )
    if mode == "full" and vocabulary is not None and vocabulary > arch.vocabulary:
        raise UserError(
            f"the tokenizer has {vocabulary} tokens, the model {arch.vocabulary}",
            "Use a tokenizer of this model, or --scale proxy, which fits the model to the tokenizer.",
        )
    if mode == "full" and length is not None and arch.max_positions is not None and length > arch.max_positions:
        raise UserError(
            f"--seq-len {length}: the model goes up to {arch.max_positions} positions",
            "Use a shorter sequence, or --scale proxy.",
        )


def _full(
    model: Model, published: ModelFlops, budget: Budget, setting: Setting, given: _Given
) -> tuple[ScalePlan | None, str]:
    """The published model, and what speaks against it; no plan when it cannot run at all."""
    arch = published.architecture
    length = given.sequence_length or model.sequence_length
    if arch.max_positions is not None and length > arch.max_positions:
        return None, f"it goes up to {arch.max_positions} positions, fewer than --seq-len {length}"
    if given.vocabulary is not None and given.vocabulary > arch.vocabulary:
        return None, f"the tokenizer has {given.vocabulary} tokens, the model {arch.vocabulary}"
    batch = given.micro_batch or model.target_micro_batch
    memory = _memory(published, budget, setting, batch, length)
    while given.micro_batch is None and batch > 1 and not _fits(memory, budget):
        batch //= 2
        memory = _memory(published, budget, setting, batch, length)
    if not _fits(memory, budget):
        return None, _lack(memory, budget, batch, length)
    flops = published.training([length] * batch)[0]
    seconds = flops / (EXPECTED_UTILISATION * budget.flops_per_second_per_rank)
    plan = ScalePlan(
        kind="full",
        reason=f"The {'model of the folder' if model.is_folder else 'published model'} is trained: it needs about "
        f"{gibibytes(memory.total)} of the {gibibytes(budget.memory_bytes_per_rank)} a rank has, and a step takes "
        f"about {_seconds(seconds)}.",
        config=rescale.trainable(model.config),
        micro_batch=batch,
        sequence_length=length,
        published=published,
        trained=published,
        memory=memory,
        width_factor=1.0,
    )
    if seconds > LONGEST_FULL_STEP_S:
        return plan, f"a step of the full model would take about {_seconds(seconds)}"
    return plan, ""


def _proxy(model: Model, published: ModelFlops, budget: Budget, setting: Setting, given: _Given, why: str) -> ScalePlan:
    arch = published.architecture
    parts_full = published.parts(model.sequence_length)
    chosen = _chosen(published, model.sequence_length, parts_full, budget, setting, given)
    if chosen is None:
        raise UserError(
            f"no proxy of {model.name} fits here: a rank has {gibibytes(budget.memory_bytes_per_rank)} and each part "
            f"must keep its share of the FLOPs within {LARGEST_SHARE_ERROR:.0%}",
            "Use fewer ranks, a shorter sequence or a smaller micro batch, or leave out --layers.",
        )
    shape, length, batch = chosen
    config = rescale.scaled_config(model.config, arch, shape, length)
    trained = ModelFlops.from_config(config)
    parts = trained.parts(length)
    factor = shape.hidden / arch.hidden
    as_published = factor == 1.0 and shape.layers == arch.layers and shape.vocabulary == arch.vocabulary
    reason = _proxy_reason(model, arch, shape, length, why, given, parts, parts_full)
    if as_published and length == model.sequence_length:
        config, reason = rescale.trainable(model.config), "The published model is no larger than a proxy would be."
    return ScalePlan(
        kind="full" if as_published and length == model.sequence_length else "proxy",
        reason=reason,
        config=config,
        micro_batch=batch,
        sequence_length=length,
        published=published,
        trained=trained,
        memory=_memory(trained, budget, setting, batch, length),
        width_factor=factor,
    )


def _chosen(
    published: ModelFlops, length: int, parts: PartFlops, budget: Budget, setting: Setting, given: _Given
) -> tuple[Architecture, int, int] | None:
    """The best shape that fits, its sequence length and micro batch.

    What is best depends on the machine alone; what the user fixes only replaces the value chosen. So runs that differ
    in one setting train the same model.
    """
    arch = published.architecture
    candidates: list[tuple[float, Architecture, int, int]] = []
    for shape, tokens in shapes(arch, length):
        counts = ModelFlops.from_architecture(shape)
        error = share_error(counts.parts(tokens), parts)
        if error > LARGEST_SHARE_ERROR:
            continue
        flops = counts.training([tokens])[0]
        for batch in (2**i for i in range(9)):
            if not _fits(_memory(counts, budget, setting, batch, tokens), budget):
                break
            price = cost(arch, counts, tokens, batch, flops * batch, budget, error)
            candidates.append((price, shape, tokens, batch))
    candidates.sort(key=lambda candidate: candidate[0])
    for _, shape, tokens, batch in candidates:
        wanted = shape if given.layers is None else _with_layers(arch, shape, length, parts, given.layers)
        if wanted is None:
            continue
        if given.vocabulary is not None:
            wanted = replace(wanted, vocabulary=given.vocabulary)
        final = given.sequence_length or tokens
        batch = given.micro_batch or max(1, batch * tokens // final)
        if _fits(_memory(ModelFlops.from_architecture(wanted), budget, setting, batch, final), budget):
            return wanted, final, batch
    return None


def _with_layers(
    arch: Architecture, shape: Architecture, length: int, parts: PartFlops, layers: int
) -> Architecture | None:
    """The shape as wide as the one given with another number of layers, if its parts keep their shares."""
    for other, tokens in shapes(arch, length, layers):
        if (other.heads, other.head_dim) == (shape.heads, shape.head_dim):
            error = share_error(ModelFlops.from_architecture(other).parts(tokens), parts)
            return other if error <= LARGEST_SHARE_ERROR else None
    return None


def _proxy_reason(
    model: Model,
    arch: Architecture,
    shape: Architecture,
    length: int,
    why: str,
    given: _Given,
    parts: PartFlops,
    published: PartFlops,
) -> str:
    sizes = {
        "hidden size": (arch.hidden, shape.hidden),
        "layers": (arch.layers, shape.layers),
        "sequence": (model.sequence_length, length),
        "vocabulary": (arch.vocabulary, shape.vocabulary),
    }
    scaled = ", ".join(f"{name} {before} to {after}" for name, (before, after) in sizes.items() if before != after)
    error = share_error(parts, published)
    kept = f"each part keeps its share of the FLOPs within {max(0.1, math.ceil(error * 1000) / 10):g} %"
    if error > LARGEST_SHARE_ERROR:
        causes = [
            name
            for name, value in (("sequence length", given.sequence_length), ("tokenizer", given.vocabulary))
            if value
        ]
        kept = (
            f"with the {' and '.join(causes)} given, attention has {parts.attention / parts.total:.1%} of the FLOPs "
            f"({published.attention / published.total:.1%} published), the MLP {parts.mlp / parts.total:.1%} "
            f"({published.mlp / published.total:.1%}), the head {parts.head / parts.total:.1%} "
            f"({published.head / published.total:.1%})"
        )
    weights = "; it starts from random weights, not those of the checkpoint" if model.weights else ""
    return f"A proxy is trained, because {why}: {scaled}; {kept}{weights}."


def _memory(counts: ModelFlops, budget: Budget, setting: Setting, batch: int, length: int) -> MemoryEstimate:
    return estimate_memory(
        counts,
        engine=setting.engine,
        zero_stage=setting.zero_stage,
        dtype=setting.dtype,
        gradient_checkpointing=setting.gradient_checkpointing,
        world_size=budget.world_size,
        micro_batch=batch,
        sequence_length=length,
    )


def _fits(memory: MemoryEstimate, budget: Budget) -> bool:
    return memory.total <= RESERVE * budget.memory_bytes_per_rank


def _lack(memory: MemoryEstimate, budget: Budget, batch: int, length: int) -> str:
    return (
        f"the full model needs about {gibibytes(memory.total)} on each rank (states {gibibytes(memory.states)}, "
        f"activations and logits {gibibytes(memory.activations + memory.logits)} for {batch} x {length} tokens) "
        f"and a rank has {gibibytes(budget.memory_bytes_per_rank)}"
    )


def gibibytes(size: float) -> str:
    """A number of bytes for people."""
    return f"{size / 2**30:.3g} GiB" if size < 999.5 * 2**30 else f"{size / 2**30:,.0f} GiB"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 100 else f"{seconds:.0f} s"
