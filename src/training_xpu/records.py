"""The base of every record that crosses a process or file boundary, and the only ways such a record reaches disk."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from training_xpu.errors import UserError

LONGEST_LINE = 16 << 20  # bytes

RecordT = TypeVar("RecordT", bound="Record")


class Record(BaseModel):
    """A versioned record.

    Non-finite floats are written as the strings "NaN", "Infinity" and "-Infinity", so that files stay valid JSON and a
    diverged loss is not confused with an unknown one (null).
    """

    model_config = ConfigDict(extra="forbid", validate_by_name=True, validate_by_alias=True, ser_json_inf_nan="strings")

    schema_version: int = Field(default=1, alias="schema")

    def to_json(self, indent: int | None = None) -> str:
        return self.model_dump_json(by_alias=True, indent=indent)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads one record from a JSON file.

        Raises:
            UserError: the file is missing, is no such record, or was written by a newer version.
        """
        if path.exists() and not path.is_file():
            raise UserError(f"cannot read {path}: it is no regular file")
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not a {cls.__name__}: it is not text") from error
        known = cls.model_fields["schema_version"].default
        try:
            found = json.loads(text).get("schema", known)
            if isinstance(found, int) and found > known:
                raise UserError(
                    f"{path} has schema {found}, newer than {known}, which this version reads",
                    "Upgrade training-xpu-pytorch.",
                )
            return cls.model_validate_json(text)
        except (ValueError, AttributeError, RecursionError) as error:
            reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
            raise UserError(f"{path} is not a {cls.__name__}: {reason}") from error

    def write(self, path: Path) -> None:
        """Replaces the file in one step: a reader sees the old record or the new one, whole."""
        write_atomically(path, self.to_json(indent=2) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """Writes text to a temporary neighbour, flushes it to disk and renames it over path."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def append_line(path: Path, record: Record) -> None:
    """Appends one line with a single write, so that lines of several processes on one host do not mix."""
    data = record.to_json().encode() + b"\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        written = os.write(descriptor, data)
    finally:
        os.close(descriptor)
    if written != len(data):
        raise OSError(28, "No space left on device", str(path))


def read_lines(path: Path, kind: type[RecordT]) -> Iterator[RecordT]:
    """Yields the records of a line file in order.

    A line cut short by a crash or a full disk is passed over, and so is one longer than any that is written.
    """
    if not path.is_file():
        return
    with path.open("rb") as stream:
        while line := stream.readline(LONGEST_LINE):
            try:
                yield kind.model_validate_json(line)
            except ValidationError:
                continue
