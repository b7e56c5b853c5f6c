"""What `--data` names: finds the files, says what kind each is, and answers bad paths before any work is done."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from training_xpu.errors import UserError, nearest

STANDARD_LIBRARY = "python standard library"
ACCEPTED = "Give a text file, a folder of text or source files, JSONL, Parquet or a saved HF dataset."

_FOLDERS_LEFT_OUT = frozenset({"__pycache__", "node_modules"})
_LIBRARY_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_JSONL_SUFFIXES = frozenset({".jsonl", ".ndjson", ".jsonlines"})
_SNIFFED_BYTES = 8192


class Kind(StrEnum):
    TEXT = "text"
    JSONL = "jsonl"
    PARQUET = "parquet"
    ARROW = "arrow"  # part of a saved HF dataset, read through `datasets`


@dataclass(frozen=True, slots=True)
class SourceFile:
    path: Path
    name: str  # relative to what the user named
    kind: Kind
    size: int  # bytes
    modified_ns: int
    changed_ns: int  # st_ctime_ns, which no tool sets back


@dataclass(frozen=True, slots=True)
class Source:
    """The files behind one `--data`, in a fixed order.

    A single file is read strictly: whatever cannot be read is an error. In a folder such files and lines are left
    out and counted.
    """

    name: str  # for people
    root: Path
    files: tuple[SourceFile, ...]
    strict: bool
    field: str | None  # column of JSONL, Parquet and HF datasets; None: "text", or else "content"
    saved_dataset: bool = False
    split: str | None = None  # of a saved HF DatasetDict

    @property
    def size(self) -> int:
        """Bytes on disk, before anything is left out."""
        return sum(f.size for f in self.files)

    def signature(self) -> str:
        """A digest over the files' names, sizes and times, not their content, so that 10 GB need no reading.

        The change time (ctime) is part of it: any write moves it, and no tool can set it back as it can the
        modification time. Copying the data therefore costs one more preparation and never gives stale tokens.
        """
        digest = hashlib.blake2b(digest_size=16)
        digest.update(json.dumps([self.strict, self.field, self.saved_dataset, self.split]).encode())
        for f in self.files:
            digest.update(os.fsencode(f.name) + b"\0")
            digest.update(f"{f.kind} {f.size} {f.modified_ns} {f.changed_ns}\n".encode())
        return digest.hexdigest()


def locate(data: Path | None, field: str | None = None) -> Source:
    """Finds the files of `--data`; None is the standard library's source of the running Python, without its tests.

    Raises:
        UserError: there is no such path, nothing in it can be text, or `field` is given for data without fields.
    """
    if data is None:
        source = _standard_library()
    else:
        source = _named(data, field)
    if field is not None and not source.saved_dataset and all(f.kind is Kind.TEXT for f in source.files):
        raise UserError(
            f"--data-field {field} does not apply to {source.name}, which is plain text",
            "Leave it out, or give JSONL, Parquet or a saved HF dataset with --data.",
        )
    return source


def missing(option: str, path: Path) -> UserError:
    """The error for a path that does not exist; the remedy names the nearest neighbour of its first missing part."""
    if path.is_symlink():
        return UserError(f"{option} {path} is a link to {path.readlink()}, which does not exist", "Mend the link.")
    lost = path
    while not lost.parent.exists() and lost.parent != lost:
        lost = lost.parent
    problem = f"{option} {path} does not exist"
    if lost != path:
        problem += f" (there is no {lost})"
    try:
        siblings = [p.name for p in lost.parent.iterdir()]
    except OSError:
        siblings = []
    remedy = nearest(lost.name, siblings) if siblings else ""
    if not remedy.startswith("Did you mean") and len(siblings) > 10:
        remedy = ""  # the whole of a big folder helps nobody
    return UserError(problem, remedy or f"{lost.parent} has no entry of a similar name.")


def sniff(head: bytes) -> str | None:
    """What the first bytes of a file show it to be if it is not UTF-8 text, for people; None: it may be text."""
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "UTF-16 text"
    for magic, what in (
        (b"\x1f\x8b", "gzip"),
        (b"\x28\xb5\x2f\xfd", "zstd"),
        (b"PK\x03\x04", "zip"),
        (b"BZh", "bzip2"),
    ):
        if head.startswith(magic):
            return f"{what}-compressed"
    return "binary" if b"\0" in head[:_SNIFFED_BYTES] else None


def read_head(path: Path) -> bytes:
    with path.open("rb") as stream:
        return stream.read(_SNIFFED_BYTES)


def _named(data: Path, field: str | None) -> Source:
    try:
        found = data.stat()
    except FileNotFoundError:
        raise missing("--data", data) from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UserError(f"--data {data} is a link that leads to itself", "Mend the link.") from None
        raise UserError(f"cannot read --data {data}: {error.strerror}", ACCEPTED) from error
    try:
        if stat.S_ISDIR(found.st_mode):
            return _folder(data, field)
        if stat.S_ISREG(found.st_mode):
            return _single_file(data, found, field)
    except PermissionError as error:
        raise UserError(f"cannot read --data {data}: {error.strerror}", "Check its permissions.") from error
    raise UserError(f"--data {data} is neither a file nor a folder", ACCEPTED)


def _single_file(path: Path, found: os.stat_result, field: str | None) -> Source:
    if found.st_size == 0:
        raise UserError(f"--data {path} is empty", ACCEPTED)
    head = read_head(path)
    kind = _kind(path)
    if head.startswith(b"PAR1"):
        kind = Kind.PARQUET
    elif kind is Kind.TEXT and path.suffix.lower() == ".json" and _starts_with_object_line(path):
        kind = Kind.JSONL
    if kind is not Kind.PARQUET and (what := sniff(head)) is not None:
        raise UserError(f"--data {path} is {what}, not UTF-8 text", _remedy_for(what, path))
    return Source(str(path), path.parent, (_file(path, path.name, kind, found),), strict=True, field=field)


def _remedy_for(what: str, path: Path) -> str:
    if what.startswith("UTF-16"):
        return f"Convert it: iconv -f UTF-16 -t UTF-8 {path}"
    if what.endswith("compressed"):
        return "Unpack it first."
    if path.suffix == ".arrow":
        return "For a saved HF dataset give its folder."
    return ACCEPTED


def _starts_with_object_line(path: Path) -> bool:
    """Tells JSON lines from a JSON document spread over many lines, which is text like any other."""
    with path.open("rb") as stream:
        line = stream.readline(1 << 20)
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _folder(root: Path, field: str | None) -> Source:
    if (root / "dataset_dict.json").is_file():
        return _saved_dataset(root, _choose_split(root), field)
    if (root / "state.json").is_file() and (root / "dataset_info.json").is_file():
        return _saved_dataset(root, None, field)
    files = tuple(f for f in _walk(root) if f.size > 0)
    if not files:
        raise UserError(f"--data {root} has no files with text in them", ACCEPTED)
    return Source(str(root), root, files, strict=False, field=field)


def _choose_split(root: Path) -> str:
    try:
        splits = [str(s) for s in json.loads((root / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{root / 'dataset_dict.json'} is damaged: {error}", "Save the dataset again.") from error
    if not splits:
        raise UserError(f"--data {root} is a saved HF dataset without any split", ACCEPTED)
    return "train" if "train" in splits else splits[0]


def _saved_dataset(root: Path, split: str | None, field: str | None) -> Source:
    folder = root / split if split else root
    if not folder.is_dir():
        raise UserError(f"--data {root} lacks the folder of its split {split}", "Save the dataset again.")
    files = tuple(_file(p, p.name, Kind.ARROW, p.stat()) for p in sorted(folder.iterdir()) if p.is_file())
    name = f"{root} (split {split})" if split else str(root)
    return Source(name, root, files, strict=True, field=field, saved_dataset=True, split=split)


def _standard_library() -> Source:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = tuple(
        f for f in (_walk(root, _LIBRARY_LEFT_OUT) if root.is_dir() else ()) if f.path.suffix == ".py" and f.size > 0
    )
    if not files:
        raise UserError(f"this Python has no library source in {root}", "Name your own text with --data.")
    return Source(STANDARD_LIBRARY, root, files, strict=False, field=None)


def _walk(root: Path, left_out: frozenset[str] = _FOLDERS_LEFT_OUT) -> Iterator[SourceFile]:
    """Regular files under root in order of name; links are followed, each folder once, hidden names left out."""
    seen: set[tuple[int, int]] = set()
    for folder, folders, names in os.walk(root, followlinks=True):
        try:
            found = Path(folder).stat()
        except OSError:
            folders.clear()
            continue
        identity = (found.st_dev, found.st_ino)
        if identity in seen:  # a link led back up, or two links lead here
            folders.clear()
            continue
        seen.add(identity)
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in left_out)
        for name in sorted(names):
            path = Path(folder, name)
            try:
                found = path.stat()
            except OSError:
                continue  # a dangling link, or it has just been removed
            if not name.startswith(".") and stat.S_ISREG(found.st_mode):
                yield _file(path, str(path.relative_to(root)), _kind(path), found)


def _kind(path: Path) -> Kind:
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return Kind.PARQUET
    return Kind.JSONL if suffix in _JSONL_SUFFIXES else Kind.TEXT


def _file(path: Path, name: str, kind: Kind, found: os.stat_result) -> SourceFile:
    return SourceFile(path, name, kind, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
