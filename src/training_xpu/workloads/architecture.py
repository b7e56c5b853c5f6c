"""What a published model config says about the shape of the model: one reading of the many field names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from training_xpu.errors import UserError

ALIASES: dict[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "n_kv_heads"),
    "head_dim": ("head_dim",),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "vocab_size": ("vocab_size",),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "max_seq_len"),
    "num_experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "num_experts_per_tok": ("num_experts_per_tok", "num_experts_per_token"),
    "moe_intermediate_size": ("moe_intermediate_size",),
    "shared_expert_intermediate_size": ("shared_expert_intermediate_size",),
    "sliding_window": ("sliding_window",),
}

# Beyond any model there is: a slip in a config must not become a loop over a billion layers.
_LARGEST = {
    "hidden_size": 1 << 24,
    "num_hidden_layers": 10_000,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 20,
    "intermediate_size": 1 << 26,
    "vocab_size": 1 << 26,
    "max_position_embeddings": 1 << 32,
    "num_experts": 1 << 16,
    "num_experts_per_tok": 1 << 16,
    "moe_intermediate_size": 1 << 26,
    "shared_expert_intermediate_size": 1 << 26,
}

_MARKS_UNSUPPORTED = {
    "text_config": "it is a multimodal model",
    "kv_lora_rank": "it has latent attention",
    "ssm_state_size": "it has state-space layers",
    "state_size": "it has state-space layers",
    "mamba_d_state": "it has state-space layers",
    "n_shared_experts": "its shared experts are laid out in a way not known here",
    "attention_chunk_size": "it has chunked attention",
    "num_nextn_predict_layers": "it predicts several tokens at once",
}


Sliding = Literal["all", "from_max_window_layers", "even_below_max_window_layers", "alternate", "five_of_six"]


@dataclass(frozen=True)
class Family:
    """What the code of a model type fixes and its config does not say (as of transformers 5)."""

    gated_mlp: bool = True
    tied: bool = False  # default of tie_word_embeddings
    qkv_bias: bool | str = False  # a string names the config field
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    norms_per_layer: int = 2  # vectors of hidden_size
    norm_bias: bool = False
    qk_norm: Literal["", "head", "full"] = ""  # one weight per head dimension, or per query and key channel
    learned_positions: bool = False
    default_head_dim: int | None = None
    default_window: int | None = None
    # Which layers slide where the config has a window but no layer_types.
    sliding: Sliding = "all"


_BIASED = Family(
    gated_mlp=False, qkv_bias=True, output_bias=True, mlp_bias=True, norm_bias=True, learned_positions=True, tied=True
)

FAMILIES: dict[str, Family] = {
    "llama": Family(qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias"),
    "granite": Family(qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": Family(default_window=4096),
    "mixtral": Family(),
    "phi3": Family(),
    "qwen2": Family(qkv_bias=True, sliding="from_max_window_layers"),
    "qwen2_moe": Family(qkv_bias="qkv_bias", sliding="even_below_max_window_layers"),
    "qwen3": Family(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm="head",
        default_head_dim=128,
        sliding="from_max_window_layers",
    ),
    "qwen3_moe": Family(qkv_bias="attention_bias", output_bias="attention_bias", qk_norm="head"),
    "olmo2": Family(qkv_bias="attention_bias", output_bias="attention_bias", qk_norm="full"),
    "gemma": Family(tied=True, default_head_dim=256),
    "gemma2": Family(tied=True, default_head_dim=256, norms_per_layer=4, sliding="alternate"),
    "gemma3_text": Family(tied=True, default_head_dim=256, norms_per_layer=4, qk_norm="head", sliding="five_of_six"),
    "gpt2": _BIASED,
    "gpt_neox": Family(
        gated_mlp=False, qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias=True, norm_bias=True
    ),
    "starcoder2": Family(
        gated_mlp=False, tied=True, qkv_bias="use_bias", output_bias="use_bias", mlp_bias="use_bias", norm_bias=True
    ),
}
_BIASED_UNLESS_SAID = {("starcoder2", "use_bias"), ("gpt_neox", "attention_bias"), ("qwen2_moe", "qkv_bias")}


@dataclass(frozen=True)
class Architecture:
    """The shape of a decoder-only language model. Sizes are numbers of channels."""

    model_type: str
    family: Family
    known_family: bool  # False: the family's facts are assumed and want checking against the real module
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # dense layers
    vocabulary: int
    max_positions: int | None
    tied: bool
    experts: int  # 0: dense
    active_experts: int
    expert_ffn: int
    shared_ffn: int  # 0: no shared expert
    windows: tuple[int | None, ...]  # per layer: keys a query sees at most, itself included; None: all
    sparse: tuple[bool, ...]  # per layer: mixture of experts or dense MLP
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool

    @property
    def layers(self) -> int:
        return len(self.windows)

    @property
    def attention_width(self) -> int:
        return self.heads * self.head_dim


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """Reads a Hugging Face config.json, given as a mapping.

    Raises:
        UserError: a size is missing or not a positive whole number, sizes contradict each other, or the model has
            parts whose arithmetic is not known here.
    """
    for mark, reason in _MARKS_UNSUPPORTED.items():
        if config.get(mark):
            raise UserError(
                f"this model config cannot be used: {reason} ({mark})",
                "Choose a decoder-only text model: " + ", ".join(sorted(FAMILIES)) + ".",
            )
    model_type = str(config.get("model_type", ""))
    family = FAMILIES.get(model_type, Family())
    hidden = _size(config, "hidden_size")
    layers = _size(config, "num_hidden_layers")
    heads = _size(config, "num_attention_heads")
    kv_heads = _size(config, "num_key_value_heads", heads)
    head_dim = _size(config, "head_dim", family.default_head_dim or 0) or _derived_head_dim(hidden, heads)
    if heads % kv_heads:
        raise UserError(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}",
            "Each key/value head serves the same number of query heads; correct config.json.",
        )
    experts, active = _size(config, "num_experts", 0), 0
    if experts:
        active = _size(config, "num_experts_per_tok")
        if active > experts:
            raise UserError(
                f"num_experts_per_tok {active} is more than the {experts} experts there are", "Correct config.json."
            )
    expert_ffn = 0
    if experts:
        expert_ffn = _size(config, "moe_intermediate_size", 0) or _size(config, "intermediate_size")
    sparse = _sparse_layers(config, layers) if experts else (False,) * layers
    ffn_default = 4 * hidden if model_type == "gpt2" else (expert_ffn if all(sparse) else None)
    return Architecture(
        model_type=model_type,
        family=family,
        known_family=model_type in FAMILIES,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=_size(config, "intermediate_size", ffn_default),
        vocabulary=_size(config, "vocab_size"),
        max_positions=_size(config, "max_position_embeddings", 0) or None,
        tied=bool(config.get("tie_word_embeddings", family.tied)),
        experts=experts,
        active_experts=active,
        expert_ffn=expert_ffn,
        shared_ffn=_size(config, "shared_expert_intermediate_size", 0) if experts else 0,
        windows=_windows(config, family, layers),
        sparse=sparse,
        qkv_bias=_flag(config, model_type, family.qkv_bias),
        output_bias=_flag(config, model_type, family.output_bias),
        mlp_bias=_flag(config, model_type, family.mlp_bias),
    )


def field_name(config: Mapping[str, Any], canonical: str) -> str:
    """The name under which this config has a field, or the canonical one when it has none."""
    return next((name for name in ALIASES[canonical] if config.get(name) is not None), canonical)


def _size(config: Mapping[str, Any], canonical: str, default: int | None = None) -> int:
    name = field_name(config, canonical)
    value = config.get(name)
    if value is None:
        if default is None:
            raise UserError(f"the model config has no {canonical}", "Add it to config.json.")
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < (0 if default == 0 else 1):
        raise UserError(f"the model config has {name} = {value!r}; a positive whole number is needed")
    if value > _LARGEST[canonical]:
        raise UserError(
            f"the model config has {name} = {value}; at most {_LARGEST[canonical]} is possible", "Correct config.json."
        )
    return value


def _whole(config: Mapping[str, Any], name: str, default: int) -> int:
    """A number of layers, such as where a pattern begins; 0 and null stand for the default."""
    value = config.get(name) or default
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UserError(f"the model config has {name} = {value!r}; a positive whole number is needed")
    return value


def _derived_head_dim(hidden: int, heads: int) -> int:
    if hidden % heads:
        raise UserError(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}",
            "Correct config.json, or name the size of a head there as head_dim.",
        )
    return hidden // heads


def _flag(config: Mapping[str, Any], model_type: str, fact: bool | str) -> bool:
    if isinstance(fact, bool):
        return fact
    return bool(config.get(fact, (model_type, fact) in _BIASED_UNLESS_SAID))


def _sparse_layers(config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """Qwen's fields: every decoder_sparse_step-th layer has experts, except those named in mlp_only_layers."""
    step = _whole(config, "decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise UserError(f"the model config has mlp_only_layers = {dense!r}; a list of layers is needed")
    first_sparse = _whole(config, "first_k_dense_replace", 0)
    return tuple(i >= first_sparse and i not in dense and (i + 1) % step == 0 for i in range(layers))


def _windows(config: Mapping[str, Any], family: Family, layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window", family.default_window) or None
    if config.get("use_sliding_window") is False:
        window = None
    elif window is not None and (not isinstance(window, int) or window < 1):
        raise UserError(f"the model config has sliding_window = {window!r}; a positive whole number is needed")
    kinds = config.get("layer_types")
    if kinds:
        if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
            raise UserError(f"the model config has layer_types = {kinds!r}; a list of names is needed")
        unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
        if unknown:
            raise UserError(
                f"this model config cannot be used: it has {unknown[0].replace('_', ' ')} layers",
                "Choose a decoder-only text model with full or sliding attention.",
            )
        if len(kinds) != layers:
            raise UserError(f"layer_types names {len(kinds)} layers, num_hidden_layers says {layers}")
        slides = [kind == "sliding_attention" for kind in kinds]
    else:
        slides = [_slides(config, family, i) for i in range(layers)]
    return tuple(window if slide else None for slide in slides)


def _slides(config: Mapping[str, Any], family: Family, index: int) -> bool:
    first_full = _whole(config, "max_window_layers", 0)
    match family.sliding:
        case "all":
            return True
        case "from_max_window_layers":
            return index >= first_full
        case "even_below_max_window_layers":
            return index % 2 == 0 and index < first_full
        case "alternate":
            return index % 2 == 0
        case "five_of_six":
            return (index + 1) % _whole(config, "sliding_window_pattern", 6) != 0
