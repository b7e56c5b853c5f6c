"""Predicted peaks of live bytes against those of real training steps, counted by torch's profiler."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, LlamaConfig, MixtralConfig, Qwen3Config

from training_xpu.blocks import LOSS, publish
from training_xpu.errors import UserError
from training_xpu.recompute.prediction.ledger import PARTS
from training_xpu.recompute.prediction.live_bytes import Event, LiveBytes, Segment, Stretch
from training_xpu.recompute.prediction.predict import PeakPrediction, predict_peaks
from training_xpu.recompute.prediction.setting import TrainingSetting
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


def plain(dtype: Any = "fp32") -> TrainingSetting:
    return TrainingSetting(dtype=dtype, batch_size=BATCH, sequence_length=LENGTH)


def in_chunks(model: Any, input_ids: torch.Tensor, labels: torch.Tensor, **more: Any) -> torch.Tensor:
    """The loss of a Llama from 64 tokens at a time; a chunk's logits are computed again in the backward."""

    def of_chunk(hidden: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model.lm_head(hidden).float(), wanted, reduction="sum")

    hidden = model.model(input_ids=input_ids, use_cache=False).last_hidden_state.flatten(0, 1)
    total = torch.zeros(())
    for part, wanted in zip(hidden.split(64), labels.flatten().split(64), strict=True):
        total = total + checkpoint(of_chunk, part, wanted, use_reentrant=False)
    return total / labels.numel()


def measured_peak(config: Any, recomputed: int, dtype: str, loss_of: Any = None) -> int:
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
            loss = loss_of(model, tokens, tokens) if loss_of else model(input_ids=tokens, labels=tokens).loss
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
    predicted = predict_peaks(model, plain(dtype))
    assert predicted.blocks == LAYERS
    for recomputed in (0, 2, LAYERS):
        measured = measured_peak(FAMILIES[family](), recomputed, dtype)
        assert predicted.peaks[recomputed] == pytest.approx(measured, rel=0.015), recomputed


def test_a_loss_that_another_feature_publishes_is_the_one_that_is_predicted() -> None:
    sizes = {**SIZES, "vocab_size": 8192, "num_hidden_layers": LAYERS}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes))
    whole = predict_peaks(model, plain()).peaks
    publish(model, LOSS, in_chunks)
    predicted = predict_peaks(model, plain()).peaks
    for recomputed in (0, LAYERS):
        measured = measured_peak(LlamaConfig(**sizes), recomputed, "fp32", in_chunks)
        assert predicted[recomputed] == pytest.approx(measured, rel=0.015)
    # Full logits in fp32 and their gradient: 256 tokens instead of 64.
    assert whole[LAYERS] - predicted[LAYERS] > 2 * (BATCH * LENGTH - 64) * 8192 * 4 * 0.9


def test_the_model_asked_about_stays_as_it_was() -> None:
    model = AutoModelForCausalLM.from_config(FAMILIES["llama"]())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attention = model.config._attn_implementation
    flags = [getattr(m, "gradient_checkpointing", None) for m in model.modules()]
    calls = []
    model.register_forward_pre_hook(lambda *a: calls.append(1))
    predict_peaks(model, plain())
    assert not calls
    assert model.config._attn_implementation == attention
    assert [getattr(m, "gradient_checkpointing", None) for m in model.modules()] == flags
    assert len(model.model.layers) == LAYERS
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def peaks_of(*peaks: int) -> PeakPrediction:
    kinds = ("Layer",) * (len(peaks) - 1)
    return PeakPrediction(kinds, kinds, peaks, ("head",) * len(peaks), tuple({} for _ in peaks), {})


def test_the_fewest_recomputed_blocks_that_fit_are_found() -> None:
    prediction = peaks_of(100, 80, 60, 50)
    assert prediction.blocks == 3
    assert prediction.fewest_recomputed(100) == 0
    assert prediction.fewest_recomputed(99) == 1
    assert prediction.fewest_recomputed(60) == 2
    assert prediction.fewest_recomputed(49) is None


@pytest.mark.parametrize("engine", ["plain", "ddp", "fsdp", "zero0", "zero1", "zero2", "zero3"])
def test_parts_add_up_to_the_peak(engine: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(FAMILIES["llama"]())
    deepspeed = engine.startswith("zero")
    setting = TrainingSetting(
        engine="deepspeed" if deepspeed else engine,  # type: ignore[arg-type]
        zero_stage=int(engine[-1]) if deepspeed else 0,
        world_size=1 if engine == "plain" else 4,
        dtype="bf16",
        batch_size=BATCH,
        sequence_length=LENGTH,
        gradient_accumulation=2,
        reduce_bucket_elements=100_000,
    )
    prediction = predict_peaks(model, setting)
    for count, peak in enumerate(prediction.peaks):
        parts = prediction.parts(count)
        assert sum(parts.values()) == peak
        assert tuple(parts) == PARTS
        assert all(size >= 0 for size in parts.values()), parts
    assert prediction.kinds == ("LlamaDecoderLayer",) * LAYERS
    assert prediction.names == tuple(f"model.layers.{i}" for i in range(LAYERS))


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(UserError, match="no repeated blocks"):
        predict_peaks(torch.nn.Linear(3, 3), plain())


def test_a_model_that_cannot_be_traced_is_refused_in_one_line() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(FAMILIES["llama"]())
    model.lm_head = torch.nn.Linear(7, 7, device="meta")  # does not fit
    with pytest.raises(UserError, match="cannot be predicted") as caught:
        predict_peaks(model, plain())
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
    assert counter.segments == [Segment("first", (Stretch(2048, 2048),)), Segment("second", (Stretch(0, -2048),))]
    assert counter.live == 0


def test_events_cut_a_segment_into_stretches() -> None:
    with LiveBytes() as counter:
        counter.mark("only")
        a = torch.zeros(100, dtype=torch.uint8)
        counter.note("gradient", 7)
        b = torch.zeros(50, dtype=torch.uint8)
        del a, b
        counter.mark("end")
    segment = counter.segments[0]
    assert segment.steps == (Stretch(100, 100), Event("gradient", 7), Stretch(50, -100))
    assert (segment.peak, segment.net) == (150, 0)


def test_what_was_there_before_does_not_count_when_it_is_viewed() -> None:
    weight = torch.zeros(256)
    with LiveBytes() as counter:
        counter.know(weight)
        counter.mark("only")
        view = weight.view(16, 16)
        copied = view + 1
        counter.mark("end")
    assert counter.segments[0].net == copied.nbytes


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_gradients_never_reach_of_a_bucket_is_told(stage: int) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(FAMILIES["llama"]())
    elements = sum(p.numel() for p in model.parameters())
    setting = TrainingSetting(engine="deepspeed", zero_stage=stage, world_size=2, batch_size=2, sequence_length=32)
    prediction = predict_peaks(model, setting)
    assert prediction.untouched_bytes == (500_000_000 - elements) * 4
    small = predict_peaks(model, replace(setting, reduce_bucket_elements=elements // 2))
    assert small.untouched_bytes == 0
    assert predict_peaks(model, replace(setting, device_type="cuda")).untouched_bytes == 0
