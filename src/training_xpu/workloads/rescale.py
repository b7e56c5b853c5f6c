"""Writes a scaled shape back into a Hugging Face config, under the field names the config itself uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from training_xpu.workloads.architecture import Architecture, field_name

# What describes a stored checkpoint, not the model that is trained.
_NOT_TRAINED = (
    "_name_or_path",
    "auto_map",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "id2label",
    "label2id",
    "problem_type",
)


def trainable(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config as it is trained: without the stored dtype, and without a cache of keys and values."""
    return {**{key: value for key, value in config.items() if key not in _NOT_TRAINED}, "use_cache": False}


def scaled_config(
    config: Mapping[str, Any], published: Architecture, shape: Architecture, sequence_length: int
) -> dict[str, Any]:
    """The published config with the sizes of `shape`.

    Token ids are unset: those of the published tokenizer lie outside a small vocabulary. Positions, sliding windows
    and the lengths that rotary embeddings are scaled by shrink with the sequence.
    """
    scaled = trainable(config)
    factor = shape.attention_width / published.attention_width
    sizes = {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocabulary,
    }
    if published.max_positions is not None:
        sizes["max_position_embeddings"] = max(sequence_length, round(factor * published.max_positions))
    if published.experts and config.get("moe_intermediate_size") is not None:
        sizes["moe_intermediate_size"] = shape.expert_ffn
    elif published.experts:
        sizes["intermediate_size"] = shape.expert_ffn
    if published.shared_ffn:
        sizes["shared_expert_intermediate_size"] = shape.shared_ffn
    if shape.kv_heads != shape.heads or scaled.get(field_name(config, "num_key_value_heads")) is not None:
        sizes["num_key_value_heads"] = shape.kv_heads
    if scaled.get("head_dim") is not None or shape.hidden != shape.attention_width:
        sizes["head_dim"] = shape.head_dim
    for canonical, size in sizes.items():
        scaled[field_name(config, canonical)] = size
    _scale_windows(scaled, published, shape)
    _scale_sparse_layers(scaled, shape)
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        scaled[token] = None
    positions = sizes.get("max_position_embeddings", sequence_length)
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(scaled.get(key), Mapping):
            scaled[key] = _scale_rope(scaled[key], factor, positions, shape.head_dim / published.head_dim)
    if isinstance(scaled.get("original_max_position_embeddings"), int):
        original = round(factor * scaled["original_max_position_embeddings"])
        scaled["original_max_position_embeddings"] = max(1, min(original, positions - 1))
    if "query_pre_attn_scalar" in scaled and scaled["query_pre_attn_scalar"] == published.head_dim:
        scaled["query_pre_attn_scalar"] = shape.head_dim
    return scaled


def layer_kinds(arch: Architecture, layers: int) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """The (windows, sparse) of a model of fewer layers: each kind keeps its share and about its place."""
    kinds = list(zip(arch.windows, arch.sparse, strict=True))
    exact = {kind: count * layers / arch.layers for kind, count in Counter(kinds).items()}
    left = {kind: int(share) for kind, share in exact.items()}
    by_remainder = sorted(exact, key=lambda kind: left[kind] - exact[kind])
    for kind in by_remainder[: layers - sum(left.values())]:
        left[kind] += 1
    chosen = []
    for position in range(layers):
        wanted = kinds[position * arch.layers // layers]
        if not left[wanted]:
            wanted = max(left, key=lambda kind: left[kind])
        left[wanted] -= 1
        chosen.append(wanted)
    return tuple(window for window, _ in chosen), tuple(sparse for _, sparse in chosen)


def _scale_windows(scaled: dict[str, Any], published: Architecture, shape: Architecture) -> None:
    had_kinds = scaled.pop("layer_types", None) is not None
    if all(window is None for window in published.windows):
        if scaled.get("use_sliding_window") is False:  # a window that is not used would only mislead
            scaled.pop("sliding_window", None)
            scaled.pop("max_window_layers", None)
        return
    scaled["sliding_window"] = next((w for w in shape.windows if w is not None), None)
    if "max_window_layers" in scaled:
        scaled["max_window_layers"] = sum(w is None for w in shape.windows)
    if had_kinds or len(set(published.windows)) > 1:
        scaled["layer_types"] = ["full_attention" if w is None else "sliding_attention" for w in shape.windows]


def _scale_sparse_layers(scaled: dict[str, Any], shape: Architecture) -> None:
    if "decoder_sparse_step" in scaled or "mlp_only_layers" in scaled:
        scaled["decoder_sparse_step"] = 1
        scaled["mlp_only_layers"] = [i for i, is_sparse in enumerate(shape.sparse) if not is_sparse]


def _scale_rope(rope: Mapping[str, Any], factor: float, positions: int, head_factor: float) -> dict[str, Any]:
    """Rotary scaling knows the length the model was first trained with; it shrinks with all lengths.

    Newer configs hold one such mapping per kind of layer. Lists hold one number per pair of head channels; where
    heads become smaller, evenly spaced ones are kept.
    """
    scaled = dict(rope)
    for key, value in rope.items():
        if isinstance(value, Mapping):
            scaled[key] = _scale_rope(value, factor, positions, head_factor)
        elif key in ("short_factor", "long_factor") and isinstance(value, list):
            kept = max(1, round(len(value) * head_factor))
            scaled[key] = [value[i * len(value) // kept] for i in range(kept)]
    original = rope.get("original_max_position_embeddings")
    if isinstance(original, int):
        scaled["original_max_position_embeddings"] = max(1, min(round(factor * original), positions - 1))
    return scaled
