"""Device nodes and drivers on fake trees, and how kinds of device are told apart."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from training_xpu import device
from training_xpu.device.accelerators import recognise, torch_view


def tree(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    return root


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the whole PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def script(folder: Path, name: str, answer: str, code: int = 0) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{answer}'\nexit {code}\n")
    path.chmod(0o755)


def test_nodes_by_vendor(tmp_path: Path) -> None:
    root = tree(
        tmp_path, dict.fromkeys(["/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia1", "/dev/null", "/dev/kfd"], "")
    )
    assert device.device_nodes(root) == {"nvidia": ["/dev/nvidia0", "/dev/nvidia1"], "amd": ["/dev/kfd"]}
    assert device.may_have_accelerator(root)


def test_no_nodes(tmp_path: Path) -> None:
    assert device.device_nodes(tmp_path) == {}
    assert device.driver(tmp_path) is None


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023", "535.104.05"),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build  (dvs)  Thu Feb 6",
            "570.124.06",
        ),
    ],
)
def test_nvidia_driver_is_read_from_the_kernel(tmp_path: Path, tools: Path, line: str, expected: str) -> None:
    root = tree(tmp_path, {"/dev/nvidia0": "", "/proc/driver/nvidia/version": line})
    assert device.driver(root) == f"nvidia {expected}"


def test_amd_driver(tmp_path: Path, tools: Path) -> None:
    root = tree(tmp_path, {"/dev/kfd": "", "/sys/module/amdgpu/version": "6.10.5"})
    assert device.driver(root) == "amdgpu 6.10.5"


def test_ppu_answers_ppu_smi_first(tmp_path: Path, tools: Path) -> None:
    root = tree(tmp_path, {"/dev/alixpu": "", "/dev/alixpu_ppu0": ""})
    script(tools, "ppu-smi", "1.3.4-a1b2")
    script(tools, "nvidia-smi", "550.00")
    assert device.driver(root) == "ppu 1.3.4-a1b2"


def test_ppu_in_cuda_compatible_mode_answers_nvidia_smi(tmp_path: Path, tools: Path) -> None:
    root = tree(tmp_path, {"/dev/alixpu": "", "/dev/alixpu_ppu0": ""})
    script(tools, "nvidia-smi", "1.7.0")
    assert device.driver(root) == "ppu 1.7.0"


@pytest.mark.parametrize(("answer", "code"), [("No devices were found", 0), ("535.1", 9), ("", 0)])
def test_a_tool_that_fails_gives_no_driver(tmp_path: Path, tools: Path, answer: str, code: int) -> None:
    root = tree(tmp_path, {"/dev/nvidia0": ""})
    script(tools, "nvidia-smi", answer, code)
    assert device.driver(root) is None


PLAIN, ROCM, SAIL = SimpleNamespace(hip=None), SimpleNamespace(hip="6.2"), SimpleNamespace(hip=None, sail="2.1.0")


@pytest.mark.parametrize(
    ("device_type", "names", "version", "torch_version", "expected"),
    [
        ("cpu", [], PLAIN, "2.13.0+cpu", "cpu"),
        ("cuda", ["NVIDIA H100 80GB HBM3"], PLAIN, "2.13.0+cu128", "cuda"),
        ("cuda", ["AMD Instinct MI300X"], ROCM, "2.13.0+rocm6.2", "rocm"),
        ("cuda", ["PPU-ZW810E"], PLAIN, "2.6.0", "ppu"),
        ("cuda", ["some name"], SAIL, "2.10.0", "ppu"),
        ("cuda", ["some name"], PLAIN, "2.8.0+ali.9.ppu1.7.0.cu129", "ppu"),
        ("cuda", ["NVIDIA SUPPUR"], PLAIN, "2.13.0", "cuda"),
        ("cpu", [], PLAIN, "2.8.0+ali.9.ppu1.7.0.cu129", "cpu"),
        ("xpu", ["Intel Data Center GPU Max 1550"], PLAIN, "2.13.0+xpu", "xpu"),
    ],
)
def test_kinds(device_type: str, names: list[str], version: object, torch_version: str, expected: str) -> None:
    assert recognise(device_type, names, version, torch_version) == expected


def test_what_torch_says_here() -> None:
    import torch

    view = torch_view()
    assert view.torch == torch.__version__
    assert "fp32" in view.dtypes
    assert "bf16" in view.dtypes or view.device_type != "cpu"
    assert len(view.accelerators) == torch.accelerator.device_count()
    if view.device_type == "cpu":
        assert ("fp16" in view.dtypes) == torch.ops.mkldnn._is_mkldnn_fp16_supported()
        assert ("bf16" in view.emulated) == (not torch.ops.mkldnn._is_mkldnn_bf16_supported())


def test_torch_need_not_be_asked_for_bf16_kernels() -> None:
    import torch

    assert device.has_bf16_kernels() == torch.ops.mkldnn._is_mkldnn_bf16_supported()


def test_importing_device_loads_neither_torch_nor_pydantic() -> None:
    code = (
        "import sys; from training_xpu import device; device.usable_cores(); device.usable_memory(); "
        "device.oom_kill_count(); device.device_nodes(); print('torch' in sys.modules, 'pydantic' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_every_public_name_exists() -> None:
    for name in device.__all__:
        assert getattr(device, name) is not None
    with pytest.raises(AttributeError):
        device.no_such_name  # noqa: B018
