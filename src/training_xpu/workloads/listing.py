"""What `ljperf models` shows: each model, and how large it would be trained on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from training_xpu import device
from training_xpu.errors import UserError
from training_xpu.workloads.catalogue import DEFAULT_ENGINE, Model, targets
from training_xpu.workloads.flops import ModelFlops
from training_xpu.workloads.memory import MemoryEstimate, estimate_memory
from training_xpu.workloads.proxy import Budget, ScalePlan, Setting, plan_scale
from training_xpu.workloads.ranks import choose_nproc

if TYPE_CHECKING:
    from training_xpu.device.accelerators import TorchView

TARGET_DTYPE = "bf16"  # of the devices that models are meant for
ZERO_STAGE = 3
# FLOP/s of one core until it is measured, by the widest unit it has: in bf16, or in fp32 where there are no kernels for
# that. The order is that of preference.
_ASSUMED_PEAKS = (("amx_bf16", 400e9), ("avx512_bf16", 150e9), ("svebf16", 100e9), ("bf16", 60e9), ("avx2", 60e9))
_ASSUMED_PEAK = 30e9


@dataclass(frozen=True)
class Machine:
    """What this machine has for a training job."""

    ranks: int
    memory_bytes_per_rank: int
    flops_per_second_per_rank: float
    peak_source: str
    dtype: str = TARGET_DTYPE  # what a benchmark would train in

    @property
    def budget(self) -> Budget:
        return Budget(self.memory_bytes_per_rank, self.flops_per_second_per_rank, self.ranks)


def this_machine(nproc: int | None = None) -> Machine:
    """Memory and peak of this machine, divided among the ranks a benchmark would start.

    Torch is asked, in a process of its own, only where there may be an accelerator.

    Args:
        nproc: ranks; None: one per accelerator, or two on CPUs.

    Raises:
        CannotRunHere: more ranks than accelerators.
        UserError: far more ranks than cores.
    """
    if device.may_have_accelerator():
        view = device.torch_view()
        if view.accelerators:
            return _accelerators(view, choose_nproc(nproc, len(view.accelerators)))
    ranks = choose_nproc(nproc, 0)
    dtype = "bf16" if device.has_bf16_kernels() else "fp32"
    peak = device.cached_peak(dtype, measure=False)
    if peak is not None:
        total, source = peak.flops, peak.source
    else:
        flags = device.isa_flags()
        per_core = next((flops for flag, flops in _ASSUMED_PEAKS if flag in flags), _ASSUMED_PEAK)
        total = per_core * device.cores().usable_physical
        source = f"assumed: {per_core / 1e9:.0f} GFLOP/s a core; the first benchmark measures it"
    return Machine(ranks, device.usable_memory() // ranks, total / ranks, source, dtype)


def _accelerators(view: TorchView, ranks: int) -> Machine:
    first = view.accelerators[0]
    dtype = "bf16" if "bf16" in view.dtypes else "fp32"
    memory = min(a.memory_bytes or device.usable_memory() for a in view.accelerators)
    peak = device.known_peak(first.name, dtype, first.units) or device.cached_peak(dtype)
    assert peak is not None
    return Machine(ranks, memory, peak.flops, peak.source, dtype)


def plan_here(model: Model, machine: Machine) -> ScalePlan | UserError:
    """What `--scale auto` chooses on this machine with DeepSpeed's ZeRO-3, or why nothing fits."""
    try:
        return plan_scale(model, "auto", machine.budget, Setting(DEFAULT_ENGINE, ZERO_STAGE, machine.dtype))
    except UserError as error:
        return error


def memory_on_target(model: Model) -> tuple[MemoryEstimate, int]:
    """What a step of the full model needs on one target device, nothing recomputed, and what that device has."""
    estimate = estimate_memory(
        ModelFlops.from_config(model.config),
        engine=DEFAULT_ENGINE,
        zero_stage=ZERO_STAGE,
        dtype=TARGET_DTYPE,
        world_size=model.target_world_size,
        micro_batch=model.target_micro_batch,
        sequence_length=model.sequence_length,
    )
    return estimate, targets()[model.target_device].memory_bytes
