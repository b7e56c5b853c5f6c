"""Peaks: the table, the measurement and its cache."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from training_xpu import device
from training_xpu.device import accelerators, gemm, nodes, peaks
from training_xpu.errors import CannotRunHere, UserError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRAINING_XPU_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def cpu_only(monkeypatch: pytest.MonkeyPatch) -> accelerators.TorchView:
    """The table and the cache as a machine without accelerators sees them."""
    view = accelerators.TorchView(torch="2.13.0", kind="cpu", device_type="cpu", dtypes=["bf16", "fp32"], emulated=[])
    monkeypatch.setattr(accelerators, "torch_view", lambda: view)
    monkeypatch.setattr(nodes, "may_have_accelerator", lambda: False)
    return view


def measured(monkeypatch: pytest.MonkeyPatch, flops: float, quiet: bool = True) -> None:
    answer = gemm.GemmPeak(flops=flops, size=2048, repetitions=9, threads=2, quiet=quiet)
    monkeypatch.setattr(gemm, "measure", lambda dtype, device_type: answer)


# The vendors' own sheets: dense 16-bit figures in TFLOP/s, names as torch.cuda.get_device_name gives them.
@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA A100-SXM4-40GB", "bf16", 312),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5),
        ("NVIDIA A100 80GB PCIe", "tf32", 156),
        ("NVIDIA H100 80GB HBM3", "bf16", 1979 / 2),
        ("NVIDIA H100 PCIe", "bf16", 1513 / 2),
        ("NVIDIA H100 NVL", "bf16", 1671 / 2),
        ("NVIDIA H200", "fp16", 1979 / 2),
        ("NVIDIA H200 NVL", "bf16", 1671 / 2),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA L4", "bf16", 242 / 2),
        ("NVIDIA A10", "bf16", 125),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("Tesla V100-SXM2-32GB", "fp16", 125),
        ("Tesla T4", "fp16", 65),
        ("AMD Instinct MI250X", "bf16", 383 / 2),
        ("AMD Instinct MI300X", "bf16", 1307.4),
    ],
)
def test_known_peaks(name: str, dtype: str, tflops: float) -> None:
    peak = device.known_peak(name, dtype)
    assert peak is not None
    assert peak.flops == pytest.approx(tflops * 1e12)
    assert peak.kind == "known"
    assert "https://" in peak.source


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("NVIDIA A10G", "bf16"),  # another chip than the A10
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "bf16"),  # a part of one
        ("NVIDIA H20", "bf16"),  # no public data sheet
        ("NVIDIA GH200 480GB", "bf16"),
        ("NVIDIA GeForce RTX 4090 D", "bf16"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16"),
        ("PPU-ZW810E", "bf16"),
        ("Tesla T4", "bf16"),  # has no bf16 units
        ("AMD EPYC", "fp32"),
    ],
)
def test_unknown_peaks(name: str, dtype: str) -> None:
    assert device.known_peak(name, dtype) is None


def test_partitioned_accelerators_keep_their_name_but_not_their_peak() -> None:
    assert device.known_peak("AMD Instinct MI300X", "bf16", units=304) is not None
    assert device.known_peak("AMD Instinct MI300X", "bf16", units=38) is None


def test_every_row_names_a_source_and_dense_figures() -> None:
    rows = device.known_peaks()
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        assert row.source.startswith("https://")
        assert set(row.flops) <= {"bf16", "fp16", "tf32", "fp32"}
        assert all(1e12 < flops < 3e15 for flops in row.flops.values())
        re.compile(row.match)


def test_measurement_is_consistent_with_its_parts() -> None:
    result = gemm.measure("fp32", seconds=0.1)
    assert result.threads == device.cores().usable_physical
    assert result.repetitions >= 1
    # No core of today does more than 64 fp32 FLOPs in a cycle at 8 GHz, nor less than 10 million a second.
    assert 1e7 < result.flops < result.threads * 64 * 8e9


def test_measurement_leaves_the_thread_count_alone() -> None:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        gemm.measure("fp32", seconds=0.02)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_measured_once_read_ever_after(
    cpu_only: accelerators.TorchView, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    measured(monkeypatch, 5e11)
    first = device.measured_peaks(["bf16"])["bf16"]
    assert (first.flops, first.kind, first.dtype) == (5e11, "measured", "bf16")
    assert "2048" in first.source
    assert len(list(cache.glob("peaks/bf16-*.json"))) == 1
    assert not list(cache.glob("peaks/.*"))

    monkeypatch.setattr(peaks, "probe", lambda dtypes: pytest.fail("measured again"))
    assert device.cached_peak("bf16") == first
    assert device.peak("bf16") == first
    assert device.cached_peak("fp32", measure=False) is None


def test_best_measurement_is_kept(cpu_only: accelerators.TorchView, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, 5e11)
    device.measured_peaks(["bf16"])
    measured(monkeypatch, 4e11)
    assert device.measured_peaks(["bf16"])["bf16"].flops == 5e11
    measured(monkeypatch, 6e11)
    assert device.measured_peaks(["bf16"])["bf16"].flops == 6e11


def test_disturbed_measurement_is_tried_again(
    cpu_only: accelerators.TorchView, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(monkeypatch, 2e11, quiet=False)
    disturbed = device.measured_peaks(["bf16"])["bf16"]
    assert "busy" in disturbed.source
    better = disturbed.model_copy(update={"flops": 4e11, "quiet": True})
    document = peaks.ProbeDocument(view=cpu_only, peaks=[better])
    monkeypatch.setattr(peaks, "probe", lambda dtypes: document)
    assert device.cached_peak("bf16") == better
    assert device.cached_peak("bf16", measure=False) == disturbed


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"schema": 1}', "flops", "dtype", "torch"])
def test_damaged_cache_is_ignored(
    cpu_only: accelerators.TorchView, monkeypatch: pytest.MonkeyPatch, cache: Path, damage: str
) -> None:
    measured(monkeypatch, 5e11)
    device.measured_peaks(["bf16"])
    (file,) = cache.glob("peaks/bf16-*.json")
    entry = json.loads(file.read_text())
    if damage == "flops":
        entry["peak"]["flops"] = "Infinity"
    elif damage == "dtype":
        entry["peak"]["dtype"] = "fp32"
    elif damage == "torch":
        entry["torch"] = "1.0"
    file.write_text(json.dumps(entry) if damage in ("flops", "dtype", "torch") else damage)
    assert device.cached_peak("bf16", measure=False) is None


def test_unwritable_cache_is_no_failure(
    cpu_only: accelerators.TorchView, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRAINING_XPU_CACHE", str(tmp_path / "file" / "below"))
    measured(monkeypatch, 5e11)
    assert device.measured_peaks(["bf16"])["bf16"].flops == 5e11


def test_known_accelerator_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    card = accelerators.Accelerator(index=0, name="NVIDIA H100 80GB HBM3", memory_bytes=80 << 30, units=132)
    view = accelerators.TorchView(
        torch="2.13.0",
        kind="cuda",
        device_type="cuda",
        dtypes=["bf16", "fp16", "fp32"],
        emulated=[],
        accelerators=[card],
    )
    monkeypatch.setattr(accelerators, "torch_view", lambda: view)
    monkeypatch.setattr(gemm, "measure", lambda dtype, device_type: pytest.fail("measured"))
    document = peaks.answer(["bf16", "fp32"])
    assert [(p.dtype, p.flops, p.kind) for p in document.peaks] == [
        ("bf16", 989.5e12, "known"),
        ("fp32", 67e12, "known"),
    ]


def test_unknown_accelerator_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    card = accelerators.Accelerator(index=0, name="PPU-ZW810E", memory_bytes=96 << 30)
    view = accelerators.TorchView(
        torch="2.8.0", kind="ppu", device_type="cuda", dtypes=["bf16", "fp32"], emulated=[], accelerators=[card]
    )
    monkeypatch.setattr(accelerators, "torch_view", lambda: view)
    answer = gemm.GemmPeak(flops=1e14, size=8192, repetitions=9, threads=None, quiet=True)
    monkeypatch.setattr(gemm, "measure", lambda dtype, device_type: answer)
    (peak,) = peaks.answer(["bf16"]).peaks
    assert (peak.kind, peak.flops, peak.device) == ("measured", 1e14, "PPU-ZW810E")
    assert "one accelerator" in peak.source


def test_unknown_dtype_names_the_nearest() -> None:
    with pytest.raises(UserError) as raised:
        device.cached_peak("bf61")
    assert "bf16" in raised.value.remedy


def test_dtype_this_device_cannot_train_in(cpu_only: accelerators.TorchView, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks, "probe", lambda dtypes: peaks.ProbeDocument(view=cpu_only, peaks=[]))
    with pytest.raises(CannotRunHere) as raised:
        device.cached_peak("fp16")
    assert "fp16" in raised.value.problem
    assert "bf16" in raised.value.remedy


def test_probe_process_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'ImportError: libfoo.so' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(peaks.sys, "executable", str(broken))
    with pytest.raises(CannotRunHere, match=r"ImportError: libfoo\.so"):
        peaks.probe(["bf16"])
