"""One training step of a small version of a model on fake tensors, cut into segments that longer models are made of.

What a block adds and takes does not depend on how many there are, so that a model of any depth is predicted from a
trace of a few blocks: embedding, block after block, head and loss, and all of it backwards. Gradients of parameters are
let go as soon as they are there; an event tells the model of the engine, which knows what becomes of them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from training_xpu.recompute.prediction.live_bytes import LiveBytes, Segment

EMPTY = Segment("", ())


@dataclass(frozen=True)
class BlockTrace:
    """One block, kept or recomputed, and what lies between the block before it and itself."""

    before: Segment
    forward: Segment
    backward: Segment
    before_backward: Segment
    # Autocast's copies of the block's weights that nobody else holds when its context ends, after the loss.
    cast_weights: int = 0


@dataclass(frozen=True)
class HeadTrace:
    """Final norm, head and loss, and the end of autocast's context after them.

    Where blocks are recomputed, what they were called with lives on, such as masks that a kept block does not save.
    """

    forward: Segment
    backward: Segment
    cast_weights: int


@dataclass(frozen=True)
class StepTrace:
    """Segments of a training step without those of the optimizer; every traced block by its place in the trace."""

    order: tuple[int, ...]  # which of the blocks that were given runs first, second, ...
    kept: tuple[BlockTrace, ...]
    recomputed: tuple[BlockTrace, ...]
    head: HeadTrace
    head_after_recomputed: HeadTrace


def trace_step(
    model: torch.nn.Module,
    blocks: Sequence[torch.nn.Module],
    forward: Callable[[], torch.Tensor],
    mode: FakeTensorMode,
    set_recompute: Callable[[bool], None],
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    module_events: bool = False,
) -> StepTrace:
    """Runs forward and backward on fake tensors, all blocks kept and all recomputed.

    Args:
        model: on fake tensors of `mode`, in training mode.
        blocks: its repeated blocks, in any order.
        forward: runs the model and returns the loss; called inside `mode`.
        set_recompute: switches recompute of all blocks.
        autocast: the context of the forward.
        module_events: note when each module is entered and left, forwards and backwards, as ZeRO-3's hooks see it.

    Raises:
        ValueError: a block does not run, or runs more than once in a forward.
    """
    # Cycles of an earlier run, freed by the garbage collector in the middle of this one, would be taken for its own.
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        set_recompute(False)
        kept, order = _run(model, blocks, forward, mode, autocast, module_events)
        set_recompute(True)
        recomputed, _ = _run(model, blocks, forward, mode, autocast, module_events)
    finally:
        set_recompute(False)
        if collecting:
            gc.enable()
    weights = [sum(p.numel() for p in blocks[i].parameters() if p.requires_grad) for i in order]
    cast = -kept["end-of-forward"].net
    released = -cast - recomputed["end-of-forward"].net
    shares = [released * numel // max(1, sum(weights)) for numel in weights]
    return StepTrace(
        order=tuple(order),
        kept=_traces(kept, [0] * len(order)),
        recomputed=_traces(recomputed, shares),
        head=_head(kept, len(order), cast),
        head_after_recomputed=_head(recomputed, len(order), cast),
    )


def _head(segments: dict[str, Segment], count: int, cast: int) -> HeadTrace:
    return HeadTrace(segments[f"before-{count}"], segments.get("head-backward", EMPTY), cast)


def _traces(segments: dict[str, Segment], cast: Sequence[int]) -> tuple[BlockTrace, ...]:
    return tuple(
        BlockTrace(
            segments.get(f"before-{i}", EMPTY),
            segments[f"block-{i}"],
            segments.get(f"block-{i}-backward", EMPTY),
            segments.get(f"before-{i}-backward", EMPTY),
            share,
        )
        for i, share in enumerate(cast)
    )


def _run(
    model: torch.nn.Module,
    blocks: Sequence[torch.nn.Module],
    forward: Callable[[], torch.Tensor],
    mode: FakeTensorMode,
    autocast: Callable[[], AbstractContextManager[Any]],
    module_events: bool,
) -> tuple[dict[str, Segment], list[int]]:
    """The segments of one step, and which of the blocks ran first, second, ..."""
    counter = LiveBytes()
    in_backward = False
    order: list[int] = []
    # A tensor's hooks run in the order in which they were registered, so that where a block's output is the next one's
    # input, one hook does for both.
    last_output: list[Any] = [None]
    handed_on: set[int] = set()

    def before(block: int) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            if in_backward:
                return
            if block in order:
                raise ValueError("a block runs more than once in a forward")
            order.append(block)
            index = len(order) - 1
            hidden = _first_tensor((args, kwargs))
            if hidden is not None and hidden is last_output[0]:
                handed_on.add(index - 1)
            elif hidden is not None and hidden.requires_grad:
                hidden.register_hook(lambda gradient: counter.mark(f"before-{index}-backward"))  # type: ignore[no-untyped-call]
            last_output[0] = None
            counter.mark(f"block-{index}")

        return hook

    def arrived(index: int) -> Callable[..., None]:
        def hook(gradient: torch.Tensor) -> None:
            if index in handed_on:
                counter.mark(f"before-{index + 1}-backward")
            counter.mark(f"block-{index}-backward")

        return hook

    def after(block: int) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
            if in_backward:
                return
            index = order.index(block)
            hidden = _first_tensor(output)
            if hidden is not None and hidden.requires_grad:
                hidden.register_hook(arrived(index))  # type: ignore[no-untyped-call]
                last_output[0] = hidden if index < len(blocks) - 1 else None
            counter.mark(f"before-{index + 1}")

        return hook

    handles = []
    for index, block in enumerate(blocks):
        handles.append(block.register_forward_pre_hook(before(index), with_kwargs=True))
        handles.append(block.register_forward_hook(after(index)))
    try:
        with _parameter_events(model, counter), _module_events(model, counter, module_events), mode, counter:
            for tensor in (*model.parameters(), *model.buffers()):
                counter.know(tensor)
            counter.mark("before-0")
            with autocast():
                loss = forward()
                counter.mark("end-of-forward")
            if len(order) < len(blocks):
                raise ValueError(f"{len(blocks) - len(order)} blocks do not run")
            in_backward = True
            counter.mark("head-backward")
            loss.backward()  # type: ignore[no-untyped-call]
            counter.mark("end")
    finally:
        for handle in handles:
            handle.remove()
        for parameter in model.parameters():
            parameter.grad = None
    return {segment.name: segment for segment in counter.segments}, order


@contextmanager
def _parameter_events(model: torch.nn.Module, counter: LiveBytes) -> Iterator[None]:
    def hook(parameter: torch.Tensor) -> None:
        parameter.grad = None
        counter.note("gradient", id(parameter))

    handles = [
        p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        for p in model.parameters()
        if p.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Passage(torch.autograd.Function):
    """Hands a tensor on and calls back when its gradient comes by."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        ctx.call = call
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.call()
        return gradients[0], None


@contextmanager
def _module_events(model: torch.nn.Module, counter: LiveBytes, wanted: bool) -> Iterator[None]:
    """Notes "enter", "leave", "enter-backward" and "leave-backward" for every module, by id.

    A module is entered backwards once its output has a gradient, and left once all its positional inputs that require
    one have theirs; keyword arguments are not looked at (DeepSpeed 0.19, runtime/zero/parameter_offload.py).
    """
    if not wanted:
        yield
        return

    def before(module: torch.nn.Module, args: Any) -> Any:
        counter.note("enter", id(module))
        waiting = [0]

        def left() -> None:
            waiting[0] -= 1
            if waiting[0] == 0:
                counter.note("leave-backward", id(module))

        def passed(tensor: torch.Tensor) -> Any:
            if not (torch.is_grad_enabled() and tensor.requires_grad):
                return tensor
            waiting[0] += 1
            return _Passage.apply(tensor, left)  # type: ignore[no-untyped-call]

        return _mapped(args, passed)

    def after(module: torch.nn.Module, args: Any, output: Any) -> Any:
        counter.note("leave", id(module))
        entered = [False]

        def enter() -> None:
            if not entered[0]:
                entered[0] = True
                counter.note("enter-backward", id(module))

        def passed(tensor: torch.Tensor) -> Any:
            if not (torch.is_grad_enabled() and tensor.requires_grad):
                return tensor
            return _Passage.apply(tensor, enter)  # type: ignore[no-untyped-call]

        return _mapped(output, passed)

    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(before))
        handles.append(module.register_forward_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _mapped(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """A structure with a function applied to its tensors; what is no plain container stays as it is."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, function) for item in value)
    if isinstance(value, dict):
        for key, item in value.items():
            value[key] = _mapped(item, function)
    return value


def _first_tensor(value: Any) -> torch.Tensor | None:
    """The hidden state among a block's arguments or results: the first floating-point tensor."""
    if isinstance(value, torch.Tensor):
        return value if value.is_floating_point() else None
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            found = _first_tensor(item)
            if found is not None:
                return found
    return None
