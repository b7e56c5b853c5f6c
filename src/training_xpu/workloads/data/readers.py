"""Reads the documents of a source, in its own order or in a seeded shuffled one, without holding it all in memory."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from training_xpu.errors import UserError, nearest
from training_xpu.workloads.data.sources import Kind, Source, SourceFile, sniff

# A text longer than this counts as several documents: one whole book per call would need a hundred bytes of memory
# per token in the tokenizer.
LONGEST_DOCUMENT = 1 << 20  # characters; of a text file: bytes
_LINES_BLOCK = 4 << 20  # bytes of JSONL that are shuffled together
_ROWS = 1000  # rows of Parquet or HF datasets that are shuffled together
_SINGLE_TEXT = 64 << 10  # bytes: one text file alone has no documents of its own, and is cut into parts of this size
_NEWLINE_SEARCH = 16 << 10  # bytes after a wanted cut in which a line end is looked for
_LINES_LOOKED_AT = 100  # of each JSONL file of a folder, in search of the text column
_DEFAULT_FIELDS = ("text", "content")


@dataclass(frozen=True, slots=True)
class _Shard:
    """A part of one file that can be read alone: bytes, a Parquet row group (start), or rows of a saved dataset."""

    file: int
    start: int
    end: int
    size: int  # bytes on disk


class Reader:
    """Yields the documents of a source; after reading, `left_out` tells what was passed over in a folder."""

    def __init__(self, source: Source, longest: int = LONGEST_DOCUMENT) -> None:
        """
        Args:
            source: from `locate`.
            longest: characters; a longer document is cut at line ends and its parts are documents of their own.
        """
        self.source = source
        self.left_out: dict[str, set[str]] = {}
        self.bytes_read = 0  # of files, as far as the documents yielded so far reach
        self._longest = longest
        alone = source.strict and len(source.files) == 1 and source.files[0].kind is Kind.TEXT
        self._text_block = _SINGLE_TEXT if alone else LONGEST_DOCUMENT
        self._dataset: Any = None

    def documents(self, order: np.random.Generator | None = None) -> Iterator[str]:
        """Documents that are not blank, as they stand (line ends included; a byte-order mark is dropped).

        Args:
            order: shuffles the parts of the source and the documents within each part; None keeps the source's order.

        Raises:
            UserError: a strict source holds something that cannot be read as text.
        """
        shards = self._shards()
        sequence = range(len(shards)) if order is None else order.permutation(len(shards)).tolist()
        for index in sequence:
            shard = shards[index]
            for texts in self._read(shard):
                found = [part for text in texts if text.strip() for part in cut(text, self._longest)]
                positions = range(len(found)) if order is None else order.permutation(len(found)).tolist()
                for position in positions:
                    if found[position].strip():
                        yield _encodable(found[position])
            self.bytes_read += shard.size

    def check_field(self) -> None:
        """Looks for the text column in the first rows of the files, until one has it.

        Raises:
            UserError: none has.
        """
        first: UserError | None = None
        for file in self.source.files:
            try:
                if self._has_field(file):
                    return
            except UserError as error:
                first = first or error
        if first is not None:
            raise first

    def _has_field(self, file: SourceFile) -> bool:
        """False where the file says nothing about columns, as plain text does.

        Raises:
            UserError: it has columns, and not the one looked for.
        """
        if file.kind is Kind.TEXT:
            return self.source.field is None
        if file.kind is Kind.JSONL:
            return self._has_json_field(file)
        schema = _schema(file)
        if schema is None:
            return False
        choose_column(schema, self.source.field, self.source.name if self.source.saved_dataset else str(file.path))
        return True

    def _has_json_field(self, file: SourceFile) -> bool:
        """In a folder lines may be left out, so that more than the first is looked at."""
        strict = Reader(replace(self.source, strict=True))
        first: UserError | None = None
        at = 0
        try:
            with file.path.open("rb") as stream:
                for line in itertools.islice(stream, _LINES_LOOKED_AT):
                    if line.strip():
                        try:
                            strict._line_text(file, line.removeprefix(b"\xef\xbb\xbf") if at == 0 else line, at)
                            return True
                        except UserError as error:
                            if self.source.strict:
                                raise
                            first = first or error
                    at += len(line)
        except OSError:
            return False  # reading it in earnest says what is wrong
        if first is not None:
            raise first
        return False

    def summary(self) -> str:
        """What was left out, e.g. "2 binary, 1 not UTF-8"; empty when nothing was."""
        return ", ".join(
            f"1 {reason.replace('lines ', 'line ')}" if len(names) == 1 else f"{len(names)} {reason}"
            for reason, names in sorted(self.left_out.items())
        )

    def nothing_found(self) -> UserError:
        """The error for a source without any text."""
        why = self.summary()
        problem = f"no text found in {self.source.name}"
        return UserError(
            problem + (f": left out {why}" if why else ""), "Name text with --data, or its column with --data-field."
        )

    def _fail(self, file: SourceFile, reason: str, error: UserError, part: str = "") -> None:
        if self.source.strict:
            raise error
        self.left_out.setdefault(reason, set()).add(f"{file.name}{part}")

    def _shards(self) -> list[_Shard]:
        if self.source.saved_dataset:
            self._dataset = _open_saved(self.source)
            rows = len(self._dataset)
            blocks = [(start, min(start + _ROWS, rows)) for start in range(0, rows, _ROWS)]
            return [_Shard(0, start, end, self.source.size * (end - start) // rows) for start, end in blocks]
        shards: list[_Shard] = []
        for index, file in enumerate(self.source.files):
            if file.kind is Kind.PARQUET:
                groups = self._row_groups(file)
                shards.extend(_Shard(index, group, group + 1, file.size // groups) for group in range(groups))
            else:
                step = _LINES_BLOCK if file.kind is Kind.JSONL else self._text_block
                ends = [(at, min(at + step, file.size)) for at in range(0, file.size, step)]
                shards.extend(_Shard(index, start, end, end - start) for start, end in ends)
        return shards

    def _read(self, shard: _Shard) -> Iterator[list[str]]:
        if self.source.saved_dataset:
            column = self._dataset[shard.start : shard.end]["text"]
            yield [text for text in column if text is not None]
            return
        file = self.source.files[shard.file]
        try:
            if file.kind is Kind.PARQUET:
                yield from self._read_row_group(file, shard.start)
            elif file.kind is Kind.JSONL:
                yield self._read_lines(file, shard)
            else:
                yield self._read_text(file, shard)
        except OSError as error:
            gone = isinstance(error, FileNotFoundError)
            problem = f"cannot read {file.path}: {error.strerror or error}"
            remedy = "It was there a moment ago." if gone else "Check its permissions and the disk."
            self._fail(file, "vanished" if gone else "unreadable", UserError(problem, remedy))

    def _read_text(self, file: SourceFile, shard: _Shard) -> list[str]:
        with file.path.open("rb", buffering=0) as stream:
            descriptor = stream.fileno()
            what = sniff(os.pread(descriptor, 8192, 0))
            if what is not None:
                self._fail(file, "binary", UserError(f"{file.path} is {what}, not UTF-8 text"))
                return []
            start = _text_cut(descriptor, shard.start, file.size)
            data = _read_range(descriptor, start, _text_cut(descriptor, shard.end, file.size))
        if start == 0:
            data = data.removeprefix(b"\xef\xbb\xbf")
        try:
            return [data.decode("utf-8")]
        except UnicodeDecodeError as error:
            problem = f"{file.path} is not UTF-8: byte 0x{data[error.start]:02x} at position {start + error.start}"
            remedy = f"Convert it, for instance from Latin-1: iconv -f LATIN1 -t UTF-8 {file.path}"
            self._fail(file, "not UTF-8", UserError(problem, remedy))
            return []

    def _read_lines(self, file: SourceFile, shard: _Shard) -> list[str]:
        """Documents of the lines that start inside the shard."""
        texts: list[str] = []
        with file.path.open("rb") as stream:
            if shard.start > 0:
                stream.seek(shard.start - 1)
                stream.readline()
            at = stream.tell()
            while at < shard.end and (line := stream.readline()):
                if line.strip():
                    text = self._line_text(file, line.removeprefix(b"\xef\xbb\xbf") if at == 0 else line, at)
                    if text is not None:
                        texts.append(text)
                at += len(line)
        return texts

    def _line_text(self, file: SourceFile, line: bytes, at: int) -> str | None:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            reasons = {json.JSONDecodeError: getattr(error, "msg", ""), RecursionError: "it is nested too deeply"}
            reason = reasons.get(type(error), "it is not UTF-8")
            problem = f"{file.path} line {_line_number(file.path, at)} is not JSON: {reason}"
            self._fail(file, "lines not JSON", UserError(problem, "JSONL has one JSON object per line."), f":{at}")
            return None
        if not isinstance(row, dict):
            problem = f"{file.path} line {_line_number(file.path, at)} is no JSON object"
            remedy = 'Each line must be an object such as {"text": "..."}.'
            self._fail(file, "lines without an object", UserError(problem, remedy), f":{at}")
            return None
        field = self.source.field or next((name for name in _DEFAULT_FIELDS if name in row), None)
        if field is None or field not in row:
            problem = f"{file.path} line {_line_number(file.path, at)} has no field {_wanted(field)}"
            self._fail(file, "lines without the field", UserError(problem, _field_remedy(field, row)), f":{at}")
            return None
        value = row[field]
        if value is not None and not isinstance(value, str):
            problem = (
                f"{file.path} line {_line_number(file.path, at)}: field {field!r} is {type(value).__name__}, not text"
            )
            self._fail(file, "lines without text", UserError(problem, _field_remedy(None, row)), f":{at}")
            return None
        return value

    def _row_groups(self, file: SourceFile) -> int:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            return int(pq.read_metadata(file.path).num_row_groups)
        except (pa.ArrowException, OSError) as error:
            first = str(error).splitlines()[0]
            self._fail(file, "damaged Parquet", UserError(f"cannot read {file.path} as Parquet: {first}"))
            return 0

    def _read_row_group(self, file: SourceFile, group: int) -> Iterator[list[str]]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(file.path) as opened:
                try:
                    field = choose_column(opened.schema_arrow, self.source.field, str(file.path))
                except UserError as error:
                    self._fail(file, "Parquet without the column", error)
                    return
                for batch in opened.iter_batches(batch_size=_ROWS, row_groups=[group], columns=[field]):
                    yield [text for text in batch.column(0).to_pylist() if text is not None]
        except pa.ArrowException as error:
            first = str(error).splitlines()[0]
            self._fail(file, "damaged Parquet", UserError(f"cannot read {file.path} as Parquet: {first}"))


def choose_column(schema: Any, field: str | None, where: str) -> str:
    """The text column of an Arrow schema: `field` if given, otherwise "text", otherwise "content".

    Raises:
        UserError: there is no such column, or it does not hold text; names those that do.
    """
    import pyarrow.types as types

    def holds_text(kind: Any) -> bool:
        return any(
            t(kind) or (types.is_dictionary(kind) and t(kind.value_type))
            for t in (types.is_string, types.is_large_string, types.is_string_view)
        )

    columns = {f.name: f.type for f in schema}
    textual = [name for name, kind in columns.items() if holds_text(kind)]
    chosen = field or next((name for name in _DEFAULT_FIELDS if name in columns), None)
    if chosen is None or chosen not in columns:
        raise UserError(
            f"{where} has no column {_wanted(chosen)}; it has {', '.join(columns)}", _field_remedy(chosen, textual)
        )
    if chosen not in textual:
        raise UserError(f"column {chosen!r} of {where} holds {columns[chosen]}, not text", _field_remedy(None, textual))
    return chosen


def _schema(file: SourceFile) -> Any:
    """The columns of a Parquet file or of a saved HF dataset's Arrow file; None where they cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if file.kind is Kind.PARQUET:
            return pq.read_schema(file.path)
        if file.path.suffix != ".arrow":
            return None
        with pa.OSFile(str(file.path)) as stream:
            return pa.ipc.open_stream(stream).schema
    except (pa.ArrowException, OSError):
        return None  # reading it in earnest says what is wrong


def cut(text: str, longest: int) -> Iterator[str]:
    """Parts of at most `longest` characters that add up to the text: cut after line ends where there are any."""
    start = 0
    while len(text) - start > longest:
        newline = text.rfind("\n", start, start + longest)
        end = newline + 1 if newline >= start else start + longest
        yield text[start:end]
        start = end
    yield text[start:]


def _encodable(text: str) -> str:
    """JSON can spell half of a surrogate pair, which no UTF-8 encoder takes; it becomes U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _wanted(field: str | None) -> str:
    return repr(field) if field else " or ".join(repr(f) for f in _DEFAULT_FIELDS)


def _field_remedy(field: str | None, known: Any) -> str:
    names = [str(k) for k in known]
    if not names:
        return "Nothing in it is text."
    return nearest(field, names) if field else f"Name one with --data-field: {', '.join(names)}."


def _line_number(path: Path, at: int) -> int:
    number = 1
    with path.open("rb") as stream:
        while at > 0 and (block := stream.read(min(at, 1 << 20))):
            number += block.count(b"\n")
            at -= len(block)
    return number


def _text_cut(descriptor: int, wanted: int, size: int) -> int:
    """Where the text is cut near a byte position: after the next line end, or before the next whole character."""
    if wanted <= 0 or wanted >= size:
        return max(0, min(wanted, size))
    ahead = os.pread(descriptor, _NEWLINE_SEARCH, wanted)
    newline = ahead.find(b"\n")
    if newline >= 0:
        return wanted + newline + 1
    skipped = 0
    while skipped < min(4, len(ahead)) and ahead[skipped] & 0xC0 == 0x80:
        skipped += 1
    return wanted + skipped


def _read_range(descriptor: int, start: int, end: int) -> bytes:
    parts: list[bytes] = []
    while start < end and (part := os.pread(descriptor, end - start, start)):
        parts.append(part)
        start += len(part)
    return b"".join(parts)


def _open_saved(source: Source) -> Any:
    """Opens a saved HF dataset, its text column renamed to "text"; needs the `datasets` package, no network."""
    from datasets import load_from_disk

    folder = source.root / source.split if source.split else source.root
    try:
        dataset = load_from_disk(str(folder))
    except Exception as error:  # `datasets` raises many kinds for damaged folders
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"cannot open the saved HF dataset {folder}: {first}", "Save it again.") from error
    field = choose_column(dataset.features.arrow_schema, source.field, source.name)
    return (
        dataset.select_columns([field]).rename_column(field, "text")
        if field != "text"
        else dataset.select_columns(["text"])
    )
