"""Memory that runs out all the same: tried again where no other rank can be left waiting, else heeded at next start."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import inspect
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from training_xpu import device, report, seams
from training_xpu.engines.identify import identify
from training_xpu.errors import UserError
from training_xpu.recompute.online import out_of_memory
from training_xpu.records import Record

_MOST_RETRIES = 3


class RunningPlan(Record):
    """What a process is running with, left behind if the kernel kills it."""

    layers_recomputed: int
    layers_total: int
    pid: int
    started: float  # of the process, seconds since the epoch
    oom_kills: int | None  # of the kernel's counter at the time


def can_retry(root: torch.nn.Module) -> bool:
    """Whether the root's forward can be run again without leaving another rank waiting: it has no collectives."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return True
    sharded = any(hasattr(p, "ds_id") for p in root.parameters())
    return not sharded and identify(root) in ("ddp", "deepspeed")


def heed_last_start(key: str, total: int) -> out_of_memory.TighterPlan | None:
    """The tighter plan that earlier starts of this job ask for; one that the kernel has killed asks for one too.

    Args:
        total: layers of the model; a note that does not go with it is passed over.
    """
    path = _running_path(key)
    try:
        if path.exists():
            _heed_killed(key, path)
    except OSError as error:
        report.logger.info("the note of the last start stays: %s: %s", path, error.strerror)
    plan = out_of_memory.remembered(key)
    return plan if plan is not None and 0 < plan.layers_at_least <= plan.layers_total == total else None


def _heed_killed(key: str, path: Path) -> None:
    with contextlib.suppress(UserError):
        last = RunningPlan.read(path)
        now = device.oom_kill_count()
        if _is_alive(last):
            return  # it runs at this moment: two starts of the same job
        if last.oom_kills is not None and now is not None and now > last.oom_kills:
            reason = "the kernel ended it for lack of memory"
            out_of_memory.remember(key, last.layers_recomputed, last.layers_total, reason)
    path.unlink(missing_ok=True)


def leave_running_plan(key: str, recomputed: int, total: int) -> None:
    """Notes what this process runs with, until it ends in order."""
    path = _running_path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        RunningPlan(
            layers_recomputed=recomputed,
            layers_total=total,
            pid=os.getpid(),
            started=psutil.Process().create_time(),
            oom_kills=device.oom_kill_count(),
        ).write(path)
    except OSError as error:
        report.logger.info("cannot note the plan in %s: %s", path, error.strerror)
        return
    atexit.register(path.unlink, missing_ok=True)


def _running_path(key: str) -> Any:
    return out_of_memory.record_path(key).with_suffix(".running.json")


def _is_alive(last: RunningPlan) -> bool:
    try:
        return abs(psutil.Process(last.pid).create_time() - last.started) < 1
    except psutil.Error:
        return False


class GuardedForward:
    """Stands in front of the inner model's forward; copied and pickled as what stood there before.

    Where memory runs out in it, `tighten` is asked for a plan that needs less, and the forward runs again with the same
    random numbers; where it may not, `give_up` hears of it and the error goes on.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        retry: bool,
        tighten: Callable[[], bool],
        give_up: Callable[[BaseException], None],
    ) -> None:
        self._module = weakref.ref(module)
        self._before = module.__dict__.get("forward")
        self._retry = retry
        self._tighten = tighten
        self._give_up = give_up
        with contextlib.suppress(TypeError, ValueError):
            self.__signature__ = inspect.signature(module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None
        own = self._before or functools.partial(type(module).forward, module)
        if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and module.training):
            return own(*args, **kwargs)
        for _ in range(_MOST_RETRIES if self._retry else 0):
            random = _random_states()
            try:
                return own(*args, **kwargs)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory.is_out_of_memory(error) or not self._tighten():
                    self._note(error)
                    raise
            # Out here the error and with it the frames that hold the failed forward's activations are gone.
            gc.collect()
            if torch.accelerator.is_available():
                torch.accelerator.empty_cache()
            _restore(random)
        try:
            return own(*args, **kwargs)
        except (RuntimeError, MemoryError) as error:
            self._note(error)
            raise

    def _note(self, error: BaseException) -> None:
        if out_of_memory.is_out_of_memory(error):
            self._give_up(error)

    def remove(self) -> None:
        module = self._module()
        if module is not None and module.__dict__.get("forward") is self:
            if self._before is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = self._before

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        import copy

        if self._before is not None:
            return copy.deepcopy(self._before, memo)
        module = self._module()
        return getattr(memo.get(id(module), module), "forward")  # noqa: B009 - the class's, bound to the copy

    def __reduce__(self) -> tuple[Any, ...]:
        if self._before is not None:
            return functools.partial, (self._before,)
        return getattr, (self._module(), "forward")


def watch_backward(give_up: Callable[[BaseException], None]) -> Callable[[], None]:
    """Has `give_up` hear of memory that runs out in a backward; returns what ends that."""

    method = weakref.WeakMethod(give_up)  # a model that its script lets go of must not be kept alive

    def hear(error: BaseException) -> None:
        told = method()
        if told is not None and out_of_memory.is_out_of_memory(error):
            told(error)

    def stop() -> None:
        if hear in seams.STEP.backward_faults:
            seams.STEP.backward_faults.remove(hear)

    seams.STEP.backward_faults.append(hear)
    return stop


def _random_states() -> list[Any]:
    states: list[Any] = [torch.get_rng_state()]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        states.append(torch.get_device_module(kind).get_rng_state())
    return states


def _restore(states: list[Any]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        torch.get_device_module(kind).set_rng_state(states[1])
