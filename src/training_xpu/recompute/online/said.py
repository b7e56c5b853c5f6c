"""What the recompute feature tells its user: one log line and one report record for each thing worth knowing."""

from __future__ import annotations

from training_xpu import envs, report
from training_xpu.recompute.budget import Budget
from training_xpu.recompute.online.out_of_memory import TighterPlan
from training_xpu.recompute.online.overhead import Overhead
from training_xpu.recompute.online.plan import Plan, StepCheck

FEATURE = "recompute"


def applied(budget: Budget, overhead: Overhead, plan: Plan, check: StepCheck, replans: int, again: bool) -> None:
    """A plan has run for a step.

    Args:
        plan: of the step's largest micro batch.
        again: it was too far off, and is made anew.
    """
    total, recomputed = len(plan.modes), plan.recomputed
    predicted_total, measured_total = overhead.total(check.predicted_peak), overhead.total(check.measured_peak)
    how = f" ({plan.policy})" if "selective" in plan.policy else ""
    line = (
        f"recompute {recomputed} of {total} layers{how}: predicted peak {_size(predicted_total)} of "
        f"{_size(budget.bytes)} budget, measured {_size(measured_total)}"
    )
    if again:
        off = f"peak by {check.off_peak:.1%}, what it keeps by {check.off_saving:.1%}"
        line += f"; the prediction was off ({off}), planning again"
    elif not plan.fits:
        line += f"; the budget cannot be met even so: {_remedy()}"
    report.write(
        FEATURE,
        "applied",
        line,
        layers_total=total,
        layers_recomputed=recomputed,
        policy=plan.policy,
        modes=[mode.value for mode in plan.modes],
        predicted_peak_bytes=check.predicted_peak,
        measured_peak_bytes=check.measured_peak,
        overhead_bytes=overhead.measured_total - overhead.measured_live,
        budget_bytes=budget.bytes,
        budget_source=budget.source,
        fits=plan.fits,
        replans=replans,
        settled=not again,
    )
    _print(line)


def tighter(plan: TighterPlan, path: str) -> None:
    """An earlier start of this job ran out of memory."""
    line = (
        f"at least {plan.layers_at_least} of {plan.layers_total} layers are recomputed, because this job's last start "
        f"did not fit: {plan.reason} (delete {path} to forget it)"
    )
    report.write(FEATURE, "seen", line, layers_at_least=plan.layers_at_least)
    _print(line)


def ran_out(recomputed: int, now: int, total: int) -> None:
    """Memory ran out in a forward, which runs again."""
    line = f"out of memory with {recomputed} of {total} layers recomputed: trying again with at least {now}"
    report.write(FEATURE, "seen", line, layers_recomputed=recomputed, layers_at_least=now)
    _print(line)


def stepped_aside(reason: str) -> None:
    report.write(FEATURE, "stepped-aside", reason)
    _print(f"{FEATURE} steps aside: {reason}")


def _remedy() -> str:
    alone = envs.distributed().world_size == 1
    return "use a smaller micro batch" + ("" if alone else ", a higher ZeRO stage or FSDP")


def _size(amount: int) -> str:
    return f"{amount / 2**30:.2f} GiB" if amount >= 2**30 else f"{amount / 2**20:.1f} MiB"


def _print(line: str) -> None:
    """Once per node: the ranks of a node say much the same."""
    level = report.logger.warning if envs.distributed().local_rank == 0 else report.logger.info
    level("%s", line)
