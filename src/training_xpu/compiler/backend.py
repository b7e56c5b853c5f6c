"""Inductor behind a counter: which graphs are made for a region, in what time, and where the code broke."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

Compiler = Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]
GRAPHS_PER_FRAME = 16  # dynamo's own limit of 8 is the same for all kinds of blocks that share a forward


@dataclass
class Break:
    """A place where a graph had to end."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}: " if self.file else ""
        return place + self.reason


@dataclass
class Compilation:
    """What has been compiled for one region so far."""

    graphs: int = 0
    seconds: float = 0.0
    breaks: list[Break] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  # what a compiler said of a graph that runs in plain Python

    def add_break(self, found: Break) -> None:
        if found not in self.breaks:
            self.breaks.append(found)


class Backend:
    """A compiler for torch.compile: Inductor, with a record of what it was given.

    One object per region, so that dynamo keeps the regions' graphs apart.
    """

    def __init__(self, options: dict[str, Any] | None = None, compiler: Compiler | None = None) -> None:
        """
        Args:
            options: Inductor's, as torch.compile takes them.
            compiler: makes a function of a graph and its inputs; None: Inductor.
        """
        self.record = Compilation()
        self._options = dict(options or {})
        self._compiler = compiler or self._inductor

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        begun = time.perf_counter()
        try:
            with _one_at_a_time():
                compiled = self._compiler(graph, inputs)
        except Exception as error:
            self.record.failures.append(_first_line(error))
            raise
        finally:
            self.record.seconds += time.perf_counter() - begun
        self.record.graphs += 1
        return compiled

    def _inductor(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx

        compiled: Any = compile_fx(graph, inputs, config_patches=self._options or None)
        return compiled  # type: ignore[no-any-return]


@contextlib.contextmanager
def compiling(backend: Backend) -> Iterator[None]:
    """Around a call that may compile: what fails runs in plain Python, breaks are recorded, backward is made at once.

    A number read from a tensor (`.item()`) stays inside the graph. DDP's splitting of graphs by bucket is off: a block
    is smaller than what it was made for, and would come apart.
    """
    from torch._dynamo import output_graph

    reasons: list[Any] = getattr(output_graph, "graph_break_reasons", [])
    before = len(reasons)
    dynamo = torch._dynamo.config.patch(
        suppress_errors=True,
        optimize_ddp=False,
        capture_scalar_outputs=True,
        recompile_limit=GRAPHS_PER_FRAME,
        accumulated_recompile_limit=1024,
    )
    functorch = torch._functorch.config.patch(force_non_lazy_backward_lowering=True)
    with _quiet("torch._dynamo", "torch._inductor"), dynamo, functorch:
        try:
            yield
        finally:
            for reason in reasons[before:]:
                backend.record.add_break(_break_of(reason))


def _break_of(reason: Any) -> Break:
    frame = reason.user_stack[-1] if reason.user_stack else None
    return Break(frame.filename if frame else "", frame.lineno or 0 if frame else 0, _in_words(str(reason.reason)))


def _in_words(reason: str) -> str:
    """What dynamo says of a break, without its advice to those who develop it: the kind and the explanation.

    >>> _in_words("Data-dependent branching\\n  Explanation: Detected a branch.\\n  Developer debug context: x")
    'Data-dependent branching: Detected a branch.'
    """
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    told = [line.partition(": ")[2] for line in lines if line.startswith(("Explanation: ", "Hint: "))][:2]
    return f"{lines[0]}: {' '.join(told)}" if lines and told else _first_line(reason)


def _first_line(said: object) -> str:
    text = f"{type(said).__name__}: {said}" if isinstance(said, BaseException) else str(said)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else text


class _Silence(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno < logging.WARNING


@contextlib.contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Dynamo prints a traceback for each frame that it leaves alone; the region's own line says it."""
    silence = _Silence()
    handlers = [h for n in names for h in logging.getLogger(n).handlers]
    for handler in handlers:
        handler.addFilter(silence)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(silence)


_in_process = threading.RLock()


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Ranks of a machine make the same graphs: one compiles, the others find its result in Inductor's cache."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    with _in_process:
        try:
            folder = Path(cache_dir())
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder / "training_xpu.lock", os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            descriptor = os.open(tempfile.gettempdir(), os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
