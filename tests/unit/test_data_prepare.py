"""Tokens, the held-out part, the tokenizer and the cache."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from training_xpu.errors import UserError
from training_xpu.workloads.config import PreparedData
from training_xpu.workloads.data.holdout import Files, Wanted, write_split
from training_xpu.workloads.data.prepare import prepare
from training_xpu.workloads.data.tokenizer import TextTokenizer, adopt


def quiet(text: str) -> None:
    pass


def made(data: Path, cache: Path, **options: Any) -> PreparedData:
    chosen: dict[str, Any] = {
        "tokenizer": None,
        "vocabulary_size": 300,
        "sequence_length": 8,
        "max_tokens": None,
        "seed": 0,
        "data_field": None,
        "progress": quiet,
        "eval_sequences": 2,
    }
    return prepare(data, cache=cache, **{**chosen, **options})


def texts(prepared: PreparedData, side: str) -> list[str]:
    """Documents decoded by transformers, each checked to end with its only EOS."""
    tokenizer = AutoTokenizer.from_pretrained(prepared.tokenizer)
    tokens = np.load(prepared.train_tokens if side == "train" else prepared.eval_tokens)
    offsets = np.load(prepared.train_offsets if side == "train" else prepared.eval_offsets)
    assert offsets.dtype == np.int64
    documents = [tokens[a:b] for a, b in pairwise(offsets)]
    assert all(document[-1] == prepared.eos_token_id for document in documents)
    assert (tokens == prepared.eos_token_id).sum() == len(documents)
    return [tokenizer.decode(document[:-1]) for document in documents]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    rows = [f"document {i}: ünï 漢 🙂 <|end_of_text|>\r\n" + f"word{i % 7} " * (i % 30) for i in range(400)]
    rows += rows[:200]  # exact duplicates
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows), encoding="utf-8")
    return folder / "a.jsonl"


@pytest.fixture(scope="module")
def prepared(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    return made(corpus, tmp_path_factory.mktemp("cache"))


def rows_of(corpus: Path) -> list[str]:
    return [json.loads(line)["text"] for line in corpus.read_text(encoding="utf-8").splitlines()]


def test_every_document_comes_back_on_exactly_one_side(corpus: Path, prepared: PreparedData) -> None:
    train, held_out = texts(prepared, "train"), texts(prepared, "eval")
    assert sorted(train + held_out) == sorted(rows_of(corpus))
    assert not set(train) & set(held_out)
    assert prepared.document_count == 600
    assert 0.01 < len(held_out) / 600 < 0.12


def test_record_says_what_the_files_hold(prepared: PreparedData) -> None:
    train, held_out = np.load(prepared.train_tokens), np.load(prepared.eval_tokens)
    assert (len(train), len(held_out)) == (prepared.train_token_count, prepared.eval_token_count)
    assert train.dtype == np.uint16
    assert train.max() < prepared.vocabulary_size


def test_tokenizer_loads_in_transformers_with_its_special_tokens(prepared: PreparedData) -> None:
    tokenizer = AutoTokenizer.from_pretrained(prepared.tokenizer)
    assert tokenizer.eos_token_id == prepared.eos_token_id
    assert tokenizer.pad_token_id == prepared.pad_token_id
    assert tokenizer.bos_token is not None
    assert len({tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id}) == 3
    assert len(tokenizer) <= prepared.vocabulary_size
    assert tokenizer.decode(tokenizer("  x\r\n\tñ🙂")["input_ids"]) == "  x\r\n\tñ🙂"


def test_same_input_gives_the_same_tokens_anywhere(corpus: Path, prepared: PreparedData, tmp_path: Path) -> None:
    copy = tmp_path / "other name.jsonl"
    copy.write_bytes(corpus.read_bytes())
    again = made(copy, tmp_path / "cache")
    assert again.digest == prepared.digest
    assert again.train_tokens.read_bytes() == prepared.train_tokens.read_bytes()


def test_found_again_without_tokenizing(corpus: Path, tmp_path: Path) -> None:
    first = made(corpus, tmp_path)
    changed = first.train_tokens.stat().st_ctime_ns
    said: list[str] = []
    assert made(corpus, tmp_path, progress=said.append) == first
    assert first.train_tokens.stat().st_ctime_ns == changed
    assert "from the cache" in said[-1]


@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped", "manifest", "tokenizer"])
def test_damaged_cache_is_made_again(corpus: Path, tmp_path: Path, damage: str) -> None:
    first = made(corpus, tmp_path)
    good = first.train_tokens.read_bytes()
    if damage == "missing":
        first.eval_offsets.unlink()
    elif damage == "truncated":
        first.train_tokens.write_bytes(good[:-10])
    elif damage == "flipped":
        first.train_tokens.write_bytes(good[:-2] + b"\x07\x00")
    elif damage == "manifest":
        (first.train_tokens.parent / "prepared.json").write_text("{")
    else:
        for path in tmp_path.rglob("tokenizer.json"):
            path.write_text("{}")
    again = made(corpus, tmp_path)
    assert again == first
    assert again.train_tokens.read_bytes() == good


def test_left_overs_of_a_killed_run_are_removed(corpus: Path, tmp_path: Path) -> None:
    folder = made(corpus, tmp_path).train_tokens.parent
    left = folder.with_name(f"{folder.name}.building-99999999")
    folder.rename(left)
    assert made(corpus, tmp_path).train_tokens.parent == folder
    assert not left.exists()


def test_maximum_bounds_training_and_keeps_evaluation(corpus: Path, prepared: PreparedData, tmp_path: Path) -> None:
    few = made(corpus, tmp_path, max_tokens=500, seed=1)
    longest = max(np.diff(np.load(prepared.train_offsets)))
    assert 500 <= few.train_token_count < 500 + longest
    assert few.eval_token_count >= 2 * 8
    assert set(texts(few, "eval")) <= set(texts(prepared, "eval"))
    other = made(corpus, tmp_path, max_tokens=500, seed=2)
    assert texts(other, "train") != texts(few, "train")
    assert made(corpus, tmp_path, max_tokens=500, seed=1) == few


def test_one_document_is_cut_to_hold_some_of_it_out(tmp_path: Path) -> None:
    lines = [f"line {i} of the only document\n" for i in range(2000)]
    (tmp_path / "a.txt").write_text("".join(lines))
    prepared = made(tmp_path / "a.txt", tmp_path / "cache", sequence_length=64)
    train, held_out = texts(prepared, "train"), texts(prepared, "eval")
    back = "".join(train + held_out).splitlines(keepends=True)
    assert sorted(back) == sorted(lines)
    assert prepared.eval_token_count >= 2 * 64
    assert prepared.eval_token_count <= 0.3 * (prepared.train_token_count + prepared.eval_token_count)


def test_one_text_over_and_over_is_split_and_said_so(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello world\n" * 3000)
    said: list[str] = []
    prepared = made(tmp_path / "a.txt", tmp_path / "cache", sequence_length=128, progress=said.append)
    assert prepared.eval_token_count >= 128
    assert any("too uniform" in line for line in said)


def test_too_small_says_how_much_is_needed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefg")
    with pytest.raises(UserError, match="holds 8 tokens; one evaluation and one training sequence of 8 need 16"):
        made(tmp_path / "a.txt", tmp_path / "cache")
    (tmp_path / "a.txt").write_text("abcdefghijklmno")  # and EOS: just enough
    prepared = made(tmp_path / "a.txt", tmp_path / "cache")
    assert prepared.train_token_count >= 8
    assert prepared.eval_token_count >= 8


@pytest.mark.parametrize("vocabulary", [300, 128_256])
def test_vocabulary_of_any_size(corpus: Path, tmp_path: Path, vocabulary: int) -> None:
    prepared = made(corpus, tmp_path, vocabulary_size=vocabulary)
    assert prepared.vocabulary_size == vocabulary
    assert len(AutoTokenizer.from_pretrained(prepared.tokenizer)) <= vocabulary


def test_vocabulary_below_the_bytes_is_refused(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="too small"):
        made(corpus, tmp_path, vocabulary_size=200)


def word_tokenizer(folder: Path, words: int, begins: bool = False, **config: object) -> Path:
    names = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(words))]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    tokenizer.enable_truncation(4)
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def words(tmp_path: Path) -> Path:
    lines = [json.dumps({"text": " ".join(f"w{(i * 7 + j) % 50}" for j in range(10))}) for i in range(60)]
    (tmp_path / "words.jsonl").write_text("\n".join(lines))
    return tmp_path / "words.jsonl"


def test_users_tokenizer_with_begin_token_and_large_ids(words: Path, tmp_path: Path) -> None:
    given = word_tokenizer(tmp_path / "my tokenizer", 70_000, begins=True, bos_token="<s>", eos_token="</s>")
    prepared = made(words, tmp_path / "cache", tokenizer=given, vocabulary_size=80_000)
    tokens, offsets = np.load(prepared.train_tokens), np.load(prepared.train_offsets)
    assert tokens.dtype == np.uint32
    assert set(np.diff(offsets)) == {12}  # <s>, ten words whatever the truncation, </s>
    assert set(tokens[offsets[:-1]]) == {1}
    assert set(tokens[offsets[1:] - 1]) == {2}
    assert prepared.vocabulary_size == 80_000
    loaded = AutoTokenizer.from_pretrained(prepared.tokenizer)
    assert (loaded.bos_token, loaded.eos_token, loaded.pad_token) == ("<s>", "</s>", "</s>")


def test_users_tokenizer_by_file_and_with_unnamed_end(words: Path, tmp_path: Path) -> None:
    given = word_tokenizer(tmp_path / "given", 60)
    prepared = made(words, tmp_path / "cache", tokenizer=given / "tokenizer.json")
    assert prepared.eos_token_id == 2
    assert set(np.diff(np.load(prepared.train_offsets))) == {11}


def test_size_of_a_users_tokenizer_is_its_largest_id(tmp_path: Path) -> None:
    (tmp_path / "there already").mkdir()
    assert adopt(word_tokenizer(tmp_path / "given", 60), tmp_path / "there already").size == 63


def test_tokenizer_without_tokenizer_json_goes_through_transformers(words: Path, tmp_path: Path) -> None:
    folder = tmp_path / "older"
    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, "<|endoftext|>"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"})
    )
    prepared = made(words, tmp_path / "cache", tokenizer=folder)
    assert prepared.eos_token_id == 256
    assert texts(prepared, "eval")[0].startswith("w")


def test_tokenizers_that_cannot_be_used(words: Path, tmp_path: Path) -> None:
    def fault(given: Path, vocabulary: int = 300) -> UserError:
        with pytest.raises(UserError) as caught:
            made(words, tmp_path / "cache", tokenizer=given, vocabulary_size=vocabulary)
        assert caught.value.remedy
        return caught.value

    good = word_tokenizer(tmp_path / "good", 60)
    assert fault(tmp_path / "goof").remedy == "Did you mean good?"
    (tmp_path / "bare").mkdir()
    assert "holds no tokenizer" in fault(tmp_path / "bare").problem
    assert "not a folder" in fault(words).problem
    assert "has 63 tokens, the model only 50" in fault(good, 50).problem
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    assert "is not a tokenizer" in fault(tmp_path / "broken").problem
    odd = word_tokenizer(tmp_path / "odd", 60, eos_token="<gone>")
    assert "'<gone>'" in fault(odd).problem
    assert not list((tmp_path / "cache").rglob("*.building-*"))


def test_unwritable_cache(words: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UserError, match="cannot write the data cache"):
        made(words, tmp_path / "cache")


def test_held_out_documents_do_not_depend_on_order(prepared: PreparedData, tmp_path: Path) -> None:
    tokenizer = _byte_tokenizer()
    documents = [f"document number {i}" for i in range(500)]
    sides = []
    for name, order in (("a", documents), ("b", documents[::-1])):
        (tmp_path / name).mkdir()
        files = Files(tmp_path / name, np.dtype(np.uint16))
        split = write_split(order, tokenizer, files, Wanted(8, 16, None), lambda tokens: None)
        assert split.good
        offsets, tokens = np.load(files.offsets("eval")), np.load(files.tokens("eval"))
        sides.append({tuple(tokens[a:b]) for a, b in pairwise(offsets)})
    assert sides[0] == sides[1]


def _byte_tokenizer() -> TextTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return TextTokenizer(tokenizer, 257, 256, 256, ())
