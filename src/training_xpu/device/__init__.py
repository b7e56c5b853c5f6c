"""What this machine computes on: kind, cores, memory, accelerators, peak FLOP/s; the one owner of peak-memory resets.

Importing it loads neither torch nor pydantic. Cores, memory, limits, device nodes and the kernel's out-of-memory
counter are read without torch; `cached_peak` and `torch_view` ask torch in a process of its own.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training_xpu.device.cgroups import OomKills, oom_kill_count, oom_kills
from training_xpu.device.cpu import Cores, NumaNode, cores, cpu_model, has_bf16_kernels, isa_flags, numa_nodes
from training_xpu.device.files import ROOT
from training_xpu.device.host_memory import Memory, PeakMemory, memory, shared_memory_bytes
from training_xpu.device.nodes import device_nodes, driver, may_have_accelerator

if TYPE_CHECKING:
    from training_xpu.device.accelerators import Accelerator, TorchView, list_dtypes
    from training_xpu.device.peaks import Peak, cached_peak, known_peak, known_peaks, measured_peaks, peak, torch_view

__all__ = [
    "Accelerator",
    "Cores",
    "Memory",
    "NumaNode",
    "OomKills",
    "Peak",
    "PeakMemory",
    "TorchView",
    "cached_peak",
    "cores",
    "cpu_model",
    "device_nodes",
    "driver",
    "has_bf16_kernels",
    "isa_flags",
    "kind",
    "known_peak",
    "known_peaks",
    "list_dtypes",
    "may_have_accelerator",
    "measured_peaks",
    "memory",
    "numa_nodes",
    "oom_kill_count",
    "oom_kills",
    "peak",
    "shared_memory_bytes",
    "torch_view",
    "usable_cores",
    "usable_memory",
]

# Modules that define pydantic records are loaded when something of theirs is first asked for.
_LAZY = {
    "accelerators": ("Accelerator", "TorchView", "list_dtypes"),
    "peaks": ("Peak", "cached_peak", "known_peak", "known_peaks", "measured_peaks", "peak", "torch_view"),
}


def __getattr__(name: str) -> Any:
    for module, names in _LAZY.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def usable_cores(root: Path = ROOT) -> int:
    """Hardware threads this process may use: affinity, cpuset and CPU quota heeded, at least one.

    `cores` tells physical cores apart, and why there are no more.
    """
    return cores(root).usable_logical


def usable_memory(root: Path = ROOT) -> int:
    """Bytes of main memory this process may use: the machine's memory or the smallest control-group limit.

    `memory` tells how much of it is in use.
    """
    return memory(root).usable


def kind() -> str:
    """What torch computes on: "cpu", "cuda" (NVIDIA), "ppu", "rocm" (AMD), or torch's name for another ("xpu", ...).

    Needs torch only where there may be an accelerator, and then asks it in a process of its own unless it is loaded.
    """
    if "torch" not in sys.modules and not may_have_accelerator():
        return "cpu"
    from training_xpu.device.peaks import torch_view

    return torch_view().kind
