"""The seam at init_process_group and new_group."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed.distributed_c10d as c10d

from training_xpu.seams.base import Patch, Places, Seam, in_subscriber


@dataclass
class ProcessGroupCall:
    """A call about to be made; a subscriber may change the arguments."""

    function: str  # init_process_group or new_group
    arguments: dict[str, Any]  # by name, those that the caller has given


class ProcessGroupSeam(Seam[ProcessGroupCall]):
    """Calls of init_process_group and new_group, before they are made; those of device meshes and subgroups included.

    `split_group`, which cuts an existing group, is not reported.
    """

    def _install(self) -> None:
        for patch in _PATCHES:
            patch.install()

    def _uninstall(self) -> None:
        for patch in _PATCHES:
            patch.uninstall()

    def ask(self, call: ProcessGroupCall) -> None:
        asked = set()
        # A subscriber may bring in others, who want to hear of this very call.
        while waiting := [s for s in self.subscriptions if s not in asked]:
            asked.add(waiting[0])
            attempt = ProcessGroupCall(call.function, dict(call.arguments))
            came_through, _ = self.call(waiting[0], attempt)
            if came_through:
                call.arguments = attempt.arguments


PROCESS_GROUP = ProcessGroupSeam("process-group")


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)
    name = original.__name__

    @functools.wraps(original)
    def make_group(*args: Any, **kwargs: Any) -> Any:
        if not PROCESS_GROUP.subscriptions or in_subscriber():
            return original(*args, **kwargs)
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return original(*args, **kwargs)  # torch's own message about wrong arguments is the right one
        call = ProcessGroupCall(name, dict(given))
        PROCESS_GROUP.ask(call)
        return original(**call.arguments)

    return make_group


def _holders(name: str) -> Places:
    """All modules of torch that hold the function: some took their copy when they were imported."""
    function = getattr(c10d, name)
    modules = [m for n, m in list(sys.modules.items()) if n.partition(".")[0] == "torch"]
    return [(m, name) for m in modules if getattr(m, "__dict__", {}).get(name) is function]


_PATCHES = [Patch(functools.partial(_holders, name), _wrap) for name in ("init_process_group", "new_group")]
