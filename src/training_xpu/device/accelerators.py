"""What torch makes of this machine: its accelerators, what kind they are, and the dtypes they can train in."""

from __future__ import annotations

import re
import sys
from typing import Any

from pydantic import Field

from training_xpu.device.nodes import may_have_accelerator
from training_xpu.records import Record

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


class Accelerator(Record):
    """One accelerator as this process's torch sees it."""

    index: int
    name: str
    memory_bytes: int | None
    units: int | None = None  # multiprocessors or compute units
    capability: str = ""  # CUDA compute capability or ROCm architecture, "" where there is no such thing


class TorchView(Record):
    """What torch says about this machine and about itself."""

    torch: str  # version
    kind: str  # see `device.kind`
    device_type: str  # torch's own name: "cpu", "cuda", "xpu", ...
    accelerators: list[Accelerator] = Field(default_factory=list)
    dtypes: list[str]  # of "bf16", "fp16", "fp32": those this device can train in
    emulated: list[str]  # of these, those it multiplies matrices in many times slower
    cpu_capability: str = ""  # the kernels torch chose: "AVX512", "AVX2", "DEFAULT", ...
    blas: str = ""  # e.g. "mkl"
    libraries: list[str] = Field(default_factory=list)  # lines of torch.__config__.show()
    threads: int | None = None  # intra-op threads of the torch that was asked


def recognise(device_type: str, names: list[str], version: Any, torch_version: str) -> str:
    """The kind of device behind torch's device type.

    PPUs and AMD's accelerators both answer to "cuda". A PPU is known by torch.version.sail (builds of its own), by
    the device's name (CUDA-compatible mode, e.g. "PPU-ZW810E") or by torch's local version ("+...ppu1.7.0...").

    Args:
        device_type: torch's name, such as "cpu" or "cuda".
        names: the devices' names.
        version: the module torch.version.
        torch_version: torch.__version__.
    """
    if device_type != "cuda":
        return device_type
    named = any(re.search(r"(?<![A-Za-z])PPU(?![A-Za-z])", name) for name in names)
    if getattr(version, "sail", None) or named or re.search(r"\+.*\bppu\d", torch_version):
        return "ppu"
    return "rocm" if getattr(version, "hip", None) else "cuda"


def torch_view() -> TorchView:
    """Asks torch in this process; imports it, and on accelerators starts their runtime."""
    import torch

    device_type, accelerators = "cpu", list[Accelerator]()
    current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if current is not None:
        device_type = current.type
        module = torch.get_device_module(device_type)
        accelerators = [_accelerator(module, i) for i in range(torch.accelerator.device_count())]
    config = [line.strip(" -") for line in torch.__config__.show().splitlines()[1:]]
    blas = re.search(r"BLAS_INFO=(\w+)", " ".join(config))
    return TorchView(
        torch=str(torch.__version__),
        kind=recognise(device_type, [a.name for a in accelerators], torch.version, str(torch.__version__)),
        device_type=device_type,
        accelerators=accelerators,
        dtypes=list_dtypes(device_type),
        emulated=[] if device_type != "cpu" or _has_bf16_kernels() else ["bf16"],
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        blas=blas[1] if blas else "",
        libraries=[x for x in config if x and not x.startswith(("Build settings", "CPU capability", "C++ Version"))],
        threads=torch.get_num_threads(),
    )


def list_dtypes(device_type: str | None = None) -> list[str]:
    """Which of "bf16", "fp16" and "fp32" this device can train in, tried out on a tiny matrix multiplication.

    On CPU, fp16 counts only where oneDNN has kernels for it: without them it would run element by element.
    """
    import torch

    if device_type is None:
        current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device_type = "cpu" if current is None else current.type
    return [name for name in _DTYPES if _trains(name, device_type)]


def _has_bf16_kernels() -> bool:
    """Whether oneDNN multiplies bf16 matrices on this CPU; where not, torch does so element by element.

    The gradient of a linear layer then takes a hundred times as long as in fp32 (x86 with AVX2 alone, torch 2.13).
    """
    import torch

    asked = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return bool(asked is not None and asked())


def _trains(name: str, device_type: str) -> bool:
    import torch

    if device_type == "cpu" and name == "fp16":
        # The same question DeepSpeed's CPU accelerator asks.
        asked = getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", None)
        if asked is None or not asked():
            return False
    if device_type == "cuda" and name == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return False
    try:
        weight = torch.ones(16, 16, device=device_type, dtype=getattr(torch, _DTYPES[name]), requires_grad=True)
        (gradient,) = torch.autograd.grad((weight @ weight).sum(), weight)
        return bool((gradient == 32).all())
    except (RuntimeError, NotImplementedError, TypeError):
        return False


def _accelerator(module: Any, index: int) -> Accelerator:
    properties = module.get_device_properties(index)
    name = str(getattr(properties, "name", "")) or str(module.get_device_name(index))
    architecture = str(getattr(properties, "gcnArchName", "")).split(":")[0]
    major, minor = getattr(properties, "major", None), getattr(properties, "minor", None)
    capability = architecture or (f"{major}.{minor}" if major is not None and minor is not None else "")
    return Accelerator(
        index=index,
        name=name,
        memory_bytes=getattr(properties, "total_memory", None),
        units=getattr(properties, "multi_processor_count", None),
        capability=capability,
    )


def torch_is_ready() -> bool:
    """Whether asking torch in this process costs nothing more: it is imported, and so is any accelerator's runtime."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "accelerator"):
        return False
    if not may_have_accelerator():
        return True
    initialised = getattr(getattr(torch, "cuda", None), "is_initialized", None)
    return bool(initialised and initialised())
