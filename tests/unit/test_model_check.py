"""Model folders that are broken in every way found so far, refused without loading a weight."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from training_xpu.engines.model import hf_config
from training_xpu.errors import UserError
from training_xpu.workloads import model_check, model_probe
from training_xpu.workloads.architecture import FAMILIES
from training_xpu.workloads.catalogue import catalogue_model, complete_config, local_model, model_names
from training_xpu.workloads.model_check import Question
from training_xpu.workloads.weight_files import stored_shapes, weight_files

TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
GPT2 = {"n_embd": 64, "n_head": 4, "n_layer": 2}


def put(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**TINY, **changes}))
    return folder


def check(folder: Path) -> None:
    """What `--model ddp/FOLDER` goes through, within this process."""
    model = local_model(str(folder))
    model_probe.check(Question(config=dict(model.config), where=f"{folder}/config.json", weights=model.weights))


def fault(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        check(folder)
    assert caught.value.exit_code == 2
    assert "\n" not in caught.value.problem
    assert str(folder) in caught.value.problem
    return f"{caught.value.problem}\n{caught.value.remedy}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny model and its weights."""
    folder = put(tmp_path_factory.mktemp("model") / "whole")
    AutoModelForCausalLM.from_config(hf_config(complete_config(TINY, "it"))).save_pretrained(folder)
    return folder


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


@pytest.mark.parametrize("name", model_names())
def test_the_models_of_the_catalogue_are_sound(name: str) -> None:
    model_probe.check_config(catalogue_model(name).config, name)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_saves_of_a_family_is_sound(family: str, tmp_path: Path) -> None:
    """Also where tensors are stored under other names than the module's, or tied ones only once."""
    sparse = EXPERTS if "moe" in family or family == "mixtral" else {}
    config = {**TINY, "model_type": family, **sparse, **(GPT2 if family == "gpt2" else {})}
    built = AutoModelForCausalLM.from_config(hf_config(complete_config(config, family)))
    built.save_pretrained(tmp_path)
    check(tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    torch.save(built.state_dict(), tmp_path / "pytorch_model.bin")
    check(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "nope"}, "hidden_act is 'nope', which is no activation function"),
        ({"hidden_act": "silo"}, "Did you mean silu"),
        ({"pad_token_id": 512}, "pad_token_id is 512, outside the vocabulary of 512 tokens|0 to 511"),
        ({"eos_token_id": 10**9}, "eos_token_id is 1000000000"),
        ({"eos_token_id": [2, 600]}, "eos_token_id is 600"),
        ({"bos_token_id": -7}, "bos_token_id is -7"),
        ({"rope_parameters": {"rope_type": "nope", "rope_theta": 1e4}}, "rope_type of rope_parameters is 'nope'"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": -2}}, "factor of rope_parameters"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0}}, "a positive number is needed"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "factor"),
        ({"rope_parameters": "x"}, "rope_parameters"),
        ({"rope_theta": -5}, "rope_theta"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": "x"}, "rope_theta"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, "short_factor": [1.0] * 3,
                              "long_factor": [1.0] * 3}}, "transformers cannot build this model"),
        ({"head_dim": 3}, "head_dim|forward pass"),
        ({"attention_dropout": 7.0}, "attention_dropout is 7.0, which is no probability"),
        ({"max_window_layers": "x", "model_type": "qwen2"}, "max_window_layers"),
        ({"layer_types": "x"}, "layer_types"),
        ({"dtype": "nope"}, "nope"),
        ({"hidden_size": 10**12}, "hidden_size = 1000000000000; at most"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000; at most 10000"),
        ({"num_attention_heads": 10**9, "num_key_value_heads": 10**9}, "heads"),
    ],
)  # fmt: skip
def test_values_that_cannot_be(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    text = fault(put(tmp_path / "model", **changes))
    assert any(word in text for word in words.split("|"))


def test_older_configs_say_minus_one_for_no_token(tmp_path: Path) -> None:
    check(put(tmp_path / "model", pad_token_id=-1))


def test_a_rotary_table_that_is_not_finite_is_noticed_whatever_setting_made_it() -> None:
    config = {**complete_config(TINY, "it"), "rope_parameters": {"rope_type": "default", "rope_theta": 1e-320}}
    with pytest.raises(UserError, match="rotary embedding is not finite"):
        model_probe.check_config(config, "it")


@pytest.mark.parametrize(
    ("content", "word"),
    [("[]", "no JSON object"), ("7", "no JSON object"), ("", "not valid JSON"), ("[" * 200_000, "not valid JSON")],
)
def test_configs_that_are_no_object(content: str, word: str, tmp_path: Path) -> None:
    folder = put(tmp_path / "model")
    (folder / "config.json").write_text(content)
    assert word in fault(folder)


def test_a_config_that_is_no_file(tmp_path: Path) -> None:
    folder = put(tmp_path / "model")
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    assert "no regular file" in fault(folder)


def test_whole_weights_pass(model: Path) -> None:
    check(model)
    shapes = stored_shapes(weight_files(model))
    assert shapes["model.embed_tokens.weight"] == (512, 64)
    assert shapes["model.layers.1.mlp.down_proj.weight"] == (64, 176)


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda file: file.write_bytes(b""), "is empty"),
        (lambda file: file.write_bytes(b"\0" * 4), "damaged or cut short"),
        (lambda file: file.write_bytes(file.read_bytes()[:1000]), "damaged or cut short"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "damaged or cut short"),
        (lambda file: file.write_bytes(b"\xff" * 100), "damaged or cut short"),
        (lambda file: (file.unlink(), file.mkdir()), "no regular file"),
    ],
)
def test_damaged_weights(model: Path, spoil: Any, word: str) -> None:
    spoil(model / "model.safetensors")
    assert word in fault(model)


def test_weights_of_torch_s_own_format(model: Path) -> None:
    state = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    file = model / "pytorch_model.bin"
    torch.save(state, file)
    check(model)
    file.write_bytes(file.read_bytes()[:-100])
    assert "damaged or cut short" in fault(model)
    file.write_bytes(b"hello, no weights here")
    assert "damaged or cut short" in fault(model)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"hidden_size": 128, "head_dim": 16}, "has shape"),
        ({"vocab_size": 500}, "lm_head.weight has shape [512, 64], the config gives [500, 64]"),
        ({"intermediate_size": 160}, "the config gives"),
        ({"num_hidden_layers": 3}, "9 of 30 tensors are missing, such as model.layers.2."),
    ],
)
def test_weights_of_another_config(model: Path, changes: dict[str, Any], word: str) -> None:
    saved = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**saved, **changes}))
    text = fault(model)
    assert "the weights do not match config.json" in text
    assert word in text


def test_weights_of_something_else(model: Path) -> None:
    save_file({"a": torch.zeros(2)}, model / "model.safetensors")
    assert "21 of 21 tensors are missing" in fault(model)


def test_weights_without_the_head_are_left_to_transformers(model: Path) -> None:
    state = load_file(model / "model.safetensors")
    body = {name.removeprefix("model."): t for name, t in state.items() if name != "lm_head.weight"}
    save_file(body, model / "model.safetensors", metadata={"format": "pt"})
    check(model)


@pytest.mark.parametrize("content", ["[]", "{", '{"weight_map": 7}', '{"weight_map": {"a": "gone.safetensors"}}'])
def test_indices_of_weights(model: Path, content: str) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(content)
    assert "index" in fault(model) or "gone.safetensors" in fault(model)


@pytest.mark.parametrize("content", ["[]", "{", ""])
def test_a_broken_generation_config_beside_weights(model: Path, content: str) -> None:
    (model / "generation_config.json").write_text(content)
    assert "generation_config.json cannot be read" in fault(model)


def test_the_question_is_asked_in_a_process_of_its_own_and_a_good_answer_kept(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRAINING_XPU_CACHE", str(tmp_path / "cache"))
    found = local_model(str(model))
    broken = {**found.config, "hidden_act": "nope"}
    with pytest.raises(UserError, match="it: hidden_act is 'nope'"):
        model_check.check_model(broken, "it")
    asked: list[Any] = []
    ask = model_check._ask
    monkeypatch.setattr(model_check, "_ask", lambda question: asked.append(question) or ask(question))
    for _ in range(2):
        model_check.check_model(found.config, "it", found.weights)
    assert len(asked) == 1
    with pytest.raises(UserError):  # what failed is not kept
        model_check.check_model(broken, "it")
    (model / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-1])
    with pytest.raises(UserError, match="damaged or cut short"):
        model_check.check_model(found.config, "it", found.weights)
    assert len(asked) == 3
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""
