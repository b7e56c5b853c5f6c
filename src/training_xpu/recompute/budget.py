"""How much memory a rank may use, and how users write an amount of it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from training_xpu import device, envs
from training_xpu.errors import UserError

VARIABLE = "TRAINING_XPU_MEMORY_BUDGET"
LIVE = "live:"
SIZES = "Write bytes (6442450944), a size (6GiB, 512MiB, 80GB), or live:6GiB for live tensors alone."
FORMS = (
    "Write bytes (6442450944), a size (6GiB, 512MiB, 80GB), a share of the limit (80%), or live:6GiB for live tensors "
    "alone."
)
_LEAST_WITHOUT_UNIT = 1 << 20  # bytes; nothing trains in less, so that a smaller number was meant in GiB

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)},
    **{letter: 1024**power for power, letter in enumerate("kmgt", start=1)},  # as Docker and Slurm read them
}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-z%]*)", re.IGNORECASE)


@dataclass(frozen=True)
class Budget:
    """Bytes one rank may use: of resident memory on CPU, of what the allocator reserves on accelerators."""

    bytes: int
    source: str  # where the number comes from, for people
    live: bool = False  # of live tensor bytes alone, whatever the allocator adds


@dataclass(frozen=True)
class Unit:
    """What amounts that are compared with each other are all written in."""

    name: str
    bytes: int

    def number(self, size: int) -> str:
        return f"{size / self.bytes:.2f}"

    def amount(self, size: int) -> str:
        return f"{self.number(size)} {self.name}"


def unit_for(largest: int) -> Unit:
    """GiB, or MiB where the largest amount is below one GiB."""
    return Unit("GiB", 1 << 30) if abs(largest) >= 1 << 30 else Unit("MiB", 1 << 20)


def size_text(size: int) -> str:
    """An amount that stands alone."""
    return unit_for(size).amount(size)


def parse_size(
    text: str, whole: int | None = None, name: str = "the memory budget", *, written: str | None = None
) -> int:
    """Reads an amount of memory in bytes.

    Args:
        text: bytes, a number with a unit (KiB to TiB, kB to TB, or K to T for powers of 1024), or a percentage.
        whole: what a percentage is of; None where percentages make no sense.
        name: what the amount is called in errors.
        written: what the user wrote, where `text` is a part of it; None: `text`.

    Raises:
        UserError: it is none of these, nothing, more than the whole, or so few bytes that a unit seems to be missing.
    """
    written = text if written is None else written
    forms = SIZES if whole is None else FORMS
    match = _SIZE.fullmatch(text.strip())
    number, unit = (float(match[1]), match[2].lower()) if match else (math.nan, "")
    if unit == "%":
        if whole is None:
            raise UserError(f"{name} is {written!r}: a share of what?", forms)
        if not 0 < number <= 100:
            raise UserError(f"{name} is {written!r}, which is not above 0% and at most 100%", forms)
        return int(whole * number / 100)
    if math.isnan(number) or unit not in _UNITS:
        raise UserError(f"{name} is {written!r}, which is no amount of memory", forms)
    size = number * _UNITS[unit]
    if not 1 <= size < 2**63:
        raise UserError(f"{name} is {written!r}: it must be at least one byte and below 8 EiB", forms)
    if not unit and size < _LEAST_WITHOUT_UNIT:
        raise UserError(
            f"{name} is {written!r}, which would be bytes: is a unit missing?", f"Such as: {written.strip()}GiB"
        )
    return int(size)


def memory_limit(local_ranks: int, device_type: str = "cpu") -> Budget:
    """What one rank can have at most.

    Args:
        local_ranks: ranks that share this machine's main memory; an accelerator belongs to one rank.
        device_type: torch's name of what the rank computes on.
    """
    if device_type != "cpu":
        import torch

        free, total = torch.get_device_module(device_type).mem_get_info()
        reserved = torch.accelerator.memory_reserved()
        # What others hold on the device, the context of this process included, is not the allocator's to reserve.
        return Budget(min(total, free + reserved), f"free on the {device_type} device")
    memory = device.memory()
    share = f", divided among {local_ranks} ranks" if local_ranks > 1 else ""
    return Budget(memory.usable // local_ranks, f"{memory.limit_source or 'main memory'}{share}")


def read_budget(text: str, limit: Budget | None, name: str = VARIABLE) -> Budget:
    """Reads a budget as users write it.

    Args:
        text: what `parse_size` reads, of the limit; or the same after "live:", for live tensor bytes alone. These do
            not depend on the allocator, so that a plan within them is the same on every machine.
        limit: what a share is of; None where there is nothing to have a share of.

    Raises:
        UserError: it is no amount of memory.
    """
    live = text.strip().lower().startswith(LIVE)
    amount = text.strip()[len(LIVE) :] if live else text
    size = parse_size(amount, None if limit is None else limit.bytes, name, written=text)
    of = f" of {size_text(limit.bytes)}, {limit.source}" if limit is not None and amount.rstrip().endswith("%") else ""
    return Budget(size, f"{name}={text}{of}", live)


def memory_budget(local_ranks: int, device_type: str = "cpu") -> Budget:
    """The budget of one rank: what TRAINING_XPU_MEMORY_BUDGET says, or the limit.

    Raises:
        UserError: the variable holds no amount of memory.
    """
    limit = memory_limit(local_ranks, device_type)
    text = envs.get(VARIABLE)
    return limit if text is None else read_budget(text, limit)
