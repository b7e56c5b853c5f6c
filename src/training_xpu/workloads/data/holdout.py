"""Writes documents as token files and holds some of them out for evaluation.

A document is held out when the hash of its text falls into the lowest twentieth. So the choice depends on the text
alone, not on its place, the seed or how much is read, and exact duplicates (up to line ends and outer blanks) share a
side. Data with few documents cannot be split that way; then whole groups of equal documents are held out in order of
hash.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

from training_xpu.workloads.data.tokenizer import TextTokenizer

HELD_OUT_SHARE = 0.05
_HASHES = 1 << 64
_LARGEST_SHARE = 0.3  # of all tokens, where the data and not `maximum` limits training
_BATCH = 1 << 20  # characters tokenized at once

Tokens = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Tokens asked for."""

    sequence_length: int  # each side needs at least so many
    evaluation: int  # enough for all evaluation sequences; fewer are fine if that would take a fifth of the data
    maximum: int | None  # training tokens after which reading stops


@dataclass(frozen=True, slots=True)
class Files:
    """The token files of a folder of prepared data."""

    folder: Path
    dtype: np.dtype[Any]

    def tokens(self, side: str) -> Path:
        return self.folder / f"{side}-tokens.npy"

    def offsets(self, side: str) -> Path:
        return self.folder / f"{side}-offsets.npy"


@dataclass(slots=True)
class Split:
    """What was written."""

    train_tokens: int
    evaluation_tokens: int
    documents: int
    characters: int  # read, both sides
    good: bool  # both sides have what they need

    @property
    def tokens(self) -> int:
        return self.train_tokens + self.evaluation_tokens


def group_of(text: str) -> int:
    """A 64-bit hash that equal documents share; line ends and outer blanks make no difference."""
    plain = text.replace("\r\n", "\n").strip()
    return int.from_bytes(hashlib.blake2b(plain.encode("utf-8"), digest_size=8).digest(), "big")


def is_held_out(group: int) -> bool:
    return group < HELD_OUT_SHARE * _HASHES


def write_split(
    documents: Iterable[str], tokenizer: TextTokenizer, files: Files, wanted: Wanted, tick: Callable[[int], None]
) -> Split:
    """Tokenizes documents until both sides have enough (or to the end) and writes both sides' files.

    Args:
        documents: texts without blank ones.
        tokenizer: ends each document with EOS.
        files: where to; existing files are replaced.
        wanted: tokens asked for.
        tick: called now and then with the tokens written so far.
    """
    characters = 0
    with _Writer(files, "train") as train, _Writer(files, "eval") as evaluation:
        for batch in _batches(documents):
            kept: list[tuple[int, str]] = []
            for text in batch:
                characters += len(text)
                group = group_of(text)
                if is_held_out(group) or not _enough(train.count, wanted.maximum):
                    kept.append((group, text))
            for (group, _), ids in zip(kept, tokenizer.encode([text for _, text in kept]), strict=True):
                if is_held_out(group):
                    evaluation.append(ids, group)
                elif not _enough(train.count, wanted.maximum):
                    train.append(ids, group)
            tick(train.count + evaluation.count)
            if _enough(train.count, wanted.maximum) and evaluation.count >= wanted.evaluation:
                break
    good = _is_good(train.count, evaluation.count, wanted)
    split = Split(train.count, evaluation.count, len(train.groups) + len(evaluation.groups), characters, good)
    if not good and split.tokens >= 2 * wanted.sequence_length:
        _choose_again(files, np.array([*train.groups, *evaluation.groups], dtype=np.uint64), wanted, split)
    return split


def split_at_token(files: Files, wanted: Wanted, split: Split, eos_token_id: int) -> None:
    """The last resort for data that is one text over and over: the last tokens are held out, whatever they say.

    The document the cut falls into gets an EOS at the cut.
    """
    tokens, offsets = _both_sides(files)
    held_out = _target(len(tokens), wanted)
    at = len(tokens) - held_out
    inside = at not in offsets
    before = [int(o) for o in offsets if o < at]
    first = np.append(tokens[:at], np.array([eos_token_id], dtype=files.dtype)) if inside else tokens[:at]
    after = [0, *(int(o) - at for o in offsets if o > at)]
    _save(files, "train", first, np.array([*before, len(first)], dtype=np.int64))
    _save(files, "eval", tokens[at:], np.array(after, dtype=np.int64))
    split.train_tokens, split.evaluation_tokens = len(first), held_out
    split.documents += int(inside)
    split.good = True


def _choose_again(files: Files, groups: npt.NDArray[np.uint64], wanted: Wanted, split: Split) -> None:
    """Holds out other documents than those of low hash, if some choice of whole groups gives both sides enough."""
    tokens, offsets = _both_sides(files)
    lengths = np.diff(offsets)
    target = _target(len(tokens), wanted)
    most = max(round(len(tokens) * _LARGEST_SHARE), target)
    names, member = np.unique(groups, return_inverse=True)  # in order of hash
    sizes = np.bincount(member, weights=lengths, minlength=len(names)).astype(np.int64)
    chosen = np.zeros(len(names), dtype=bool)
    held_out = 0
    for group, size in enumerate(sizes):
        if held_out >= target:
            break
        if held_out + size <= most:
            chosen[group] = True
            held_out += int(size)
    if held_out < target or len(tokens) - held_out < wanted.sequence_length:
        return
    side = chosen[member]
    for name, belongs in (("train", ~side), ("eval", side)):
        ends = np.concatenate([[0], np.cumsum(lengths[belongs])]).astype(np.int64)
        _save(files, name, tokens[np.repeat(belongs, lengths)], ends)
    split.train_tokens, split.evaluation_tokens, split.good = len(tokens) - held_out, held_out, True


def _target(tokens: int, wanted: Wanted) -> int:
    return min(wanted.evaluation, max(wanted.sequence_length, tokens // 5))


def _is_good(train: int, evaluation: int, wanted: Wanted) -> bool:
    if _enough(train, wanted.maximum):
        return evaluation >= wanted.evaluation
    total = train + evaluation
    target = _target(total, wanted)
    return train >= wanted.sequence_length and target <= evaluation <= max(total * _LARGEST_SHARE, target)


def _enough(count: int, maximum: int | None) -> bool:
    return maximum is not None and count >= maximum


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in documents:
        batch.append(text)
        size += len(text)
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _both_sides(files: Files) -> tuple[Tokens, npt.NDArray[np.int64]]:
    """All tokens in memory, training side first, and the offsets of all documents."""
    tokens = np.concatenate([np.load(files.tokens(side)) for side in ("train", "eval")])
    train, evaluation = (np.load(files.offsets(side)) for side in ("train", "eval"))
    return tokens, np.concatenate([train, evaluation[1:] + train[-1]])


def _save(files: Files, side: str, tokens: Tokens, offsets: npt.NDArray[np.int64]) -> None:
    np.save(files.tokens(side), tokens)
    np.save(files.offsets(side), offsets)


class _Writer:
    """Appends documents to a .npy file whose length is not known beforehand."""

    def __init__(self, files: Files, side: str) -> None:
        self.groups = array("Q")
        self.count = 0
        self._offsets = array("q", [0])
        self._offsets_path = files.offsets(side)
        self._dtype = files.dtype
        self._stream = files.tokens(side).open("wb")
        self._write_header()

    def append(self, ids: list[int], group: int) -> None:
        self._stream.write(np.array(ids, dtype=self._dtype).tobytes())
        self.count += len(ids)
        self._offsets.append(self.count)
        self.groups.append(group)

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        with self._stream:
            self._stream.seek(0)
            self._write_header()  # numpy pads the header so that any length fits in its place
        np.save(self._offsets_path, np.array(self._offsets, dtype=np.int64))

    def _write_header(self) -> None:
        header = {"descr": npy.dtype_to_descr(self._dtype), "fortran_order": False, "shape": (self.count,)}
        npy.write_array_header_1_0(self._stream, header)
