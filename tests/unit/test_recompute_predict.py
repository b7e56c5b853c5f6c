"""Predicted peaks of live bytes against those of real training steps, counted by torch's profiler."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, LlamaConfig, MixtralConfig, Qwen3Config

from training_xpu.errors import UserError
from training_xpu.recompute.live_bytes import LiveBytes, Segment, walk
from training_xpu.recompute.predict import PeakPrediction, predict_peaks
from training_xpu.workloads.live_bytes import measure_live_bytes

BATCH, LENGTH, LAYERS = 2, 128, 5
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "num_hidden_layers": LAYERS,
}
FAMILIES: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=32),
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=4),
    "gemma2": lambda: Gemma2Config(**SIZES, head_dim=32),  # eager attention, masks, two kinds of attention
    "gpt2": lambda: GPT2Config(n_layer=LAYERS, n_embd=128, n_head=4, vocab_size=1024, n_positions=256),
}


def measured_peak(config: Any, recomputed: int, dtype: str) -> int:
    """Of the third step of a real model, AdamW's states in place."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.config.use_cache = False
    model.train()
    model.activation_checkpointing_enable()
    layers = [m for m in model.modules() if hasattr(m, "gradient_checkpointing") and m is not model]
    blocks = [m for m in layers if "Layer" in type(m).__name__ or "Block" in type(m).__name__]
    assert len(blocks) == LAYERS
    for index, block in enumerate(blocks):
        block.gradient_checkpointing = index < recomputed
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(0, config.vocab_size, (BATCH, LENGTH))

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16) if dtype == "bf16" else nullcontext():
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    return measure_live_bytes(step).peak_bytes


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", "fp32"),
        ("llama", "bf16"),
        ("qwen3", "bf16"),
        ("mixtral", "fp32"),
        ("gemma2", "bf16"),
        ("gpt2", "fp32"),
    ],
)
def test_predicted_peaks_are_the_measured_ones(family: str, dtype: Any) -> None:
    config = FAMILIES[family]()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    predicted = predict_peaks(model, BATCH, LENGTH, dtype=dtype)
    assert predicted.blocks == LAYERS
    for recomputed in (0, 2, LAYERS):
        measured = measured_peak(FAMILIES[family](), recomputed, dtype)
        assert predicted.peaks[recomputed] == pytest.approx(measured, rel=0.015), recomputed


def test_the_model_asked_about_stays_as_it_was() -> None:
    model = AutoModelForCausalLM.from_config(FAMILIES["llama"]())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attention = model.config._attn_implementation
    flags = [getattr(m, "gradient_checkpointing", None) for m in model.modules()]
    calls = []
    model.register_forward_pre_hook(lambda *a: calls.append(1))
    predict_peaks(model, BATCH, LENGTH)
    assert not calls
    assert model.config._attn_implementation == attention
    assert [getattr(m, "gradient_checkpointing", None) for m in model.modules()] == flags
    assert len(model.model.layers) == LAYERS
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_states_of_ddp_with_adamw_are_sixteen_bytes_a_weight_besides_buffers_and_inputs() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(FAMILIES["llama"]())
    weights = sum(p.numel() for p in model.parameters())
    rotary = 2 * (128 // 4 // 2) * 4  # inverse frequencies of one head, and the original ones
    inputs = 2 * BATCH * LENGTH * 8  # ids and labels
    predicted = predict_peaks(model, BATCH, LENGTH, gradient_buckets=True)
    assert predicted.state_bytes == 16 * weights + rotary + inputs


def test_more_recompute_never_needs_more_in_these_models_and_the_fewest_that_fit_are_found() -> None:
    prediction = PeakPrediction(3, 10, (100, 80, 60, 50), ("a", "a", "a", "b"))
    assert prediction.fewest_recomputed(100) == 0
    assert prediction.fewest_recomputed(99) == 1
    assert prediction.fewest_recomputed(60) == 2
    assert prediction.fewest_recomputed(49) is None


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(UserError, match="blocks are none"):
        predict_peaks(torch.nn.Linear(3, 3), 1, 8)


def test_a_model_that_cannot_be_traced_is_refused_in_one_line() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(FAMILIES["llama"]())
    model.lm_head = torch.nn.Linear(7, 7, device="meta")  # does not fit
    with pytest.raises(UserError, match="cannot be predicted") as caught:
        predict_peaks(model, BATCH, LENGTH)
    assert len(str(caught.value).splitlines()) == 1


def test_live_bytes_follow_storages_and_not_views() -> None:
    with LiveBytes() as counter:
        counter.mark("first")
        a = torch.zeros(256, dtype=torch.float32)
        b = a[10:20]  # no storage of its own
        c = a + 1
        del a
        counter.mark("second")
        del b, c
        counter.mark("end")
    assert counter.segments == [Segment("first", 2048, 2048), Segment("second", 0, -2048)]
    assert counter.live == 0


def test_walk_finds_the_highest_point() -> None:
    segments = [Segment("up", 30, 20), Segment("top", 25, -5), Segment("down", 10, -15)]
    assert walk(100, segments) == (145, "top")
    assert walk(7, []) == (7, "")
