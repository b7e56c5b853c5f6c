"""Live tensor bytes over one step, which PyTorch does not count on CPUs.

The running sum of the profiler's signed allocation events, on top of what was alive when it started. Counting costs, so
this happens in a separate step that is never timed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile


def living_tensor_bytes() -> int:
    """Bytes of all tensor storages that Python can see now, each storage once, and of DDP's gradient buckets."""
    seen: dict[int, int] = {}
    buckets = 0
    for thing in gc.get_objects():
        if issubclass(type(thing), DistributedDataParallel):
            buckets += bucket_bytes(thing)
        if not issubclass(type(thing), torch.Tensor):  # isinstance would ask objects for their class, and some warn
            continue
        _count(thing, seen)
        if thing.is_leaf and thing.grad is not None:
            _count(thing.grad, seen)
    return sum(seen.values()) + buckets


def bucket_bytes(model: DistributedDataParallel) -> int:
    """Bytes of the buckets that DDP's reducer holds in C++; 0 where the gradients are views of them and so seen."""
    told: dict[str, Any] = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    if told.get("gradient_as_bucket_view"):
        return 0
    sizes = str(told.get("rebuilt_bucket_sizes") or told.get("bucket_sizes") or "")
    return sum(int(size) for size in sizes.split(",") if size.strip())


def _count(tensor: torch.Tensor, seen: dict[int, int]) -> None:
    if tensor.device.type == "meta" or tensor.layout != torch.strided:
        return
    try:
        local = getattr(tensor, "_local_tensor", tensor)
        storage = local.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
    except (RuntimeError, NotImplementedError):  # tensors without storage, such as fake ones
        return


class LiveBytesProfile:
    """Around one step: `start`, the step, `stop`; then `peak_bytes` and `communication_seconds` are known."""

    def __init__(self) -> None:
        self._profile: Any = None
        self._before = 0
        self.peak_bytes = 0
        self.communication_seconds = 0.0

    def start(self) -> None:
        gc.collect()
        self._before = living_tensor_bytes()
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.start()

    def stop(self) -> None:
        self._profile.stop()
        events = self._profile.profiler.kineto_results.events()
        self.peak_bytes = self._before + peak_of_allocations(
            (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
        )
        self.communication_seconds = covered_seconds(
            (event.start_ns(), event.start_ns() + event.duration_ns())
            for event in events
            if event.name().startswith(("gloo:", "nccl:", "xccl:", "accl:"))
        )
        self._profile = None


def measure_live_bytes(step: Callable[[], None]) -> LiveBytesProfile:
    measured = LiveBytesProfile()
    measured.start()
    step()
    measured.stop()
    return measured


def peak_of_allocations(changes: Iterable[tuple[int, int]]) -> int:
    """The largest running sum of signed byte changes, given as (time, bytes) in any order; at least 0."""
    live = peak = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        live += change
        peak = max(peak, live)
    return peak


def covered_seconds(spans: Iterable[tuple[int, int]]) -> float:
    """Seconds covered by at least one of the spans, given as (start, end) in nanoseconds."""
    total = 0
    until = None
    for start, end in sorted(spans):
        if until is None or start > until:
            total += end - start
            until = end
        elif end > until:
            total += end - until
            until = end
    return total / 1e9
