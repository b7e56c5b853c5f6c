"""What the allocator holds beyond live tensors: resident memory on CPU, reserved memory on accelerators."""

from __future__ import annotations

from dataclasses import dataclass

# Share of a change in live bytes that may come on top of it, by where it is allocated. On CPU the C library keeps freed
# pieces among those in use (docs/concepts/memory.md has the measurements); a caching allocator rounds and splits.
_MARGIN = {"cpu": 0.10, "live": 0.0}
_ACCELERATOR_MARGIN = 0.05


@dataclass(frozen=True)
class Overhead:
    """Memory of a process as a function of its live bytes, from one measured step."""

    measured_live: int  # peak of that step
    measured_total: int  # resident or reserved at its peak
    margin: float

    @classmethod
    def measured(cls, live: int, total: int | None, device_type: str) -> Overhead:
        """
        Args:
            device_type: torch's name, or "live" where live bytes are all that counts.
            total: peak resident or reserved bytes of the step; None where it cannot be read: live bytes stand in.
        """
        return cls(live, max(live, total or 0), _MARGIN.get(device_type, _ACCELERATOR_MARGIN))

    def total(self, live: int) -> int:
        """Bytes the process will hold at its peak with this peak of live bytes."""
        more = max(0, live - self.measured_live)
        return live + (self.measured_total - self.measured_live) + round(self.margin * more)

    def live_budget(self, budget: int) -> int:
        """The peak of live bytes that `total` turns into this budget."""
        fixed = self.measured_total - self.measured_live
        room = budget - fixed
        if room <= self.measured_live:
            return room
        return self.measured_live + int((room - self.measured_live) / (1 + self.margin))
