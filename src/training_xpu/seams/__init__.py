"""Every patch of foreign code. A seam is a place in torch where a feature may step in.

Five seams: `COMPILE` (calls of torch.compile), `MODULE_COMPILE` (calls of nn.Module.compile), `PROCESS_GROUP`
(init_process_group and new_group), `ROOT_FORWARD` (the first training forward of the root module) and `STEP` (each
optimizer step). Nothing is patched while nobody is subscribed; with the last subscriber gone every attribute is again
the very object it was. Only torch's own objects are patched: when this runs inside `import torch`, the package that
imports torch may itself be half imported.

What cannot be seen: a function of torch that somebody took by `from torch import compile` before the seam was
subscribed. Inside `import torch` nobody has had the chance, and modules of torch that hold an early copy are patched
too; so this concerns late subscriptions alone. Code that still holds a wrapper after the last subscriber has gone runs
straight into the original.

A subscriber that raises never breaks training: it is dropped, and the fault handler says so. Calls that a subscriber
makes itself are not reported to any seam. Subscriptions may be made and cancelled on any thread.
"""

from __future__ import annotations

from typing import Any

from training_xpu.errors import UserError, nearest
from training_xpu.seams.base import Seam, Subscription, set_fault_handler
from training_xpu.seams.compiling import COMPILE, MODULE_COMPILE, CompileCall, ModuleCompileCall
from training_xpu.seams.process_groups import PROCESS_GROUP, ProcessGroupCall
from training_xpu.seams.root_forward import ROOT_FORWARD, RootForward
from training_xpu.seams.steps import STEP, Step

__all__ = [
    "COMPILE",
    "MODULE_COMPILE",
    "PROCESS_GROUP",
    "ROOT_FORWARD",
    "SEAMS",
    "STEP",
    "CompileCall",
    "ModuleCompileCall",
    "ProcessGroupCall",
    "RootForward",
    "Seam",
    "Step",
    "Subscription",
    "by_name",
    "set_fault_handler",
]

SEAMS: dict[str, Seam[Any]] = {s.name: s for s in (COMPILE, MODULE_COMPILE, PROCESS_GROUP, ROOT_FORWARD, STEP)}


def by_name(name: str) -> Seam[Any]:
    """
    Raises:
        UserError: there is no such seam.
    """
    if name not in SEAMS:
        raise UserError(f"unknown seam {name!r}", nearest(name, SEAMS))
    return SEAMS[name]
