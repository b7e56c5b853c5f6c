"""Peak FLOP/s of this device: known from the vendor's data sheet, otherwise measured and cached."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from training_xpu import envs
from training_xpu.device import accelerators, cpu, gemm, nodes
from training_xpu.device.accelerators import Accelerator, TorchView
from training_xpu.errors import CannotRunHere, UserError, nearest
from training_xpu.records import Record, RecordT, write_atomically

DTYPES = ("bf16", "fp16", "fp32")
_PROBE_TIMEOUT_S = 120  # importing torch from a cold network disk takes long


class Peak(Record):
    """The most FLOP/s this device does in one dtype, dense, multiplications and additions counted apart.

    On CPU the device is all cores this process may use, together; on accelerators it is one accelerator.
    """

    dtype: str
    flops: float = Field(gt=0)  # FLOP/s
    kind: Literal["measured", "known"]
    source: str  # one line for people: how it was measured, or the vendor's document
    device: str  # e.g. "AMD EPYC, 2 cores" or "NVIDIA H100 80GB HBM3"
    quiet: bool = True  # measured only; False: other processes were busy meanwhile, so the true peak is higher


class ProbeDocument(Record):
    """What `python -m training_xpu.device --json` prints."""

    view: TorchView
    peaks: list[Peak]


class _CachedPeak(Record):
    torch: str
    isa: list[str]
    peak: Peak


class _CachedView(Record):
    torch: str
    cores: int
    view: TorchView


@dataclass(frozen=True)
class KnownPeaks:
    """One row of peaks.yaml: dense figures of one accelerator."""

    name: str
    match: str
    flops: dict[str, float]  # "bf16", "fp16", "tf32", "fp32" -> FLOP/s
    source: str
    units: int | None = None
    note: str = ""


@functools.cache
def known_peaks() -> tuple[KnownPeaks, ...]:
    """All accelerators whose peaks are known from a vendor's document."""
    import yaml

    rows = yaml.safe_load(resources.files(__package__).joinpath("peaks.yaml").read_text(encoding="utf-8"))
    return tuple(
        KnownPeaks(
            name=row["name"],
            match=row["match"],
            flops={dtype: float(tflops) * 1e12 for dtype, tflops in row["tflops"].items()},
            source=row["source"],
            units=row.get("units"),
            note=row.get("note", ""),
        )
        for row in rows
    )


def known_peak(device_name: str, dtype: str, units: int | None = None) -> Peak | None:
    """The data-sheet peak of the accelerator of that name, None when it has no row or no figure for the dtype.

    Args:
        device_name: as torch names it, e.g. "NVIDIA H100 80GB HBM3".
        dtype: "bf16", "fp16", "fp32" (without TF32) or "tf32".
        units: how many multiprocessors or compute units torch sees; a different number than the row's is no match.
    """
    if re.search(r"\bMIG\b", device_name):
        return None
    for row in known_peaks():
        if re.search(row.match, device_name, re.IGNORECASE):
            if dtype not in row.flops or (units and row.units and units != row.units):
                return None
            note = f", {row.note}" if row.note else ""
            source = f"{row.name} data sheet, dense{note}: {row.source}"
            return Peak(dtype=dtype, flops=row.flops[dtype], kind="known", source=source, device=device_name)
    return None


def measured_peaks(dtypes: Iterable[str] = DTYPES) -> dict[str, Peak]:
    """Measures in this process, keeps the best of this and earlier measurements in the cache folder and returns it.

    Takes about two seconds for all dtypes, after torch has been imported. Dtypes this device cannot train in are left
    out. See `gemm.measure`.
    """
    view = accelerators.torch_view()
    return {dtype: _measured(dtype, view) for dtype in _checked(dtypes) if dtype in view.dtypes}


def cached_peak(dtype: str, measure: bool = True) -> Peak | None:
    """The peak of this device without loading torch into this process unless it is there already.

    A measurement that other processes disturbed is tried again at each call, and the best one is kept.

    Args:
        dtype: "bf16", "fp16" or "fp32".
        measure: False: answer from the cache and the table only, None when they hold nothing.

    Raises:
        UserError: no such dtype.
        CannotRunHere: this device cannot train in that dtype, or the measuring process failed.
    """
    found = cached_peaks([dtype], measure).get(dtype)
    if found is None and measure:
        view = torch_view()
        raise CannotRunHere(
            f"this device ({_device_name(view)}) cannot train in {dtype}", "Use " + " or ".join(view.dtypes) + "."
        )
    return found


def cached_peaks(dtypes: Iterable[str] = DTYPES, measure: bool = True) -> dict[str, Peak]:
    """As `cached_peak` for several dtypes, with one measuring process for all; those without an answer are left out."""
    asked = _checked(dtypes)
    found = {dtype: peak for dtype in asked if (peak := _lookup(dtype)) is not None}
    missing = [dtype for dtype in asked if dtype not in found or not found[dtype].quiet]
    if measure and missing:
        found.update({peak.dtype: peak for peak in probe(missing).peaks})
    return {dtype: found[dtype] for dtype in asked if dtype in found}


def peak(dtype: str) -> Peak:
    """The peak of this device: known from the table for accelerators that are in it, measured otherwise.

    Raises:
        UserError, CannotRunHere: as `cached_peak` does.
    """
    found = cached_peak(dtype)
    assert found is not None
    return found


def torch_view() -> TorchView:
    """What torch says about this machine, asked in a process of its own unless torch is ready here; cached on CPU.

    A launcher must not start an accelerator's runtime: it would take memory from the ranks.
    """
    if accelerators.torch_is_ready():
        return accelerators.torch_view()
    if not nodes.may_have_accelerator():
        cached = _read(_view_file(), _CachedView)
        if cached is not None and cached.torch == torch_version() and cached.cores == cpu.cores().usable_logical:
            return cached.view
    return probe([]).view


def probe(dtypes: Iterable[str]) -> ProbeDocument:
    """Runs `python -m training_xpu.device --json` in a process of its own.

    Raises:
        CannotRunHere: it failed; its last line on stderr is named.
    """
    command = [sys.executable, "-m", "training_xpu.device", "--json"]
    asked = [f"--dtype={dtype}" for dtype in dtypes]
    command += asked or ["--no-peaks"]
    environment = envs.snapshot()
    # All cores are to be measured, whatever threads a job on them is given, and without features.
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_PROC_BIND", "KMP_AFFINITY", "GOMP_CPU_AFFINITY"):
        environment.pop(name, None)
    environment.pop("TRAINING_XPU_REPORT", None)
    environment["TRAINING_XPU_DISABLE"] = "1"
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise CannotRunHere(
            f"asking torch about this machine took more than {_PROBE_TIMEOUT_S} s", "Run: " + " ".join(command)
        ) from error
    try:
        return ProbeDocument.model_validate_json(done.stdout)
    except ValidationError as error:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise CannotRunHere(
            f"torch could not be asked about this machine: {last}", "Run: " + " ".join(command)
        ) from error


def answer(dtypes: Iterable[str]) -> ProbeDocument:
    """What this process's torch says, with a peak for each dtype this device can train in."""
    view = accelerators.torch_view()
    if view.device_type == "cpu":
        _write(_view_file(), _CachedView(torch=torch_version(), cores=cpu.cores().usable_logical, view=view))
    found = []
    for dtype in _checked(dtypes):
        if dtype in view.dtypes:
            peak = _known(dtype, view) or _cached(dtype, _device_name(view))
            found.append(peak if peak is not None and peak.quiet else _measured(dtype, view))
    return ProbeDocument(view=view, peaks=found)


def torch_version() -> str:
    """The installed torch's version, read without importing it; "" when there is none."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def _checked(dtypes: Iterable[str]) -> list[str]:
    asked = list(dtypes)
    for dtype in asked:
        if dtype not in DTYPES:
            raise UserError(f"unknown dtype {dtype!r}", nearest(dtype, DTYPES))
    return asked


def _lookup(dtype: str) -> Peak | None:
    if not nodes.may_have_accelerator():
        return _cached(dtype, _cpu_name())
    if not accelerators.torch_is_ready():
        return None  # only torch knows which accelerator this is
    view = accelerators.torch_view()
    return _known(dtype, view) or _cached(dtype, _device_name(view))


def _known(dtype: str, view: TorchView) -> Peak | None:
    first: Accelerator | None = view.accelerators[0] if view.accelerators else None
    return known_peak(first.name, dtype, first.units) if first is not None else None


def _measured(dtype: str, view: TorchView) -> Peak:
    device = _device_name(view)
    result = gemm.measure(dtype, view.device_type)
    where = f"{result.threads} cores" if result.threads is not None else "one accelerator"
    disturbed = "" if result.quiet else ", while other processes were busy"
    peak = Peak(
        dtype=dtype,
        flops=result.flops,
        kind="measured",
        source=f"measured: best of {result.repetitions} {dtype} matrix multiplications, {result.size} rows, "
        f"on {where}{disturbed}",
        device=device,
        quiet=result.quiet,
    )
    before = _cached(dtype, device)
    if before is not None and before.flops > peak.flops:  # what was reached once can be reached
        peak = before.model_copy(update={"quiet": before.quiet or peak.quiet})
    _write(_peak_file(dtype, device), _CachedPeak(torch=torch_version(), isa=cpu.isa_flags(), peak=peak))
    return peak


def _cached(dtype: str, device: str) -> Peak | None:
    entry = _read(_peak_file(dtype, device), _CachedPeak)
    if entry is None or (entry.torch, entry.isa) != (torch_version(), cpu.isa_flags()):
        return None
    found = entry.peak
    return found if (found.dtype, found.device) == (dtype, device) and math.isfinite(found.flops) else None


def _device_name(view: TorchView) -> str:
    return view.accelerators[0].name if view.accelerators else _cpu_name()


def _cpu_name() -> str:
    count = cpu.cores().usable_physical
    return f"{cpu.cpu_model()}, {count} core{'' if count == 1 else 's'}"


def _peak_file(dtype: str, device: str) -> Path:
    key = json.dumps([device, cpu.isa_flags(), torch_version(), dtype])
    return envs.cache_folder() / "peaks" / f"{dtype}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _view_file() -> Path:
    key = json.dumps([cpu.isa_flags(), torch_version(), cpu.cores().usable_logical, sys.prefix])
    return envs.cache_folder() / "torch" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _read(path: Path, kind: type[RecordT]) -> RecordT | None:
    """A damaged or foreign cache entry is no entry."""
    try:
        return kind.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _write(path: Path, record: Record) -> None:
    """A cache that cannot be written is no reason to fail: the next process measures again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, record.to_json(indent=2) + "\n")
    except OSError:
        return
