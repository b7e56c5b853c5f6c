"""The weight files of a local Hugging Face checkpoint: which there are, and which tensors they say they hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from training_xpu.errors import UserError

Shapes = dict[str, tuple[int, ...]]

_SAVE_AGAIN = "Save the model again, or remove the file to start from random weights."


def weight_files(folder: Path) -> list[Path]:
    """The files that transformers would load, none where the folder holds no weights.

    Raises:
        UserError: an index is damaged or names files that are not there.
    """
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).exists():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if not index.exists():
            continue
        try:
            files = sorted({str(file) for file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise UserError(f"{index} is no index of weights", "Save the model again.") from error
        missing = [file for file in files if not (folder / file).exists()]
        if missing:
            raise UserError(
                f"{folder} lacks {len(missing)} of {len(files)} weight files, such as {missing[0]}",
                "Fetch them, or remove the index to start from random weights.",
            )
        return [folder / file for file in files]
    return []


def stored_shapes(files: list[Path]) -> Shapes:
    """Name -> shape of every tensor, from the headers alone. Files of torch's oldest format have none and are skipped.

    Raises:
        UserError: a file is empty, cut short or no weights.
    """
    found: Shapes = {}
    for file in files:
        if not file.is_file():
            raise UserError(f"{file} is no regular file", _SAVE_AGAIN)
        if file.stat().st_size == 0:
            raise UserError(f"{file} is empty", _SAVE_AGAIN)
        found |= _in_safetensors(file) if file.suffix == ".safetensors" else _in_pickle(file)
    return found


def _in_safetensors(file: Path) -> Shapes:
    from safetensors import safe_open

    try:
        with safe_open(str(file), framework="numpy") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except Exception as error:  # the library has a kind of its own, and OSError
        raise _damaged(file, error) from error


def _in_pickle(file: Path) -> Shapes:
    import torch

    with file.open("rb") as stream:
        head = stream.read(2)
    if head == b"\x80\x02":
        return {}
    try:
        loaded: Any = torch.load(file, map_location="meta", weights_only=True, mmap=True)
        return {str(name): tuple(tensor.shape) for name, tensor in loaded.items()}
    except Exception as error:  # torch raises many kinds for damaged files
        raise _damaged(file, error) from error


def _damaged(file: Path, error: Exception) -> UserError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return UserError(f"{file} is damaged or cut short: {reason[:200]}", _SAVE_AGAIN)
