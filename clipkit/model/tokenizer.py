"""Tokenizers: CLIP's byte-pair encoding, and tokenizers of the transformers library.

open_clip cleans texts before it passes them to a tokenizer of transformers, and transformers itself does not.
There is a class for each, so that a model gets the tokens it was trained with.
"""

import gzip
import html
import json
import os
import re as standard_re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib.util import find_spec
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, SupportsIndex

import numpy as np
import torch
from torch import Tensor

from clipkit.errors import CheckpointError, ConfigError, DataError, nearest
from clipkit.files.open_clip import make_tokenizer, vocabulary_file
from clipkit.model.architectures import Architecture, TextTower

if TYPE_CHECKING:
    from tokenizers.models import BPE

# CLIP's byte-pair encoding: the Rust library ``tokenizers`` with a cache of parts of texts.
#
# The ids equal those of OpenAI's tokenizer and of open_clip's ``SimpleTokenizer``: ftfy repairs the text, HTML
# entities are unescaped twice, white space is normalized, and everything is lower case.
#
# A text is cleaned if it is not plain ASCII, split at its spaces, and the ids of each part are looked up. Only a
# part that is not cached is split into words and encoded. This is exact because words end at a space. Nothing here
# locks, warns or starts threads, so threads and forked processes can tokenize.

CONTEXT_LENGTH = 77
START_OF_TEXT, END_OF_TEXT = 49406, 49407
VOCABULARY = "bpe_simple_vocab_16e6"  # recorded in checkpoints
_MERGES = 49152 - 256 - 2
_MAX_CONTEXT = 1_000_000  # tokens, as for architectures
MAX_CHARACTERS = 100_000  # of a text; at most a few hundred of them can reach the model

# OpenAI's pattern: special tokens, English contractions, runs of letters, single digits, runs of other characters
_WORD = r"<start_of_text>|<end_of_text>|'s|'t|'re|'ve|'m|'ll|'d|[LETTER]+|[NUMBER]|[^\sLETTERNUMBER]+"
_ASCII_WORD = standard_re.compile(_WORD.replace("LETTER", "a-z").replace("NUMBER", "0-9"))  # for lower case
_SPECIAL = ("<start_of_text>", "<end_of_text>")
# ASCII of which ftfy and html change nothing but white space: no control characters, no "&"
_PLAIN_ASCII = standard_re.compile(r"[\t\n\f\r -%'-~]*")


def tokenize(
    texts: str | Sequence[str], context_length: int = CONTEXT_LENGTH, *, trim: bool = False
) -> Tensor:
    """Tokenize texts to (N, L) int64: start of text, the text, end of text, zeros.

    Args:
        texts: one or many; a lone surrogate counts as U+FFFD, as in ftfy.
        context_length: L, from 2 to 1,000,000. Longer texts are cut and still end with end of text.
        trim: reduce L to the longest of the texts, which saves work and does not change features.

    Raises:
        DataError: a text is longer than 100,000 characters, or not a string.
        ConfigError: ``context_length`` is out of range.
    """
    if not isinstance(context_length, SupportsIndex) or not 2 <= context_length <= _MAX_CONTEXT:
        raise ConfigError(f"context_length = {context_length!r} is not a number from 2 to {_MAX_CONTEXT}")
    context_length = int(context_length)
    many = [texts] if isinstance(texts, str) else convert_strings(texts, "texts")
    longest = max(map(len, many), default=0)
    if longest > MAX_CHARACTERS:
        raise DataError(f"a text of {longest} characters is over the limit of {MAX_CHARACTERS}")
    room = 2 * (context_length - 2)  # bytes
    rows = []
    for text in many:
        if not _PLAIN_ASCII.fullmatch(text):
            import ftfy

            text = html.unescape(html.unescape(ftfy.fix_text(text)))
        ids = b"".join(map(_parts.__getitem__, text.lower().split()))
        rows.append(ids[:room])
    if trim:
        context_length = max(map(len, rows), default=0) // 2 + 2
    start = _pack_ids([START_OF_TEXT])
    end = _pack_ids([END_OF_TEXT])
    width = 2 * context_length
    padded = b"".join([(start + row + end).ljust(width, b"\0") for row in rows])
    tokens = np.frombuffer(padded, np.uint16).astype(np.int64)
    return torch.from_numpy(tokens).view(len(rows), context_length)


def convert_strings(strings: Iterable[str], label: str) -> list[str]:
    """Convert strings of any type, such as numpy's, to a list of str; ``label`` is their name in messages."""
    if isinstance(strings, bytes) or not isinstance(strings, Iterable):
        raise DataError(f"{label} must be a list of strings, not {type(strings).__name__}")
    try:
        many = list(strings)
    except TypeError as error:  # an array without dimensions
        raise DataError(f"{label} must be a list of strings: {error}") from error
    if set(map(type, many)) <= {str}:
        return many
    for i, string in enumerate(many):
        if not isinstance(string, str):
            raise DataError(f"{label} must be strings, but number {i} is of type {type(string).__name__}")
    return [str(string) for string in many]


class _Cache(dict[str, bytes]):
    """Cache of the ids of short strings, two bytes each.

    A full cache is reset to its initial content: frequent strings return soon, and reading needs no
    bookkeeping. Longer strings are not cached, which limits memory for any text. Threads may share it: at worst
    two compute the same ids.
    """

    LIMIT = 2**17  # strings; both caches, full of emoji and Cyrillic, take 40 MB
    LONGEST = 32  # characters, and ids

    def __init__(self, initial: Callable[[], dict[str, bytes]], compute: Callable[[str], bytes]) -> None:
        super().__init__()
        self._initial, self._compute = initial, compute

    def __missing__(self, string: str) -> bytes:
        if not self:
            self.update(self._initial())
            return self[string]
        ids = self._compute(string)
        if len(string) <= self.LONGEST and len(ids) <= 2 * self.LONGEST:
            if len(self) >= self.LIMIT:
                self.clear()
                self.update(self._initial())
            self[string] = ids
        return ids


def _encode_part(part: str) -> bytes:
    """Return the ids of a part of a clean text, in lower case."""
    if not (part.isascii() and part.isprintable()):
        return b"".join(map(_words.__getitem__, _word_pattern().findall(part)))
    # the most frequent first: a word, a word and a punctuation mark
    if part.isalpha():
        return _encode_word(part)
    if part[:-1].isalpha() and part[-1] in ",.:;!?":
        return _parts[part[:-1]] + _parts[part[-1]]
    words = _ASCII_WORD.findall(part)
    return _words[part] if words == [part] else b"".join(map(_parts.__getitem__, words))


def _encode_word(word: str) -> bytes:
    model = _load_bpe()
    symbols = word.encode().decode("latin-1").translate(model.symbols)
    return _pack_ids([token.id for token in model.bpe.tokenize(symbols)])


def _pack_ids(ids: list[int]) -> bytes:
    return array("H", ids).tobytes()


@cache
def _word_pattern() -> Any:
    import regex  # the standard library has no \p{L} and \p{N}

    return regex.compile(_WORD.replace("LETTER", r"\p{L}").replace("NUMBER", r"\p{N}"), regex.IGNORECASE)


class _Model(NamedTuple):
    bpe: "BPE"
    # by byte
    symbols: dict[int, str]
    # ids of ASCII words that are one token, and of special tokens
    words: dict[str, bytes]
    # those of letters only
    plain_words: dict[str, bytes]


@cache
def _load_bpe() -> _Model:
    from tokenizers.models import BPE

    symbols = byte_symbols()
    vocabulary = {token: i for i, token in enumerate([*list_tokens(), *_SPECIAL])}
    bpe = BPE(vocabulary, read_merges(), end_of_word_suffix="</w>", cache_capacity=0)
    words = {token[:-4]: i for token, i in vocabulary.items() if token.isascii() and token.endswith("</w>")}
    words |= {token: vocabulary[token] for token in _SPECIAL}
    ids = {word: _pack_ids([i]) for word, i in words.items()}
    plain_words = {word: ids[word] for word in ids if word.isalpha()}
    return _Model(bpe=bpe, symbols=symbols, words=ids, plain_words=plain_words)


@cache
def list_tokens() -> tuple[str, ...]:
    """Return the vocabulary without its two special tokens, by id."""
    symbols = byte_symbols().values()
    return (*symbols, *(symbol + "</w>" for symbol in symbols), *map("".join, read_merges()))


def read_merges() -> list[tuple[str, str]]:
    """Return the merges of the byte-pair encoding in order, from the file in open_clip_torch."""
    lines = gzip.decompress(vocabulary_file().read_bytes()).decode("utf-8").split("\n")[1 : _MERGES + 1]
    pairs = [line.split() for line in lines]
    return [(left, right) for left, right in pairs]


def byte_symbols() -> dict[int, str]:
    """Map each byte to a printable character in the vocabulary's order: itself, or the next from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    symbols = {byte: chr(byte) for byte in printable}
    for i, byte in enumerate(others):
        symbols[byte] = chr(256 + i)
    return symbols


_parts = _Cache(lambda: _load_bpe().plain_words, _encode_part)
_words = _Cache(lambda: _load_bpe().words, _encode_word)


_FOLDER = "tokenizer"  # in a checkpoint
_UNCLEANED = "transformers without cleaning"
_CLASSES = "class names"
_PROBED_WORDS = 200  # of a vocabulary


class Tokenizer(Protocol):
    """A tokenizer that can be stored with the weights."""

    @property
    def vocab_size(self) -> int:
        """The largest token plus one."""

    @property
    def special_tokens(self) -> Sequence[int]:
        """Tokens that stand for no part of a text: start, end, unknown, and padding other than zeros at the end."""

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Tokenize N texts to (N, L) int64."""

    def count_cut(self, texts: Sequence[str], tokens: Tensor) -> int:
        """Count texts that were cut at the context length, given their tokens (N, L).

        Only texts whose tokens have no room for padding are tokenized again.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, without the start and the end of text."""

    def store(self, folder: Path) -> Any:
        """Write the tokenizer's files to a checkpoint folder, and return its entry in model.json."""

    def replace_length(self, context_length: int) -> "Tokenizer":
        """Return the tokenizer with another maximum number of tokens."""


def _select_full(texts: Sequence[str], tokens: Tensor, length: int, *, padding: int = 0) -> list[str]:
    """Return the texts whose tokens (N, L) have no padding at the end of the context length."""
    if tokens.shape[1] < length:
        return []
    is_full = (tokens[:, length - 1] != padding).tolist()
    return list(compress(texts, is_full))


@dataclass(frozen=True, kw_only=True)
class ClipTokenizer:
    """CLIP's tokenizer, see ``clipkit.tokenize``. Its vocabulary is part of open_clip_torch."""

    context_length: int = 77
    trim: bool = True
    vocab_size: ClassVar[int] = END_OF_TEXT + 1
    special_tokens: ClassVar[Sequence[int]] = (START_OF_TEXT, END_OF_TEXT)

    def __call__(self, texts: Sequence[str]) -> Tensor:
        return tokenize(texts, self.context_length, trim=self.trim)

    def count_cut(self, texts: Sequence[str], tokens: Tensor) -> int:
        longer = tokenize(_select_full(texts, tokens, self.context_length), self.context_length + 1)
        return int(longer[:, -1].count_nonzero())

    def decode(self, ids: Sequence[int]) -> str:
        symbols = list_tokens()
        byte_of_symbol = {symbol: byte for byte, symbol in byte_symbols().items()}
        text = "".join(symbols[i] for i in ids if i < START_OF_TEXT).replace("</w>", " ").rstrip()
        return bytes(byte_of_symbol.get(symbol, ord(" ")) for symbol in text).decode("utf-8", "replace")

    def store(self, folder: Path) -> Any:
        return VOCABULARY

    def replace_length(self, context_length: int) -> "ClipTokenizer":
        return replace(self, context_length=context_length)


@dataclass(frozen=True, kw_only=True)
class ClassTokenizer:
    """Maps names of classes to (N, 1) class numbers, for a classification head."""

    names: tuple[str, ...]
    special_tokens: ClassVar[Sequence[int]] = ()

    @property
    def vocab_size(self) -> int:
        return len(self.names)

    def __call__(self, texts: Sequence[str]) -> Tensor:
        try:
            labels = [self._labels[" ".join(text.split())] for text in texts]
        except KeyError as error:
            name = str(error.args[0])
            raise DataError(
                f"{name[:80]!r} is not one of the model's {len(self.names)} classes: {nearest(name, self.names)} "
                "(its classification head encodes only class names)"
            ) from error
        return torch.tensor(labels, dtype=torch.int64).view(-1, 1)

    def count_cut(self, texts: Sequence[str], tokens: Tensor) -> int:
        return 0

    def decode(self, ids: Sequence[int]) -> str:
        return self.names[ids[0]]

    @cached_property
    def _labels(self) -> dict[str, int]:
        labels = {name: i for i, name in enumerate(self.names)}
        # names of folders with "_" are evaluated with spaces
        return {name.replace("_", " "): i for name, i in labels.items()} | labels

    def store(self, folder: Path) -> Any:
        return _CLASSES

    def replace_length(self, context_length: int) -> "ClassTokenizer":
        return self


@dataclass(kw_only=True)
class LibraryTokenizer:
    """A tokenizer of transformers after open_clip's cleaning of texts.

    Attributes:
        source: a folder, or a name on the Hugging Face hub; read at the first text.
        context_length: length to which texts are padded or cut.
        options: open_clip's ``tokenizer_kwargs``.
        trim: remove columns that are padding in all rows.
    """

    source: str
    context_length: int
    options: dict[str, Any] = field(default_factory=dict)
    trim: bool = False
    _loaded: Any = None

    @property
    def vocab_size(self) -> int:
        return max(self._load_library().tokenizer.get_vocab().values(), default=0) + 1

    @property
    def special_tokens(self) -> Sequence[int]:
        return list(self._load_library().tokenizer.all_special_ids)

    @property
    def padding(self) -> int:
        """The token behind shorter texts; other tokenizers pad with 0."""
        return int(self._load_library().tokenizer.pad_token_id)

    def __call__(self, texts: Sequence[str]) -> Tensor:
        if not texts:
            return torch.zeros(0, self.context_length, dtype=torch.int64)
        library = self._load_library()
        ids: Tensor = library(list(texts))
        padding = library.tokenizer.pad_token_id
        if self.trim and library.tokenizer.padding_side == "right":
            used = (ids != padding).any(dim=0).nonzero()
            longest = int(used[-1]) + 1 if len(used) else 1
            ids = ids[:, :longest]
        return ids

    def count_cut(self, texts: Sequence[str], tokens: Tensor) -> int:
        library = self._load_library()
        tokenizer = library.tokenizer
        length = self.context_length
        special = library.tokenizer_mode != "clips"
        if not special:
            length -= 3
        elif tokenizer.padding_side == "right" and tokenizer.pad_token_id != tokenizer.eos_token_id:
            texts = _select_full(texts, tokens, length, padding=tokenizer.pad_token_id)
        if not texts:
            return 0
        cleaned = [library.clean_fn(text) for text in texts]
        longer = tokenizer(cleaned, truncation=True, max_length=length + 1, add_special_tokens=special)
        return sum(len(row) > length for row in longer["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._load_library().tokenizer.decode(list(ids), skip_special_tokens=True))

    def _load_library(self) -> Any:
        if self._loaded is None:
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # loader processes are forked
            from clipkit.files.hub import convert_hub_errors

            if Path(self.source).is_dir() and not has_tokenizer(Path(self.source)):
                raise ConfigError(
                    f"{self.source} has no tokenizer: copy tokenizer.json and tokenizer_config.json of the model "
                    "into this folder"
                )
            with convert_hub_errors(self.source):
                library = make_tokenizer(self.source, self.context_length, **self.options)
            _check_words(library.tokenizer, self.source)
            if library.tokenizer.pad_token_id is None:
                raise ConfigError(
                    f"the tokenizer in {self.source} has no padding token: add pad_token to tokenizer_config.json, "
                    "the token whose number is pad_token_id in config.json"
                )
            self._loaded = library
        return self._loaded

    def store(self, folder: Path) -> Any:
        tokenizer = self._load_library().tokenizer
        tokenizer("", truncation=True, max_length=self.context_length)  # the files contain the last length
        tokenizer.save_pretrained(folder / _FOLDER)
        names = ("context_length", "options", "trim")
        return {"kind": "transformers", **{name: getattr(self, name) for name in names}}

    def replace_length(self, context_length: int) -> "LibraryTokenizer":
        return replace(self, context_length=context_length, _loaded=None)


@dataclass(kw_only=True)
class TransformersTokenizer:
    """The tokenizer of a folder as transformers runs it, without cleaning of texts.

    Texts are padded with zeros. Padding has no effect on a causal tower that reads a text at its largest token.

    Attributes:
        source: the folder; read at the first text.
    """

    source: str
    context_length: int
    _loaded: Any = field(default=None, compare=False, repr=False)

    def __call__(self, texts: Sequence[str]) -> Tensor:
        if not texts:
            return torch.zeros(0, self.context_length, dtype=torch.int64)
        rows = self.encode_rows(texts)
        longest = max(1, *map(len, rows))
        for row in rows:
            row += [0] * (longest - len(row))
        return torch.tensor(rows)

    def count_cut(self, texts: Sequence[str], tokens: Tensor) -> int:
        if not texts or tokens.shape[1] < self.context_length:
            return 0
        longer = self.encode_rows(texts, self.context_length + 1)
        return sum(len(row) > self.context_length for row in longer)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.load_library().decode(list(ids), skip_special_tokens=True))

    def encode_rows(self, texts: Sequence[str], length: int = 0) -> list[list[int]]:
        """Return the ids of each text without padding, cut at ``length``, by default the context length."""
        rows: list[list[int]] = self.load_library()(
            list(texts),
            truncation=True,
            max_length=length or self.context_length,
            return_attention_mask=False,
        )["input_ids"]
        return rows

    def load_library(self) -> Any:
        """Return transformers' tokenizer; ConfigError if the folder has none that works."""
        if self._loaded is None:
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # loader processes are forked
            from transformers import AutoTokenizer

            try:
                tokenizer = AutoTokenizer.from_pretrained(
                    self.source, trust_remote_code=False, local_files_only=True
                )
            except Exception as error:  # the Rust library raises nothing more specific
                cause = " ".join(str(error).split())[:200]
                raise ConfigError(
                    f"transformers cannot read the tokenizer in {self.source}: {cause}"
                ) from error
            _check_words(tokenizer, self.source)
            # with which other libraries cut texts after an export
            tokenizer.model_max_length = self.context_length
            if "max_length" in tokenizer.init_kwargs:  # at which texts were cut before the files were written
                tokenizer.init_kwargs["max_length"] = self.context_length
            if tokenizer.pad_token is None:
                tokenizer.pad_token = tokenizer.eos_token
            self._loaded = tokenizer
        return self._loaded

    @property
    def vocab_size(self) -> int:
        """The largest token plus one."""
        return max(self.load_library().get_vocab().values(), default=0) + 1

    @property
    def special_tokens(self) -> Sequence[int]:
        return list(self.load_library().all_special_ids)

    def store(self, folder: Path) -> Any:
        self.encode_rows([""])  # the files contain the length at which texts were cut last
        self.load_library().save_pretrained(folder / _FOLDER)
        return {"kind": _UNCLEANED, "context_length": self.context_length}

    def replace_length(self, context_length: int) -> "TransformersTokenizer":
        return replace(self, context_length=context_length, _loaded=None)


def _check_words(library: Any, source: str) -> None:
    """Raise ConfigError if a tokenizer of transformers encodes all words of its vocabulary alike.

    transformers builds a tokenizer without words if files are missing.
    """
    ids = list(library.get_vocab().values())
    step = 1 + len(ids) // _PROBED_WORDS
    words = {library.decode([i], skip_special_tokens=True).strip() for i in ids[::step]} - {""}
    rows: set[tuple[int, ...]] = set()
    if words:
        rows.update(map(tuple, library(sorted(words))["input_ids"]))
    are_alike = len(words) > 1 and len(rows) == 1
    if not words or are_alike:
        raise ConfigError(
            f"the tokenizer in {source} encodes all words alike ({len(ids)} tokens, {len(words)} of them words): "
            "use the folder with all files of the model's tokenizer"
        )


def open_trained_tokenizer(folder: str, context_length: int) -> TransformersTokenizer:
    """Return the tokenizer in a folder, for clipkit's text transformer, which reads a text at its largest token."""
    name = f"model.tokenizer = {folder!r}"
    if find_spec("transformers") is None:
        raise ConfigError(f"{name} requires transformers: pip install -e '.[export]'")
    path = Path(folder).expanduser()
    if not has_tokenizer(path):
        raise ConfigError(
            f"{name}: no tokenizer there; python -m data tokenizer SOURCE --out {folder} makes one"
        )
    tokenizer = TransformersTokenizer(source=str(path.absolute()), context_length=context_length)
    if find_text_end(tokenizer) is None:
        raise ConfigError(f"{name}: it must end every text with its largest token")
    return tokenizer


def open_stored_tokenizer(folder: Path) -> TransformersTokenizer:
    """Return the tokenizer of a checkpoint of a run with ``model.tokenizer``, of any context length."""
    return TransformersTokenizer(source=str(folder / _FOLDER), context_length=CONTEXT_LENGTH)


def create_tokenizer(shape: Architecture, *, stored: Any = None, folder: Path | None = None) -> Tokenizer:
    """Return the tokenizer of an architecture.

    Args:
        stored: result of ``Tokenizer.store`` when the checkpoint ``folder`` was written; None if there is none.
        folder: the checkpoint.
    """
    if isinstance(stored, dict) and stored.get("kind") in ("transformers", _UNCLEANED) and folder is not None:
        try:
            if stored["kind"] == _UNCLEANED:
                length = int(stored["context_length"])
                return TransformersTokenizer(source=str(folder / _FOLDER), context_length=length)
            return LibraryTokenizer(
                source=str(folder / _FOLDER),
                context_length=int(stored["context_length"]),
                options=dict(stored["options"]),
                trim=bool(stored["trim"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{folder}: the stored tokenizer is invalid: {error!r}") from error
    if stored not in (None, VOCABULARY) and not (stored == _CLASSES and shape.text.classes):
        raise CheckpointError(f"{folder}: tokenizer {stored!r} is unknown to this version")
    if stored is None and shape.text.library_tokenizer is not None:
        return LibraryTokenizer(**shape.text.library_tokenizer)
    if stored != VOCABULARY and shape.text.classes:
        return ClassTokenizer(names=shape.text.classes)
    return ClipTokenizer(context_length=shape.text.context_length, trim=shape.text.any_length)


# The tokenizer of a ``CLIPModel`` in a folder of transformers: CLIP's if the folder has the same one or none,
# otherwise the folder's.

ANY_END = 2  # value in old files, which means the largest token of a text
_LARGEST = 16 * 2**20  # bytes of a file; CLIP's largest has 3.6 MB
_CLIPS_CLASSES = (
    None, "CLIPTokenizer", "CLIPTokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend",
)  # fmt: skip
_SPECIAL_TOKENS = {START_OF_TEXT: "<|startoftext|>", END_OF_TEXT: "<|endoftext|>"}
_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "vocab.txt", "*.model")
# texts that need no cleaning
_PROBES = ("A photo of the Cat's 12 dogs, they'll run!", "x  Y\tz", "eine Straße", "猫の写真", "")


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has files of a tokenizer."""
    return any(any(folder.glob(name)) for name in _FILES)


def open_folder_tokenizer(folder: Path, text: TextTower, end: int) -> Tokenizer:
    """Return the tokenizer of a folder of transformers, for clipkit's text tower, which reads the largest token.

    Args:
        end: the token at which transformers reads a text, config.json's ``eos_token_id``.
    """
    if not has_tokenizer(folder) or _is_clips(folder):
        if text.vocab_size <= END_OF_TEXT:
            raise CheckpointError(
                f"config.json: vocab_size = {text.vocab_size} is less than that of CLIP's tokenizer"
            )
        if end not in (ANY_END, END_OF_TEXT):
            raise CheckpointError(
                f"config.json: texts are read at token {end}, and CLIP's tokenizer ends them with {END_OF_TEXT}"
            )
        return ClipTokenizer(context_length=text.context_length)
    tokenizer = TransformersTokenizer(source=str(folder), context_length=text.context_length)
    try:
        if tokenizer.vocab_size > text.vocab_size:
            raise CheckpointError(
                f"its tokenizer has tokens up to {tokenizer.vocab_size - 1}, and config.json says "
                f"vocab_size = {text.vocab_size}"
            )
        if end != ANY_END and find_text_end(tokenizer) != end:
            raise CheckpointError(
                f"config.json: texts are read at token {end}, which does not end its tokenizer's texts, or is "
                "not its largest"
            )
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    return tokenizer


def find_text_end(tokenizer: TransformersTokenizer) -> int | None:
    """Return the token that ends all texts, cut or not, if it is the largest of the vocabulary; otherwise None."""
    largest = tokenizer.vocab_size - 1
    ends = {row[-1] if row else None for row in tokenizer.encode_rows([*_PROBES, "a " * 2000])}
    return largest if ends == {largest} else None


def _is_clips(folder: Path) -> bool:
    """Return whether a folder's tokenizer is CLIP's; False if that is unclear."""

    def read_text(name: str) -> str:
        path = folder / name
        if path.stat().st_size > _LARGEST:
            raise ValueError(f"{path} is too large to be CLIP's")
        return path.read_text(encoding="utf-8")

    def read_object(name: str) -> dict[str, Any]:
        value = json.loads(read_text(name)) if (folder / name).is_file() else {}
        if not isinstance(value, dict):
            raise ValueError(f"{name} is not an object")
        return value

    try:
        settings = read_object("tokenizer_config.json")
        if settings.get("tokenizer_class") not in _CLIPS_CLASSES or settings.get("auto_map"):
            return False
        added = {str(token) for token in settings.get("added_tokens_decoder") or {}}
        added.update(map(str, read_object("added_tokens.json").values()))
        if not added <= set(map(str, _SPECIAL_TOKENS)):
            return False
        if (folder / "tokenizer.json").is_file():
            return _is_clips_json(read_text("tokenizer.json"))
        if (folder / "vocab.json").is_file() or (folder / "merges.txt").is_file():
            merges = [line for line in read_text("merges.txt").split("\n") if line.strip()]
            if merges and merges[0].startswith("#version"):
                merges = merges[1:]
            return _is_clips_vocabulary(read_object("vocab.json"), merges)
        return not any(any(folder.glob(name)) for name in ("vocab.txt", "*.model"))
    except (OSError, ValueError, RecursionError, AttributeError, TypeError, KeyError):
        return False


def _is_clips_json(content: str) -> bool:
    stored = json.loads(content)
    model = stored["model"]
    if not _is_clips_vocabulary(model["vocab"], model["merges"]):
        return False
    if {token["id"] for token in stored["added_tokens"]} - _SPECIAL_TOKENS.keys():
        return False
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(content)
    except Exception:  # the Rust library raises nothing more specific
        return False
    tokenizer.no_truncation()
    tokenizer.no_padding()
    encodings = tokenizer.encode_batch(list(_PROBES))
    return all(
        encoding.ids == [token for token in row if token]
        for encoding, row in zip(encodings, tokenize(_PROBES).tolist(), strict=True)
    )


def _is_clips_vocabulary(vocabulary: Mapping[str, Any], merges: list[Any]) -> bool:
    tokens = [*list_tokens(), *_SPECIAL_TOKENS.values()]
    if vocabulary != {token: i for i, token in enumerate(tokens)}:
        return False
    pairs = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in merges]
    return pairs == read_merges()
