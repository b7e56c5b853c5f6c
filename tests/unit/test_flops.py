"""FLOPs and parameters against arithmetic written out here, torch's own counter and real modules."""

from __future__ import annotations

from typing import Any

import pytest

from training_xpu.errors import UserError
from training_xpu.workloads.catalogue import catalogue_model
from training_xpu.workloads.flops import MFU_FORMULA, ModelFlops, attended_pairs

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 100, "n_positions": 128}
MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", SMALL),
    ("llama", {**SMALL, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("granite", SMALL),
    ("mistral", {**SMALL, "sliding_window": None}),
    ("mixtral", {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}),
    ("phi3", SMALL),
    ("qwen2", SMALL),
    ("qwen2_moe", {**SMALL, **MOE, "shared_expert_intermediate_size": 48, "decoder_sparse_step": 2}),
    ("qwen3", {**SMALL, "head_dim": 32}),
    ("qwen3_moe", {**SMALL, **MOE, "head_dim": 16, "mlp_only_layers": [1]}),
    ("olmo2", SMALL),
    ("gemma", {**SMALL, "head_dim": 32}),
    ("gemma2", {**SMALL, "head_dim": 32, "sliding_window": 8}),
    ("gemma3_text", {**SMALL, "head_dim": 32, "sliding_window": 8}),
    ("gpt2", {**GPT2, "bos_token_id": None, "eos_token_id": None}),
    ("gpt_neox", {k: v for k, v in SMALL.items() if k != "num_key_value_heads"}),
    ("starcoder2", SMALL),
]


def test_pairs_equal_an_explicit_mask() -> None:
    for length in (1, 2, 7, 20):
        for window in (None, 1, 3, 7, 19, 20, 50):
            for causal in (True, False):
                seen = sum(
                    (key <= query or not causal) and (window is None or abs(query - key) < window)
                    for query in range(length)
                    for key in range(length)
                )
                assert attended_pairs(length, window, causal) == seen, (length, window, causal)


def test_llama3_8b_by_hand() -> None:
    model = ModelFlops.from_config(catalogue_model("llama3-8b").config)
    per_token_and_layer = 4096 * 4096 * 2 + 4096 * 1024 * 2 + 4096 * 14336 * 3  # q and o, k and v, gate, up and down
    norms = 32 * 2 * 4096 + 4096
    assert model.parameters == 32 * per_token_and_layer + 2 * 128256 * 4096 + norms == 8_030_261_248
    assert model.active_parameters == model.parameters
    n = 4096
    linear = 2 * n * (32 * per_token_and_layer + 128256 * 4096)
    scores = 32 * 32 * (n * (n + 1) // 2) * (2 * 128 + 2 * 128)
    assert model.forward([n]) == linear + scores


def test_qwen3_8b_by_hand() -> None:
    model = ModelFlops.from_config(catalogue_model("qwen3-8b").config)
    attention = 4096 * (32 * 128) + 4096 * (8 * 128) * 2 + (32 * 128) * 4096
    mlp = 4096 * 12288 * 3
    norms = 36 * (2 * 4096 + 2 * 128) + 4096
    assert model.parameters == 36 * (attention + mlp) + 2 * 151936 * 4096 + norms == 8_190_735_360
    assert model.parts(1000).mlp == 36 * 2 * 1000 * mlp
    assert model.parts(1000).attention == 36 * (2 * 1000 * attention + 4 * 32 * 128 * (1000 * 1001 // 2))
    assert model.parts(1000).head == 2 * 1000 * 4096 * 151936


def test_mixtral_by_hand_counts_the_router_and_two_of_eight_experts() -> None:
    model = ModelFlops.from_config(catalogue_model("mixtral-8x7b").config)
    attention = 4096 * 4096 * 2 + 4096 * 1024 * 2
    expert = 3 * 4096 * 14336
    router = 4096 * 8
    rest = 2 * 32000 * 4096 + 32 * 2 * 4096 + 4096
    assert model.parameters == 32 * (attention + 8 * expert + router) + rest == 46_702_792_704
    assert model.active_parameters == 32 * (attention + 2 * expert + router) + rest == 12_879_925_248
    n = 512
    scores = 32 * 4 * 4096 * (n * (n + 1) // 2)
    assert model.forward([n]) == 2 * n * (32 * (attention + 2 * expert + router) + 32000 * 4096) + scores


def test_a_tied_head_is_one_matrix_of_parameters_and_still_computed() -> None:
    model = ModelFlops.from_config(catalogue_model("llama3.2-1b").config)
    layer = 2048 * 2048 * 2 + 2048 * 512 * 2 + 3 * 2048 * 8192
    assert model.parameters == 16 * layer + 128256 * 2048 + 33 * 2048 == 1_235_814_400
    assert model.parts(10).head == 2 * 10 * 2048 * 128256


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("llama3.1-70b", 70_553_706_496), ("qwen2.5-7b", 7_615_616_512)],
)
def test_published_parameter_counts(name: str, parameters: int) -> None:
    assert ModelFlops.from_config(catalogue_model(name).config).parameters == parameters


def test_sliding_window_by_hand() -> None:
    config = {**SMALL, "model_type": "mistral", "sliding_window": 8}
    pairs = 1 + 2 + 3 + 4 + 5 + 6 + 7 + 8 + 12 * 8  # 20 tokens: the first 8 queries see all before them
    attention = 64 * 64 * 2 + 64 * 32 * 2
    assert ModelFlops.from_config(config).parts(20).attention == 3 * (2 * 20 * attention + 4 * 64 * pairs)


def test_layers_of_two_kinds_are_counted_apart() -> None:
    full, sliding = 20 * 21 // 2, 36 + 12 * 8
    named = {**SMALL, "model_type": "llama", "sliding_window": 8}
    named["layer_types"] = ["full_attention", "sliding_attention", "sliding_attention"]
    expected = {
        "layer_types": (named, full + 2 * sliding),
        "qwen2, from max_window_layers on": (
            {**SMALL, "model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2},
            2 * full + sliding,
        ),
        "qwen2, switched off": (
            {**SMALL, "model_type": "qwen2", "sliding_window": 8, "use_sliding_window": False, "max_window_layers": 2},
            3 * full,
        ),
        "gemma2, every second": (
            {**SMALL, "model_type": "gemma2", "head_dim": 16, "sliding_window": 8},
            full + 2 * sliding,
        ),
        "gemma3, all but every third": (
            {**SMALL, "model_type": "gemma3_text", "head_dim": 16, "sliding_window": 8, "sliding_window_pattern": 3},
            full + 2 * sliding,
        ),
    }
    projections = 3 * 2 * 20 * (64 * 64 * 2 + 64 * 32 * 2)
    for name, (config, pairs) in expected.items():
        assert ModelFlops.from_config(config).parts(20).attention == projections + 4 * 64 * pairs, name


def test_training_counts_padding_and_recompute_in_hardware_flops_alone() -> None:
    model = ModelFlops.from_config({**SMALL, "model_type": "llama"})
    short, long, padded = model.parts(10), model.parts(30), model.parts(32)
    assert model.training([10, 30])[0] == 3 * (short.total + long.total)
    assert model.training([10, 30], 0.5)[1] == 3 * (short.total + long.total) + 0.5 * (short.blocks + long.blocks)
    useful, computed = model.training([10, 30], 1.0, padded_to=32)
    assert useful == 3 * (short.total + long.total)
    assert computed == 2 * (3 * padded.total + padded.blocks)
    assert model.forward([10, 30], padded_to=32) == 2 * padded.total
    with pytest.raises(ValueError, match="longer than"):
        model.forward([40], padded_to=32)
    with pytest.raises(ValueError, match="not within"):
        model.training([10], 1.5)


def test_shares_add_up_to_one() -> None:
    shares = ModelFlops.from_config(catalogue_model("llama3-8b").config).shares(4096)
    assert shares.attention + shares.mlp + shares.head == pytest.approx(1.0)
    layer = 4096 * 4096 * 2 + 4096 * 1024 * 2 + 2 * 4096 * 4097 / 2  # scores and values: 2 * width * mean keys
    head = 128256 * 4096
    mlp = 3 * 4096 * 14336
    assert shares.head == pytest.approx(head / (32 * (layer + mlp) + head))
    assert shares.mlp == pytest.approx(32 * mlp / (32 * (layer + mlp) + head))


def test_the_formula_is_named() -> None:
    assert "2204.02311" in MFU_FORMULA
    assert "causal" in MFU_FORMULA


@pytest.mark.parametrize(("model_type", "config"), FAMILIES)
def test_parameters_and_flops_equal_the_real_module(model_type: str, config: dict[str, Any]) -> None:
    """torch counts attention as the full square, so does causal=False here; eager code is counted exactly, while the
    CPU's fused attention kernel and grouped matrix products are not counted by torch at all."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoConfig, AutoModelForCausalLM

    hf_config = AutoConfig.for_model(model_type, **config)
    hf_config._attn_implementation = "eager"
    hf_config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(hf_config).eval()
    # torch computes the square and masks it afterwards: a window saves it nothing.
    written = {"model_type": model_type, **config}
    unwindowed = {**hf_config.to_dict(), "sliding_window": None}
    for reading in (written, hf_config.to_dict()):
        assert ModelFlops.from_config(reading).parameters == sum(p.numel() for p in model.parameters())
    assert ModelFlops.from_config(written) == ModelFlops.from_config(hf_config.to_dict())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(40).reshape(2, 20), use_cache=False)
    assert counter.get_total_flops() == ModelFlops.from_config(unwindowed, causal=False).forward([20, 20])


def test_backward_is_twice_the_forward() -> None:
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoConfig, AutoModelForCausalLM

    hf_config = AutoConfig.for_model("llama", **SMALL)
    hf_config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(hf_config)
    tokens = torch.arange(40).reshape(2, 20)
    with FlopCounterMode(display=False) as counter:
        model(tokens, labels=tokens, use_cache=False).loss.backward()
    expected, _ = ModelFlops.from_config(hf_config.to_dict(), causal=False).training([20, 20])
    assert counter.get_total_flops() == expected


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"hidden_size": 65}, "not a multiple of num_attention_heads"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads"),
        ({"hidden_size": None}, "no hidden_size"),
        ({"vocab_size": "100"}, "positive whole number"),
        ({"num_hidden_layers": 0}, "positive whole number"),
        ({"num_local_experts": 2, "num_experts_per_tok": 3}, "more than the 2 experts"),
        ({"kv_lora_rank": 16}, "latent attention"),
        ({"text_config": {"hidden_size": 3}}, "multimodal"),
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "linear attention layers"),
        ({"layer_types": ["full_attention"]}, "names 1 layers"),
        ({"sliding_window": -4}, "positive whole number"),
    ],
)
def test_contradictions_are_refused(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        ModelFlops.from_config({**SMALL, "model_type": "llama", **change})
