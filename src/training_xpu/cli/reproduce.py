"""`ljperf reproduce RUN`: the same configuration again, compared with what it gave before."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from training_xpu import envs
from training_xpu.cli import console
from training_xpu.errors import ExitCode

if TYPE_CHECKING:
    from training_xpu.perf.records import LossComparison, RatioEstimate, ReproductionDocument
    from training_xpu.perf.reproduce import Launch
    from training_xpu.workloads.config import JobConfig

MOST_DIFFERENCES = 20


def reproduce(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="The run: its name, the beginning of it, its folder, or latest.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
    output: Annotated[Path | None, typer.Option(help="Folder of the run records. Default: ./runs.")] = None,
) -> int:
    """Run the configuration of an earlier run again and compare loss curve, throughput and environment.

    Exits with 1 when the loss curve leaves the tolerance or the run fails.
    """
    from training_xpu.cli.launching import check_variables, refuse_existing_launcher
    from training_xpu.perf.fingerprint import differences
    from training_xpu.perf.reproduce import reproduce as run_and_compare
    from training_xpu.perf.store import find_run

    check_variables()
    refuse_existing_launcher("reproduce")
    runs_folder = (output or envs.runs_folder()).absolute()
    document = run_and_compare(find_run(run, runs_folder), launcher(output), runs_folder, differences)
    if as_json:
        console.result(document.to_json(indent=2))
    else:
        console.result(page(document))
    return exit_code(document)


def launcher(output: Path | None) -> Launch:
    """Starts a job as `ljperf benchmark` does, its data prepared again where the cache has lost them."""

    def launch(config: JobConfig, arm: str, features: list[str], runs_folder: Path) -> Path:
        from training_xpu.cli.launching import introduce, make_context
        from training_xpu.perf.children import interrupt_on_signals
        from training_xpu.perf.limits import check_job
        from training_xpu.perf.request import TrainingRequest
        from training_xpu.perf.resolve import with_data_in_place
        from training_xpu.perf.runner import Arm, run_arm

        check_job(config)
        with interrupt_on_signals():
            job = with_data_in_place(config, console.note)
            context = make_context(TrainingRequest(model=job.workload), job, runs_folder, 1)
            introduce(job)
            return run_arm(job, Arm(name=arm, features=features), context)

    return launch


def exit_code(document: ReproductionDocument) -> int:
    if document.verdict == "interrupted":
        return ExitCode.INTERRUPTED
    return ExitCode.DONE if document.verdict in ("identical", "within tolerance") else ExitCode.FAILED


def page(document: ReproductionDocument) -> str:
    """The comparison as text for people."""
    lines = [f"{document.verdict}: {document.reason}"]
    if document.loss is not None:
        lines += _loss(document.loss)
    if document.throughput is not None:
        lines.append(_throughput(document.throughput))
    if document.differences:
        lines.append("environment:")
        lines += [
            f"  {d.field}: {_shown(d.original)} -> {_shown(d.reproduction)}"
            for d in document.differences[:MOST_DIFFERENCES]
        ]
        if len(document.differences) > MOST_DIFFERENCES:
            lines.append(f"  and {len(document.differences) - MOST_DIFFERENCES} more, see --json")
    else:
        lines.append("environment: no difference")
    return "\n".join([*lines, f"original:     {document.original}", f"reproduction: {document.reproduction}"])


def _loss(loss: LossComparison) -> list[str]:
    if loss.identical:
        return []
    return [
        f"loss: first difference at step {loss.first_difference}; largest {loss.largest_absolute:.3g} at step "
        f"{loss.largest_absolute_step}, relative {loss.largest_relative:.2%} at step {loss.largest_relative_step}",
        f"tolerance: {loss.tolerance:.1%} at each step ({loss.tolerance_reason})",
    ]


def _throughput(ratio: RatioEstimate) -> str:
    low, high = ratio.ci95
    verdict = {"same": "the same", "inconclusive": "inconclusive: too few or too uneven steps to tell"}
    return (
        f"tokens/s/device: {ratio.ratio:.3f} x the original, 95 % interval {low:.3f} - {high:.3f}: "
        f"{verdict.get(ratio.verdict, ratio.verdict)} (one run each: what else ran on the machine is in it)"
    )


def _shown(value: object) -> str:
    return "not there" if value is None else str(value)
