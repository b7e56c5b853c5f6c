"""From the records of ranks to what a run measured.

Definitions, all over the measured steps (complete on every rank, after the detected warm-up):

- warm-up: what the step times show, and the steps in which features measured and planned
- step time: the slowest rank's, since the others wait for it; saving a checkpoint or evaluating is no part of it
- tokens per second and device: real tokens of all ranks / (ranks x step time); the median over steps is given
- phase: mean over ranks, then median over steps
- MFU, HFU: FLOPs of all ranks / (ranks x step time x peak FLOP/s of a rank), median over steps
- data share: time spent waiting for data / step time, both summed, so that rare stalls count
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from training_xpu.perf.records import LossSummary, Summary
from training_xpu.workloads.config import JobConfig
from training_xpu.workloads.records import EventRecord, StepRecord

Phase = Literal["data", "forward", "backward", "optimizer", "communication"]
PHASES: tuple[Phase, ...] = ("data", "forward", "backward", "optimizer", "communication")


_SHORTEST_STEP_S, _LONGEST_STEP_S = 1e-9, 1e9  # the clock's resolution; 30 years
_MOST_FLOPS = 1e40


@dataclass(frozen=True, slots=True)
class GroupStep:
    """One optimizer step of all ranks together. Seconds, bytes, tokens and FLOPs; sums are over ranks."""

    step: int
    ranks: int
    step_s: float  # the slowest rank's
    phases_s: dict[Phase, float | None]  # mean over ranks; None when a rank does not know
    real_tokens: int
    padded_tokens: int
    model_flops: float
    hardware_flops: float
    peak_memory_by_rank: dict[int, int]

    @property
    def tokens_per_second_per_device(self) -> float:
        return self.real_tokens / (self.ranks * self.step_s)


@dataclass(frozen=True, slots=True)
class Measured:
    """The steps that count, in order, and how many before them are warm-up."""

    steps: list[GroupStep]
    warmup_steps: int
    settled: bool  # False: step times were still drifting, see `statistics.WarmUp`


def group_steps(steps: Iterable[StepRecord], config: JobConfig) -> list[GroupStep]:
    """The steps that every rank has completed, in order of their number.

    A rank killed in the middle leaves steps that others have and it has not: they are passed over. A step done twice,
    before a restart and after it, counts once, as it was done last. Of a job on several nodes, whose nodes may write
    to folders of their own, the ranks of each node that has written anything are expected.
    """
    by_step: dict[int, dict[int, StepRecord]] = {}
    nodes: set[int] = set()
    for record in steps:
        if not 0 <= record.rank < config.world_size:
            continue
        by_step.setdefault(record.step, {})[record.rank] = record
        nodes.add(record.rank // config.nproc)
    return [_group(by_step[n]) for n in sorted(by_step) if _complete(by_step[n], nodes, config.nproc)]


def measured(steps: Sequence[StepRecord], config: JobConfig, settled_at: float | None = None) -> Measured:
    """Complete steps without the warm-up: what `statistics.detect_warmup` finds in their times, or more.

    Args:
        settled_at: when the features had done what they do once, in seconds since the epoch. Where no step came after
            it, it is passed over.
    """
    from training_xpu.perf.statistics import detect_warmup

    groups = group_steps(steps, config)
    warmup = detect_warmup([g.step_s for g in groups])
    count = warmup.steps
    if settled_at is not None:
        last = min((s.step for s in steps if s.time >= settled_at), default=0)
        busy = sum(g.step <= last for g in groups)
        if busy == len(groups):
            return Measured(groups[count:], count, settled=False)
        count = max(count, busy)
    return Measured(groups[count:], count, warmup.settled)


def settled_at(feature_reports: Iterable[dict[str, Any]]) -> float | None:
    """When the last process's features had first applied for good; None where none has."""
    first: dict[tuple[Any, Any, Any], float] = {}
    for line in feature_reports:
        if line.get("event") == "applied" and (line.get("data") or {}).get("settled", True):
            first.setdefault((line.get("host"), line.get("pid"), line.get("feature")), float(line["time"]))
    return max(first.values(), default=None)


def summarise(
    steps: Sequence[StepRecord],
    events: Sequence[EventRecord],
    config: JobConfig,
    peak_memory_kind: str = "",
    settled_at: float | None = None,
) -> Summary:
    """What a run measured; never raises for lack of steps: what nobody measured is null.

    Args:
        steps: the content of steps.jsonl, in its order.
        events: the content of events.jsonl, in its order.
        config: of the job.
        peak_memory_kind: what `StepRecord.peak_memory_bytes` counts on this device, `device.PeakMemory().kind`.
        settled_at: as in `measured`.
    """
    from training_xpu.perf.statistics import estimate

    found = measured(steps, config, settled_at)
    groups = found.steps
    summary = Summary(
        steps_measured=len(groups),
        warmup_steps=found.warmup_steps,
        peak_flops=config.peak_flops_per_rank,
        peak_source=config.peak_source,
        live_bytes_peak=_live_bytes(events),
        communication_s_profiled=max(
            (e.seconds for e in events if e.event == "live-bytes" and e.seconds), default=None
        ),
        loss=_losses(steps, events),
    )
    if not groups:
        return summary
    summary.tokens_per_second_per_device = estimate([g.tokens_per_second_per_device for g in groups])
    summary.step_time_s = estimate([g.step_s for g in groups])
    summary.phases_s = {phase: _median(g.phases_s[phase] for g in groups) for phase in PHASES}
    summary.data_share = _data_share(groups)
    real, padded = sum(g.real_tokens for g in groups), sum(g.padded_tokens for g in groups)
    summary.real_token_share = real / (real + padded) if real + padded else None
    summary.peak_memory_bytes_by_rank = _peaks(groups)
    if summary.peak_memory_bytes_by_rank:
        summary.peak_memory_bytes = max(summary.peak_memory_bytes_by_rank.values())
        summary.peak_memory_kind = peak_memory_kind
    _add_utilisation(summary, groups, config.peak_flops_per_rank)
    return summary


def _complete(records: dict[int, StepRecord], nodes: set[int], nproc: int) -> bool:
    present = Counter(rank // nproc for rank in records)
    return all(present[node] == nproc for node in nodes) and all(_is_plausible(r) for r in records.values())


def _is_plausible(record: StepRecord) -> bool:
    """False for a damaged record, whose numbers would make rates infinite: it counts as not there."""
    amounts = (record.real_tokens, record.padded_tokens, record.peak_memory_bytes or 0)
    flops = (record.model_flops, record.hardware_flops)
    phases = (record.data_s, record.forward_s, record.backward_s, record.optimizer_s, record.communication_s)
    return (
        _SHORTEST_STEP_S <= record.step_s <= _LONGEST_STEP_S
        and all(0 <= amount < 1 << 63 for amount in amounts)
        and all(0 <= number < _MOST_FLOPS for number in flops)
        and all(seconds is None or math.isfinite(seconds) for seconds in phases)
    )


def _group(records: dict[int, StepRecord]) -> GroupStep:
    ranks = [records[rank] for rank in sorted(records)]
    return GroupStep(
        step=ranks[0].step,
        ranks=len(ranks),
        step_s=max(r.step_s for r in ranks),
        phases_s={
            "data": _mean(ranks, lambda r: r.data_s),
            "forward": _mean(ranks, lambda r: r.forward_s),
            "backward": _mean(ranks, lambda r: r.backward_s),
            "optimizer": _mean(ranks, lambda r: r.optimizer_s),
            "communication": _mean(ranks, lambda r: r.communication_s),
        },
        real_tokens=sum(r.real_tokens for r in ranks),
        padded_tokens=sum(r.padded_tokens for r in ranks),
        model_flops=sum(r.model_flops for r in ranks),
        hardware_flops=sum(r.hardware_flops for r in ranks),
        peak_memory_by_rank={r.rank: r.peak_memory_bytes for r in ranks if r.peak_memory_bytes is not None},
    )


def _mean(ranks: list[StepRecord], seconds: Callable[[StepRecord], float | None]) -> float | None:
    known = [s for s in map(seconds, ranks) if s is not None]
    return sum(known) / len(known) if len(known) == len(ranks) else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.median(known) if known else None


def _data_share(groups: list[GroupStep]) -> float | None:
    known = [(g.phases_s["data"], g.step_s) for g in groups]
    waits = [(data, step) for data, step in known if data is not None]
    return sum(d for d, _ in waits) / sum(s for _, s in waits) if waits else None


def _peaks(groups: list[GroupStep]) -> dict[int, int]:
    peaks: dict[int, int] = {}
    for group in groups:
        for rank, size in group.peak_memory_by_rank.items():
            peaks[rank] = max(size, peaks.get(rank, 0))
    return dict(sorted(peaks.items()))


def _add_utilisation(summary: Summary, groups: list[GroupStep], peak: float | None) -> None:
    model = statistics.median(g.model_flops / (g.ranks * g.step_s) for g in groups)
    hardware = statistics.median(g.hardware_flops / (g.ranks * g.step_s) for g in groups)
    summary.model_flops_per_second = model or None  # none counted: not a rate of zero
    if model and peak:
        from training_xpu.workloads.flops import MFU_FORMULA

        summary.mfu = model / peak
        summary.hfu = hardware / peak
        summary.mfu_formula = MFU_FORMULA


def _live_bytes(events: Sequence[EventRecord]) -> int | None:
    sizes = [e.value for e in events if e.event == "live-bytes" and e.value is not None and math.isfinite(e.value)]
    return int(max(sizes)) if sizes else None


def _losses(steps: Sequence[StepRecord], events: Sequence[EventRecord]) -> LossSummary:
    """Losses as they are, NaN included; a step's loss is the same on all ranks, so that any rank's will do."""
    curve = losses_by_step(steps)
    evaluations = evaluation_losses(events)
    return LossSummary(
        first=curve[min(curve)] if curve else None,
        last=curve[max(curve)] if curve else None,
        eval_before=evaluations.get("before"),
        eval_after=evaluations.get("after"),
    )


def losses_by_step(steps: Iterable[StepRecord]) -> dict[int, float]:
    """Step -> training loss, also of steps that not every rank completed; the last record of a step wins."""
    return {record.step: record.loss for record in steps}


def evaluation_losses(events: Iterable[EventRecord]) -> dict[str, float]:
    """`before` and `after` -> held-out loss."""
    return {e.name: e.value for e in events if e.event == "evaluation" and e.value is not None}
