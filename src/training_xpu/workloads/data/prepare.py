"""From `--data` and `--tokenizer` to memory-mapped tokens, once, in the launcher, before any rank starts.

Prepared data lives in `<cache>/data/<key>/`. The key is a digest over the files' names, sizes and times and over the
settings, so that finding it again costs no reading (see `Source.signature`). A folder appears whole, by a rename, or
not at all; runs that start at the same time share the work through a lock that ends with the process that holds it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from training_xpu.errors import UserError
from training_xpu.records import Record
from training_xpu.workloads.config import PreparedData
from training_xpu.workloads.data import tokenizer as tokenizers
from training_xpu.workloads.data.holdout import Files, Split, Wanted, split_at_token, write_split
from training_xpu.workloads.data.readers import LONGEST_DOCUMENT, Reader
from training_xpu.workloads.data.sources import Source, locate
from training_xpu.workloads.data.tokenizer import TextTokenizer

FORMAT = 1  # part of every key: raise it when the same input would give other tokens
MANIFEST = "prepared.json"
_PARTS = 64  # a source with too few documents is cut into about so many
_SMALLEST_PART = 256  # characters
_VERIFIED_BYTES = 64 << 20  # files up to this size are hashed when they are found again, larger ones only measured
_SECONDS_BETWEEN_MESSAGES = 2.0

Progress = Callable[[str], None]


class FileSeal(Record):
    """Size and hash of one prepared file, relative to its folder."""

    name: str
    size: int  # bytes
    digest: str


class Manifest(Record):
    """`prepared.json`: the record, with paths relative to its folder, and the seals of all files."""

    prepared: PreparedData
    seals: list[FileSeal]


def prepare(
    data: Path | None,
    tokenizer: Path | None,
    vocabulary_size: int,
    cache: Path,
    sequence_length: int,
    max_tokens: int | None,
    seed: int,
    data_field: str | None,
    progress: Progress,
    eval_sequences: int = 16,
) -> PreparedData:
    """Tokenizes the data, or finds it already tokenized.

    Args:
        data: a text file, a folder, JSONL, Parquet or a saved HF dataset; None: the standard library's source.
        tokenizer: a local HF tokenizer folder; None: a byte-level BPE is trained on a sample of the data and cached.
        vocabulary_size: rows of the model's embedding. The tokenizer may have fewer tokens, never more.
        cache: where prepared data and trained tokenizers are kept.
        sequence_length: tokens per sequence.
        max_tokens: training tokens after which tokenizing stops, documents taken in an order shuffled by `seed`; the
            held-out part comes on top. None: everything, in the source's order.
        seed: of that order; without `max_tokens` it has no effect.
        data_field: column of JSONL, Parquet and HF datasets; None: "text", or else "content".
        progress: is given lines for people.
        eval_sequences: sequences the evaluation will use; so many are held out unless that took a fifth of the data.

    Returns:
        The record ranks get. `digest` is taken over the tokens themselves: equal digests, equal tokens, on any machine.

    Raises:
        UserError: the data, its field or the tokenizer cannot be used, or the data is too small; says what to do.
    """
    source = locate(data, data_field)
    if tokenizer is not None:
        tokenizers.check_given(tokenizer)
    elif vocabulary_size < tokenizers.SMALLEST_VOCABULARY:
        raise UserError(
            f"a vocabulary of {vocabulary_size} is too small for a byte-level tokenizer",
            f"Use {tokenizers.SMALLEST_VOCABULARY} or more, or give a smaller tokenizer with --tokenizer.",
        )
    wanted = Wanted(
        sequence_length=sequence_length,
        evaluation=sequence_length * max(1, eval_sequences),
        maximum=None if max_tokens is None else max(max_tokens, sequence_length),
    )
    tokenizer_key = _trained_key(source, vocabulary_size) if tokenizer is None else _given_key(tokenizer)
    order = None if max_tokens is None else seed
    key = _key(
        "data", source.signature(), tokenizer_key, vocabulary_size, sequence_length, eval_sequences, max_tokens, order
    )
    folder = _absolute(cache) / "data" / key
    with _locked(folder, progress):
        found = _reuse(folder)
        if found is not None:
            progress(f"tokens of {source.name} from the cache: {found.train_token_count:,} for training")
            return found.model_copy(update={"source": source.name})
        with _new_folder(folder) as building:
            if tokenizer is None:
                trained = _trained_tokenizer(source, vocabulary_size, folder.parent.parent, progress)
                shutil.copytree(trained, building / "tokenizer")
                text_tokenizer = tokenizers.load(building / "tokenizer")
            else:
                text_tokenizer = tokenizers.adopt(tokenizer, building / "tokenizer")
            if text_tokenizer.size > vocabulary_size:
                raise UserError(
                    f"the tokenizer {tokenizer} has {text_tokenizer.size:,} tokens, the model only {vocabulary_size:,}",
                    "Give the model's own tokenizer, or leave --tokenizer out to have one trained on the data.",
                )
            split = _tokenize(source, text_tokenizer, building, wanted, order, progress)
            _write_manifest(source, text_tokenizer, building, split, vocabulary_size)
        made = _reuse(folder)
    if made is None:
        raise UserError(f"the data cache {folder} changes while it is used", "Give this run a cache folder of its own.")
    return made


def check_data(data: Path | None, data_field: str | None) -> None:
    """Answers a wrong `--data` or `--data-field` at once, from a first look at the files.

    Raises:
        UserError: the data are not there, or have no such column.
    """
    if data is None and data_field is None:
        return
    if data is not None and data_field is None and data.is_dir():
        return  # without a column to look for, a walk through a large folder would tell little
    Reader(locate(data, data_field)).check_field()


def _tokenize(
    source: Source, tokenizer: TextTokenizer, folder: Path, wanted: Wanted, order: int | None, progress: Progress
) -> Split:
    files = Files(folder, np.dtype(np.uint16 if tokenizer.size <= 1 << 16 else np.uint32))

    def write(longest: int) -> tuple[Reader, Split]:
        reader = Reader(source, longest)
        ticker = _Ticker(progress)

        def tick(tokens: int) -> None:
            ticker(f"tokenizing {source.name}: {_mebibytes(reader.bytes_read, source.size)}, {_count(tokens, 'token')}")

        generator = None if order is None else np.random.default_rng(order)
        return reader, write_split(reader.documents(generator), tokenizer, files, wanted, tick)

    reader, split = write(LONGEST_DOCUMENT)
    if split.documents == 0:
        raise reader.nothing_found()
    needed = 2 * wanted.sequence_length
    if split.tokens < needed:
        raise UserError(
            f"{source.name} holds {_count(split.tokens, 'token')}; one evaluation and one training sequence of "
            f"{wanted.sequence_length:,} need {needed:,}",
            "Give more text with --data, or a smaller --seq-len.",
        )
    if not split.good:
        documents = split.documents
        reader, split = write(max(_SMALLEST_PART, split.characters // _PARTS))
        has = f"{source.name} has {_count(documents, 'document')}"
        progress(f"{has}: cut into {_count(split.documents, 'part')} to hold some out")
    if not split.good:
        split_at_token(files, wanted, split, tokenizer.eos_token_id)
        progress(f"{source.name} is too uniform or too short to hold whole documents out: its end is held out instead")
    if summary := reader.summary():
        progress(f"left out of {source.name}: {summary}")
    progress(
        f"{source.name}: {_count(split.documents, 'document')}, {_count(split.train_tokens, 'token')} for training, "
        f"{split.evaluation_tokens:,} held out"
    )
    return split


def _trained_tokenizer(source: Source, vocabulary_size: int, cache: Path, progress: Progress) -> Path:
    """The folder of a tokenizer trained on the source, kept apart from the tokens: these depend on more settings."""
    folder = cache / "tokenizers" / _trained_key(source, vocabulary_size)
    with _locked(folder, progress):
        if (folder / tokenizers.SPECIAL_TOKENS_FILE).is_file():
            with contextlib.suppress(UserError):
                tokenizers.load(folder)
                return folder
        with _new_folder(folder) as building:
            sample = min(64 << 20, max(8 << 20, 256 * vocabulary_size))  # characters
            progress(f"training a tokenizer of {vocabulary_size:,} tokens on {source.name}")
            reader = Reader(source)
            texts = _sample(reader, sample)
            first = next(texts, None)
            if first is None:
                raise reader.nothing_found()
            tokenizers.train(_chain(first, texts), vocabulary_size, building)
    return folder


def _sample(reader: Reader, characters: int) -> Iterator[str]:
    """Documents from all over the source, always the same ones, until there are so many characters."""
    taken = 0
    for text in reader.documents(np.random.default_rng(0)):
        yield text
        taken += len(text)
        if taken >= characters:
            return


def _chain(first: str, rest: Iterator[str]) -> Iterator[str]:
    yield first
    yield from rest


def _write_manifest(source: Source, tokenizer: TextTokenizer, folder: Path, split: Split, vocabulary_size: int) -> None:
    seals = [_seal(path, folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    prepared = PreparedData(
        source=source.name,
        train_tokens=Path("train-tokens.npy"),
        train_offsets=Path("train-offsets.npy"),
        eval_tokens=Path("eval-tokens.npy"),
        eval_offsets=Path("eval-offsets.npy"),
        tokenizer=Path("tokenizer"),
        vocabulary_size=vocabulary_size,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        train_token_count=split.train_tokens,
        eval_token_count=split.evaluation_tokens,
        document_count=split.documents,
        digest=_key(FORMAT, vocabulary_size, [(seal.name, seal.digest) for seal in seals]),
    )
    Manifest(prepared=prepared, seals=seals).write(folder / MANIFEST)


def _reuse(folder: Path) -> PreparedData | None:
    """The record of a folder prepared earlier, or None if anything in it is missing or altered."""
    if not folder.is_dir():
        return None
    try:
        manifest = Manifest.read(folder / MANIFEST)
        for seal in manifest.seals:
            path = folder / seal.name
            if path.stat().st_size != seal.size:
                return None
            if seal.size <= _VERIFIED_BYTES and _seal(path, folder) != seal:
                return None
    except (UserError, OSError):
        return None
    named = manifest.prepared
    paths = ("train_tokens", "train_offsets", "eval_tokens", "eval_offsets", "tokenizer")
    return named.model_copy(update={path: folder / getattr(named, path) for path in paths})


def _seal(path: Path, folder: Path) -> FileSeal:
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16))
    return FileSeal(name=str(path.relative_to(folder)), size=path.stat().st_size, digest=digest.hexdigest())


def _trained_key(source: Source, vocabulary_size: int) -> str:
    return _key("tokenizer", source.signature(), vocabulary_size)


def _given_key(tokenizer: Path) -> str:
    """Over the content of the tokenizer's own files; weights that lie beside them are not looked at."""
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    names = (*tokenizers.FILES, "config.json")
    found = [_seal(folder / name, folder) for name in names if (folder / name).is_file()]
    return _key("given", [(seal.name, seal.digest) for seal in found])


def _key(*parts: object) -> str:
    return hashlib.blake2b(json.dumps([FORMAT, *parts]).encode(), digest_size=16).hexdigest()


def _absolute(cache: Path) -> Path:
    return Path(os.path.abspath(cache.expanduser()))  # noqa: PTH100 - links in the user's path are kept


@contextlib.contextmanager
def _locked(folder: Path, progress: Progress) -> Iterator[None]:
    """Holds the lock of a folder; the kernel lets go of it when the process ends, however it ends."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder.with_name(f"{folder.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise _unwritable(folder.parent, error) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another run is preparing the same data; waiting for it")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder that takes the place of `folder` if all goes well; called with the lock held."""
    for left in folder.parent.glob(f"{folder.name}.building-*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    building = folder.with_name(f"{folder.name}.building-{os.getpid()}")
    try:
        building.mkdir()
        yield building
        if folder.exists():
            shutil.rmtree(folder)
        building.rename(folder)
    except OSError as error:
        raise _unwritable(folder.parent, error) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _unwritable(folder: Path, error: OSError) -> UserError:
    problem = f"cannot write the data cache {folder}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, None):  # numpy tells a short write without a number
        return UserError(problem, "Free some space, or choose another cache folder.")
    return UserError(problem, "Choose a cache folder that you may write to.")


def _mebibytes(done: int, total: int) -> str:
    return f"{done / 2**20:.1f} of {total / 2**20:.1f} MiB"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


class _Ticker:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._last = time.monotonic()

    def __call__(self, text: str) -> None:
        if time.monotonic() - self._last >= _SECONDS_BETWEEN_MESSAGES:
            self._last = time.monotonic()
            self._progress(text)
