"""How many ranks a node has: chosen here for training and for listings alike."""

from __future__ import annotations

from training_xpu import device, envs
from training_xpu.errors import CannotRunHere, UserError

RANKS_ON_CPU = 2  # where there are two cores, so that something is parallel
PROCESSES_PER_CORE = 8  # ranks on CPUs, or loader workers of a rank: more would only wait for each other


def choose_nproc(asked: int | None, accelerators: int) -> int:
    """Ranks on this node.

    Args:
        asked: `--nproc`; None: one per accelerator, or two on CPUs.
        accelerators: how many this node has.

    Raises:
        CannotRunHere: more ranks than accelerators.
        UserError: far more ranks than cores.
    """
    if asked is None:
        return accelerators or min(RANKS_ON_CPU, device.usable_cores())
    if accelerators and asked > accelerators:
        here = "1 accelerator" if accelerators == 1 else f"{accelerators} accelerators"
        raise CannotRunHere(f"--nproc {asked}: this machine has {here}", f"Use --nproc {accelerators}.")
    # A launcher may have given this rank a single core of many, and has decided on the number of ranks itself.
    if not accelerators and not envs.distributed().launched:
        most = most_processes()
        if asked > most:
            raise UserError(
                f"--nproc {asked}: at most {most} ranks, {PROCESSES_PER_CORE} for each usable core",
                f"Such as: --nproc {min(RANKS_ON_CPU, device.usable_cores())}",
            )
    return asked


def most_processes() -> int:
    return PROCESSES_PER_CORE * device.usable_cores()
