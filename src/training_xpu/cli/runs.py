"""`ljperf runs`: the runs that have been made, and one of them in detail."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from training_xpu import envs
from training_xpu.cli import console

if TYPE_CHECKING:
    from training_xpu.perf.records import Estimate, RankFailure, RunEntry, RunRecord, Summary

Rows = list[tuple[str, str]]

UNKNOWN = "-"
TRACEBACK_LINES = 6


def runs(
    run: Annotated[
        str | None,
        typer.Argument(metavar="[RUN]", help="Show one run: its name, the beginning of it, its folder, or latest."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
    output: Annotated[Path | None, typer.Option(help="Folder of the run records. Default: ./runs.")] = None,
) -> None:
    """List the runs that have been made, newest first, or show one of them."""
    from training_xpu.perf import store
    from training_xpu.perf.leftovers import clear_leftovers

    folder = output or envs.runs_folder()
    clear_leftovers(folder)
    if run is not None:
        found = store.find_run(run, folder)
        record = with_summary(found, store.load_run(found))
        console.result(record.to_json(indent=2) if as_json else page(found, record, output))
        return
    entries = [_entry(path, record) for path, record in store.list_runs(folder)]
    if as_json:
        from training_xpu.perf.records import RunsDocument

        console.result(RunsDocument(runs_folder=folder.absolute(), runs=entries).to_json(indent=2))
    elif not entries:
        console.result(f"no runs in {folder}; start one with ljperf benchmark")
    else:
        console.result(listing(entries))
        for entry in entries:
            if entry.reason:
                console.note(f"{entry.name}: {entry.reason.splitlines()[0]}")


def with_summary(folder: Path, record: RunRecord) -> RunRecord:
    """The record, with the summary its owner did not live to add."""
    from training_xpu.perf import store

    if record.summary is not None or record.config is None:
        return record
    steps = store.load_steps(folder)
    if not steps:
        return record
    from training_xpu.perf.summary import summarise

    return record.model_copy(update={"summary": summarise(steps, store.load_events(folder), record.config)})


def _entry(path: Path, record: RunRecord | str) -> RunEntry:
    from training_xpu.perf.records import RunEntry

    if isinstance(record, str):
        return RunEntry(run=path, name=path.name, status="unreadable", reason=record)
    summary = record.summary
    return RunEntry(
        run=path,
        name=path.name,
        status=record.status,
        reason=record.reason,
        created=record.created,
        workload=record.workload,
        arm=record.arm,
        experiment=record.experiment,
        tokens_per_second_per_device=summary.tokens_per_second_per_device if summary else None,
        mfu=summary.mfu if summary else None,
        loss=summary.loss if summary else None,
    )


COLUMNS = ("run", "when", "workload", "arm", "status", "tokens/s/device", "MFU", "loss")
FIRST_NUMBER = 5  # columns from here on are aligned to the right


def listing(entries: list[RunEntry]) -> str:
    """One line per run, never folded: names are there to be copied and searched for."""
    rows = [
        (
            entry.name,
            _when(entry.created) if entry.created else UNKNOWN,
            entry.workload or UNKNOWN,
            entry.arm or UNKNOWN,
            entry.status,
            _rate(entry.tokens_per_second_per_device),
            f"{entry.mfu:.1%}" if entry.mfu is not None else UNKNOWN,
            _number(entry.loss.last if entry.loss else None),
        )
        for entry in entries
    ]
    widths = [max(len(row[i]) for row in (COLUMNS, *rows)) for i in range(len(COLUMNS))]
    lines = []
    for row in (COLUMNS, *rows):
        cells = [
            cell.ljust(width) if i < FIRST_NUMBER else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells))
    return "\n".join(lines)


def page(folder: Path, record: RunRecord, output: Path | None) -> str:
    """One run as text for people."""
    sections: list[tuple[str, Rows]] = [(record.name, _about(folder, record))]
    if record.summary is not None:
        if record.summary.steps_measured:
            sections.append(("Measured", _measured(record.summary)))
        if record.summary.loss.first is not None:
            sections.append(("Loss", _loss(record.summary)))
    blocks = [_section(title, rows) for title, rows in sections]
    blocks += [_failure(failure) for failure in record.failures]
    if record.config is not None:
        again = f"ljperf reproduce {folder.name}" + (f" --output {output}" if output else "")
        blocks.append(f"Run it again and compare:  {again}")
    return "\n\n".join(blocks)


def _section(title: str, rows: Rows) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows)])


def _about(folder: Path, record: RunRecord) -> Rows:
    rows: Rows = [
        ("status", record.status + (f": {record.reason}" if record.reason else "")),
        ("workload", record.workload),
        ("arm", record.arm + (f" (features: {', '.join(record.features)})" if record.features else "")),
        ("started", _when(record.created)),
    ]
    if record.finished is not None:
        rows.append(("took", _duration((record.finished - record.created).total_seconds())))
    config = record.config
    if config is not None:
        steps, ranks = console.count(config.steps, "step"), console.count(config.world_size, "rank")
        rows += [
            ("model", f"{config.scale.kind}, {config.scale.parameters / 1e6:,.1f} M parameters: {config.scale.reason}"),
            (
                "job",
                f"{steps} on {ranks}, {config.micro_batch} x {config.sequence_length} tokens per rank and "
                f"micro batch, accumulation {config.gradient_accumulation}, {config.dtype}",
            ),
            ("data", config.data.source),
        ]
        if config.resume_from is not None:
            rows.append(("resumed from", str(config.resume_from)))
    if record.experiment is not None:
        rows.append(("experiment", record.experiment))
    applied = [_report(line) for line in record.feature_reports if line.get("feature")]
    rows += [("feature", line) for line in applied]
    rows += [("command", " ".join(record.command)), ("record", str(folder))]
    return rows


def _report(line: dict[str, object]) -> str:
    parts = [str(line[key]) for key in ("feature", "event", "reason") if line.get(key)]
    where = f" ({line['role']} {line['rank']})" if line.get("role") == "rank" else ""
    return " ".join(parts[:2]) + where + (f": {parts[2]}" if len(parts) > 2 else "")


def _measured(summary: Summary) -> Rows:
    rows: Rows = [("steps", f"{summary.steps_measured} after {summary.warmup_steps} of warm-up")]
    rate, step = summary.tokens_per_second_per_device, summary.step_time_s
    if rate is not None:
        rows.append(("tokens/s/device", f"{rate.median:,.0f}  ({_interval(rate, 0)})"))
    if step is not None:
        rows.append(("step time", f"{step.median:.3f} s  ({_interval(step, 3)}; p5 {step.p5:.3f}, p95 {step.p95:.3f})"))
    phases = [f"{name} {seconds:.3f} s" for name, seconds in summary.phases_s.items() if seconds is not None]
    if phases:
        rows.append(("per step", ", ".join(phases)))
    if summary.data_share is not None:
        rows.append(("waiting for data", f"{summary.data_share:.1%} of the step"))
    if summary.real_token_share is not None and summary.real_token_share < 1:
        rows.append(("real tokens", f"{summary.real_token_share:.1%}, the rest is padding"))
    if summary.mfu is not None and summary.hfu is not None and summary.peak_flops is not None:
        peak = f"{summary.peak_flops / 1e12:,.3f} TFLOP/s per rank ({summary.peak_source})"
        rows.append(("MFU", f"{summary.mfu:.1%}, HFU {summary.hfu:.1%} of {peak}"))
    if summary.peak_memory_bytes is not None:
        ranks = ", ".join(f"rank {rank} {_size(size)}" for rank, size in summary.peak_memory_bytes_by_rank.items())
        rows.append(("peak memory", ranks + (f" ({summary.peak_memory_kind})" if summary.peak_memory_kind else "")))
    if summary.live_bytes_peak is not None:
        rows.append(("live tensors", f"{_size(summary.live_bytes_peak)} at most, in a separate, untimed step"))
    return rows


def _loss(summary: Summary) -> Rows:
    loss = summary.loss
    return [
        ("training", f"{_number(loss.first)} -> {_number(loss.last)}"),
        ("held out", f"{_number(loss.eval_before)} -> {_number(loss.eval_after)}"),
    ]


def _failure(failure: RankFailure) -> str:
    code = f" (exit code {failure.exit_code})" if failure.exit_code is not None else ""
    lines = [f"  {line}" for line in failure.traceback.strip().splitlines()[-TRACEBACK_LINES:]]
    return "\n".join([f"Rank {failure.rank} failed: {failure.reason}{code}", *lines])


def _interval(estimate: Estimate, digits: int) -> str:
    low, high = estimate.ci95
    if estimate.count < 2:
        return "one step: no interval can be known"
    return f"95 % interval {low:,.{digits}f} - {high:,.{digits}f}"


def _rate(estimate: Estimate | None) -> str:
    return f"{estimate.median:,.0f}" if estimate else UNKNOWN


def _number(value: float | None) -> str:
    return f"{value:.3f}" if value is not None else UNKNOWN


def _when(moment: datetime) -> str:
    try:
        return f"{moment.astimezone():%Y-%m-%d %H:%M}"
    except (OverflowError, ValueError):  # the first and last years there are, in a damaged record
        return f"{moment:%Y-%m-%d %H:%M}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _size(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 else f"{size / 2**20:,.0f} MiB"
