"""Predicts the peak of live tensor bytes of a training step for every number of recomputed blocks, without running it.

Recomputed are the first blocks of the model: their turn in the backward comes last, when the activations of the others
are gone, so that what recomputing brings back for a moment meets the emptiest memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from training_xpu.blocks import LOSS, BlockGroup, find_blocks, published, unwrap
from training_xpu.errors import UserError
from training_xpu.recompute.prediction.fake_model import fake_copy, use_causal_attention
from training_xpu.recompute.prediction.ledger import COMMUNICATION, PARTS, Peak
from training_xpu.recompute.prediction.model_blocks import Block, adapt_configs, blocks_of, select
from training_xpu.recompute.prediction.setting import TrainingSetting
from training_xpu.recompute.prediction.timeline import Naming, Timeline, engine_class, interpolated
from training_xpu.recompute.prediction.trace import StepTrace, trace_step
from training_xpu.recompute.prediction.weights import weights_of

# Where an engine watches modules a simulation is slow, and peaks of more blocks than these are interpolated where the
# simulated ones lie on a line to within this share.
SIMULATED_WHOLE = 16
ON_A_LINE = 5e-4
_LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
_SWITCHES = ("gradient_checkpointing", "activation_checkpointing")


@dataclass(frozen=True)
class PeakPrediction:
    """Live tensor bytes of the rank that needs most. What the allocator holds beyond them is not in it."""

    kinds: tuple[str, ...]  # kind of each block, in the order of execution
    names: tuple[str, ...]  # path of each block
    peaks: tuple[int, ...]  # element n: with the first n blocks recomputed
    phases: tuple[str, ...]  # where each peak is: "head-backward", "block-2-backward", ...
    all_parts: tuple[dict[str, int], ...]
    saved_bytes: dict[str, int]  # kind -> what a block of it keeps for its backward when it is not recomputed
    untouched_bytes: int = 0  # of communication buffers larger than what is ever written to them; resident on no CPU

    @property
    def blocks(self) -> int:
        return len(self.kinds)

    def parts(self, recomputed: int) -> dict[str, int]:
        """What the peak is made of with this many blocks recomputed; the parts add up to it."""
        return dict(self.all_parts[recomputed])

    def untouched(self, recomputed: int) -> int:
        """Of the peak with this many blocks recomputed: bytes that are never written to."""
        return min(self.untouched_bytes, self.all_parts[recomputed].get(COMMUNICATION, 0))

    def fewest_recomputed(self, budget: int) -> int | None:
        """The smallest number of recomputed blocks whose peak is within a budget in bytes; None where none is."""
        return next((n for n, peak in enumerate(self.peaks) if peak <= budget), None)


def predict_peaks(
    model: torch.nn.Module,
    setting: TrainingSetting,
    *,
    inputs: Mapping[str, Any] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    groups: Sequence[BlockGroup] | None = None,
) -> PeakPrediction:
    """Predicts for a model on any device, with full sequences.

    Args:
        model: with real or meta weights, wrapped or not; it is neither run nor changed.
        inputs: keyword arguments of its forward, real or meta tensors, of one micro batch; None: `input_ids` and
            `labels` of the setting's batch size and sequence length, as HF causal language models take.
        loss: makes the loss of the forward's output; None: the output's `loss`, or itself where it is one number, or
            else the mean of its first tensor.
        groups: the blocks that may be recomputed; None: `find_blocks(model)`.

    Raises:
        UserError: the model has no repeated blocks, or cannot be traced.
    """
    model = unwrap(model)
    groups = find_blocks(model) if groups is None else groups
    if not groups:
        raise UserError(
            f"the memory of {type(model).__name__} cannot be predicted: no repeated blocks were found",
            "Blocks are equal modules in a ModuleList or Sequential, or transformers layers.",
        )
    try:
        return _predict(model, setting, inputs, loss, groups)
    except UserError:
        raise
    except (RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError, KeyError, IndexError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"the memory of {type(model).__name__} cannot be predicted: {lines[0]}") from error


def _predict(
    model: torch.nn.Module,
    setting: TrainingSetting,
    inputs: Mapping[str, Any] | None,
    loss: Callable[[Any], torch.Tensor] | None,
    groups: Sequence[BlockGroup],
) -> PeakPrediction:
    blocks = blocks_of(groups, model)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    selection = select(model, blocks)
    kept = selection.kept
    small: Any = _copy(model, setting, mode, selection.left_out)
    adapt_configs(small, selection, model)
    small.train()
    engine_class(setting).adapt(small, setting)
    if hasattr(small, "config"):
        use_causal_attention(small)
    names = _names_in_copy(blocks, kept, small)
    traced_blocks = [small.get_submodule(name) for name in names]
    keywords, inputs_bytes = _inputs(mode, setting, inputs)
    if hasattr(small, "config") and "use_cache" not in keywords and inputs is None:
        keywords["use_cache"] = False
    run = published(model, LOSS)

    def forward() -> torch.Tensor:
        return _loss(small(**keywords) if run is None else run(small, **keywords), loss)

    trace = trace_step(
        small,
        traced_blocks,
        forward,
        mode,
        _switch(small, traced_blocks),
        functools.partial(_autocast, setting),
        engine_class(setting).watches_modules,
    )
    ordered, traced = _in_order(blocks, [kept[i] for i in trace.order])
    elements = setting.element_bytes if setting.engine == "deepspeed" else None
    weights = weights_of(model, [b.module for b in ordered], elements, inputs_bytes * setting.gradient_accumulation)
    index = {name: i for i, (name, _) in enumerate(model.named_parameters())}
    naming = Naming(small, [traced_blocks[i] for i in trace.order], index)
    random_state = torch.get_rng_state().nbytes if setting.device_type == "cpu" else 0
    timeline = Timeline(trace, traced, ordered, naming, weights, random_state)
    peaks = _peaks(timeline, setting, len(ordered))
    return PeakPrediction(
        kinds=tuple(b.kind for b in ordered),
        names=tuple(b.name for b in ordered),
        peaks=tuple(p.total for p in peaks),
        phases=tuple(p.phase for p in peaks),
        all_parts=tuple(p.parts for p in peaks),
        saved_bytes=_saved(trace, timeline, ordered),
        untouched_bytes=engine_class(setting).untouched_bytes(weights, setting) if setting.device_type == "cpu" else 0,
    )


def _copy(
    model: torch.nn.Module, setting: TrainingSetting, mode: FakeTensorMode, leave_out: Sequence[torch.nn.Module]
) -> torch.nn.Module:
    """On fake tensors, with the dtypes that the forward sees: engines with masters compute on low-precision weights."""
    if setting.engine in ("deepspeed", "fsdp") and setting.dtype != "fp32":
        return fake_copy(model, mode, _LOW[setting.dtype], cast_buffers=False, leave_out=leave_out)
    return fake_copy(model, mode, leave_out=leave_out)


def _names_in_copy(blocks: Sequence[Block], kept: Sequence[int], small: torch.nn.Module) -> list[str]:
    """Paths of the kept blocks in the shortened copy, whose lists count anew."""
    names = []
    places: dict[str, int] = {}
    for index in kept:
        container = blocks[index].container
        place = places[container] = places.get(container, -1) + 1
        members = list((small.get_submodule(container) if container else small)._modules)
        own = {b.name for b in blocks if b.container == container}
        if len(members) == len([b for b in kept if blocks[b].container == container]):
            tail = blocks[index].name.removeprefix(container + ".").partition(".")[2]
            names.append(".".join(part for part in (container, members[place], tail) if part))
        else:
            assert own
            names.append(blocks[index].name)
    return names


def _in_order(blocks: Sequence[Block], traced: Sequence[int]) -> tuple[list[Block], list[int]]:
    """All blocks in the order of execution, and where among them the traced ones are.

    Containers run in the order in which their traced blocks did, each from its first block to its last.
    """
    containers = dict.fromkeys(blocks[i].container for i in traced)
    order = [i for container in containers for i, b in enumerate(blocks) if b.container == container]
    by_container = {c: [i for i in traced if blocks[i].container == c] for c in containers}
    if [i for c in containers for i in by_container[c]] != list(traced):
        if len(order) != len(traced):
            raise ValueError("its blocks do not run container after container")
        order = list(traced)
    return [blocks[i] for i in order], [order.index(i) for i in traced]


def _inputs(
    mode: FakeTensorMode, setting: TrainingSetting, given: Mapping[str, Any] | None
) -> tuple[dict[str, Any], int]:
    if given is None:
        shape = (setting.batch_size, setting.sequence_length)
        given = {name: torch.empty(shape, dtype=torch.long, device="meta") for name in ("input_ids", "labels")}
    size = sum(t.numel() * t.element_size() for t in given.values() if isinstance(t, torch.Tensor))
    with mode:
        made = {
            name: torch.empty(tuple(t.shape), dtype=t.dtype) if isinstance(t, torch.Tensor) else t
            for name, t in given.items()
        }
    return made, size


def _loss(output: Any, function: Callable[[Any], torch.Tensor] | None) -> torch.Tensor:
    if function is not None:
        return function(output)
    found = getattr(output, "loss", None)
    if isinstance(found, torch.Tensor):
        return found
    if isinstance(output, dict):
        found = output.get("loss")
        output = list(output.values()) if found is None else found
    while isinstance(output, list | tuple):
        output = next(item for item in output if isinstance(item, torch.Tensor | list | tuple | dict))
    result: torch.Tensor = output
    return result if result.dim() == 0 else result.float().mean()


def _autocast(setting: TrainingSetting) -> AbstractContextManager[Any]:
    if setting.engine not in ("plain", "ddp") or setting.dtype == "fp32":
        return nullcontext()
    return torch.autocast("cpu", dtype=_LOW[setting.dtype])


def _switch(small: Any, blocks: Sequence[Any]) -> Callable[[bool], None]:
    """Blocks with a flag of their own use it; the others get a forward that goes through torch's checkpoint."""
    own = [any(hasattr(block, name) for name in _SWITCHES) for block in blocks]
    if any(own):
        enable = getattr(small, "activation_checkpointing_enable", None) or small.gradient_checkpointing_enable
        enable()
    plain = [block.forward for block in blocks]

    def through_checkpoint(forward: Any) -> Any:
        return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)

    def switch(on: bool) -> None:
        for block, has_flag, forward in zip(blocks, own, plain, strict=True):
            if has_flag:
                for name in _SWITCHES:
                    if hasattr(block, name):
                        setattr(block, name, on)
            else:
                block.forward = through_checkpoint(forward) if on else forward

    return switch


def _peaks(timeline: Timeline, setting: TrainingSetting, count: int) -> list[Peak]:
    def simulate(number: int) -> Peak:
        return timeline.peak(setting, [i < number for i in range(count)])

    if not engine_class(setting).watches_modules or count <= SIMULATED_WHOLE:
        return [simulate(n) for n in range(count + 1)]
    sampled = {n: simulate(n) for n in (0, 1, count - 1, count)}
    intervals = [(1, count - 1)]
    while intervals:
        first, last = intervals.pop()
        if last - first < 2:
            continue
        middle = (first + last) // 2
        sampled[middle] = simulate(middle)
        share = (middle - first) / (last - first)
        line = sampled[first].total * (1 - share) + sampled[last].total * share
        if abs(sampled[middle].total - line) > ON_A_LINE * line:
            intervals += [(first, middle), (middle, last)]
    result = []
    for below, above, share in interpolated(sampled, count):
        low, high = sampled[below], sampled[above]
        nearer = low if share < 0.5 else high
        parts = {p: round(low.parts[p] * (1 - share) + high.parts[p] * share) for p in PARTS}
        result.append(Peak(sum(parts.values()), nearer.phase, parts))
    return result


def _saved(trace: StepTrace, timeline: Timeline, blocks: Sequence[Block]) -> dict[str, int]:
    found: dict[str, int] = {}
    for block, place in zip(blocks, timeline.stand_ins, strict=True):
        kept = trace.kept[place]
        found[block.kind] = max(found.get(block.kind, 0), kept.forward.net - kept.cast_weights)
    return found
