"""`ljperf plan`: predicts what a training step needs and recommends how many blocks to recompute."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from training_xpu.cli import console
from training_xpu.cli.completion import complete_workload
from training_xpu.cli.config_file import ConfigOption

if TYPE_CHECKING:
    from training_xpu.perf.plan_records import PlanCalibration, PlanDocument, PlanOption
    from training_xpu.recompute.budget import Unit

WORKLOAD, MACHINE, RESULT = "Workload", "Machine", "Result"
_ROWS_SHOWN_WHOLE = 12  # of options; of more, those that matter


def plan(
    model: Annotated[
        str | None,
        typer.Option(
            help="Workload as engine/model: deepspeed, fsdp, ddp or transformers / a catalogue name or ./folder.",
            autocompletion=complete_workload,
            rich_help_panel=WORKLOAD,
        ),
    ] = None,
    module: Annotated[
        str | None,
        typer.Option(
            help="Instead of --model, module:function that returns a torch.nn.Module, or (module, inputs).",
            rich_help_panel=WORKLOAD,
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="With --module: deepspeed, fsdp, ddp or plain. Default: deepspeed.", rich_help_panel=WORKLOAD
        ),
    ] = None,
    zero: Annotated[
        int | None, typer.Option(help="ZeRO stage of DeepSpeed, 0 to 3. Default: 3.", rich_help_panel=WORKLOAD)
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="bf16, fp16 or fp32. Default: bf16; for CPUs fp32 where this one has no bf16 kernels.",
            rich_help_panel=WORKLOAD,
        ),
    ] = None,
    optimizer: Annotated[str, typer.Option(help="Kind of optimizer.", rich_help_panel=WORKLOAD)] = "adamw",
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens per sequence. Default: the model's.", rich_help_panel=WORKLOAD)
    ] = None,
    micro_batch: Annotated[
        int | None,
        typer.Option(help="Sequences per rank and forward. Default: the model's.", rich_help_panel=WORKLOAD),
    ] = None,
    gradient_accumulation: Annotated[int, typer.Option(help="Micro batches per step.", rich_help_panel=WORKLOAD)] = 1,
    world_size: Annotated[
        int | None, typer.Option(help="Ranks. Default: those the model is meant for.", rich_help_panel=MACHINE)
    ] = None,
    device_memory: Annotated[
        str | None,
        typer.Option(
            help="What a rank has: 80GiB, bytes, 80% of the device the model is meant for, live:6GiB for live tensors "
            "alone, or this: as on this machine. Default: that device; TRAINING_XPU_MEMORY_BUDGET where it is set.",
            rich_help_panel=MACHINE,
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="accelerator or cpu. Default: accelerator; with --device-memory this, what this machine has.",
            rich_help_panel=MACHINE,
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Also draw peak and step time into this HTML file.", rich_help_panel=RESULT),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            help="Plan nothing: fit what the allocator adds to the runs in this folder, for later plans.",
            rich_help_panel=RESULT,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.", rich_help_panel=RESULT)] = False,
    config: ConfigOption = None,
) -> int:
    """Predict the memory of a training step and recommend how many layers to recompute.

    Needs neither weights nor an accelerator. Exit code 1 where nothing fits.
    """
    if calibrate is not None:
        return _calibrate(calibrate, as_json)
    if plot is not None:
        from training_xpu.perf.plan_plot import check_plot_path

        check_plot_path(plot)
    from training_xpu import envs
    from training_xpu.perf.garbage import objects_that_stay

    with objects_that_stay():
        from training_xpu.perf.plan import does_not_fit, make_plan
        from training_xpu.perf.plan_subject import PlanRequest

    request = PlanRequest(
        model=model,
        module=module,
        engine=engine,
        seq_len=seq_len,
        micro_batch=micro_batch,
        world_size=world_size,
        zero=zero,
        dtype=dtype,
        gradient_accumulation=gradient_accumulation,
        optimizer=optimizer,
        device_memory=device_memory,
        device=device,
    )
    document = make_plan(request, envs.runs_folder())
    if as_json:
        console.result(document.to_json(indent=2))
    else:
        show(document)
    if plot is not None:
        from training_xpu.perf.plan_plot import write_plot

        write_plot(document, plot)
        console.note(f"plot: {plot}")
    if document.recommended_layers is None:
        raise does_not_fit(document)
    return 0


def _calibrate(folder: Path, as_json: bool) -> int:
    from training_xpu.perf.calibrate import calibrate_from

    document = calibrate_from(folder, console.note)
    if as_json:
        console.result(document.to_json(indent=2))
        return 0
    for found in document.calibrations:
        console.result(_calibration(found))
    for reason, runs in document.passed_over.items():
        console.result(f"passed over {runs} {'run' if runs == 1 else 'runs'}: {reason}")
    return 0


def show(document: PlanDocument) -> None:
    """The table, the recommendation, and what the numbers rest on."""
    from training_xpu.perf.plan_plot import title
    from training_xpu.recompute.budget import size_text, unit_for

    unit = unit_for(document.largest_bytes)
    console.table(
        f"{title(document)}; {unit.name} of one rank",
        ["recomputed", *document.amount_names, "step time", ""],
        [_row(document, option, unit) for option in _selected(document)],
    )
    console.result(_recommendation(document))
    if document.defaults:
        console.result(f"Not given: {'; '.join(document.defaults)}.")
    budget = f"{size_text(document.budget_bytes)} ({document.budget_source})"
    if document.budget_live:
        console.result(f'Live tensors of a rank: {budget}. "live" must fit it, whatever the allocator holds beyond.')
    else:
        console.result(
            f'Memory of a rank: {budget}. "up to" must fit it: predicted live tensors, and the upper end of the '
            "allocator's overhead."
        )
    untouched = max(option.untouched_bytes for option in document.options)
    if untouched:
        console.result(
            f"Communication buffers: without {size_text(untouched)} of them that are allocated and never written to, "
            f"and so not resident{'; live tensors count them' if document.budget_live else ''}."
        )
    console.result(f"Overhead: {_calibration(document.calibration)}.")
    console.result(f"Step time: by {document.step_time_source}.")


def _selected(document: PlanDocument) -> list[PlanOption]:
    """All options, or of many: both ends, the quarters, and those around the recommended one."""
    if len(document.options) <= _ROWS_SHOWN_WHOLE:
        return document.options
    layers = document.layers
    wanted = {0, layers, *(round(layers * q / 4) for q in (1, 2, 3))}
    if document.recommended_layers is not None:
        wanted |= {document.recommended_layers + d for d in (-1, 0, 1)}
    return [option for option in document.options if option.layers in wanted]


def _row(document: PlanDocument, option: PlanOption, unit: Unit) -> list[str]:
    ratio = option.predicted_step_time_ratio
    recommended = option.layers == document.recommended_layers
    return [
        f"{option.layers} of {document.layers}",
        *(unit.number(size) for size in document.amounts(option)),
        "?" if ratio is None else f"{ratio:.3f}",
        "<- recommended" if recommended else "" if option.fits else "does not fit",
    ]


def _recommendation(document: PlanDocument) -> str:
    layers = document.recommended_layers
    if layers is None:
        return f"Recommended: nothing fits, not even all {document.layers} blocks recomputed."
    if layers == 0:
        return "Recommended: recompute nothing; everything fits."
    ratio = document.options[layers].predicted_step_time_ratio
    slower = "" if ratio is None else f"; a step takes about {ratio - 1:.1%} longer than without"
    return f"Recommended: recompute {layers} of {document.layers} blocks, the first ones{slower}."


def _calibration(found: PlanCalibration) -> str:
    error = found.cross_validated_error
    known = "" if error is None else f"; cross-validated error {error:.1%}"
    return (
        f"calibration {found.version} for {found.device_kind} ({found.allocator}), {found.source}; "
        f"{found.fitted_on}{known}"
    )
