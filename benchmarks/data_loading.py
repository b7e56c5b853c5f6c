"""What taking a step's batches costs, by number of loader workers, as a share of a training step of half a second.

The arms take turns step by step; between two takes the process computes, as training would, so that workers can read
ahead. Prints the median and a bootstrap 95 % interval for each arm.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from training_xpu.workloads.data.batches import training_batches
from training_xpu.workloads.data.prepare import prepare

STEP_SECONDS = 0.5
WORKERS = (0, 1, 2)


def interval(values: list[float]) -> tuple[float, float, float]:
    """Median, and the bootstrap 95 % interval of it."""
    drawn = np.random.default_rng(0).choice(values, size=(2000, len(values)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return float(np.median(values)), float(low), float(high)


def compute(seconds: float) -> None:
    matrix = torch.ones(128, 128)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        matrix @ matrix


def measure(steps: int, cache: Path, sequence_length: int) -> dict[int, list[float]]:
    """Seconds per step and arm; micro batch 2, two micro batches per step, one rank."""
    data = prepare(None, None, 8192, cache, sequence_length, 500_000, 0, None, lambda text: None)
    arms = {
        workers: training_batches(
            data,
            rank=0,
            world_size=1,
            micro_batch=2,
            gradient_accumulation=2,
            sequence_length=sequence_length,
            workers=workers,
        )
        for workers in WORKERS
    }
    seconds: dict[int, list[float]] = {workers: [] for workers in WORKERS}
    for step in range(steps):
        for workers, batches in arms.items():
            begun = time.perf_counter()
            next(batches)
            if step >= 5:
                seconds[workers].append(time.perf_counter() - begun)
            compute(0.01)
    for batches in arms.values():
        batches.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--sequence-length", type=int, default=512)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        seconds = measure(100 if options.quick else 1000, Path(cache), options.sequence_length)
    found = {workers: interval(values) for workers, values in seconds.items()}
    median, low, high = (value / STEP_SECONDS for value in found[1])
    if options.json:
        arms = {str(w): {"median_s": m, "ci95_s": [a, b]} for w, (m, a, b) in found.items()}
        print(json.dumps({"step_s": STEP_SECONDS, "workers": arms, "share": median, "share_ci95": [low, high]}))
        return
    for workers, values in found.items():
        print("{} workers: {:.0f} us per step [{:.0f}, {:.0f}]".format(workers, *(v * 1e6 for v in values)))
    print(f"data time with 1 worker: {median:.3%} of a {STEP_SECONDS} s step [{low:.3%}, {high:.3%}]")


if __name__ == "__main__":
    main()
