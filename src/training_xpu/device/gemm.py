"""How many FLOP/s square matrix multiplications reach on this device: the measured peak."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass

from training_xpu.device.cpu import cores
from training_xpu.device.host_memory import memory

_SIZES = (512, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
_ALWAYS = 1024  # sizes up to this one are tried whatever a smaller one has promised
_TORCH_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True)
class GemmPeak:
    """The best of `repetitions` multiplications of two square matrices; the best one had `size` rows."""

    flops: float  # FLOP/s
    size: int
    repetitions: int
    threads: int | None  # CPU only
    quiet: bool  # False: other processes took CPU time even during the best one, so the machine can do more


def measure(dtype: str, device_type: str = "cpu", seconds: float = 0.6) -> GemmPeak:
    """Multiplies square matrices of growing size and keeps the fastest, counted as 2 n^3 FLOPs each.

    Both layouts of a linear layer are tried, A B and A B^T, as their kernels differ by a few per cent. On CPU it runs
    on one thread for each core this process may use; the thread count is put back afterwards. What makes the plan for
    each size is not counted. Small sizes take a fraction of a scheduler's time slice and are repeated often, so that
    even on a machine that others use some repetition is likely to run undisturbed.

    Args:
        dtype: "bf16", "fp16" or "fp32".
        device_type: torch's name; on accelerators the current device is measured.
        seconds: about how long it may take, start-up of torch's threads or the device's runtime left out.
    """
    import torch

    threads = None
    before = torch.get_num_threads()
    synchronize: Callable[[], object]
    if device_type == "cpu":
        threads = cores().usable_physical
        torch.set_num_threads(threads)
        synchronize, room = (lambda: None), memory().available // 8
    else:
        synchronize, room = torch.accelerator.synchronize, torch.accelerator.get_memory_info()[0] // 4
    # Accelerators queue work: several multiplications between two synchronisations hide what those cost.
    batch = 1 if device_type == "cpu" else 8
    best, best_size, count, quiet = 0.0, 0, 0, True
    try:
        with torch.no_grad():
            warm = torch.ones(256, 256, device=device_type).to(getattr(torch, _TORCH_NAMES[dtype]))
            (warm @ warm.t()).sum().item()
            deadline = time.perf_counter() + seconds
            for size in _SIZES:
                expected = 4 * batch * 2 * size**3 / best if best else 0.0
                if size > _ALWAYS and (12 * size * size > room or time.perf_counter() + expected > deadline):
                    break
                a = torch.randn(size, size, device=device_type).to(getattr(torch, _TORCH_NAMES[dtype]))
                b, c = a.clone(), torch.empty_like(a)
                for right in (b, b.t()):
                    torch.mm(a, right, out=c)
                synchronize()
                turn, share = 0, time.perf_counter() + seconds / 6
                while turn < 12 or time.perf_counter() < share:
                    right = b.t() if turn % 2 else b
                    preempted, start = _preemptions(), time.perf_counter()
                    for _ in range(batch):
                        torch.mm(a, right, out=c)
                    synchronize()
                    taken = time.perf_counter() - start
                    turn, count = turn + 1, count + batch
                    if 2 * size**3 * batch / taken > best:
                        best, best_size = 2 * size**3 * batch / taken, size
                        quiet = threads is None or _preemptions() == preempted
                    if time.perf_counter() > deadline:
                        break
    finally:
        torch.set_num_threads(before)
    return GemmPeak(best, best_size, count, threads, quiet)


def _preemptions() -> int:
    """How often a thread of this process lost its core to another one; CPU times are too coarse at a millisecond."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
