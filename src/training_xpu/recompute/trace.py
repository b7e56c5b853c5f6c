"""One training step of a small version of a model on fake tensors, cut into segments that longer models are made of.

What a block adds and takes does not depend on how many there are, so that a model of any depth is predicted from a
trace of a few blocks: embedding, block after block, head and loss, and all of it backwards.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from training_xpu.recompute.live_bytes import LiveBytes, Segment


@dataclass(frozen=True)
class BlockSegments:
    """One kind of block, kept or recomputed."""

    forward: Segment
    backward: Segment
    # Autocast's copies of the block's weights that nobody else holds when its context ends, after the loss.
    cast_weights: int = 0


@dataclass(frozen=True)
class StepTrace:
    """The segments of a training step without those of the optimizer.

    Gradients of parameters are alive from the backward that makes them, as with a plain optimizer, unless the trace was
    made with `consume_gradients`.
    """

    embedding: BlockSegments
    head: BlockSegments  # final norm, head and loss
    kept: dict[str, BlockSegments]  # kind -> segments
    recomputed: dict[str, BlockSegments]

    def segments(self, kinds: Sequence[str], recomputed: Sequence[bool]) -> list[Segment]:
        """The whole step of a model with these blocks, first to last.

        Args:
            kinds: kind of each block.
            recomputed: whether each block is recomputed.
        """
        blocks = [(self.recomputed if r else self.kept)[kind] for kind, r in zip(kinds, recomputed, strict=True)]
        cast = self.head.cast_weights + sum(block.cast_weights for block in blocks)
        return [
            self.embedding.forward,
            *(block.forward for block in blocks),
            self.head.forward,
            Segment("end of forward", 0, -cast),
            self.head.backward,
            *(block.backward for block in reversed(blocks)),
            self.embedding.backward,
        ]


def trace_step(
    model: torch.nn.Module,
    blocks: Sequence[torch.nn.Module],
    kinds: Sequence[str],
    forward: Callable[[], torch.Tensor],
    mode: FakeTensorMode,
    set_recompute: Callable[[Sequence[bool]], None],
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    consume_gradients: bool = False,
) -> StepTrace:
    """Runs forward and backward twice on fake tensors, all blocks kept and all recomputed.

    Args:
        model: on fake tensors of `mode`, in training mode.
        blocks: its repeated blocks in the order of their calls; each kind at least twice where it can be, since the
            first block of a model also makes what all share.
        kinds: the kind of each block.
        forward: runs the model and returns the loss; called inside `mode`.
        set_recompute: switches recompute of each block.
        autocast: the context of the forward.
        consume_gradients: let go of each parameter's gradient as soon as it is there, as engines do that reduce and
            partition gradients during the backward.
    """
    handles = []
    if consume_gradients:
        for parameter in model.parameters():
            if parameter.requires_grad:
                handles.append(parameter.register_post_accumulate_grad_hook(_drop_gradient))  # type: ignore[no-untyped-call]
    try:
        by_mode = {}
        for recompute in (False, True):
            set_recompute([recompute] * len(blocks))
            by_mode[recompute] = _run(model, blocks, forward, mode, autocast)
    finally:
        for handle in handles:
            handle.remove()
        set_recompute([False] * len(blocks))
    kept, recomputed = by_mode[False], by_mode[True]
    weights = [sum(p.numel() for p in block.parameters()) for block in blocks]
    released = kept["end-of-forward"].net - recomputed["end-of-forward"].net
    shares = [released * numel // max(1, sum(weights)) for numel in weights]
    return StepTrace(
        embedding=BlockSegments(kept["embedding"], kept["embedding-backward"]),
        head=BlockSegments(kept["head"], kept["head-backward"], -kept["end-of-forward"].net),
        kept=_typical(kept, kinds, [0] * len(blocks)),
        recomputed=_typical(recomputed, kinds, shares),
    )


def _typical(segments: dict[str, Segment], kinds: Sequence[str], cast: Sequence[int]) -> dict[str, BlockSegments]:
    """The last block of each kind stands for it."""
    return {
        kind: BlockSegments(segments[f"block-{i}"], segments[f"block-{i}-backward"], cast[i])
        for i, kind in enumerate(kinds)
    }


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _run(
    model: torch.nn.Module,
    blocks: Sequence[torch.nn.Module],
    forward: Callable[[], torch.Tensor],
    mode: FakeTensorMode,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> dict[str, Segment]:
    counter = LiveBytes()
    in_backward = False

    def mark(name: str) -> None:
        counter.mark(name)

    def before(index: int) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            if in_backward:
                return
            hidden = _first_tensor((args, kwargs))
            if index == 0 and hidden is not None and hidden.requires_grad:
                hidden.register_hook(lambda gradient: mark("embedding-backward"))  # type: ignore[no-untyped-call]
            mark(f"block-{index}")

        return hook

    def after(index: int) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
            if in_backward:
                return
            hidden = _first_tensor(output)
            if hidden is not None and hidden.requires_grad:
                hidden.register_hook(lambda gradient: mark(f"block-{index}-backward"))  # type: ignore[no-untyped-call]
            if index == len(blocks) - 1:
                mark("head")

        return hook

    handles = []
    for index, block in enumerate(blocks):
        handles.append(block.register_forward_pre_hook(before(index), with_kwargs=True))
        handles.append(block.register_forward_hook(after(index)))
    try:
        with mode, counter:
            for _ in range(2):  # the first one fills caches that stay
                gc.collect()
                counter.restart()
                in_backward = False
                mark("embedding")
                with autocast():
                    loss = forward()
                    mark("end-of-forward")
                in_backward = True
                mark("head-backward")
                loss.backward()  # type: ignore[no-untyped-call]
                mark("end")
                del loss
                for parameter in model.parameters():
                    parameter.grad = None
    finally:
        for handle in handles:
            handle.remove()
    return {segment.name: segment for segment in counter.segments}


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
