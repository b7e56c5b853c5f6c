"""Writes requirements.lock: the exact versions that continuous integration tests, resolved by pip for this Python.

The packages are those of pyproject.toml, its `tensorboard` extra and its `dev` group included. torch stays at the
version the lock file has, since which build of torch is tested is a decision; `--torch` moves it.
Needs pip 23 or newer and the package index that pip is set up for. Nothing is installed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
EXTRAS = ("tensorboard",)  # those that tests use
# torch's builds for accelerators pin libraries of their own exactly, and its build for CPUs needs none of them.
FOLLOWS_TORCH = re.compile(r"nvidia-|cuda-|triton(-|$)|pytorch-triton|intel-|rocm")
HEADER = """\
# The versions that continuous integration tests. Written by `make lock`; change pyproject.toml instead of this file.
# No hashes and no local versions: torch has a build for each platform, and pins what it needs there itself.
"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", metavar="VERSION", help="the build of torch to test; default: the one locked now")
    options = parser.parse_args(arguments)
    wanted = requirements(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8")))
    torch = options.torch or locked_torch()
    if torch is not None:
        wanted.append(f"torch=={torch}")
    LOCK.write_text(HEADER + "".join(f"{line}\n" for line in pins(resolve(wanted))), encoding="utf-8")
    return 0


def requirements(project: dict[str, Any]) -> list[str]:
    """What pyproject.toml asks for, and its build backend: an installation from the lock file builds nothing apart."""
    table = project["project"]
    extras = [line for extra in EXTRAS for line in table["optional-dependencies"][extra]]
    return [
        *project["build-system"]["requires"],
        *table["dependencies"],
        *extras,
        *project["dependency-groups"]["dev"],
    ]


def locked_torch() -> str | None:
    if not LOCK.exists():
        return None
    found = re.search(r"^torch==(\S+)$", LOCK.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else None


def resolve(wanted: list[str]) -> list[tuple[str, str]]:
    """Name and version of everything pip would install into an empty environment."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        subprocess.run([*command, "--report", str(report), *wanted], check=True, cwd=folder)
        install = json.loads(report.read_text(encoding="utf-8"))["install"]
    return [(item["metadata"]["name"], item["metadata"]["version"]) for item in install]


def pins(resolved: list[tuple[str, str]]) -> list[str]:
    """Sorted lines `name==version`, without local versions and without what torch pins itself.

    >>> pins([("torch", "2.13.0+cpu"), ("nvidia-nccl-cu13", "2.30.7"), ("PyYAML", "6.0.4")])
    ['PyYAML==6.0.4', 'torch==2.13.0']
    """
    kept = [(name, version.partition("+")[0]) for name, version in resolved if not FOLLOWS_TORCH.match(name.lower())]
    return [f"{name}=={version}" for name, version in sorted(kept, key=lambda pin: pin[0].lower())]


if __name__ == "__main__":
    sys.exit(main())
