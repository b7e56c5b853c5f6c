"""`ljperf models`: the catalogue, and what of it fits this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from training_xpu.workloads.catalogue import Model
    from training_xpu.workloads.flops import ModelFlops
    from training_xpu.workloads.listing import Machine
    from training_xpu.workloads.proxy import ScalePlan


def models(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]", help="Show one model in detail: a name, engine/model, or the path of a model folder."
        ),
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Ranks on this node; as a benchmark chooses them if not given.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """List the models, with their sizes and what of each fits this machine."""
    from training_xpu.workloads.listing import this_machine

    chosen = _chosen(model)
    machine = this_machine(nproc)
    if as_json:
        from training_xpu.workloads.listing_records import models_document

        typer.echo(models_document(chosen, machine).to_json(indent=2))
    elif model is None:
        _print_all(chosen, machine)
    else:
        _print_one(chosen[0], machine)


def _chosen(model: str | None) -> list[Model]:
    from training_xpu.workloads import catalogue

    if model is None:
        return [catalogue.catalogue_model(name) for name in catalogue.model_names()]
    if model.startswith((".", "/", "~")):
        return [catalogue.local_model(model)]
    if "/" in model:
        return [catalogue.resolve(model).model]
    return [catalogue.catalogue_model(model)]


def _print_all(chosen: list[Model], machine: Machine) -> None:
    from training_xpu.cli import console
    from training_xpu.workloads.catalogue import DEFAULT_ENGINE, ENGINES
    from training_xpu.workloads.flops import ModelFlops
    from training_xpu.workloads.listing import plan_here

    rows = []
    for model in chosen:
        counts = ModelFlops.from_config(model.config)
        arch = counts.architecture
        rows.append(
            [
                model.name,
                _count(counts.parameters),
                str(arch.layers),
                str(arch.hidden),
                f"{arch.heads}/{arch.kv_heads}",
                str(arch.vocabulary),
                str(model.sequence_length),
                f"{model.target_world_size} x {model.target_device}",
                _size_in_words(plan_here(model, machine)),
            ]
        )
    columns = [
        "model",
        "parameters",
        "layers",
        "hidden",
        "heads/kv",
        "vocabulary",
        "sequence",
        "meant for",
        "fits here",
    ]
    console.table("", columns, rows)
    console.result(f"Here: {_machine_in_words(machine)}.")
    console.result(f"Engines, for each model: {', '.join(ENGINES)}. Use as: --model {DEFAULT_ENGINE}/{chosen[0].name}")
    console.result("One model in detail: ljperf models MODEL. A folder with a config.json: --model deepspeed/./FOLDER")


def _print_one(model: Model, machine: Machine) -> None:
    from training_xpu.cli import console
    from training_xpu.errors import UserError
    from training_xpu.workloads.catalogue import ENGINES
    from training_xpu.workloads.flops import ModelFlops
    from training_xpu.workloads.listing import memory_on_target, plan_here
    from training_xpu.workloads.proxy import gibibytes

    counts = ModelFlops.from_config(model.config)
    plan = plan_here(model, machine)
    published = _facts(counts, model.sequence_length, model.target_micro_batch)
    if isinstance(plan, UserError):
        here = dict.fromkeys(published, "")
    else:
        here = _facts(plan.trained, plan.sequence_length, plan.micro_batch)
    rows = [[name, value, here[name]] for name, value in published.items()]
    console.table(model.name, ["", "in full" if model.is_folder else "published", "trained here"], rows)
    if not model.is_folder:
        needed, available = memory_on_target(model)
        fits = "fits" if needed.total <= available else "fits only with recompute"
        console.result(
            f"Meant for: {model.target_world_size} x {model.target_device}; with ZeRO-3 in bf16 a step needs about "
            f"{gibibytes(needed.total)} of its {gibibytes(available)}: {fits}"
        )
    console.result(f"Here: {_machine_in_words(machine)}")
    console.result(plan.problem if isinstance(plan, UserError) else plan.reason)
    console.result(f"Engines: {', '.join(ENGINES)}")
    console.result(f"Config: {model.source}" + ("; its weights are there" if model.weights else ""))


def _size_in_words(plan: ScalePlan | Exception) -> str:
    if isinstance(plan, Exception):
        return "nothing"
    if plan.kind == "full":
        return "full"
    arch = plan.trained.architecture
    return f"proxy: {_count(plan.trained.parameters)}, {arch.layers} layers, hidden {arch.hidden}"


def _machine_in_words(machine: Machine) -> str:
    from training_xpu.workloads.proxy import gibibytes

    ranks = "1 rank" if machine.ranks == 1 else f"{machine.ranks} ranks, each"
    peak = machine.flops_per_second_per_rank
    speed = f"{peak / 1e12:.3g} TFLOP/s" if peak >= 1e12 else f"{peak / 1e9:.3g} GFLOP/s"
    memory = gibibytes(machine.memory_bytes_per_rank)
    return f"{ranks} with {memory} and {speed} in {machine.dtype} ({machine.peak_source})"


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def _facts(counts: ModelFlops, length: int, micro_batch: int) -> dict[str, str]:
    arch, parts = counts.architecture, counts.parts(length)
    facts = {
        "parameters": _count(counts.parameters),
        "layers": str(arch.layers),
        "hidden size": str(arch.hidden),
        "heads, key/value heads, head size": f"{arch.heads}, {arch.kv_heads}, {arch.head_dim}",
        "vocabulary": str(arch.vocabulary),
        "sequence": str(length),
        "micro batch per rank": str(micro_batch),
        "FLOPs in attention": f"{parts.attention / parts.total:.1%}",
        "FLOPs in MLP": f"{parts.mlp / parts.total:.1%}",
        "FLOPs in head": f"{parts.head / parts.total:.1%}",
    }
    if not all(arch.sparse):
        facts["MLP width"] = str(arch.ffn)
    if any(arch.sparse):
        facts["parameters one token uses"] = _count(counts.active_parameters)
        facts["experts, used per token, width"] = f"{arch.experts}, {arch.active_experts}, {arch.expert_ffn}"
    return facts
