"""What can be told of accelerators without torch: device nodes and drivers."""

from __future__ import annotations

import re
from pathlib import Path

from training_xpu.device.files import ROOT, at, read_text

# Device nodes that drivers make, as glob patterns below /dev.
_NODES = {
    "nvidia": ("nvidia[0-9]*", "dxg"),  # dxg: WSL
    "ppu": ("alixpu", "alixpu_ppu[0-9]*"),
    "amd": ("kfd",),
    "graphics": ("dri/renderD*",),  # also Intel's accelerators; any display adapter has one
    "habana": ("accel/accel[0-9]*", "hl[0-9]*"),
    "ascend": ("davinci[0-9]*",),
}


def device_nodes(root: Path = ROOT) -> dict[str, list[str]]:
    """Vendor -> device nodes present. Empty: no accelerator this project has heard of."""
    found = {
        vendor: sorted("/dev/" + str(p.relative_to(at(root, "/dev"))) for g in globs for p in at(root, "/dev").glob(g))
        for vendor, globs in _NODES.items()
    }
    return {vendor: nodes for vendor, nodes in found.items() if nodes}


def may_have_accelerator(root: Path = ROOT) -> bool:
    """False when it is certain without importing torch that torch has no accelerator to use.

    A foreign torch backend (entry point group torch.backends) may know devices whose nodes are unknown here.
    """
    if device_nodes(root):
        return True
    from importlib import metadata  # 15 ms that most callers do without

    return any(point.name != "training_xpu" for point in metadata.entry_points(group="torch.backends"))


def driver(root: Path = ROOT) -> str | None:
    """The accelerator driver's name and version, None when there is none.

    Reads what kernel modules publish; only where that says nothing, asks nvidia-smi or ppu-smi, each for at most
    five seconds.
    """
    nodes = device_nodes(root)
    nvidia = read_text(at(root, "/proc/driver/nvidia/version")) or ""
    version = re.search(r"Kernel Module(?: for \S+)?\s+(\d[\d.]*)", nvidia)
    if version and "ppu" not in nodes:
        return f"nvidia {version[1]}"
    amdgpu = read_text(at(root, "/sys/module/amdgpu/version"))
    if amdgpu and "amd" in nodes:
        return f"amdgpu {amdgpu}"
    for tool, vendors in (("ppu-smi", ("ppu",)), ("nvidia-smi", ("nvidia", "ppu"))):
        answer = _ask(tool) if any(v in nodes for v in vendors) else None
        if answer:
            return f"{'ppu' if 'ppu' in nodes else 'nvidia'} {answer}"
    return None


def _ask(tool: str) -> str | None:
    import shutil
    import subprocess

    path = shutil.which(tool)
    if path is None:
        return None
    command = [path, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    first = done.stdout.strip().splitlines()[:1]
    return first[0].strip() if done.returncode == 0 and first and first[0].strip()[:1].isdigit() else None
