"""The models that can be trained: published configs, kept as data, and any local Hugging Face model folder."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training_xpu import envs
from training_xpu.errors import UserError, nearest
from training_xpu.workloads.architecture import FAMILIES, read_architecture
from training_xpu.workloads.flops import ModelFlops
from training_xpu.workloads.weight_files import weight_files

if TYPE_CHECKING:
    from training_xpu.workloads.config import EngineName

ENGINES = ("deepspeed", "fsdp", "ddp", "transformers")
DEFAULT_ENGINE = "deepspeed"
_LOCAL_TARGET = ("nvidia-h100-80gb", 8)
_LOCAL_SEQUENCE = 4096
_LOCAL_TOKENS = 1024  # of a micro batch, when the model's sequences are shorter
_LARGEST_CONFIG = 64 << 20  # bytes
_COUNT_TOLERANCE = 0.01  # of the parameters: what norms and biases of an unknown family may differ by


@dataclass(frozen=True)
class Target:
    """A device that a workload is meant for."""

    name: str
    memory_bytes: int
    peak_bf16_flops: float  # FLOP/s, dense
    source: str


@dataclass(frozen=True)
class Model:
    """A model and how it is trained where it is meant to be."""

    name: str
    config: Mapping[str, Any]  # the fields of config.json
    source: str  # where the config was published, or its folder
    sequence_length: int  # tokens
    target_device: str  # a name in targets.yaml
    target_world_size: int
    target_micro_batch: int
    weights: Path | None = None  # folder of a local checkpoint to start from

    @property
    def is_folder(self) -> bool:
        """Whether it is a user's own, and not of the catalogue: then nobody has said what device it is meant for."""
        return _is_path(self.name)


@dataclass(frozen=True)
class Workload:
    """What the user asked for as engine/model."""

    name: str
    engine: EngineName
    model: Model

    @property
    def initial_weights(self) -> Path | None:
        return self.model.weights


def model_names() -> list[str]:
    """The names of the catalogue, sorted."""
    files = (resources.files(__package__) / "models").iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


@cache
def catalogue_model(name: str) -> Model:
    """Reads one entry of the catalogue.

    Raises:
        UserError: there is no such entry.
    """
    if name not in model_names():
        if Path(name).is_dir():
            raise UserError(f"unknown model {name!r}", f"A folder is named with its path: ./{name}")
        raise UserError(f"unknown model {name!r}", nearest(name, model_names()))
    entry = _read_yaml(f"models/{name}.yaml")
    target = entry["target"]
    return Model(
        name=name,
        config=entry["config"],
        source=entry["source"],
        sequence_length=entry["sequence_length"],
        target_device=target["device"],
        target_world_size=target["world_size"],
        target_micro_batch=target["micro_batch"],
    )


@cache
def targets() -> dict[str, Target]:
    """Target devices by name."""
    return {
        name: Target(name, entry["memory_bytes"], float(entry["peak_bf16_flops"]), entry["source"])
        for name, entry in _read_yaml("targets.yaml").items()
    }


def resolve(workload: str) -> Workload:
    """Finds the engine and the model of "engine/model".

    The model is a name of the catalogue, or a path that begins with ".", "/" or "~": a folder with a config.json,
    with or without weights (deepspeed/./my-model, fsdp//data/my-model).

    Raises:
        UserError: engine or model is unknown, or the folder holds no causal language model that can be trained here.
    """
    from training_xpu.workloads.config import EngineName

    engine, slash, model = workload.partition("/")
    if _is_path(workload) or not slash or engine not in ENGINES or not model:
        raise _misnamed(workload)
    if _is_path(model):
        return Workload(workload, EngineName(engine), local_model(model))
    if model not in model_names():
        if Path(model).is_dir():
            raise UserError(f"unknown model {model!r}", f"A folder is named with its path: {engine}/./{model}")
        raise UserError(f"unknown model {model!r}", _nearest_workload(engine, model))
    return Workload(workload, EngineName(engine), catalogue_model(model))


def local_model(path: str) -> Model:
    """Reads a folder with a Hugging Face config.json. Imports transformers.

    The config is completed with the defaults of its class, so that a record of it says everything.

    Raises:
        UserError: the folder holds no causal language model that can be trained here.
    """
    folder = envs.expand("the model", path)
    config = complete_config(_read_config(folder), f"{path}/config.json")
    positions = read_architecture(config).max_positions or _LOCAL_SEQUENCE
    length = min(_LOCAL_SEQUENCE, positions)
    device, world_size = _LOCAL_TARGET
    return Model(
        name=path,
        config=config,
        source=str(folder.absolute()),
        sequence_length=length,
        target_device=device,
        target_world_size=world_size,
        target_micro_batch=max(1, _LOCAL_TOKENS // length),
        weights=folder if weight_files(folder) else None,
    )


def complete_config(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Checks a config and fills in the defaults of its class. Imports transformers.

    Args:
        config: the fields of a config.json.
        where: what to call it in errors.

    Raises:
        UserError: it is no causal language model, unknown to the installed transformers, contradicts itself, is
            quantised, or has parts whose FLOPs cannot be counted.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise UserError(f"{where} has no model_type", "Name one, such as llama; see transformers' documentation.")
    if config.get("quantization_config"):
        raise UserError(f"{where} is of a quantised model", "Training needs the model before it was quantised.")

    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if model_type in CONFIG_MAPPING:
            raise UserError(
                f"{where}: model type {model_type!r} is no causal language model",
                "Choose a decoder-only text model, such as llama, qwen3 or mixtral.",
            )
        raise UserError(
            f"{where}: the installed transformers does not know model type {model_type!r}"
            + (", and code from a model folder (auto_map) is not run" if config.get("auto_map") else ""),
            _nearest_type(model_type, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        )
    try:
        with quiet_transformers():
            full: dict[str, Any] = AutoConfig.for_model(**dict(config)).to_dict()
    except Exception as error:
        reason = str(error).strip().splitlines()[-1].strip()
        raise UserError(f"{where} is not a valid {model_type} config: {reason}", "Correct config.json.") from error
    full = {key: value for key, value in full.items() if key not in ("_name_or_path", "transformers_version")}
    full |= {"model_type": model_type, "architectures": config.get("architectures")}
    try:
        arch = read_architecture(full)
        if not arch.known_family:
            _check_count(full, ModelFlops.from_architecture(arch).parameters)
    except UserError as error:
        raise UserError(f"{where}: {error.problem}", error.remedy) from error
    return full


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without transformers' warnings, which would stand beside our one line."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _check_count(config: Mapping[str, Any], counted: int) -> None:
    """A model type this project has no facts about is trusted only when its real module has the parameters counted."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            AutoConfig.for_model(**dict(config))
        )
    actual = sum(parameter.numel() for parameter in model.parameters())
    if abs(actual - counted) > _COUNT_TOLERANCE * actual:
        raise UserError(
            f"the FLOPs of model type {config['model_type']!r} cannot be counted: it has {actual} parameters, "
            f"of which {counted} are explained",
            "Known: " + ", ".join(sorted(FAMILIES)) + ".",
        )


def _read_config(folder: Path) -> dict[str, Any]:
    if not folder.exists():
        raise UserError(f"there is no folder {folder}", "Name a folder that holds a config.json.")
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder", f"Name the folder that holds config.json: {folder.parent}")
    file = folder / "config.json"
    if file.exists() and not file.is_file():
        raise UserError(f"{file} is no regular file", "Save the model again.")
    if not file.exists():
        adapter = (folder / "adapter_config.json").exists()
        raise UserError(
            f"{folder} has no config.json",
            "It holds an adapter: merge it into its base model first." if adapter else "Save the model there first.",
        )
    try:
        if file.stat().st_size > _LARGEST_CONFIG:
            raise UserError(f"{file} is far too large for a config", "Save the model again.")
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not valid JSON: {error}", "Correct it or save the model again.") from error
    if not isinstance(config, dict):
        raise UserError(f"{file} holds no JSON object", "Save the model again.")
    return config


def _read_yaml(name: str) -> Any:
    import yaml

    return yaml.safe_load((resources.files(__package__) / name).read_text(encoding="utf-8"))


def _is_path(name: str) -> bool:
    return name.startswith((".", "/", "~"))


def _misnamed(workload: str) -> UserError:
    """The error for a workload whose engine is missing or unknown, or that has engine and model the wrong way round."""
    first, _, rest = workload.partition("/")
    models = model_names()
    if _is_path(workload):
        return UserError(f"{workload} names no engine", f"Did you mean {DEFAULT_ENGINE}/{workload}?")
    if workload in models:
        return UserError(f"{workload!r} names no engine", f"Did you mean {DEFAULT_ENGINE}/{workload}?")
    if workload and first not in ENGINES and Path(workload).is_dir():
        return UserError(f"{workload!r} names no engine", f"Did you mean the folder, {DEFAULT_ENGINE}/./{workload}?")
    if first in ENGINES and not rest:
        return UserError(f"{workload!r} names no model", f"Did you mean {first}/{models[0]}?")
    if rest in ENGINES and first not in ENGINES:
        return UserError(f"{workload!r} is not of the form engine/model", _nearest_workload(rest, first))
    if not rest:
        return UserError(f"{workload!r} is not of the form engine/model", _nearest_workload(DEFAULT_ENGINE, first))
    return UserError(f"unknown engine {first!r}", nearest(first, ENGINES))


def _nearest_workload(engine: str, model: str) -> str:
    """A remedy that names whole workloads."""
    near = nearest(model, model_names())
    for name in model_names():
        near = near.replace(name, f"{engine}/{name}")
    return near + " A path begins with ./ or /."


def _nearest_type(model_type: str, known: Mapping[str, Any]) -> str:
    near = nearest(model_type, known)
    return near if near.startswith("Did you mean") else "Upgrade transformers, or choose a type it knows."
