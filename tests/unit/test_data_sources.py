"""What `--data` accepts, and how it answers what it cannot accept."""

from __future__ import annotations

import json
import os
import sysconfig
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training_xpu.errors import UserError
from training_xpu.workloads.data.prepare import check_data
from training_xpu.workloads.data.readers import LONGEST_DOCUMENT, Reader, cut
from training_xpu.workloads.data.sources import locate


def read(data: Path | None, field: str | None = None) -> list[str]:
    return list(Reader(locate(data, field)).documents())


def fault(data: Path, field: str | None = None) -> UserError:
    with pytest.raises(UserError) as caught:
        read(data, field)
    assert "\n" not in caught.value.problem
    return caught.value


def write_lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_text_file_is_kept_as_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "with spaces é.txt"
    path.write_bytes("one\r\ntwo\tžluťoučký 漢字 🙂\n".encode())
    assert read(path) == ["one\r\ntwo\tžluťoučký 漢字 🙂\n"]


def test_byte_order_mark_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfabc")
    assert read(path) == ["abc"]


def test_large_text_is_cut_at_line_ends_without_loss(tmp_path: Path) -> None:
    text = "".join(f"line {i} ünïcode\n" for i in range(150_000))
    path = tmp_path / "large.txt"
    path.write_text(text, encoding="utf-8")
    parts = read(path)
    assert "".join(parts) == text
    assert len(parts) > 2
    assert all(part.endswith("\n") for part in parts)


def test_large_text_without_line_ends_is_cut_between_characters(tmp_path: Path) -> None:
    text = "漢字かな" * 300_000
    path = tmp_path / "large.txt"
    path.write_text(text, encoding="utf-8")
    assert "".join(read(path)) == text


@given(st.text(max_size=200), st.integers(1, 50))
def test_cut_loses_nothing_and_keeps_to_the_limit(text: str, longest: int) -> None:
    parts = list(cut(text, longest))
    assert "".join(parts) == text
    assert all(len(part) <= longest for part in parts)


def test_folder_mixes_kinds_in_order_of_name_and_counts_what_it_leaves_out(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("first\n")
    (tmp_path / "b.bin").write_bytes(b"\x00\x01\x02" * 50)
    (tmp_path / "c.txt").write_bytes(b"caf\xe9 latin one")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "blank.txt").write_text(" \n\n")
    (tmp_path / ".hidden").write_text("hidden")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / "sub").mkdir()
    write_lines(tmp_path / "sub" / "d.jsonl", {"text": "third"}, {"text": ""}, {"content": "fourth"}, {"other": 1})
    pq.write_table(pa.table({"text": ["fifth", None]}), tmp_path / "sub" / "e.parquet")
    os.mkfifo(tmp_path / "pipe")
    reader = Reader(locate(tmp_path))
    assert list(reader.documents()) == ["first\n", "third", "fourth", "fifth"]
    assert reader.summary() == "1 binary, 1 line without the field, 1 not UTF-8"


def test_symbolic_links_that_loop_or_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("once")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "self").symlink_to("self")
    (tmp_path / "nowhere.txt").symlink_to("gone.txt")
    assert read(tmp_path) == ["once"]
    assert "leads to itself" in fault(tmp_path / "self").problem
    assert "gone.txt" in fault(tmp_path / "nowhere.txt").problem


def test_linked_folder_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.txt").write_text("there")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "link").symlink_to(tmp_path / "real")
    assert read(tmp_path / "data") == ["there"]


def test_file_that_vanishes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("stays")
    (tmp_path / "b.txt").write_text("goes")
    folder, single = Reader(locate(tmp_path)), Reader(locate(tmp_path / "b.txt"))
    (tmp_path / "b.txt").unlink()
    assert list(folder.documents()) == ["stays"]
    assert folder.summary() == "1 vanished"
    with pytest.raises(UserError, match=r"cannot read .*b\.txt"):
        list(single.documents())


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_file_without_permission(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("secret")
    path.chmod(0)
    assert "Permission denied" in fault(path).problem


def test_wrong_paths_name_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("text")
    assert fault(tmp_path / "corpsu.txt").remedy == "Did you mean corpus.txt?"
    assert f"there is no {tmp_path / 'corpora'}" in fault(tmp_path / "corpora" / "a.txt").problem


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b" \n \n", "no text found"),
        (b"\x7fELF\x00\x00", "is binary"),
        ("wide".encode("utf-16"), "is UTF-16 text"),
        (b"\x1f\x8b\x08\x00", "gzip-compressed"),
        (b"abc\xe9def", "byte 0xe9 at position 3"),
    ],
)
def test_single_files_that_are_no_text(tmp_path: Path, content: bytes, said: str) -> None:
    from training_xpu.workloads.data.prepare import prepare

    path = tmp_path / "a.txt"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        prepare(path, None, 300, tmp_path / "cache", 8, None, 0, None, lambda text: None)
    assert said in caught.value.problem
    assert caught.value.remedy


def test_device_is_refused() -> None:
    assert "neither a file nor a folder" in fault(Path("/dev/null")).problem


def test_jsonl_names_line_and_fields(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"body": "one", "id": 1}, {"body": "two", "id": 2})
    assert read(path, "body") == ["one", "two"]
    assert fault(path).remedy == "Name one with --data-field: body, id."
    assert fault(path, "boby").remedy == "Did you mean body?"
    assert "field 'id' is int" in fault(path, "id").problem
    path.write_text('{"text": "fine"}\n\n{"text": broken}\n')
    assert "line 3 is not JSON" in fault(path).problem
    path.write_text('{"text": "fine"}\n["no object"]\n')
    assert "line 2 is no JSON object" in fault(path).problem
    path.write_text("[" * 100_000)
    assert "nested too deeply" in fault(path).problem


def test_jsonl_survives_half_a_surrogate_pair_and_crlf(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "x\\ud800y"}\r\n{"text": "a\\r\\nb"}\r\n')
    assert read(path) == ["x�y", "a\r\nb"]


def test_large_jsonl_reads_each_line_once(tmp_path: Path) -> None:
    texts = [f"{i} " + "x" * 90 for i in range(60_000)]  # more than one block
    path = write_lines(tmp_path / "a.jsonl", *({"text": text} for text in texts))
    assert read(path) == texts
    shuffled = list(Reader(locate(path)).documents(np.random.default_rng(1)))
    assert shuffled != texts
    assert sorted(shuffled) == sorted(texts)


def test_json_lines_in_a_json_file(tmp_path: Path) -> None:
    assert read(write_lines(tmp_path / "a.json", {"text": "one"}, {"text": "two"})) == ["one", "two"]


def test_parquet_names_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"body": ["one", "two", None], "id": [1, 2, 3]})
    pq.write_table(table, path, row_group_size=1)
    assert read(path, "body") == ["one", "two"]
    assert "it has body, id" in fault(path).problem
    assert "holds int64" in fault(path, "id").problem
    path.write_bytes(b"PAR1 and then nonsense")
    assert "as Parquet" in fault(path).problem


def test_saved_dataset_and_its_splits(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    rows = Dataset.from_dict({"content": ["one", "two"], "id": [1, 2]})
    rows.save_to_disk(str(tmp_path / "plain"))
    DatasetDict({"validation": rows.select([0]), "train": rows.select([1])}).save_to_disk(str(tmp_path / "dict"))
    assert read(tmp_path / "plain") == ["one", "two"]
    assert read(tmp_path / "dict") == ["two"]
    assert "it has content, id" in fault(tmp_path / "plain", "text").problem


def look(data: Path, field: str | None) -> None:
    check_data(data, field)


def test_a_first_look_finds_a_wrong_column(tmp_path: Path) -> None:
    from datasets import Dataset

    lines = write_lines(tmp_path / "a.jsonl", {"body": None, "id": 1})
    parquet = tmp_path / "a.parquet"
    pq.write_table(pa.table({"body": ["one"], "id": [1]}), parquet)
    saved = tmp_path / "saved"
    Dataset.from_dict({"body": ["one"], "id": [1]}).save_to_disk(str(saved))
    for data in (lines, parquet, saved):
        look(data, "body")
        for field, word in (("bodi", "'bodi'"), ("id", "not text")):
            with pytest.raises(UserError, match=word):
                look(data, field)
    with pytest.raises(UserError, match="'text' or 'content'"):
        look(lines, None)
    with pytest.raises(UserError, match="does not exist"):
        look(tmp_path / "nowhere", None)


def test_a_first_look_into_a_folder_is_content_with_one_file(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", {"other": "x"})
    (tmp_path / "b.txt").write_text("plain")
    with pytest.raises(UserError, match="no field 'body'"):
        look(tmp_path, "body")
    write_lines(tmp_path / "c.jsonl", "no object", {"body": "one"})
    look(tmp_path, "body")
    look(tmp_path, None)


def test_a_first_look_leaves_damaged_files_to_the_reader(tmp_path: Path) -> None:
    damaged = tmp_path / "a.parquet"
    damaged.write_bytes(b"PAR1 and then nonsense")
    look(damaged, "body")
    blank = tmp_path / "a.jsonl"
    blank.write_text("\n\n")
    look(blank, "body")


def test_field_for_plain_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    assert "does not apply" in fault(tmp_path / "a.txt", "text").problem


def test_enormous_document_becomes_several(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"text": "x" * (2 * LONGEST_DOCUMENT + 5)})
    assert [len(part) for part in read(path)] == [LONGEST_DOCUMENT, LONGEST_DOCUMENT, 5]


def test_default_is_the_standard_library_without_tests() -> None:
    names = [file.name for file in locate(None).files]
    assert "argparse.py" in names
    assert "json/decoder.py" in names
    assert names == [file.name for file in locate(None).files]
    assert not any({"test", "tests", "site-packages"} & set(Path(name).parts) for name in names)
    library = Path(sysconfig.get_paths()["stdlib"])
    assert (library / "argparse.py").read_text(encoding="utf-8") in read(None)


def test_signature_follows_every_write(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("abc")
    before = path.stat()
    first = locate(path).signature()
    assert locate(path).signature() == first
    path.write_text("abd")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # same size, same modification time
    assert locate(path).signature() != first
