"""Models with blocks of several kinds, models of one's own, and inputs of one's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, Gemma3TextConfig, Qwen2MoeConfig

from training_xpu.blocks import find_blocks
from training_xpu.errors import UserError
from training_xpu.recompute.prediction.model_blocks import blocks_of, select
from training_xpu.recompute.prediction.predict import predict_peaks
from training_xpu.recompute.prediction.setting import TrainingSetting
from training_xpu.workloads.live_bytes import measure_live_bytes

SETTING = TrainingSetting(batch_size=2, sequence_length=64)


class Layer(torch.nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(width, inner)
        self.down = torch.nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Own(torch.nn.Module):
    """Narrow and wide layers in turn, none of which has a switch of its own."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(64, 128 if i % 2 else 256) for i in range(layers))
        self.head = torch.nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Repeating(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](self.layers[0](x)))


def measured(model: Own, x: torch.Tensor, recomputed: int) -> int:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    plain = [layer.forward for layer in model.layers]
    for layer, forward in list(zip(model.layers, plain, strict=True))[:recomputed]:
        layer.forward = lambda x, f=forward: checkpoint(f, x, use_reentrant=False)  # type: ignore[method-assign]

    def step() -> None:
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    return measure_live_bytes(step).peak_bytes


def test_a_model_of_one_s_own_with_two_kinds_of_layers() -> None:
    with torch.device("meta"):
        model = Own(7)
    prediction = predict_peaks(model, SETTING, inputs={"x": torch.empty(512, 64, device="meta")})
    assert len(set(prediction.kinds)) == 2
    assert set(prediction.saved_bytes) == set(prediction.kinds)
    for recomputed in (0, 3, 7):
        real = measured(Own(7), torch.randn(512, 64), recomputed)
        assert prediction.peaks[recomputed] == pytest.approx(real, rel=0.02), recomputed


def test_a_loss_of_one_s_own_is_traced() -> None:
    with torch.device("meta"):
        model = Own(4)
    inputs = {"x": torch.empty(512, 64, device="meta")}
    plain = predict_peaks(model, SETTING, inputs=inputs)
    heavy = predict_peaks(model, SETTING, inputs=inputs, loss=lambda out: (out.repeat(1, 500).exp()).sum())
    assert heavy.peaks[0] > plain.peaks[0] + 4 * 512 * 10 * 500  # at least what exp keeps


def test_layers_with_different_attention_are_of_different_kinds_and_all_stand_for_themselves() -> None:
    config = Gemma3TextConfig(
        num_hidden_layers=9,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=256,
        sliding_window=16,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 3,
    )
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    blocks = blocks_of(find_blocks(model), model)
    assert [b.kind.split("(")[-1] for b in blocks[:3]] == [
        "sliding_attention)",
        "sliding_attention)",
        "full_attention)",
    ]
    kept = select(model, blocks).kept
    assert {0, 8} <= set(kept)
    assert {blocks[i].kind for i in kept} == {b.kind for b in blocks}
    prediction = predict_peaks(model, SETTING)
    assert prediction.blocks == 9
    assert len(model.model.layers) == 9
    assert model.config.layer_types == config.layer_types


def test_dense_layers_among_layers_with_experts() -> None:
    config = Qwen2MoeConfig(
        num_hidden_layers=6,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        mlp_only_layers=[0, 3],
        vocab_size=256,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    prediction = predict_peaks(model, SETTING)
    dense, sparse = prediction.kinds[0], prediction.kinds[1]
    assert prediction.kinds == (dense, sparse, sparse, dense, sparse, sparse)
    assert dense != sparse


def test_a_block_that_runs_twice_is_refused() -> None:
    with pytest.raises(UserError, match="more than once"):
        predict_peaks(Repeating(), SETTING, inputs={"x": torch.empty(4, 8)})
