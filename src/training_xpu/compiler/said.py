"""What the compile feature tells its user: one log line, and one report record, for each thing worth knowing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from training_xpu import envs, report
from training_xpu.compiler.compiled_region import CompiledRegion
from training_xpu.compiler.loss_region import LossRegion

FEATURE = "compile"
_BREAKS_NAMED = 3


def outcome(
    regions: Sequence[CompiledRegion | LossRegion],
    gains: dict[str, float],
    cache_hits: int,
    fused_optimizers: int,
    settled: bool,
) -> None:
    """What has been compiled, and what it gains; "stepped-aside" where nothing could be.

    Args:
        gains: plain time over compiled time of each region that was on trial.
        cache_hits: graphs found in Inductor's cache instead of being compiled.
        fused_optimizers: that use torch's fused kernel now.
        settled: False: the trial is still to come; that is for the report alone.
    """
    rows = [region.row(gains.get(region.name)) for region in regions]
    seconds = sum(row["compile_seconds"] for row in rows)
    fused = "fused optimizer step" if fused_optimizers else ""
    parts = [_compiled(rows), fused, _plain(rows), f"{seconds:.0f} s of compiling"]
    line = "; ".join(part for part in parts if part)
    report.write(
        FEATURE,
        "applied" if any(row["graphs"] or row["compiled"] for row in rows) else "stepped-aside",
        line,
        regions=rows,
        compile_seconds=seconds,
        cache_hits=cache_hits,
        fused_optimizers=fused_optimizers,
        settled=settled,
    )
    if not settled:
        return
    _print(f"{FEATURE}: {line}")
    for row in rows:
        _say_breaks(row["name"], row["break_reasons"])


def stepped_aside(reason: str) -> None:
    report.write(FEATURE, "stepped-aside", reason)
    _print(f"{FEATURE} steps aside: {reason}")


def _compiled(rows: Sequence[dict[str, Any]]) -> str:
    told = []
    for row in rows:
        if row["compiled"]:
            gain = "" if row["gain"] is None else f", {row['gain']:.2f}x"
            graphs = "in chunks" if "chunked" in row else f"{row['graphs']} graph{'s' * (row['graphs'] != 1)}"
            breaks = f", {row['breaks']} break{'s' * (row['breaks'] != 1)}" if row["breaks"] else ""
            told.append(f"{row['name']} x{row['count']} ({graphs}{breaks}{gain})")
    return ", ".join(told)


def _plain(rows: Sequence[dict[str, Any]]) -> str:
    told = []
    for row in rows:
        if not row["compiled"]:
            gain = "" if row["gain"] is None else f"{row['gain']:.2f}x"
            why = row["reason"] or (row["failures"][0] if row["failures"] else gain) or "no training call seen"
            told.append(f"{row['name']} ({why})")
    return "plain: " + ", ".join(told) if told else ""


def _say_breaks(name: str, breaks: Sequence[str]) -> None:
    for found in breaks[:_BREAKS_NAMED]:
        _print(f"compile: {name} breaks at {found}")
    if len(breaks) > _BREAKS_NAMED:
        _print(f"compile: {name} breaks at {len(breaks) - _BREAKS_NAMED} more places, see the report")


def _print(line: str) -> None:
    """Once per node: the ranks of a node say much the same."""
    level = report.logger.warning if envs.distributed().local_rank == 0 else report.logger.info
    level("%s", line)
