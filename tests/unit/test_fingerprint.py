"""The fingerprint: what is in it, what is kept out of it, and how two are compared."""

from __future__ import annotations

import getpass
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from training_xpu import device
from training_xpu.cli.env import page
from training_xpu.device import accelerators, nodes, peaks
from training_xpu.errors import CannotRunHere
from training_xpu.perf import fingerprint as fingerprint_module
from training_xpu.perf.fingerprint import Fingerprint, collect, differences
from training_xpu.perf.variables import is_secret, variables, without_personal

CPU_VIEW = accelerators.TorchView(
    torch="2.13.0+cpu",
    kind="cpu",
    device_type="cpu",
    dtypes=["bf16", "fp32"],
    emulated=[],
    cpu_capability="AVX512",
    blas="mkl",
    libraries=["OpenMP 4.5"],
    threads=2,
)


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch is not asked, as it answers the same to each test, and the cache is empty."""
    monkeypatch.setenv("TRAINING_XPU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(peaks, "torch_view", lambda: CPU_VIEW)
    monkeypatch.setattr(accelerators, "torch_view", lambda: CPU_VIEW)
    monkeypatch.setattr(nodes, "may_have_accelerator", lambda: False)


def peak(dtype: str, flops: float) -> device.Peak:
    return device.Peak(dtype=dtype, flops=flops, kind="measured", source="measured: in a test", device="a CPU, 2 cores")


def test_says_what_this_machine_is() -> None:
    found = collect()
    assert found.hardware.kind == "cpu"
    assert found.hardware.logical_cores >= found.hardware.physical_cores >= 1
    assert found.limits.usable_cores == device.usable_cores()
    assert found.limits.usable_memory_bytes == device.usable_memory()
    assert found.host.kernel == os.uname().release
    assert found.python.version == platform.python_version()
    assert (found.python.executable == "virtual environment") == (sys.prefix != sys.base_prefix)
    assert found.packages["torch"] == metadata.version("torch")
    assert "flash-attn" not in found.packages
    assert found.torch is not None
    assert found.torch.cuda is None or found.torch.cuda[0].isdigit()


def test_survives_the_way_through_a_file(tmp_path: Path) -> None:
    found = collect()
    found.write(tmp_path / "fingerprint.json")
    assert Fingerprint.read(tmp_path / "fingerprint.json") == found
    assert differences(found, found.model_dump(mode="json")) == []


def test_version_of_a_package_that_looks_installed_but_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint_module, "PACKAGES", ("torch", "no-such-package"))
    assert list(collect().packages) == ["torch"]


def test_no_torch_is_a_note_not_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> Any:
        raise CannotRunHere("torch could not be asked about this machine: ImportError: libfoo.so")

    monkeypatch.setattr(peaks, "torch_view", fails)
    found = collect()
    assert found.torch is None
    assert "libfoo.so" in found.notes[0]
    assert "does not import" in page(found)


def test_accelerator_that_torch_does_not_use_is_pointed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        device, "device_nodes", lambda: {"nvidia": ["/dev/nvidia0"], "graphics": ["/dev/dri/renderD128"]}
    )
    (note,) = collect().notes
    assert "/dev/nvidia0" in note
    assert "2.13.0+cpu" in note
    assert "renderD128" not in note


def test_peaks_are_those_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def cached(dtypes: list[str], measure: bool) -> dict[str, device.Peak]:
        asked.append(measure)
        return {"fp32": peak("fp32", 2e11)}

    monkeypatch.setattr(peaks, "cached_peaks", cached)
    assert [p.dtype for p in collect().peaks] == ["fp32"]
    collect(measure_peak=True)
    assert asked == [False, True]
    assert "200 GFLOP/s" in page(collect())


def test_variables_and_who_set_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = tmp_path / "defaults"
    defaults.write_text("NCCL_DEBUG=WARN\nOMP_NUM_THREADS=4\n")
    for name, value in {
        "TRAINING_XPU_IMAGE_DEFAULTS": str(defaults),
        "NCCL_DEBUG": "WARN",
        "OMP_NUM_THREADS": "8",
        "TOKENIZERS_PARALLELISM": "false",
        "GLOO_SOCKET_IFNAME": "eth0",
        "TRAINING_XPU_SET": '{"GLOO_SOCKET_IFNAME": "eth0"}',
        "UNRELATED_SETTING": "1",
    }.items():
        monkeypatch.setenv(name, value)
    found = {v.name: (v.value, v.set_by) for v in variables()}
    assert found["NCCL_DEBUG"] == ("WARN", "image")
    assert found["OMP_NUM_THREADS"] == ("8", "user")
    assert found["TOKENIZERS_PARALLELISM"] == ("false", "user")
    assert found["GLOO_SOCKET_IFNAME"] == ("eth0", "ours")
    assert "UNRELATED_SETTING" not in found
    assert "TRAINING_XPU_SET" not in found


@pytest.mark.parametrize("name", ["HF_TOKEN", "DS_API_KEY", "MLFLOW_TRACKING_PASSWORD", "hf_auth", "NCCL_SECRETS"])
def test_secrets_by_name(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "KEYBOARD", "NCCL_DEBUG", "TORCH_COMPASS", "MONKEY_BARS"])
def test_no_secrets_by_name(name: str) -> None:
    assert not is_secret(name)


def test_nothing_personal_gets_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "somebody"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("LOGNAME", "somebody")
    for name, value in {
        "HF_TOKEN": "hf_abcdef",
        "HF_HOME": f"{home}/hf",
        "HF_ENDPOINT": "https://somebody:hunter2@mirror.example/hf",
        "TORCH_HOME": "/data/somebody/torch",
        "LD_LIBRARY_PATH": f"/usr/lib:{home}/lib",
        "TRITON_CACHE_DIR": f"{home}else/cache",
    }.items():
        monkeypatch.setenv(name, value)
    assert getpass.getuser() == "somebody"
    text = collect().to_json()
    for hidden in ("hf_abcdef", "hunter2", str(home) + "/", platform.node()):
        assert hidden not in text
    found = {v.name: v.value for v in variables()}
    assert found["HF_TOKEN"] == "***"
    assert found["HF_HOME"] == "~/hf"
    assert found["HF_ENDPOINT"] == "https://***@mirror.example/hf"
    assert found["TORCH_HOME"] == "/data/<user>/torch"
    assert found["LD_LIBRARY_PATH"] == "/usr/lib:~/lib"
    assert found["TRITON_CACHE_DIR"] == f"{home}else/cache"  # another folder, that only begins alike


def test_values_that_are_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environb, b"NCCL_TOPO_FILE", b"/data/\xff.xml")
    assert "NCCL_TOPO_FILE" in collect().to_json()


def test_user_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> str:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr(getpass, "getuser", unknown)
    assert without_personal("/data/x") == "/data/x"


def test_commit_is_this_checkouts_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "venv/lib/site-packages/training_xpu/__init__.py"
    installed.parent.mkdir(parents=True)
    installed.write_text("")
    (tmp_path / "venv/.git").mkdir()  # somebody else's repository around the installation
    monkeypatch.setattr(fingerprint_module, "training_xpu", SimpleNamespace(__file__=str(installed), __version__="1"))
    assert collect().commit is None


def test_compiler_is_the_one_torch_would_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "clang++"
    fake.write_text("#!/bin/sh\necho 'clang version 99.0'\necho second line\n")
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    assert collect().compiler == "clang version 99.0"
    monkeypatch.setenv("CXX", str(tmp_path / "missing"))
    assert collect().compiler is None


def test_differences_name_fields_and_both_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    a = collect()
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    b = collect()
    b.packages = {**b.packages, "torch": "3.0"}
    b.hardware.memory_bytes += 1
    b.notes = ["something"]
    found = differences(a, b)
    assert ("packages.torch", metadata.version("torch"), "3.0") in found
    assert ("variables.OMP_NUM_THREADS", None, "8 (set by user)") in found
    assert ("hardware.memory_bytes", a.hardware.memory_bytes, b.hardware.memory_bytes) in found
    fields = [field for field, _, _ in found]
    assert fields[0] == "hardware.memory_bytes"  # the machine before the software
    assert not any(field.startswith("notes") for field in fields)


def test_folders_of_a_run_are_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    a = collect()
    monkeypatch.setenv("TRAINING_XPU_REPORT", "/data/run7/report")
    monkeypatch.setenv("TRAINING_XPU_RUNS", "/data")
    assert differences(a, collect()) == []


def test_noise_of_measured_peaks_is_no_difference() -> None:
    a, b, c = collect(), collect(), collect()
    a.peaks, b.peaks, c.peaks = [peak("bf16", 4.0e11)], [peak("bf16", 4.3e11)], [peak("bf16", 8e11)]
    assert differences(a, b) == []
    assert differences(a, c) == [("peaks.bf16", 4.0e11, 8e11)]


def test_fingerprint_of_another_version_can_be_compared() -> None:
    now = collect()
    then = now.model_dump(mode="json")
    del then["compiler"]
    then["packages"]["old"] = "1.0"
    then["future"] = {"field": 3}
    assert differences(then, now) == [
        ("packages.old", "1.0", None),
        *([("compiler", None, now.compiler)] if now.compiler else []),
        ("future.field", 3, None),
    ]
