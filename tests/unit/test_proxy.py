"""Full or proxy, and whether a proxy still is a model of the published one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from training_xpu.errors import ExitCode, UserError
from training_xpu.workloads.architecture import read_architecture
from training_xpu.workloads.catalogue import Model, Workload, catalogue_model, model_names, resolve
from training_xpu.workloads.config import EngineName
from training_xpu.workloads.flops import ModelFlops
from training_xpu.workloads.listing import memory_on_target
from training_xpu.workloads.memory import estimate_memory
from training_xpu.workloads.proxy import Budget, ScaledModel, choose_scale
from training_xpu.workloads.rescale import layer_kinds

TWO_CORES = Budget(memory_bytes_per_rank=11 * 10**9, flops_per_second_per_rank=415e9, world_size=2)
BUDGETS = {
    "a slow core": Budget(3 * 10**9, 30e9, 4),
    "two cores": TWO_CORES,
    "64 cores": Budget(64 * 10**9, 12e12, 2),
    "one H100": Budget(85 * 10**9, 989e12, 1),
}


def local(**config: Any) -> Model:
    return Model("./mine", config, "mine", config.pop("length", 4096), "nvidia-h100-80gb", 8, 1)


LOCAL = {
    "mistral-7b": local(
        model_type="mistral",
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32000,
        max_position_embeddings=32768,
        sliding_window=1024,
    ),
    "gemma2-2b": local(
        model_type="gemma2",
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=26,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        query_pre_attn_scalar=256,
        vocab_size=256000,
        max_position_embeddings=8192,
        sliding_window=1024,
    ),
    "gemma3-27b": local(
        model_type="gemma3_text",
        hidden_size=5376,
        intermediate_size=21504,
        num_hidden_layers=62,
        num_attention_heads=32,
        num_key_value_heads=16,
        head_dim=128,
        vocab_size=262208,
        max_position_embeddings=131072,
        sliding_window=1024,
        layer_types=[["full_attention", "sliding_attention"][(i + 1) % 6 > 0] for i in range(62)],
    ),
    "qwen3-30b-a3b": local(
        model_type="qwen3_moe",
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        vocab_size=151936,
        max_position_embeddings=40960,
    ),
    "qwen1.5-moe": local(
        model_type="qwen2_moe",
        hidden_size=2048,
        intermediate_size=5632,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=16,
        num_experts=60,
        num_experts_per_tok=4,
        decoder_sparse_step=2,
        vocab_size=151936,
        max_position_embeddings=8192,
        use_sliding_window=False,
        sliding_window=4096,
        max_window_layers=21,
    ),
    "phi3-mini-128k": local(
        model_type="phi3",
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        vocab_size=32064,
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        rope_theta=10000.0,
        rope_scaling={"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
    ),
    "gpt2-xl": local(
        model_type="gpt2", n_embd=1600, n_layer=48, n_head=25, n_positions=1024, vocab_size=50257, length=1024
    ),
    "one key/value head": local(
        model_type="llama",
        hidden_size=4096,
        intermediate_size=16384,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=1,
        vocab_size=65024,
        max_position_embeddings=4096,
    ),
}
MODELS = {**{name: catalogue_model(name) for name in model_names()}, **LOCAL}


def scaled(model: Model, budget: Budget = TWO_CORES, mode: Any = "proxy", **settings: Any) -> ScaledModel:
    return choose_scale(Workload("deepspeed/x", EngineName.DEEPSPEED, model), mode, budget, **settings)


@pytest.mark.parametrize("machine", BUDGETS)
@pytest.mark.parametrize("name", MODELS)
def test_each_part_keeps_its_share_of_the_flops(name: str, machine: str) -> None:
    model, proxy = MODELS[name], scaled(MODELS[name], BUDGETS[machine])
    published = ModelFlops.from_config(model.config).parts(model.sequence_length)
    trained = ModelFlops.from_config(proxy.config).parts(proxy.sequence_length)
    for part in ("attention", "mlp", "head"):
        before, after = getattr(published, part) / published.total, getattr(trained, part) / trained.total
        assert after == pytest.approx(before, rel=0.10), part
        assert getattr(proxy.scale.shares_full, part) == pytest.approx(before)
        assert getattr(proxy.scale.shares, part) == pytest.approx(after)
    needed = estimate_memory(
        ModelFlops.from_config(proxy.config),
        engine="deepspeed",
        zero_stage=3,
        dtype="bf16",
        world_size=BUDGETS[machine].world_size,
        micro_batch=proxy.micro_batch,
        sequence_length=proxy.sequence_length,
    )
    assert needed.total <= BUDGETS[machine].memory_bytes_per_rank


@pytest.mark.parametrize("name", MODELS)
def test_a_proxy_is_a_model_that_runs(name: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    proxy = scaled(MODELS[name], BUDGETS["a slow core"])
    config = AutoConfig.for_model(**proxy.config)
    model = AutoModelForCausalLM.from_config(config).eval()
    counts = ModelFlops.from_config(proxy.config)
    assert sum(p.numel() for p in model.parameters()) == counts.parameters == proxy.scale.parameters
    with torch.no_grad():
        logits = model(torch.arange(24).reshape(2, 12)).logits
    assert logits.shape == (2, 12, proxy.vocabulary)
    assert torch.isfinite(logits).all()
    for token in (config.bos_token_id, config.eos_token_id, config.pad_token_id):
        assert token is None or token < proxy.vocabulary
    assert (counts.architecture.max_positions or 0) >= proxy.sequence_length
    rope = getattr(config, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings")
    assert original is None or original < config.max_position_embeddings


@pytest.mark.parametrize("name", MODELS)
def test_ratios_of_the_published_model_are_kept(name: str) -> None:
    before = read_architecture(MODELS[name].config)
    after = read_architecture(scaled(MODELS[name]).config)
    assert (after.experts, after.active_experts) == (before.experts, before.active_experts)
    assert (after.tied, after.qkv_bias, after.model_type) == (before.tied, before.qkv_bias, before.model_type)
    assert after.heads % after.kv_heads == 0
    if before.kv_heads > 1:
        assert after.heads // after.kv_heads == before.heads // before.kv_heads
    assert after.vocabulary >= 512
    assert after.head_dim in (64, before.head_dim)


def test_llama3_8b_on_two_cores() -> None:
    proxy = scaled(catalogue_model("llama3-8b"), mode="auto")
    # Width factor 1/8; the vocabulary follows with 1/8 * 8/32.
    assert proxy.config["hidden_size"] == 4096 // 8
    assert proxy.config["intermediate_size"] == 14336 // 8
    assert (proxy.config["num_attention_heads"], proxy.config["num_key_value_heads"]) == (8, 2)
    assert proxy.config["num_hidden_layers"] == 8
    assert (proxy.sequence_length, proxy.vocabulary, proxy.micro_batch) == (4096 // 8, 128256 // 32, 2)
    scale = proxy.scale
    assert scale.kind == "proxy"
    assert scale.width_factor == 1 / 8
    assert (scale.layers_full, scale.layers, scale.sequence_full, scale.sequence) == (32, 8, 4096, 512)
    assert (scale.target_device, scale.target_world_size) == ("nvidia-h100-80gb", 8)
    assert "10.2 GiB" in scale.reason  # 11e9 bytes
    assert "hidden size 4096 to 512" in scale.reason


def test_the_model_does_not_change_with_the_noise_of_a_measured_peak_or_with_a_rank_more() -> None:
    for name in model_names():
        chosen = {
            str(scaled(catalogue_model(name), Budget(11 * 10**9, peak, ranks)).config)
            for peak in (150e9, 300e9, 415e9, 830e9)
            for ranks in (1, 2, 4)
        }
        assert len(chosen) == 1, name


@pytest.mark.parametrize("engine", EngineName)
def test_every_engine_trains_the_same_proxy(engine: EngineName) -> None:
    model = catalogue_model("mixtral-8x7b")
    other = choose_scale(Workload("x", engine, model), "auto", TWO_CORES)
    assert other.config == scaled(model).config


def test_what_the_user_fixes_replaces_the_choice_and_nothing_else() -> None:
    model = catalogue_model("llama3-8b")
    chosen = scaled(model)
    assert scaled(model, micro_batch=7) == chosen._replace(micro_batch=7)
    longer = scaled(model, sequence_length=1024)
    assert longer.sequence_length == 1024
    assert longer.micro_batch == 1  # as many tokens as before
    assert longer.config["hidden_size"] == 512
    assert longer.config["max_position_embeddings"] >= 1024
    far = scaled(model, sequence_length=2048)
    assert "with the sequence length given, attention has" in far.scale.reason
    shallow = scaled(model, layers=12)
    assert shallow.config["num_hidden_layers"] == 12
    assert shallow.config["hidden_size"] == 512
    assert shallow.vocabulary == pytest.approx(128256 / 8 * 12 / 32, abs=4)
    given = scaled(model, vocabulary=32000)
    assert given.vocabulary == given.config["vocab_size"] == 32000
    assert "with the tokenizer given" in given.scale.reason


def test_full_where_it_fits(tmp_path: Path) -> None:
    node = Budget(85 * 10**9, 989e12, 8)
    full = scaled(catalogue_model("llama3-8b"), node, "auto")
    assert full.scale.kind == "full"
    assert full.config["num_hidden_layers"] == 32
    assert full.config["bos_token_id"] == 128000
    assert "torch_dtype" not in full.config
    assert (full.micro_batch, full.sequence_length, full.vocabulary) == (1, 4096, 128256)
    assert "The published model is trained" in full.scale.reason
    # Replicated states do not fit where sharded ones do.
    workload = Workload("ddp/x", EngineName.DDP, catalogue_model("llama3-8b"))
    assert choose_scale(workload, "auto", node).scale.kind == "proxy"


def test_auto_avoids_a_step_that_would_take_minutes() -> None:
    slow = Budget(200 * 10**9, 415e9, 1)
    auto = scaled(catalogue_model("llama3.2-1b"), slow, "auto")
    assert auto.scale.kind == "proxy"
    assert "a step of the full model would take about" in auto.scale.reason
    assert scaled(catalogue_model("llama3.2-1b"), slow, "full").scale.kind == "full"


def test_full_that_cannot_be() -> None:
    model = catalogue_model("llama3-8b")
    with pytest.raises(UserError) as caught:
        scaled(model, mode="full")
    assert caught.value.exit_code is ExitCode.USAGE
    # 16 bytes per parameter over two ranks
    assert f"{16 * 8_030_261_248 / 2 / 2**30:.3g} GiB" in caught.value.problem
    assert "10.2 GiB" in caught.value.problem
    assert "--scale proxy" in caught.value.remedy
    for settings, problem in (
        ({"layers": 4}, "not the full model"),
        ({"vocabulary": 200000}, "200000 tokens"),
        ({"sequence_length": 9000}, "8192 positions"),
        ({"layers": 40}, "the model has 32 layers"),
    ):
        with pytest.raises(UserError, match=problem):
            scaled(model, mode="full", **settings)


def test_a_machine_too_small_for_any_proxy() -> None:
    with pytest.raises(UserError, match="no proxy of llama3-8b fits"):
        scaled(catalogue_model("llama3-8b"), Budget(10**6, 415e9, 2))


def test_a_small_local_model_is_trained_in_full(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, '
        '"num_attention_heads": 4, "vocab_size": 1001, "max_position_embeddings": 256}',
        encoding="utf-8",
    )
    workload = resolve(f"ddp/{tmp_path}")
    for mode in ("auto", "full", "proxy"):
        plan = choose_scale(workload, mode, TWO_CORES)
        assert plan.scale.kind == "full"
        assert plan.vocabulary == 1001
        assert plan.config["hidden_size"] == 64


def test_kinds_of_layers_keep_their_proportion() -> None:
    gemma = read_architecture(LOCAL["gemma3-27b"].config)  # 10 full of 62
    windows, _ = layer_kinds(gemma, 12)
    assert Counter(windows) == {1024: 10, None: 2}
    moe = read_architecture(LOCAL["qwen1.5-moe"].config)  # every second layer has experts
    assert Counter(layer_kinds(moe, 8)[1]) == {True: 4, False: 4}
    assert layer_kinds(gemma, 62) == (gemma.windows, gemma.sparse)


def test_memory_against_measured_peaks() -> None:
    """A step in fp32 of 8 layers, hidden 512, MLP 1536, vocabulary 8192, 4 x 512 tokens was measured at 1317.0 MiB of
    live tensors, and at 644.4 MiB with every layer recomputed. The estimate must be above, and not by much."""
    counts = ModelFlops.from_config(
        {
            "model_type": "llama",
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "vocab_size": 8192,
        }
    )
    for recompute, measured in ((False, 1317.0), (True, 644.4)):
        estimate = estimate_memory(
            counts,
            engine="ddp",
            zero_stage=0,
            dtype="fp32",
            world_size=1,
            micro_batch=4,
            sequence_length=512,
            gradient_checkpointing=recompute,
        )
        assert measured < estimate.total / 2**20 < 1.4 * measured


def test_sharding_follows_zero() -> None:
    counts = ModelFlops.from_config(catalogue_model("llama3-8b").config)
    n = counts.parameters

    def states(engine: str, stage: int, dtype: str = "bf16") -> int:
        return estimate_memory(
            counts, engine=engine, zero_stage=stage, dtype=dtype, world_size=4, micro_batch=1, sequence_length=128
        ).states

    assert states("deepspeed", 0) == states("ddp", 3) == states("transformers", 3) == 16 * n
    assert states("deepspeed", 1) == 2 * n + 2 * n + 12 * n // 4
    assert states("deepspeed", 2) == 2 * n + 2 * n // 4 + 12 * n // 4
    assert states("deepspeed", 3) == states("fsdp", 0) == 16 * n // 4
    assert states("ddp", 0, "fp32") == 16 * n


def test_each_catalogue_model_fits_its_target_but_the_largest_which_needs_recompute() -> None:
    for name in model_names():
        estimate, available = memory_on_target(catalogue_model(name))
        assert (estimate.total <= available) == (name != "llama3.1-70b"), name
