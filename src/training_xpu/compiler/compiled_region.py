"""One region's calls: compiled or plain, for which shapes, and timed while both are on trial."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from training_xpu.compiler.backend import Backend, compiling
from training_xpu.compiler.call_shape import CallShape, NotCompilable, call_shape, mark_changing_sizes
from training_xpu.compiler.regions import Region
from training_xpu.compiler.trial import RegionClock

MOST_STRUCTURES = 4  # ways to call one region that get graphs of their own
CALLS_OF_BROKEN = 3  # of each module: behind a break, torch learns from the second value on that a number changes


@dataclass
class _Structure:
    """Calls alike but for their sizes: one graph for the first sizes, one for all others."""

    sizes: tuple[Hashable, ...]
    static: Callable[..., Any]
    dynamic: Callable[..., Any] | None = None
    calls: Counter[tuple[int, bool]] = field(default_factory=Counter)  # (module, open sizes) -> those that may compile


class CompiledRegion:
    """See the module. Decisions change between optimizer steps only, so that a recompute runs what its forward ran."""

    def __init__(self, region: Region, backend: Backend, dynamic: bool = False) -> None:
        """
        Args:
            backend: of this region alone.
            dynamic: leave sizes open from the first graph on.
        """
        self.region = region
        self.backend = backend
        self.active = True  # whether calls are looked at at all
        self.compiled = True  # what they run in this step
        self.name = region.name
        self.is_block = region.is_block
        self.may_open_sizes = dynamic
        self.open_next = False  # make the graph for all sizes with the next call, whatever its sizes
        self.owner: object = None  # keeps the controller alive as long as the model's forwards
        self.sizes_changed = False  # a call met sizes that no graph is made for
        self.plain_reason = ""  # why calls run in plain Python
        self.clock: RegionClock | None = None  # while a trial is on
        self.made_graphs = False  # since the last optimizer step
        self._open_at_once = dynamic
        self._structures: dict[Hashable, _Structure] = {}
        self._parameters = [p for module in region.modules for p in module.parameters()]
        self._state = self._state_of_parameters()

    @property
    def recompiles(self) -> int:
        """Graphs made for further sizes or further ways to call the region."""
        kinds = sum(1 + (s.dynamic is not None) for s in self._structures.values())
        return max(0, kinds - 1)

    def use(self, compiled: bool) -> None:
        """What its calls run from the next optimizer step on."""
        self.compiled = compiled

    def look_again(self) -> None:
        """Lets calls compile again where the script has changed weights, such as thawed a layer, since this was asked.

        Graphs are made for weights of certain types, with or without gradients.
        """
        state = self._state_of_parameters()
        if state != self._state:
            self._state = state
            for structure in self._structures.values():
                structure.calls.clear()

    def _state_of_parameters(self) -> list[tuple[torch.dtype, bool]]:
        return [(p.dtype, p.requires_grad) for p in self._parameters]

    def close(self) -> None:
        self.active = False

    def row(self, gain: float | None) -> dict[str, Any]:
        """For the report."""
        record = self.backend.record
        return {
            "name": self.name,
            "count": len(self.region.modules),
            "graphs": record.graphs,
            "breaks": len(record.breaks),
            "break_reasons": [str(b) for b in record.breaks],
            "failures": record.failures,
            "recompiles": self.recompiles,
            "compiled": self.compiled and record.graphs > 0,
            "gain": gain,
            "reason": self.plain_reason,
            "compile_seconds": record.seconds,
        }

    def call(self, module: torch.nn.Module, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not self.compiled and self.clock is None:
            return own(module, *args, **kwargs)
        try:
            shape = call_shape(args, kwargs)
        except NotCompilable as reason:
            self.plain_reason = str(reason)
            return own(module, *args, **kwargs)
        clock = self.clock
        if clock is not None:
            return clock.timed(lambda: self._run(module, own, shape, args, kwargs), shape.tensors)
        return self._run(module, own, shape, args, kwargs)

    def _run(self, module: torch.nn.Module, own: Callable[..., Any], shape: CallShape, args: Any, kwargs: Any) -> Any:
        if not self.compiled:
            return own(module, *args, **kwargs)
        structure = self._structure(shape, own)
        if structure is None:
            return own(module, *args, **kwargs)
        other_sizes = shape.sizes != structure.sizes
        open_sizes = self._open_at_once or other_sizes or (self.open_next and structure.dynamic is None)
        if not open_sizes:
            function = structure.static
        elif structure.dynamic is not None:
            function = structure.dynamic
        elif self.may_open_sizes:
            structure.dynamic = function = self._compile(own)
        else:
            self.sizes_changed = True  # all ranks make that graph in the same step: this one waits for it
            return own(module, *args, **kwargs)
        known = (id(module), open_sizes)
        if structure.calls[known] >= (CALLS_OF_BROKEN if self.backend.record.breaks else 1):
            with torch.compiler.set_stance("eager_on_recompile"):
                return function(module, *args, **kwargs)
        if open_sizes:
            mark_changing_sizes(shape, structure.sizes)
        result = self._first_call(function, module, args, kwargs)
        structure.calls[known] += 1
        return result

    def _first_call(self, function: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        record = self.backend.record
        before = record.graphs + len(record.failures)
        with compiling(self.backend):
            result = function(module, *args, **kwargs)
        if record.graphs + len(record.failures) != before:
            self.made_graphs = True
        return result

    def _structure(self, shape: CallShape, own: Callable[..., Any]) -> _Structure | None:
        found = self._structures.get(shape.structure)
        if found is None and len(self._structures) < MOST_STRUCTURES:
            found = _Structure(shape.sizes, self._compile(own))
            self._structures[shape.structure] = found
        elif found is None:
            self.plain_reason = f"called in more than {MOST_STRUCTURES} ways"
        return found

    def _compile(self, own: Callable[..., Any]) -> Callable[..., Any]:
        compiled: Callable[..., Any] = torch.compile(own, backend=self.backend)
        return compiled
