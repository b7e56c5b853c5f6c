"""The options that `ljperf benchmark` and `ljperf train` share, declared once and given to the verb as one request."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from training_xpu.cli.completion import complete_workload
from training_xpu.cli.config_file import ConfigOption
from training_xpu.perf.request import TrainingRequest

WORKLOAD, DATA, TRAINING, MACHINE = "Workload", "Data", "Training", "Machine"


def shared_options(
    model: Annotated[
        str | None,
        typer.Option(
            help="Workload as engine/model: deepspeed, fsdp, ddp or transformers / a catalogue name or ./folder.",
            autocompletion=complete_workload,
            rich_help_panel=WORKLOAD,
        ),
    ] = None,
    scale: Annotated[
        str, typer.Option(help="full, proxy, or auto: full where it fits and else a proxy.", rich_help_panel=WORKLOAD)
    ] = "auto",
    layers: Annotated[int | None, typer.Option(help="Layers of the proxy.", rich_help_panel=WORKLOAD)] = None,
    zero: Annotated[
        int | None, typer.Option(help="ZeRO stage of DeepSpeed, 0 to 3. Default: 3.", rich_help_panel=WORKLOAD)
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="bf16, fp16 or fp32. Default: bf16 if this device has kernels for it.", rich_help_panel=WORKLOAD
        ),
    ] = None,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Recompute every layer.", rich_help_panel=WORKLOAD)
    ] = False,
    memory_budget: Annotated[
        str | None,
        typer.Option(
            help="Of a rank, for recompute: 6GiB, 80%, live:4GiB. Default: scaled with a proxy.",
            rich_help_panel=WORKLOAD,
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Text file, folder, JSONL, Parquet or saved HF dataset. Default: Python's standard library.",
            rich_help_panel=DATA,
        ),
    ] = None,
    data_field: Annotated[
        str | None, typer.Option(help="Column with the text. Default: text or content.", rich_help_panel=DATA)
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Local HF tokenizer. Default: one is trained.", rich_help_panel=DATA)
    ] = None,
    packing: Annotated[
        bool, typer.Option("--packing/--no-packing", help="Fill sequences, or pad documents.", rich_help_panel=DATA)
    ] = True,
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens per sequence. Default: the model's, scaled.", rich_help_panel=DATA)
    ] = None,
    dataloader_workers: Annotated[int, typer.Option(help="Per rank, to read ahead.", rich_help_panel=DATA)] = 0,
    eval_sequences: Annotated[
        int, typer.Option(help="Held-out sequences for the loss before and after; 0: none.", rich_help_panel=DATA)
    ] = 16,
    steps: Annotated[
        int | None, typer.Option(help="Optimizer steps. Default: 40; train: 100.", rich_help_panel=TRAINING)
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option(help="Sequences per rank and forward. Default: what fits.", rich_help_panel=TRAINING)
    ] = None,
    gradient_accumulation: Annotated[int, typer.Option(help="Micro batches per step.", rich_help_panel=TRAINING)] = 1,
    learning_rate: Annotated[
        float | None, typer.Option(help="Peak. Default: 1e-3; 3e-4 from 200 M parameters.", rich_help_panel=TRAINING)
    ] = None,
    warmup_steps: Annotated[
        int | None,
        typer.Option(
            help="To the peak; then a cosine to a tenth. Default: 5, at most a quarter of the steps.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    weight_decay: Annotated[float, typer.Option(help="Of AdamW.", rich_help_panel=TRAINING)] = 0.1,
    clip: Annotated[float, typer.Option(help="Largest gradient norm; 0: no clipping.", rich_help_panel=TRAINING)] = 1.0,
    seed: Annotated[int, typer.Option(help="Of weights and order of data.", rich_help_panel=TRAINING)] = 42,
    nproc: Annotated[
        int | None,
        typer.Option(help="Ranks on this node. Default: one per accelerator, 2 on CPUs.", rich_help_panel=MACHINE),
    ] = None,
    nnodes: Annotated[int, typer.Option(help="Nodes of the job.", rich_help_panel=MACHINE)] = 1,
    node_rank: Annotated[
        int | None, typer.Option(help="This node's number; without it they are numbered.", rich_help_panel=MACHINE)
    ] = None,
    rdzv_endpoint: Annotated[
        str | None, typer.Option(help="HOST:PORT where the nodes meet.", rich_help_panel=MACHINE)
    ] = None,
    rdzv_id: Annotated[str, typer.Option(help="Name of the job, the same on all nodes.", rich_help_panel=MACHINE)] = "",
    live_bytes: Annotated[
        bool,
        typer.Option(
            "--live-bytes/--no-live-bytes",
            help="On CPUs, count live tensor bytes in one extra, untimed step.",
            rich_help_panel=MACHINE,
        ),
    ] = True,
    config: ConfigOption = None,
) -> dict[str, Any]:
    values = dict(locals())
    del values["config"]
    return values


def with_training_options(verb: Callable[..., int]) -> Callable[..., int]:
    """Gives a verb the shared options in front of its own.

    The verb takes `settings`, a dict for `TrainingRequest` without the fields the verb adds itself, and `context`.
    """
    shared = _parameters(shared_options)
    own = [p for p in _parameters(verb) if p.name != "settings"]

    @functools.wraps(verb)
    def wrapper(**values: Any) -> int:
        settings = {p.name: values.pop(p.name) for p in shared}
        return verb(settings=shared_options(**settings), **values)

    signature = inspect.Signature([*shared, *own], return_annotation=int)
    wrapper.__signature__ = signature  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in (*shared, *own)}
    del wrapper.__wrapped__  # else the signature of the verb itself would be found
    return wrapper


def request_from(settings: dict[str, Any], **more: Any) -> TrainingRequest:
    return TrainingRequest(**{**settings, **more})


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters with their annotations evaluated, all of them by keyword."""
    hints = get_type_hints(function, include_extras=True)
    return [
        p.replace(annotation=hints[p.name], kind=inspect.Parameter.KEYWORD_ONLY)
        for p in inspect.signature(function).parameters.values()
    ]
