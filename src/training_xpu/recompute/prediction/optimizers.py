"""Bytes of optimizers: their states, and what a step needs for a moment, found by running them on fake tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from training_xpu.errors import UserError
from training_xpu.recompute.prediction.live_bytes import LiveBytes

_FUSED = ("adamw", "adam")
KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-3),
    "adam": functools.partial(torch.optim.Adam, lr=1e-3),
    "sgd": functools.partial(torch.optim.SGD, lr=1e-3),
    "sgd-momentum": functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "adafactor": functools.partial(torch.optim.Adafactor, lr=1e-3),
}


@dataclass(frozen=True)
class OptimizerBytes:
    """Bytes on one rank."""

    states: int  # from the end of the first step on
    transient: int  # more at the highest point of a step, gradients aside


def optimizer_bytes(kind: str, shapes: Iterable[tuple[int, ...]], engine: str, device_type: str) -> OptimizerBytes:
    """What an optimizer needs for fp32 tensors.

    torch's AdamW and Adam are taken in their fused form and DeepSpeed's as its FusedAdam, which both keep two moments
    and work in place; the others as torch chooses for the device: one tensor after the other on CPUs, all at once
    (`foreach`) on accelerators.

    Args:
        kind: a key of `KINDS`.
        shapes: of the tensors that this rank updates.
        engine: as in `TrainingSetting`.
    """
    if kind not in KINDS:
        raise UserError(f"the memory of optimizer {kind!r} is not known", f"Known are {', '.join(KINDS)}.")
    counts: dict[tuple[int, ...], int] = {}
    for shape in shapes:
        counts[shape] = counts.get(shape, 0) + 1
    if kind in _FUSED:
        # DeepSpeed 0.19, ops/adam/fused_adam.py: the step is a number, no tensor.
        step = 0 if engine == "deepspeed" else 4
        elements = sum(_numel(shape) * count for shape, count in counts.items())
        return OptimizerBytes(8 * elements + step * sum(counts.values()), 0)
    together = device_type != "cpu"
    states = transient = 0
    for shape, count in counts.items():
        if _numel(shape) == 0:
            continue
        one = _run(kind, shape)
        states += one.states * count
        transient = transient + one.transient * count if together else max(transient, one.transient)
    return OptimizerBytes(states, transient)


class _WithNumbers(LiveBytes):  # type: ignore[no-untyped-call]
    """Answers 1 where an optimizer looks at a number, which fake tensors do not have."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0
        return super().__torch_dispatch__(func, types, args, kwargs)


@functools.lru_cache(maxsize=4096)
def _run(kind: str, shape: tuple[int, ...]) -> OptimizerBytes:
    with FakeTensorMode(allow_non_fake_inputs=True):
        parameter = torch.nn.Parameter(torch.empty(shape))
        parameter.grad = torch.empty(shape)
        optimizer = KINDS[kind]([parameter])
        counter = _WithNumbers()
        with counter:
            step: Any = optimizer.step
            step()
            step()
            states = {id(s): s.nbytes() for s in _storages(optimizer.state[parameter].values())}
            counter.restart()
            start = counter.live
            counter.mark("step")
            step()
            peak = counter.peak - start
    return OptimizerBytes(sum(states.values()), peak)


def _storages(values: Iterable[Any]) -> list[Any]:
    return [v.untyped_storage() for v in values if isinstance(v, torch.Tensor)]


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
