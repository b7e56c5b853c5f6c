"""The tokenizer of a workload: the user's own from a local folder, or a byte-level BPE trained on the data."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from training_xpu.errors import UserError
from training_xpu.workloads.data.sources import missing

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
BOS, EOS, PAD = "<|begin_of_text|>", "<|end_of_text|>", "<|pad|>"
SMALLEST_VOCABULARY = 256 + 3  # every byte, and the three special tokens

# What folders that hold a tokenizer in some older form have; transformers can turn these into a tokenizer.json.
_OLDER_FORMS = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt", CONFIG_FILE)
_KEPT_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
FILES = (TOKENIZER_FILE, SPECIAL_TOKENS_FILE, *dict.fromkeys((*_OLDER_FORMS, *_KEPT_FILES)))  # all that are ever read
_USUAL_EOS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|im_end|>", "<|eot_id|>", "[EOS]", "[SEP]")


@dataclass(frozen=True, slots=True)
class TextTokenizer:
    """A fast tokenizer, set so that text cannot spell a special token and nothing is truncated or padded."""

    tokenizer: Tokenizer
    size: int  # the largest id + 1
    eos_token_id: int
    pad_token_id: int
    prefix: tuple[int, ...]  # put before each document: BOS, if the tokenizer itself puts it there

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The ids of each document: its text between the prefix and EOS; a tokenizer's own suffix is not used."""
        end = [self.eos_token_id]
        encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [[*self.prefix, *encoding.ids, *end] for encoding in encodings]


def load(folder: Path) -> TextTokenizer:
    """Opens a folder with tokenizer.json and the names of its special tokens; EOS is required, PAD defaults to EOS.

    Raises:
        UserError: the files are damaged, or no end-of-text token is known.
    """
    tokenizer = _open(folder / TOKENIZER_FILE)
    names = _special_names(folder, tokenizer)
    ids: dict[str, int] = {}
    for role, name in names.items():
        token = tokenizer.token_to_id(name)
        if token is None:
            raise UserError(f"the {role} {name!r} of {folder} is not in its vocabulary", f"Mend {CONFIG_FILE} there.")
        ids[role] = token
    tokenizer.no_truncation()
    tokenizer.no_padding()
    begins = tokenizer.encode("", add_special_tokens=True).ids
    prefix = (ids["bos_token"],) if begins[:1] == [ids["bos_token"]] and ids["bos_token"] != ids["eos_token"] else ()
    tokenizer.encode_special_tokens = True
    size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    return TextTokenizer(tokenizer, size, ids["eos_token"], ids["pad_token"], prefix)


def adopt(given: Path, folder: Path) -> TextTokenizer:
    """Saves the user's tokenizer into a folder that AutoTokenizer can load, with EOS, PAD and BOS named.

    Args:
        given: a local folder of a HF tokenizer or checkpoint, or its tokenizer.json.
        folder: is created if need be.

    Raises:
        UserError: the path does not exist or holds no tokenizer that can be used.
    """
    origin = given.parent if given.name == TOKENIZER_FILE and given.is_file() else given
    check_given(given)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as converted:
        if not (origin / TOKENIZER_FILE).is_file():
            _convert(origin, Path(converted))
            origin = Path(converted)
        tokenizer = _open(origin / TOKENIZER_FILE)
        names = _special_names(origin, tokenizer)
        for name in (TOKENIZER_FILE, *_KEPT_FILES):
            if (origin / name).is_file():
                shutil.copyfile(origin / name, folder / name)
        config = _read_json(origin / CONFIG_FILE)
    config.update(names)
    # Code shipped beside a tokenizer is neither copied nor run; its tokenizer.json says all that encoding needs.
    if config.pop("auto_map", None) is not None or "tokenizer_class" not in config:
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    _write_json(folder / CONFIG_FILE, config)
    _write_json(folder / SPECIAL_TOKENS_FILE, names)
    return load(folder)


def check_given(given: Path) -> None:
    """Answers a wrong `--tokenizer` at once.

    Raises:
        UserError: the path does not exist, or holds nothing that could be a tokenizer.
    """
    if not given.exists():
        raise missing("--tokenizer", given)
    if given.is_dir():
        if any((given / name).is_file() for name in (TOKENIZER_FILE, *_OLDER_FORMS)):
            return
        raise UserError(
            f"--tokenizer {given} holds no tokenizer", f"It needs a {TOKENIZER_FILE}; nothing is downloaded."
        )
    if given.name != TOKENIZER_FILE:
        raise UserError(f"--tokenizer {given} is not a folder", f"Give the folder that holds {TOKENIZER_FILE}.")


def train(texts: Iterable[str], vocabulary_size: int, folder: Path) -> TextTokenizer:
    """Trains a byte-level BPE on the texts and saves it into a folder that AutoTokenizer can load.

    Every text can be encoded, since each byte is a token. Merges seen fewer than twice are not made, so little data
    gives a smaller vocabulary than asked for.

    Args:
        texts: what to learn from; a bounded sample.
        vocabulary_size: at most so many tokens, `SMALLEST_VOCABULARY` or more.
        folder: is created if need be.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        min_frequency=2,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_broken_runs(texts), trainer=trainer)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TOKENIZER_FILE).write_text(tokenizer.to_str(pretty=True), encoding="utf-8")  # a full disk is an OSError
    names = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names}
    _write_json(folder / CONFIG_FILE, config)
    _write_json(folder / SPECIAL_TOKENS_FILE, names)
    return load(folder)


def _broken_runs(texts: Iterable[str]) -> Iterator[str]:
    """Breaks runs without blanks: the trainer walks a whole word once per merge, for ever in megabytes of base64."""
    for text in texts:
        yield re.sub(r"\S{256}", r"\g<0>\n", text)


def _open(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise UserError(
            f"{path} is not a tokenizer: {error}", "Save the tokenizer again with save_pretrained."
        ) from error


def _convert(origin: Path, folder: Path) -> None:
    """Turns an older form of tokenizer into tokenizer.json, by way of transformers."""
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(str(origin), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds for incomplete folders
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"--tokenizer {origin} cannot be loaded: {first}", f"It needs a {TOKENIZER_FILE}.") from error
    loaded.save_pretrained(str(folder))
    if not (folder / TOKENIZER_FILE).is_file():
        raise UserError(
            f"--tokenizer {origin} has no fast form ({type(loaded).__name__})", f"It needs a {TOKENIZER_FILE}."
        )


def _special_names(folder: Path, tokenizer: Tokenizer) -> dict[str, str]:
    """The text of BOS, EOS and PAD: as the folder's files say, else EOS by its usual names and the others as EOS."""
    config, special = _read_json(folder / CONFIG_FILE), _read_json(folder / SPECIAL_TOKENS_FILE)
    names: dict[str, str] = {}
    for role in ("bos_token", "eos_token", "pad_token"):
        value = config.get(role) or special.get(role)
        name = value.get("content") if isinstance(value, dict) else value
        if isinstance(name, str) and name:
            names[role] = name
    if "eos_token" not in names:
        usual = next((name for name in _USUAL_EOS if tokenizer.token_to_id(name) is not None), None)
        if usual is None:
            raise UserError(
                f"the tokenizer in {folder} names no end-of-text token", f'Add "eos_token" to its {CONFIG_FILE}.'
            )
        names["eos_token"] = usual
    return {role: names.get(role, names["eos_token"]) for role in ("bos_token", "eos_token", "pad_token")}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}", "Save the tokenizer again with save_pretrained.") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is no JSON object", "Save the tokenizer again with save_pretrained.")
    return content


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
