"""What is built installs and works: wheel, source distribution, the command outside the checkout, completion."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import training_xpu

ROOT = Path(__file__).resolve().parents[2]
VERSION = training_xpu.__version__


def run(command: list[str], **settings: object) -> str:
    ran = subprocess.run(command, capture_output=True, text=True, check=False, **settings)  # type: ignore[call-overload]
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return str(ran.stdout)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a wheel that was built from a source distribution that was built from the files of the checkout."""
    folder = tmp_path_factory.mktemp("packaging")
    checkout, out = folder / "checkout", folder / "dist"
    checkout.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, checkout)
    shutil.copytree(ROOT / "src", checkout / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(checkout)])
    return out


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of a new environment that has the wheel, and borrows what it depends on."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    (wheel,) = built.glob("*.whl")
    run([str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)])
    site = run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip()
    # A .pth file inside the borrowed folder, such as that of an editable installation, is not followed.
    Path(site, "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def clean_environment(folder: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k in ("HOME", "LANG", "TMPDIR")}
    return {**kept, "PATH": os.defpath, "TRAINING_XPU_CACHE": str(folder / "cache"), "COLUMNS": "160"}


def test_the_wheel_holds_everything_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert wheel.name == f"training_xpu_pytorch-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = f"training_xpu_pytorch-{VERSION}.dist-info"
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
        metadata = archive.read(f"{info}/METADATA").decode()
    package = ROOT / "src" / "training_xpu"
    wanted = {
        str(path.relative_to(package.parent))
        for path in package.rglob("*")
        if path.is_file() and path.suffix in (".py", ".yaml", ".json", ".typed") and "__pycache__" not in path.parts
    }
    assert "training_xpu/py.typed" in wanted
    assert "training_xpu/workloads/models/llama3-8b.yaml" in wanted
    assert {name for name in names if not name.startswith(info)} == wanted
    assert f"{info}/licenses/LICENSE" in names
    assert "[console_scripts]\nljperf = training_xpu.cli.entry:main" in entry_points
    assert "[torch.backends]\ntraining_xpu = training_xpu.autoload:autoload" in entry_points
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.11" in metadata
    assert "Provides-Extra: tensorboard" in metadata


def test_the_source_distribution_can_be_built_from(built: Path) -> None:
    with tarfile.open(built / f"training_xpu_pytorch-{VERSION}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "README.md", "src/training_xpu/device/peaks.yaml"} <= names


def test_the_installed_command_works_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    environment = clean_environment(tmp_path)
    ljperf = str(installed / "ljperf")
    assert run([ljperf, "--version"], env=environment, cwd=tmp_path) == f"ljperf {VERSION}\n"
    where = [str(installed / "python"), "-c", "import training_xpu; print(training_xpu.__file__)"]
    assert run(where, env=environment, cwd=tmp_path).startswith(str(installed.parent))
    listed = run([ljperf, "models"], env=environment, cwd=tmp_path)
    for model in ("llama3-8b", "llama3.1-70b", "llama3.2-1b", "mixtral-8x7b", "qwen2.5-7b", "qwen3-8b"):
        assert model in listed


def test_torch_finds_the_entry_point_of_the_installed_wheel(installed: Path, tmp_path: Path) -> None:
    environment = {**clean_environment(tmp_path), "TRAINING_XPU_REPORT": str(tmp_path / "reports")}
    run([str(installed / "python"), "-c", "import torch"], env=environment, cwd=tmp_path)
    (report,) = (tmp_path / "reports").glob("single-0-*.jsonl")
    assert '"event": "process"' in report.read_text()


def test_the_shell_completes_workloads_and_verbs(installed: Path, tmp_path: Path) -> None:
    environment = clean_environment(tmp_path)
    ljperf = str(installed / "ljperf")
    script = run([ljperf, "--show-completion"], env={**environment, "SHELL": "/bin/bash"}, cwd=tmp_path)
    assert "complete -o default -F _ljperf_completion ljperf" in script

    asked = (
        f"{script}\n"
        'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _ljperf_completion ljperf; printf "%s\\n" "${COMPREPLY[@]}"'
    )

    def complete(*words: str) -> set[str]:
        path = {"PATH": f"{installed}:{os.defpath}"}
        told = run(["bash", "-c", asked, "bash", *words], env={**environment, **path}, cwd=tmp_path)
        return set(told.split())

    assert complete("ljperf", "benchmark", "--model", "dee") == {
        "deepspeed/llama3-8b",
        "deepspeed/llama3.1-70b",
        "deepspeed/llama3.2-1b",
        "deepspeed/mixtral-8x7b",
        "deepspeed/qwen2.5-7b",
        "deepspeed/qwen3-8b",
    }
    assert complete("ljperf", "benchmark", "--model", "ddp/qwen3") == {"ddp/qwen3-8b"}
    assert complete("ljperf", "ben") == {"benchmark"}
