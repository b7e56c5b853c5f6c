"""Builds a model without memory for it: `python -m training_xpu.workloads.model_probe QUESTION ANSWER`.

The model is built on torch's meta device, which keeps shapes and no numbers, and of weight files only the headers are
read: a second for any size, beside the imports. `model_check` starts it.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from training_xpu.engines.model import hf_config
from training_xpu.errors import UserError, nearest
from training_xpu.workloads.architecture import FAMILIES, read_architecture
from training_xpu.workloads.catalogue import quiet_transformers
from training_xpu.workloads.model_check import Answer, Question
from training_xpu.workloads.weight_files import Shapes, stored_shapes, weight_files

CORRECT = "Correct config.json, or save the model again."
_IN_A_BLOCK = re.compile(r"\.\d+\.")
_TOKENS = 4  # of the forward pass
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
_NO_TOKEN = -1  # older configs say so where newer ones have null


def check(question: Question) -> None:
    """
    Raises:
        UserError: the config describes no model that can be built and run, or the weights are damaged or not its own.
    """
    built = check_config(question.config, question.where)
    if question.weights is not None:
        _check_generation_config(question.weights)
        check_weights(built, stored_shapes(weight_files(question.weights)), question.weights)


def check_config(config: Mapping[str, Any], where: str) -> torch.nn.Module:
    """The model of a config, on the meta device.

    Args:
        config: the fields of a config.json, with `model_type`.
        where: what to call it in errors.

    Raises:
        UserError: a value is impossible, transformers cannot build the model, or its forward pass fails.
    """
    arch = read_architecture(config)
    for problem, remedy in _problems(config, arch.vocabulary):
        raise UserError(f"{where}: {problem}", remedy)
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    with quiet_transformers(), torch.device("meta"):
        try:
            model: torch.nn.Module = auto.from_config(hf_config(dict(config)), dtype=torch.bfloat16)
        except Exception as error:
            raise UserError(f"{where}: transformers cannot build this model: {_first_line(error)}", CORRECT) from error
        if arch.known_family:  # of others it is not known which of their inputs would do
            try:
                _forward(model, min(_TOKENS, arch.max_positions or _TOKENS))
            except Exception as error:
                raise UserError(
                    f"{where}: the forward pass of this model fails: {_first_line(error)}", CORRECT
                ) from error
    if not _rotary_is_finite(model):
        raise UserError(f"{where}: the rotary embedding is not finite with these rope settings", CORRECT)
    return model


def _problems(config: Mapping[str, Any], vocabulary: int) -> Iterator[tuple[str, str]]:
    """Values that torch or transformers would trip over only later, or in words of their own."""
    from transformers.activations import ACT2FN

    for name in _ACTIVATIONS:
        value = config.get(name)
        if isinstance(value, str) and value not in ACT2FN:
            yield f"{name} is {value!r}, which is no activation function", nearest(value, ACT2FN)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        value = config.get(name)
        for token in value if isinstance(value, list) else [value]:
            if token is not None and not (isinstance(token, int) and _NO_TOKEN <= token < vocabulary):
                yield (
                    f"{name} is {token}, outside the vocabulary of {vocabulary} tokens",
                    f"Correct it to 0 to {vocabulary - 1}, or null; or correct vocab_size.",
                )
    for name, value in config.items():
        if name.endswith(("dropout", "_pdrop")) and _is_number(value) and not 0 <= value <= 1:
            yield f"{name} is {value}, which is no probability", "Correct it to 0 to 1."
    yield from _rope_problems(config, "")


def _rope_problems(rope: Mapping[str, Any], inside: str) -> Iterator[tuple[str, str]]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    known = {*ROPE_INIT_FUNCTIONS, "default"}
    kind = rope.get("rope_type", rope.get("type")) if inside else None
    if isinstance(kind, str) and kind not in known:
        yield f"the rope_type of {inside} is {kind!r}, which transformers does not know", nearest(kind, known)
    for name in ("rope_theta", "factor", "original_max_position_embeddings"):
        value = rope.get(name) if inside or name == "rope_theta" else None
        if value is not None and not (_is_number(value) and 0 < value < math.inf):
            yield f"{name}{f' of {inside}' if inside else ''} is {value!r}; a positive number is needed", CORRECT
    for name, value in rope.items():
        if isinstance(value, Mapping) and (inside or name in ("rope_parameters", "rope_scaling")):
            yield from _rope_problems(value, name)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _forward(model: torch.nn.Module, length: int) -> None:
    """With mask and positions given: those that a model makes itself depend on numbers, of which there are none."""
    ids = torch.zeros(1, length, dtype=torch.long)
    mask = torch.zeros(1, 1, length, length, dtype=torch.bfloat16)
    model.train()
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask, position_ids=ids, use_cache=False)


def _rotary_is_finite(model: torch.nn.Module) -> bool:
    """Makes the small tables of frequencies in earnest; False where they hold NaN or infinity."""
    for module in model.modules():
        if any("inv_freq" in name for name, _ in module.named_buffers(recurse=False)):
            make: Any = type(module)
            try:
                with quiet_transformers():
                    made = make(model.config)
            except Exception:  # made in some other way: nothing can be said
                continue
            if not all(bool(torch.isfinite(table).all()) for table in made.buffers()):
                return False
    return True


def _check_generation_config(folder: Path) -> None:
    """It is read, and written again, together with the weights."""
    if not (folder / "generation_config.json").exists():
        return
    from transformers import GenerationConfig

    try:
        with quiet_transformers():
            GenerationConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise UserError(
            f"{folder / 'generation_config.json'} cannot be read: {_first_line(error)}", "Correct or remove it."
        ) from error


def check_weights(model: torch.nn.Module, stored: Shapes, folder: Path) -> None:
    """Compares names and shapes.

    Names are compared as they stand and with or without the prefix of the model without its head. What has the same
    name must have the same shape, and no block may lack a tensor. A single missing head is left to transformers, which
    knows older names of it, and so are model types whose tensors transformers rearranges while loading, such as those
    with experts.

    Args:
        model: on the meta device.
        stored: from `stored_shapes`.
        folder: what to call it in errors.

    Raises:
        UserError: the two do not belong together.
    """
    if not stored:
        return
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    prefix = str(getattr(model, "base_model_prefix", "")) + "."
    found: Shapes = {}
    for name, shape in stored.items():
        other = (name, prefix + name, name.removeprefix(prefix))
        found[next((n for n in other if n in expected), name)] = shape
    for name, shape in found.items():
        if name in expected and shape != expected[name]:
            raise UserError(
                f"{folder}: the weights do not match config.json: {name} has shape {list(shape)}, "
                f"the config gives {list(expected[name])}",
                CORRECT,
            )
    config: Any = model.config
    missing = _missing(model, expected, found)
    if len(missing) < len(expected):
        missing = [name for name in missing if _IN_A_BLOCK.search(name)]
    if missing and config.model_type in FAMILIES and not _is_rearranged(config.model_type):
        raise UserError(
            f"{folder}: the weights do not match config.json: {len(missing)} of {len(expected)} tensors are missing, "
            f"such as {missing[0]}",
            CORRECT,
        )


def _missing(model: torch.nn.Module, expected: Shapes, found: Shapes) -> list[str]:
    """Tensors that are stored under none of their names; tied ones have several, of which one is enough."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    ignored: Any = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    return [
        name
        for group in names.values()
        for name in group[:1]
        if not any(n in found for n in group) and not any(re.search(pattern, name) for pattern in ignored)
    ]


def _is_rearranged(model_type: str) -> bool:
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    except ImportError:
        return False
    return get_checkpoint_conversion_mapping(model_type) is not None  # type: ignore[no-untyped-call]


def _first_line(error: Exception) -> str:
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def main(question: Path, answer: Path) -> int:
    """Reads a `Question` and writes an `Answer`; what libraries print does not matter."""
    asked = Question.read(question)
    try:
        check(asked)
        told = Answer()
    except UserError as error:
        told = Answer(problem=error.problem, remedy=error.remedy)
    told.write(answer)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
