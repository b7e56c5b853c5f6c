"""FLOPs and parameters of a causal language model, counted from its config alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from training_xpu.workloads.architecture import Architecture, read_architecture

if TYPE_CHECKING:
    from training_xpu.workloads.config import FlopShares

MFU_FORMULA = (
    "MFU = model FLOP/s / peak FLOP/s. Model FLOPs are those of forward and backward (twice the forward) for real "
    "tokens, without recompute: 2 per multiply-add of each weight matrix (router and active experts, LM head at every "
    "position, no embedding look-up), and 4 * heads * head size per layer for each (query, key) pair that attention "
    "lets through. As in PaLM (arXiv:2204.02311), appendix B, except that causal and sliding-window pairs are counted "
    "exactly, where PaLM counts the full square of the sequence length. HFU adds the FLOPs of recomputed blocks and of "
    "padding."
)


class PartFlops(NamedTuple):
    """FLOPs of one forward pass by part."""

    attention: float  # projections and scores
    mlp: float
    head: float

    @property
    def blocks(self) -> float:
        return self.attention + self.mlp

    @property
    def total(self) -> float:
        return self.attention + self.mlp + self.head


def attended_pairs(length: int, window: int | None = None, causal: bool = True) -> int:
    """How many (query, key) pairs one head computes for one sequence.

    Args:
        length: tokens in the sequence.
        window: a query sees keys less than this far away, itself included; None: no limit.
        causal: a query sees no later key.
    """
    if window is None or window >= length:
        return length * (length + 1) // 2 if causal else length * length
    if causal:
        return window * (window + 1) // 2 + (length - window) * window
    return length * length - (length - window) * (length - window + 1)


@dataclass(frozen=True)
class ModelFlops:
    """Counts for one model. All weights are numbers of weights, so multiply-adds per token."""

    architecture: Architecture
    causal: bool
    attention_weights: int  # of one layer
    dense_mlp_weights: int  # of one dense layer
    sparse_mlp_weights: int  # of one mixture-of-experts layer: what one token passes through, router included
    head_weights: int
    layer_kinds: tuple[tuple[int | None, bool, int], ...]  # (window, sparse, how many layers)
    parameters: int  # a tied head counts once
    active_parameters: int  # without the experts a token does not visit

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, causal: bool = True) -> ModelFlops:
        """Reads a Hugging Face model config.

        Args:
            config: the fields of config.json.
            causal: False counts attention in both directions, as counters do that take a kernel for the full square.

        Raises:
            UserError: the config is incomplete, contradicts itself, or has parts that cannot be counted.
        """
        return cls.from_architecture(read_architecture(config), causal=causal)

    @classmethod
    def from_architecture(cls, arch: Architecture, *, causal: bool = True) -> ModelFlops:
        matrices = 3 if arch.family.gated_mlp else 2
        attention = arch.hidden * arch.head_dim * (2 * arch.heads + 2 * arch.kv_heads)
        expert = matrices * arch.hidden * arch.expert_ffn
        shared = matrices * arch.hidden * arch.shared_ffn + (arch.hidden if arch.shared_ffn else 0)
        router = arch.hidden * arch.experts
        dense_mlp = matrices * arch.hidden * arch.ffn
        active_mlp = arch.active_experts * expert + shared + router
        kinds = Counter(zip(arch.windows, arch.sparse, strict=True))
        sparse_layers = sum(arch.sparse)

        embedding = arch.vocabulary * arch.hidden
        parameters = embedding * (1 if arch.tied else 2) + _small_parameters(arch)
        parameters += arch.layers * attention + (arch.layers - sparse_layers) * dense_mlp
        parameters += sparse_layers * (active_mlp + (arch.experts - arch.active_experts) * expert)
        idle = sparse_layers * (arch.experts - arch.active_experts) * expert
        return cls(
            architecture=arch,
            causal=causal,
            attention_weights=attention,
            dense_mlp_weights=dense_mlp,
            sparse_mlp_weights=active_mlp,
            head_weights=embedding,
            layer_kinds=tuple((window, sparse, count) for (window, sparse), count in kinds.items()),
            parameters=parameters,
            active_parameters=parameters - idle,
        )

    def parts(self, length: int) -> PartFlops:
        """FLOPs of one forward pass over one sequence of `length` tokens.

        Biases, norms, activations, softmax, rotary embedding and the embedding look-up are not counted: no matrix
        multiplications, below 1 % of the total. The head is computed for every position, with a label or not.
        """
        arch = self.architecture
        attention = mlp = 0
        for window, sparse, count in self.layer_kinds:
            pairs = attended_pairs(length, window, self.causal)
            attention += count * (2 * length * self.attention_weights + 4 * arch.attention_width * pairs)
            mlp += count * 2 * length * (self.sparse_mlp_weights if sparse else self.dense_mlp_weights)
        return PartFlops(float(attention), float(mlp), float(2 * length * self.head_weights))

    def forward(self, lengths: Sequence[int], padded_to: int | None = None) -> float:
        """FLOPs of one forward pass over a batch.

        Args:
            lengths: real tokens of each sequence; attention stays within a sequence.
            padded_to: count what is computed when each sequence is padded to this many tokens, not what is useful.
        """
        return self._batch(lengths, padded_to).total

    def training(
        self, lengths: Sequence[int], recomputed_fraction_of_blocks: float = 0.0, padded_to: int | None = None
    ) -> tuple[float, float]:
        """FLOPs of forward and backward over a batch: (model FLOPs, hardware FLOPs).

        The backward pass computes two products for each one of the forward pass. Model FLOPs are of real tokens and
        without recompute; hardware FLOPs have both, and the padding when `padded_to` is given.

        Args:
            lengths: real tokens of each sequence.
            recomputed_fraction_of_blocks: blocks whose forward pass runs again in the backward pass / all blocks.
            padded_to: tokens each sequence is padded to.
        """
        if not 0.0 <= recomputed_fraction_of_blocks <= 1.0:
            raise ValueError(f"recomputed_fraction_of_blocks is {recomputed_fraction_of_blocks}, not within 0 to 1")
        model = 3.0 * self.forward(lengths)
        computed = self._batch(lengths, padded_to)
        return model, 3.0 * computed.total + recomputed_fraction_of_blocks * computed.blocks

    def shares(self, length: int) -> FlopShares:
        """The share of each part in the forward FLOPs of one sequence of `length` tokens."""
        from training_xpu.workloads.config import FlopShares

        parts = self.parts(length)
        return FlopShares(
            attention=parts.attention / parts.total, mlp=parts.mlp / parts.total, head=parts.head / parts.total
        )

    def _batch(self, lengths: Sequence[int], padded_to: int | None) -> PartFlops:
        if padded_to is not None and any(length > padded_to for length in lengths):
            raise ValueError(f"a sequence of {max(lengths)} tokens is longer than padded_to = {padded_to}")
        attention = mlp = head = 0.0
        for length, count in Counter(lengths if padded_to is None else [padded_to] * len(lengths)).items():
            parts = self.parts(length)
            attention += count * parts.attention
            mlp += count * parts.mlp
            head += count * parts.head
        return PartFlops(attention, mlp, head)


def _small_parameters(arch: Architecture) -> int:
    """Norms, biases and learned positions."""
    family = arch.family
    queries, keys = arch.attention_width, arch.kv_heads * arch.head_dim
    norm = arch.hidden * (2 if family.norm_bias else 1)
    per_layer = family.norms_per_layer * norm
    per_layer += queries + 2 * keys if arch.qkv_bias else 0
    per_layer += arch.hidden if arch.output_bias else 0
    per_layer += {"": 0, "head": 2 * arch.head_dim, "full": queries + keys}[family.qk_norm]
    dense_bias = arch.ffn * (2 if family.gated_mlp else 1) + arch.hidden
    dense_layers = arch.layers - sum(arch.sparse)
    mlp_biases = dense_layers * dense_bias if arch.mlp_bias else 0
    positions = (arch.max_positions or 0) * arch.hidden if family.learned_positions else 0
    return arch.layers * per_layer + mlp_biases + norm + positions
