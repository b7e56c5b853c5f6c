"""Finding the workload a user means, and refusing what cannot be trained."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from training_xpu.errors import ExitCode, UserError
from training_xpu.workloads.architecture import read_architecture
from training_xpu.workloads.catalogue import ENGINES, catalogue_model, local_model, model_names, resolve, targets
from training_xpu.workloads.config import EngineName
from training_xpu.workloads.flops import ModelFlops

TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 256,
}


def folder_with(path: Path, config: Any = TINY) -> Path:
    path.mkdir(exist_ok=True)
    text = config if isinstance(config, str) else json.dumps(config)
    (path / "config.json").write_text(text, encoding="utf-8")
    return path


def test_the_catalogue_has_the_models_that_were_promised() -> None:
    assert set(model_names()) == {
        "llama3-8b",
        "llama3.1-70b",
        "llama3.2-1b",
        "qwen2.5-7b",
        "qwen3-8b",
        "mixtral-8x7b",
    }
    assert set(ENGINES) == {engine.value for engine in EngineName}


@pytest.mark.parametrize("name", model_names())
def test_each_entry_is_complete(name: str) -> None:
    model = catalogue_model(name)
    arch = read_architecture(model.config)
    assert model.source.startswith("https://huggingface.co/")
    assert model.target_device in targets()
    assert arch.known_family
    assert arch.max_positions is not None
    assert model.sequence_length <= arch.max_positions
    assert model.target_world_size >= 1


def test_reading_the_catalogue_imports_nothing_heavy() -> None:
    code = (
        "import sys; from training_xpu.workloads import catalogue, proxy\n"
        "[catalogue.catalogue_model(name) for name in catalogue.model_names()]\n"
        "print([name for name in ('torch', 'transformers', 'pydantic', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_engine_and_catalogue_name() -> None:
    workload = resolve("fsdp/qwen3-8b")
    assert workload.engine is EngineName.FSDP
    assert workload.model.name == "qwen3-8b"
    assert workload.initial_weights is None


@pytest.mark.parametrize(
    ("asked", "problem", "remedy"),
    [
        ("deepspeed/llama3-8", "unknown model 'llama3-8'", "deepspeed/llama3-8b"),
        ("deepspeed/Llama3-8B", "unknown model", "Did you mean deepspeed/llama3-8b"),
        ("deepspeed/meta-llama/Llama-3.1-70B", "unknown model", "A path begins with"),
        ("deepsped/llama3-8b", "unknown engine 'deepsped'", "Did you mean deepspeed?"),
        ("llama3-8b", "names no engine", "Did you mean deepspeed/llama3-8b?"),
        ("lama3-8b", "not of the form engine/model", "Did you mean deepspeed/llama3-8b"),
        ("llama3-8b/deepspeed", "not of the form engine/model", "Did you mean deepspeed/llama3-8b"),
        ("qwen3-8b/fsdp", "not of the form engine/model", "Did you mean fsdp/qwen3-8b"),
        ("ddp", "names no model", "Did you mean ddp/"),
        ("ddp/", "names no model", "Did you mean ddp/"),
        ("./my-model", "names no engine", "Did you mean deepspeed/./my-model?"),
        ("/data/my-model", "names no engine", "Did you mean deepspeed//data/my-model?"),
        ("", "not of the form engine/model", "deepspeed/llama3-8b"),
    ],
)
def test_misnamed_workloads_get_the_nearest_right_one(asked: str, problem: str, remedy: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve(asked)
    assert problem in caught.value.problem
    assert remedy in caught.value.remedy
    assert caught.value.exit_code is ExitCode.USAGE


def test_a_folder_named_without_its_path_is_pointed_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder_with(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        resolve("ddp/mine")
    assert caught.value.remedy.endswith("ddp/./mine")
    with pytest.raises(UserError, match="'mine' names no engine") as caught:
        resolve("mine")
    assert caught.value.remedy == "Did you mean the folder, deepspeed/./mine?"
    with pytest.raises(UserError, match="unknown model 'mine'") as caught:
        catalogue_model("mine")
    assert caught.value.remedy.endswith("./mine")


def test_a_local_config_is_completed_with_its_class_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder_with(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    relative, absolute = resolve("deepspeed/./mine"), resolve(f"fsdp/{tmp_path}/mine")
    assert relative.model.config == absolute.model.config
    assert relative.model.config["rms_norm_eps"] == 1e-6
    assert relative.model.config["tie_word_embeddings"] is False
    assert relative.initial_weights is None
    assert relative.model.sequence_length == 256
    assert relative.model.target_micro_batch == 4


def test_a_local_checkpoint_is_where_training_starts(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    saved = tmp_path / "mine"
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY)).save_pretrained(saved)
    workload = resolve(f"ddp/{saved}")
    assert workload.initial_weights == saved
    again = AutoModelForCausalLM.from_config(AutoConfig.for_model(**dict(workload.model.config)))
    counted = ModelFlops.from_config(workload.model.config).parameters
    assert sum(p.numel() for p in again.parameters()) == counted


def test_a_checkpoint_with_files_missing_is_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "mine")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="lacks 1 of 2 weight files, such as model-00002"):
        local_model(str(folder))


@pytest.mark.parametrize(
    ("config", "problem", "remedy"),
    [
        ("{not json", "is not valid JSON", "save the model again"),
        ("[1]", "holds no JSON object", ""),
        ({**TINY, "model_type": None}, "has no model_type", "llama"),
        ({**TINY, "model_type": "lama"}, "does not know model type 'lama'", "llama"),
        ({**TINY, "model_type": "mine", "auto_map": {"AutoConfig": "x.Y"}}, "auto_map) is not run", ""),
        ({"model_type": "vit"}, "'vit' is no causal language model", "decoder-only"),
        ({**TINY, "num_attention_heads": 3, "num_key_value_heads": 3}, "multiple of", "Correct config.json"),
        ({**TINY, "num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3", "correct config.json"),
        ({**TINY, "hidden_size": "64"}, "not a valid llama config", "Correct config.json"),
        ({**TINY, "quantization_config": {"bits": 4}}, "quantised", "before it was quantised"),
        (
            {**TINY, "model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3},
            "more than the 2 experts",
            "",
        ),
        ({"model_type": "mamba"}, "state-space layers", "decoder-only"),
        ({**TINY, "model_type": "phi"}, "cannot be counted", "Known: "),
    ],
)
def test_configs_that_cannot_be_trained_are_refused(tmp_path: Path, config: Any, problem: str, remedy: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve(f"deepspeed/{folder_with(tmp_path / 'mine', config)}")
    assert problem in caught.value.problem
    assert str(tmp_path) in caught.value.problem
    assert remedy in caught.value.remedy
    assert "\n" not in caught.value.problem + caught.value.remedy


def test_a_model_type_without_facts_is_used_when_its_parameters_are_explained(tmp_path: Path) -> None:
    model = local_model(str(folder_with(tmp_path / "mine", {**TINY, "model_type": "stablelm"})))
    assert not read_architecture(model.config).known_family


@pytest.mark.parametrize("content", [None, "adapter_config.json"])
def test_a_folder_without_config(tmp_path: Path, content: str | None) -> None:
    if content:
        (tmp_path / content).write_text("{}", encoding="utf-8")
    with pytest.raises(UserError) as caught:
        resolve(f"ddp/{tmp_path}")
    assert "has no config.json" in caught.value.problem
    assert ("adapter" in caught.value.remedy) == bool(content)


def test_paths_that_are_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no folder"):
        resolve(f"ddp/{tmp_path}/nowhere")
    folder_with(tmp_path)
    with pytest.raises(UserError, match="is no folder"):
        resolve(f"ddp/{tmp_path}/config.json")
