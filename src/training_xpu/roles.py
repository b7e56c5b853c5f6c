"""What a process is: launcher, rank, helper or single; judged by its command line and the variables of launchers."""

from __future__ import annotations

import os
from pathlib import PurePath
from typing import TYPE_CHECKING

from training_xpu import envs

if TYPE_CHECKING:
    from training_xpu.report import Role

_LAUNCHER_COMMANDS = frozenset(
    {"torchrun", "accelerate", "accelerate-launch", "deepspeed", "deepspeed.pt", "ds", "transformers", "trl"}
)
_LAUNCHER_MODULES = frozenset(
    {
        "torch.distributed.run",
        "torch.distributed.launch",
        "torch.distributed.elastic.multiprocessing",
        "accelerate.commands.launch",
        "accelerate.commands.accelerate_cli",
        "deepspeed.launcher.runner",
        "deepspeed.launcher.launch",
        "training_xpu.workloads.launch",
    }
)
_HELPER_MODULES = (
    "joblib.externals.loky",
    "training_xpu.device",
    "training_xpu.cli",
    "training_xpu.engines.deepspeed_ops",
)
_OPTIONS_WITH_VALUE = frozenset({"-W", "-X", "--check-hash-based-pycs"})


def role_of(command: list[str], arguments: list[str]) -> Role:
    """What this process is.

    Args:
        command: the interpreter's whole command line, `sys.orig_argv`.
        arguments: `sys.argv`. While `python -m package` looks for the package, its first entry is only "-m".
    """
    if _is_helper(command):
        return "helper"
    name = PurePath(arguments[0]).name if arguments else ""
    if name == "ljperf" and not envs.distributed().launched:
        return "helper"  # under a launcher it trains in its own process
    # First the launchers: some clusters set RANK, the node's, for torchrun itself.
    if name in _LAUNCHER_COMMANDS or _module(command) in _LAUNCHER_MODULES:
        return "launcher"
    return "rank" if envs.distributed().launched else "single"


def is_spawned(command: list[str]) -> bool:
    """Whether multiprocessing has spawned this process to run a function."""
    return "--multiprocessing-fork" in command


def _is_helper(command: list[str]) -> bool:
    code = _code(command)
    if code.startswith("from multiprocessing.") or is_spawned(command):
        return True  # spawned children, forkserver, resource tracker
    if (_module(command) or "").startswith(_HELPER_MODULES):
        return True
    script = _script(command)
    return script.replace(os.sep, "/").endswith("torch/_inductor/compile_worker/__main__.py")


def _module(command: list[str]) -> str | None:
    """The module after `-m`."""
    kind, value = _target(command)
    return value if kind == "-m" else None


def _code(command: list[str]) -> str:
    kind, value = _target(command)
    return value if kind == "-c" else ""


def _script(command: list[str]) -> str:
    kind, value = _target(command)
    return value if kind == "script" else ""


def _target(command: list[str]) -> tuple[str, str]:
    """What the interpreter was told to run: ("-m", module), ("-c", code), ("script", path) or ("", "")."""
    rest = command[1:]
    while rest:
        word = rest.pop(0)
        if word in _OPTIONS_WITH_VALUE:
            rest = rest[1:]
        elif word.startswith("-") and not word.startswith("--") and len(word) > 1:
            # Letters can be joined, as in `-um module` or `-mmodule`; after W and X the rest is their value.
            for at, letter in enumerate(word[1:], start=1):
                if letter in "WX":
                    break
                if letter in "mc":
                    return f"-{letter}", word[at + 1 :] or (rest[0] if rest else "")
        elif not word.startswith("-"):
            return "script", word
    return "", ""
