"""A feature that only watches, and reports what it has seen."""

import os

from training_xpu import envs, report


def available() -> str | None:
    return os.environ.get("TOY_CANNOT_RUN")


def on_step(step) -> None:
    if os.environ.get("TOY_FAILS_AT") == str(step.index):
        raise RuntimeError("the toy broke")
    report.write("toy", "seen", step=step.index)


def on_root_forward(event) -> None:
    report.write("toy", "applied", root=type(event.module).__name__, told=os.environ.get("TOY_TOLD", ""))


def on_compile(call) -> None:
    report.write("toy", "seen", compiled=type(call.model).__name__)


def set_for_ranks() -> None:
    envs.set_for_children({"TOY_TOLD": "by the launcher"})
    report.write("toy-launcher", "applied")
