"""`ljperf env`: what this machine and this environment are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from training_xpu.cli import console

if TYPE_CHECKING:
    from training_xpu.perf.fingerprint import Fingerprint

Rows = list[tuple[str, str]]


def env(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Measure peak FLOP/s where they are not known (seconds).")
    ] = False,
) -> None:
    """Show the fingerprint of this environment: hardware, limits, driver, packages, and variables with who set them.

    Without --measure, peaks measured earlier are shown if there are any.
    """
    from training_xpu.perf.fingerprint import collect

    if measure and not json:
        console.note("measuring peak FLOP/s ...")
    fingerprint = collect(measure_peak=measure)
    console.result(fingerprint.to_json(indent=2) if json else page(fingerprint))


def page(fingerprint: Fingerprint) -> str:
    """The fingerprint as text for people."""
    sections: list[tuple[str, Rows]] = [
        ("Hardware", _hardware(fingerprint)),
        ("Limits", _limits(fingerprint)),
        ("System", _system(fingerprint)),
        ("Packages", sorted(fingerprint.packages.items())),
        ("Variables", _variables(fingerprint)),
    ]
    blocks = [_section(title, rows) for title, rows in sections]
    blocks += [f"Note: {note}" for note in fingerprint.notes]
    return "\n\n".join(blocks)


def _section(title: str, rows: Rows) -> str:
    width = max((len(name) for name, _ in rows), default=0)
    lines = [f"  {name:<{width}}  {value}".rstrip() for name, value in rows]
    return "\n".join([title, *(lines or ["  none"])])


def _hardware(fingerprint: Fingerprint) -> Rows:
    hardware = fingerprint.hardware
    rows: Rows = [("computes on", hardware.kind)]
    rows += [
        (f"accelerator {a.index}", f"{a.name}, {_size(a.memory_bytes)}" + (f", {a.capability}" if a.capability else ""))
        for a in hardware.accelerators
    ]
    threads = "" if hardware.logical_cores == hardware.physical_cores else f", {hardware.logical_cores} threads"
    rows += [
        ("processor", f"{hardware.cpu}, {_count(hardware.physical_cores, 'core')}{threads}"),
        ("instruction sets", " ".join(hardware.isa) or "none that matter"),
        ("memory", _size(hardware.memory_bytes)),
    ]
    if len(hardware.numa) > 1:
        rows += [(f"NUMA node {n.number}", f"cores {n.cpus}, {_size(n.memory_bytes)}") for n in hardware.numa]
    rows += [(f"peak {p.dtype}", f"{_flops(p.flops)} ({p.source})") for p in fingerprint.peaks]
    if not fingerprint.peaks and fingerprint.torch is not None:
        rows.append(("peak", "not measured yet: ljperf env --measure"))
    return rows


def _limits(fingerprint: Fingerprint) -> Rows:
    limits = fingerprint.limits
    cores = _count(limits.usable_physical_cores, "core")
    if limits.usable_cores != limits.usable_physical_cores:
        cores += f", {limits.usable_cores} threads"
    if limits.cpu_quota is not None:
        cores += f" (quota {limits.cpu_quota:g}, {limits.cpu_quota_source})"
    memory = _size(limits.usable_memory_bytes)
    if limits.memory_limit_bytes is not None:
        memory += f" (limit {_size(limits.memory_limit_bytes)}, {limits.memory_limit_source})"
    rows: Rows = [
        ("usable cores", cores),
        ("allowed CPUs", limits.cpus_allowed),
        ("usable memory", memory),
        ("shared memory", _size(limits.shared_memory_bytes)),
        ("open files", _limit(limits.open_files)),
        ("processes", _limit(limits.processes)),
        ("locked memory", "no limit" if limits.locked_memory_bytes is None else _size(limits.locked_memory_bytes)),
    ]
    if limits.address_space_bytes is not None:
        rows.append(("address space", _size(limits.address_space_bytes)))
    rows.append(("transparent huge pages", limits.transparent_huge_pages or "unknown"))
    if limits.cpu_governor:
        rows.append(("CPU governor", limits.cpu_governor))
    return rows


def _system(fingerprint: Fingerprint) -> Rows:
    host, python, torch = fingerprint.host, fingerprint.python, fingerprint.torch
    commit = f" (commit {fingerprint.commit})" if fingerprint.commit else ""
    rows: Rows = [
        ("training-xpu-pytorch", fingerprint.version + commit),
        ("driver", fingerprint.driver or "none"),
        ("operating system", f"{host.os}, kernel {host.kernel}, {host.libc}, {host.architecture}"),
        ("container", "yes" if host.container else "no sign of one"),
        ("host", f"{host.id} (hash)"),
        ("Python", f"{python.version} ({python.build}), {python.executable}"),
        ("compiler", fingerprint.compiler or "none"),
    ]
    if torch is None:
        return [*rows, ("torch", "not installed, or it does not import")]
    accelerated = [f"{name} {v}" for name, v in (("CUDA", torch.cuda), ("ROCm", torch.hip), ("PPU", torch.sail)) if v]
    git = f", git {torch.git[:12]}" if torch.git else ""
    rows += [
        (
            "torch",
            f"{torch.version}, {', '.join(accelerated) or 'CPU only'}{git}{', debug build' if torch.debug else ''}",
        ),
        ("torch computes in", " ".join(f"{d} (slowly)" if d in torch.emulated else d for d in torch.dtypes)),
        (
            "torch on CPU",
            f"{torch.cpu_capability} kernels, BLAS {torch.blas or '?'}, {torch.threads} threads",
        ),
    ]
    return rows + [("", line) for line in torch.libraries]


def _variables(fingerprint: Fingerprint) -> Rows:
    from training_xpu import envs

    rows: Rows = []
    for variable in fingerprint.variables:
        rows.append((variable.name, f"{variable.value}  [{variable.set_by or 'unknown'}]"))
        if variable.name in envs.VARIABLES:
            rows.append(("", envs.VARIABLES[variable.name].meaning))
    return rows


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _limit(number: int | None) -> str:
    return "no limit" if number is None else f"{number}"


def _size(number: int | None) -> str:
    if number is None:
        return "unknown"
    value, unit = float(number), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.4g} {unit}"


def _flops(flops: float) -> str:
    return f"{flops / 1e12:.4g} TFLOP/s" if flops >= 1e12 else f"{flops / 1e9:.4g} GFLOP/s"
