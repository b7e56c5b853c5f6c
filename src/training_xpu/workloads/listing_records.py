"""The document `ljperf models --json` prints."""

from __future__ import annotations

from training_xpu.errors import UserError
from training_xpu.records import Record
from training_xpu.workloads.catalogue import ENGINES, Model
from training_xpu.workloads.config import FlopShares, Scale
from training_xpu.workloads.flops import ModelFlops
from training_xpu.workloads.listing import Machine, memory_on_target, plan_here
from training_xpu.workloads.proxy import scale_record


class ModelHere(Record):
    """What `--scale auto` chooses on this machine."""

    scale: Scale
    micro_batch: int
    memory_bytes_per_rank: int  # estimated peak of a step


class ModelEntry(Record):
    name: str
    source: str
    model_type: str
    parameters: int
    active_parameters: int  # those one token passes through
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int  # 0: dense
    vocabulary: int
    sequence_length: int
    shares: FlopShares
    # What the model is meant for; null for a folder, of which nobody has said it.
    target_device: str | None
    target_world_size: int | None
    target_micro_batch: int | None
    target_memory_bytes: int | None  # of one device
    target_memory_needed_bytes: int | None  # estimated on one device, nothing recomputed
    engines: list[str]
    here: ModelHere | None
    reason: str = ""  # why nothing fits here


class ModelsDocument(Record):
    ranks: int
    memory_bytes_per_rank: int
    dtype: str  # what a benchmark trains in here
    flops_per_second_per_rank: float  # in it
    peak_source: str
    models: list[ModelEntry]


def models_document(models: list[Model], machine: Machine) -> ModelsDocument:
    return ModelsDocument(
        ranks=machine.ranks,
        memory_bytes_per_rank=machine.memory_bytes_per_rank,
        dtype=machine.dtype,
        flops_per_second_per_rank=machine.flops_per_second_per_rank,
        peak_source=machine.peak_source,
        models=[_entry(model, machine) for model in models],
    )


def _entry(model: Model, machine: Machine) -> ModelEntry:
    counts = ModelFlops.from_config(model.config)
    arch = counts.architecture
    plan = plan_here(model, machine)
    here = None
    if not isinstance(plan, UserError):
        here = ModelHere(
            scale=scale_record(model, plan), micro_batch=plan.micro_batch, memory_bytes_per_rank=plan.memory.total
        )
    meant = not model.is_folder
    needed, available = memory_on_target(model)
    return ModelEntry(
        name=model.name,
        source=model.source,
        model_type=arch.model_type,
        parameters=counts.parameters,
        active_parameters=counts.active_parameters,
        layers=arch.layers,
        hidden_size=arch.hidden,
        heads=arch.heads,
        kv_heads=arch.kv_heads,
        head_dim=arch.head_dim,
        experts=arch.experts,
        vocabulary=arch.vocabulary,
        sequence_length=model.sequence_length,
        shares=counts.shares(model.sequence_length),
        target_device=model.target_device if meant else None,
        target_world_size=model.target_world_size if meant else None,
        target_micro_batch=model.target_micro_batch if meant else None,
        target_memory_bytes=available if meant else None,
        target_memory_needed_bytes=needed.total if meant else None,
        engines=list(ENGINES),
        here=here,
        reason=plan.problem if isinstance(plan, UserError) else "",
    )
