"""The shapes a proxy may have, and which of them suits a machine best.

A proxy is a similarity transform of the published model. With width factor s, the hidden size, the MLP's width and the
sequence length become s times as large, and so do the attention heads together: projections, MLP and scores then all
shrink by s^2 per token and layer. The head follows when the vocabulary V becomes V * s * (layers / published layers).
Heads keep the ratio of query to key/value heads, experts keep their number and how many of them a token visits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from training_xpu.workloads.architecture import Architecture
from training_xpu.workloads.flops import ModelFlops, PartFlops
from training_xpu.workloads.rescale import layer_kinds

PREFERRED_HEAD_DIM = 64  # smaller heads are slow in attention kernels for CPUs
SMALLEST_VOCABULARY = 512  # a byte-level BPE has 256 bytes, special tokens, and needs some merges to be one
LARGEST_SHARE_ERROR = 0.10  # relative, of each part
EXPECTED_UTILISATION = 0.4  # of the peak of matrix multiplications, over a whole step
_SHARE_ERROR_SOUGHT = 0.05
_USUAL_LAYERS = 8  # enough that recomputing some of them is a real choice
_FEWEST_LAYERS = 4
_USUAL_TOKENS = 1024  # per rank and step: fewer starve the matrix multiplications
_UPDATE_FLOPS_PER_PARAMETER = 4000.0  # multiplied at the peak while one parameter's states are updated and reduced
_UPDATE_SHARE = 0.3  # of the step: above, the optimizer and not the model would be measured
_SIZE_CLASS_FLOPS = 200e9
_SIZE_CLASS_RATIO = 16.0
_LEAST_FLOPS = 50e9  # of a step: a model below that is no model of a large one


@dataclass(frozen=True)
class Budget:
    """What one rank has to train with."""

    memory_bytes_per_rank: int
    flops_per_second_per_rank: float  # peak of matrix multiplications in the training dtype
    world_size: int
    # How long the step's matrix multiplications would take at the peak. A whole step takes two to three times as long.
    seconds_per_step: float = 0.5

    @property
    def flops_per_step(self) -> float:
        """In size classes far apart: neither the noise of a measured peak nor a rank more may change the proxy."""
        wanted = self.flops_per_second_per_rank * self.seconds_per_step
        steps = round(math.log(wanted / _SIZE_CLASS_FLOPS, _SIZE_CLASS_RATIO))
        return max(_LEAST_FLOPS, float(_SIZE_CLASS_FLOPS * _SIZE_CLASS_RATIO**steps))


@dataclass(frozen=True)
class Setting:
    """How the model is trained, as far as size matters."""

    engine: str
    zero_stage: int
    dtype: str
    gradient_checkpointing: bool = False


def shapes(arch: Architecture, length: int, layers: int | None = None) -> Iterator[tuple[Architecture, int]]:
    """Candidate shapes, each with the sequence length that belongs to it; the published shape is one of them.

    Args:
        arch: the published shape.
        length: its default sequence length.
        layers: how many layers candidates have; None: from one to all.
    """
    per_group = arch.heads // arch.kv_heads
    # With one key/value head for all, the ratio cannot be kept; that head's share of the FLOPs is small.
    groups = [(n, 1) for n in _counts(arch.heads)] if arch.kv_heads == 1 else []
    groups = groups or [(n * per_group, n) for n in _counts(arch.kv_heads)]
    for head_dim in sorted({arch.head_dim, min(arch.head_dim, PREFERRED_HEAD_DIM)}):
        for heads, kv_heads in groups:
            factor = heads * head_dim / arch.attention_width
            square = arch.hidden == arch.attention_width
            hidden = heads * head_dim if square else _scaled(arch.hidden, factor, math.lcm(heads, 16))
            if hidden > arch.hidden:
                continue
            for depth in [layers] if layers else _depths(arch.layers):
                # Per layer, the head's FLOPs shrink by factor^2 as those of the other parts do.
                head_factor = factor**2 * (depth / arch.layers) * (arch.hidden / hidden)
                vocabulary = max(SMALLEST_VOCABULARY, _scaled(arch.vocabulary, head_factor, 8))
                windows, sparse = layer_kinds(arch, depth)
                shape = replace(
                    arch,
                    hidden=hidden,
                    heads=heads,
                    kv_heads=kv_heads,
                    head_dim=head_dim,
                    ffn=_scaled(arch.ffn, factor, 16),
                    expert_ffn=_scaled(arch.expert_ffn, factor, 16),
                    shared_ffn=_scaled(arch.shared_ffn, factor, 16),
                    vocabulary=min(vocabulary, arch.vocabulary),
                    windows=tuple(None if w is None else max(1, round(factor * w)) for w in windows),
                    sparse=sparse,
                )
                yield shape, _scaled(length, factor, 16)


def cost(
    arch: Architecture,
    counts: ModelFlops,
    length: int,
    batch: int,
    flops: float,
    budget: Budget,
    error: float,
) -> float:
    """How far a candidate is from what is wanted, in octaves; the lowest is taken.

    Args:
        arch: the published shape.
        counts: of the candidate.
        length: its tokens per sequence.
        batch: its sequences per rank and forward pass.
        flops: of a step on one rank.
        budget: what a rank has.
        error: see `share_error`.
    """
    shape = counts.architecture
    octaves = math.log2(flops / budget.flops_per_step)
    total = octaves**2 * (2.0 if octaves > 0.25 else 1.0)
    deeper = math.log2(shape.layers / min(_USUAL_LAYERS, arch.layers))
    total += 0.5 * deeper if deeper > 0 else -0.8 * deeper
    total += max(0.0, math.log2(min(_FEWEST_LAYERS, arch.layers) / shape.layers))
    total += 0.5 * max(0.0, math.log2(_USUAL_TOKENS / (batch * length)))
    total += 0.1 * abs(math.log2(batch / 2))
    preferred = min(arch.head_dim, PREFERRED_HEAD_DIM) if shape.hidden < 1024 else arch.head_dim
    total += 0.3 if shape.head_dim != preferred else 0.0
    update_share = counts.parameters * _UPDATE_FLOPS_PER_PARAMETER * EXPECTED_UTILISATION / flops
    total += max(0.0, math.log2(update_share / _UPDATE_SHARE))
    return total + 0.2 * error / LARGEST_SHARE_ERROR + (1.0 if error > _SHARE_ERROR_SOUGHT else 0.0)


def share_error(parts: PartFlops, published: PartFlops) -> float:
    """The largest relative deviation of a part's share of the FLOPs."""
    pairs = zip(parts, published, strict=True)
    return max(abs((part / parts.total) / (full / published.total) - 1.0) for part, full in pairs)


def _scaled(size: int, factor: float, multiple: int) -> int:
    """A size in multiples that kernels like; the size itself when nothing is scaled."""
    if factor == 1.0 or size == 0:
        return size
    return max(multiple, round(factor * size / multiple) * multiple)


def _counts(limit: int) -> list[int]:
    """1 to limit; only some of many."""
    return sorted({n for n in range(1, limit + 1) if n <= 4 or limit % n == 0 or n % 8 == 0} | {limit})


def _depths(limit: int) -> list[int]:
    return sorted({n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96) if n < limit} | {limit})
