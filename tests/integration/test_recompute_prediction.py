"""Predicted peaks against those of real two-rank jobs on every engine; the benchmark does so for many more cases."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from training_xpu.engines.deepspeed_ops import build_operations
from training_xpu.perf.environment import extensions_folder
from training_xpu.recompute.predict import predict_peaks

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    yield importlib.import_module("memory_cases"), importlib.import_module("memory_measured")
    for name in ("memory_cases", "memory_measured"):
        sys.modules.pop(name, None)


def test_every_engine_s_peak_is_predicted_within_the_stated_error(benchmark_modules: tuple[Any, Any]) -> None:
    cases_module, measured_module = benchmark_modules
    common: dict[str, Any] = {
        "layers": 3,
        "width": 128,
        "vocabulary": 1024,
        "sequence": 128,
        "batch": 2,
        "recomputed_share": 0.34,
        "optimizer": "adamw",
        "bucket": 100_000,
        "persistence": 1000,
        "prefetch": 50_000,
        "reuse": 200_000,
    }
    cases = [
        cases_module.Case(engine=engine, family=family, dtype=dtype, lora=lora, accumulation=accumulation, **common)
        for engine, family, dtype, lora, accumulation in (
            ("ddp", "llama", "bf16", False, 2),
            ("zero1", "qwen3", "fp32", False, 1),
            ("zero2", "mixtral", "bf16", False, 2),
            ("zero3", "gpt2", "fp32", False, 1),
            ("zero3", "llama", "bf16", True, 1),
            ("fsdp", "llama", "bf16", False, 2),
            ("fsdp", "gpt2", "fp32", False, 1),
        )
    ]
    predictions = []
    for case in cases:
        with torch.device("meta"):
            model = cases_module.build(case)
        predictions.append(predict_peaks(model, case.setting(measured_module.WORLD_SIZE)).peaks[case.recomputed])
    build_operations(extensions_folder())
    measured: dict[int, int] = {}
    measured_module.measure(cases, lambda number, result: measured.__setitem__(number, result["live"]))
    errors = [predictions[n] / measured[n] - 1 for n in range(len(cases))]
    assert all(-0.03 <= error <= 0.05 for error in errors), dict(zip([c.label() for c in cases], errors, strict=True))
    assert sorted(abs(e) for e in errors)[len(errors) // 2] <= 0.02
