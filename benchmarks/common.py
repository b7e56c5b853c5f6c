"""What the benchmarks share: options, interleaving, the last line with the figure that matters."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

from training_xpu import device
from training_xpu.perf.statistics import estimate


def parser(description: str, rounds: int, quick_rounds: int) -> argparse.ArgumentParser:
    """Options every benchmark has; after parsing, `rounds` holds the number to run."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--quick", action="store_true", help=f"about a minute: {quick_rounds} rounds instead of {rounds}")
    made.add_argument("--json", action="store_true", help="print one JSON document")
    made.add_argument("--rounds", type=int, default=None)
    made.set_defaults(full_rounds=rounds, quick_rounds=quick_rounds)
    return made


def rounds_of(options: argparse.Namespace) -> int:
    return int(options.rounds or (options.quick_rounds if options.quick else options.full_rounds))


def interleaved(arms: dict[str, Callable[[], float]], rounds: int, say: bool = True) -> dict[str, list[float]]:
    """Runs every arm once per round, in turning order (A B, B A, ...), after one round that does not count."""
    values: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds + 1):
        names = list(arms) if number % 2 else list(arms)[::-1]
        for name in names:
            value = arms[name]()
            if number:
                values[name].append(value)
        if say:
            print(f"round {number} of {rounds}", end="\r", file=sys.stderr, flush=True)
    if say:
        print(file=sys.stderr)
    return values


def paired_ratio(values: Sequence[float], reference: Sequence[float]) -> Any:
    """Median and 95 % interval of the ratios, round by round: drift of the machine cancels out."""
    return estimate([a / b for a, b in zip(values, reference, strict=True)])


def paired_difference(values: Sequence[float], reference: Sequence[float]) -> Any:
    return estimate([a - b for a, b in zip(values, reference, strict=True)])


def machine() -> dict[str, Any]:
    """The hardware and versions a result belongs to."""
    packages = ("torch", "transformers", "deepspeed", "accelerate")
    return {
        "cpu": device.cpu_model(),
        "cores": device.usable_cores(),
        "memory_bytes": device.usable_memory(),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def finish(options: argparse.Namespace, document: dict[str, Any], last_line: str) -> None:
    """Prints the document with --json, else the line that matters."""
    if options.json:
        print(json.dumps({**document, "machine": machine(), "result": last_line}, indent=2))
    else:
        print(last_line)
