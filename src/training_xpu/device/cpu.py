"""The processor: model, instruction sets that matter for training, cores, NUMA nodes, and what of it may be used."""

from __future__ import annotations

import math
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from training_xpu.device.cgroups import cpu_quota, cpuset
from training_xpu.device.files import ROOT, as_int, at, parse_cpu_list, read_fields, read_text

# Those that choose the kernels of matrix multiplications, as /proc/cpuinfo names them (x86 "flags", ARM "Features").
_ISA = (
    *("avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512dq", "avx512vl"),
    *(
        "avx512_vnni",
        "avx512_bf16",
        "avx512_fp16",
        "avx_ne_convert",
        "amx_tile",
        "amx_int8",
        "amx_bf16",
        "amx_fp16",
        "avx10_1",
        "avx10_2",
    ),
    *("asimd", "asimdhp", "asimddp", "asimdfhm", "bf16", "i8mm", "sve", "svebf16", "svei8mm", "sve2", "sme", "sme2"),
)

# CPU implementer and part of /proc/cpuinfo, which names no model on ARM: Arm's technical reference manuals (MIDR_EL1).
_ARM_PARTS = {
    ("0x41", "0xd0c"): "Arm Neoverse N1",
    ("0x41", "0xd40"): "Arm Neoverse V1",
    ("0x41", "0xd49"): "Arm Neoverse N2",
    ("0x41", "0xd4f"): "Arm Neoverse V2",
    ("0x41", "0xd84"): "Arm Neoverse V3",
    ("0x41", "0xd8e"): "Arm Neoverse N3",
    ("0x46", "0x001"): "Fujitsu A64FX",
    ("0x48", "0xd01"): "HiSilicon Kunpeng 920",
    ("0xc0", "0xac3"): "Ampere-1",
}


@dataclass(frozen=True)
class Cores:
    """How many cores there are and how many this process may use.

    logical counts hardware threads, physical counts cores (their threads share the units that multiply matrices).
    """

    online_logical: int
    online_physical: int
    allowed: frozenset[int]  # affinity and cpuset together
    quota: float | None  # in cores; None: no quota
    quota_source: str
    usable_logical: int
    usable_physical: int

    @property
    def threads_per_core(self) -> float:
        return self.online_logical / self.online_physical


@dataclass(frozen=True)
class NumaNode:
    number: int
    cpus: frozenset[int]
    memory_bytes: int | None


def cpu_model(root: Path = ROOT) -> str:
    """The processor's name, with single spaces; the architecture when the machine does not tell."""
    fields = _cpuinfo(root)
    part = _ARM_PARTS.get((fields.get("CPU implementer", ""), fields.get("CPU part", "")))
    named = fields.get("model name") or part or fields.get("cpu") or fields.get("uarch")
    if not named and "CPU part" in fields:
        named = f"ARM implementer {fields.get('CPU implementer')} part {fields['CPU part']}"
    return " ".join((named or platform.machine()).split())


def isa_flags(root: Path = ROOT) -> list[str]:
    """The instruction sets that matter for training and that this processor has, in the kernel's names."""
    fields = _cpuinfo(root)
    present = set((fields.get("flags") or fields.get("Features") or "").split())
    return [flag for flag in _ISA if flag in present]


def has_bf16_kernels(root: Path = ROOT) -> bool:
    """Whether torch multiplies bf16 matrices with kernels made for it, told without asking torch.

    oneDNN has them for AVX-512, where they convert to fp32 if need be, and for ARM with bf16 instructions (torch 2.13,
    aten/src/ATen/native/mkldnn/Utils.h).
    """
    flags = set(isa_flags(root))
    return {"avx512bw", "avx512dq", "avx512vl"} <= flags or "bf16" in flags


def cores(root: Path = ROOT) -> Cores:
    """Counts cores: the affinity of this process, its cpuset and the CPU quota of its groups are all heeded."""
    online = _online(root)
    allowed = _affinity(root, online)
    inside = allowed & cpuset(root)
    allowed = inside or allowed  # an empty intersection would be a cpuset that is changing just now
    quota = cpu_quota(root)
    most = len(allowed) if quota is None else whole_cores(quota.value)
    return Cores(
        online_logical=len(online),
        online_physical=_physical(online, root),
        allowed=allowed,
        quota=None if quota is None else quota.value,
        quota_source="" if quota is None else quota.source,
        usable_logical=min(len(allowed), most),
        usable_physical=min(_physical(allowed, root), most),
    )


def whole_cores(quota: float) -> int:
    """A CPU quota as a number of threads, at least one.

    Rounded down: with more threads than quota the kernel stops all of them for the rest of each period, and every
    parallel region waits for the slowest. A quota a tenth below a whole number counts as that number, since an idle
    core would cost more than so rare a stop.
    """
    return max(1, math.floor(quota + 0.1))


def numa_nodes(root: Path = ROOT) -> list[NumaNode]:
    """The NUMA nodes that have CPUs, by number; empty when the kernel does not say."""
    nodes = []
    for folder in at(root, "/sys/devices/system/node").glob("node[0-9]*"):
        number, cpus = as_int(folder.name.removeprefix("node")), parse_cpu_list(read_text(folder / "cpulist"))
        if number is not None and cpus:
            total = None
            for line in (read_text(folder / "meminfo") or "").splitlines():
                words = line.split()  # "Node 0 MemTotal:  24684084 kB"
                if len(words) >= 4 and words[2] == "MemTotal:":
                    total = as_int(words[3])
            nodes.append(NumaNode(number, cpus, None if total is None else total * 1024))
    return sorted(nodes, key=lambda node: node.number)


def _cpuinfo(root: Path) -> dict[str, str]:
    """The first processor's fields; machines with several kinds of core are described by the first."""
    fields: dict[str, str] = {}
    for line in (read_text(at(root, "/proc/cpuinfo")) or "").splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip(), value.strip())
    return fields


def _online(root: Path) -> frozenset[int]:
    listed = parse_cpu_list(read_text(at(root, "/sys/devices/system/cpu/online")))
    if listed:
        return listed
    text = read_text(at(root, "/proc/cpuinfo")) or ""
    numbers = [as_int(x.partition(":")[2].strip()) for x in text.splitlines() if x.startswith("processor")]
    return frozenset(n for n in numbers if n is not None) or frozenset(range(os.cpu_count() or 1))


def _affinity(root: Path, online: frozenset[int]) -> frozenset[int]:
    if root == ROOT:
        return frozenset(os.sched_getaffinity(0))
    listed = parse_cpu_list(read_fields(at(root, "/proc/self/status")).get("Cpus_allowed_list"))
    return (listed & online) or online


def _physical(cpus: frozenset[int], root: Path) -> int:
    """How many different cores the logical CPUs stand on; where the kernel does not tell, each is its own core."""
    found = set()
    for cpu in cpus:
        topology = at(root, f"/sys/devices/system/cpu/cpu{cpu}/topology")
        siblings = read_text(topology / "core_cpus_list") or read_text(topology / "thread_siblings_list")
        found.add(parse_cpu_list(siblings) or frozenset((cpu,)))
    return max(1, len(found))
