"""Tokenizers: CLIP's byte-pair encoding, and tokenizers of the transformers library.

open_clip cleans texts before it passes them to a tokenizer of transformers, and transformers itself does not.
There is a class for each, so that a model gets the tokens it was trained with.
"""

import gzip
import html
import json
import os
import re as standard_re
import unicodedata
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib.util import find_spec
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
# A text is split at its spaces and the ids of each part are looked up. Only a part that is not cached is repaired,
# split into words and encoded. This is exact because words and entities end at a space, and so do all of ftfy's
# repairs except one, that of a wrong encoding ("schÃ¶n"): a text with a sign of that goes through ftfy as a
# whole. Nothing here locks, warns or starts threads, so threads and forked processes can tokenize.

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
_FTFY_VERSION = "6.3.1"  # the version that _repaired follows; with others, ftfy gets the whole text


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
    many = [texts] if isinstance(texts, str) else list_of_strings(texts, "texts")
    longest = max(map(len, many), default=0)
    if longest > MAX_CHARACTERS:
        raise DataError(f"a text of {longest} characters is over the limit of {MAX_CHARACTERS}")
    room = 2 * (context_length - 2)  # bytes
    rows = []
    join, ids_of = b"".join, _parts.__getitem__
    for text in many:
        # ASCII is cached in lower case, except HTML entities, which may need capitals
        if text.isascii() and "&" not in text:
            parts = text.lower().split(" ")
        else:
            parts = [part.lower() if part.isascii() and "&" not in part else part for part in text.split(" ")]
        try:
            ids = join(map(ids_of, parts))
        except _EntangledError:
            import ftfy

            ids = _ids_of_clean(_cleaned(ftfy.fix_text(text)))
        rows.append(ids[:room])
    if trim:
        context_length = max(map(len, rows), default=0) // 2 + 2
    start, end, width = _as_bytes([START_OF_TEXT]), _as_bytes([END_OF_TEXT]), 2 * context_length
    padded = join([(start + row + end).ljust(width, b"\0") for row in rows])
    tokens = np.frombuffer(padded, np.uint16).astype(np.int64)
    return torch.from_numpy(tokens).view(len(rows), context_length)


def list_of_strings(given: Iterable[str], what: str) -> list[str]:
    """Convert strings of any type, such as numpy's, to a list of str.

    Raises:
        DataError: it is not a list of strings; ``what`` is its name in the message.
    """
    if isinstance(given, bytes) or not isinstance(given, Iterable):
        raise DataError(f"{what} must be a list of strings, not {type(given).__name__}")
    try:
        many = list(given)
    except TypeError as error:  # an array without dimensions
        raise DataError(f"{what} must be a list of strings: {error}") from error
    if set(map(type, many)) <= {str}:
        return many
    for number, one in enumerate(many):
        if not isinstance(one, str):
            raise DataError(f"{what} must be strings, but number {number} is of type {type(one).__name__}")
    return [str(one) for one in many]


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


class _EntangledError(Exception):
    """The ids of a part depend on the rest of its text."""


def _ids_of_part(part: str) -> bytes:
    """Return the ids of a part of a text; it is lower case if it is ASCII without "&". Raises _EntangledError."""
    if part.isascii():  # the most frequent first: a word, a word and a punctuation mark
        if part.isalpha():
            return _ids_of_word(part)
        if part[:-1].isalpha() and part[-1] in ",.:;!?":
            return _parts[part[:-1]] + _parts[part[-1]]
    if _PLAIN_ASCII.fullmatch(part):
        words = _ASCII_WORD.findall(part)
        return _words[part] if words == [part] else b"".join(map(_parts.__getitem__, words))
    repaired = _repaired(part, entities=False)
    clean = _cleaned(repaired)
    if "&" in repaired:
        # ftfy unescapes entities too, in the lines before the first "<": whether it does must not matter
        if "\n" in part or len(part) > 1000:  # nested entities take quadratic time
            raise _EntangledError
        resolved = _repaired(part, entities=True)
        if resolved != repaired and _cleaned(resolved) != clean:
            raise _EntangledError
    return _ids_of_clean(clean)


def _ids_of_clean(text: str) -> bytes:
    if _PLAIN_ASCII.fullmatch(text):
        return b"".join(map(_parts.__getitem__, text.split(" ")))
    return b"".join(map(_words.__getitem__, _word_pattern().findall(text)))


def _ids_of_word(word: str) -> bytes:
    model = _model()
    symbols = word.encode().decode("latin-1").translate(model.symbols)
    return _as_bytes([token.id for token in model.bpe.tokenize(symbols)])


def _as_bytes(ids: list[int]) -> bytes:
    return array("H", ids).tobytes()


def _cleaned(repaired: str) -> str:
    return " ".join(html.unescape(html.unescape(repaired)).split()).lower()


# quotes that ftfy straightens
_QUOTES = dict.fromkeys(map(ord, "\u02bc\u2018\u2019\u201a\u201b"), "'")
_QUOTES |= dict.fromkeys(map(ord, "\u201c\u201d\u201e\u201f"), '"')


class _Rules(NamedTuple):
    """ftfy's steps, and what they look for."""

    mixed_up: standard_re.Pattern[str]  # matches wherever ``is_bad`` is true
    far: standard_re.Pattern[str]  # characters of signs that can continue after a space
    changed: standard_re.Pattern[str]  # characters that the steps change
    is_bad: Callable[[str], bool]
    unescape: Callable[[str], str]
    steps: tuple[Callable[[str], str], ...]


def _repaired(part: str, *, entities: bool) -> str:
    """Return what ``ftfy.fix_text`` makes of a part, whatever precedes and follows it. Raises _EntangledError.

    ftfy repeats its steps until nothing changes. One of them repairs a wrong encoding; it starts when
    ``is_bad`` finds a sign anywhere in a line, so a part with a sign is entangled with its line. In version
    6.3.1, each sign contains a control character from U+0080 to U+009F, one of ŒœÃÂЂ, or two neighbours out of
    some 400 suspicious characters that are not both letters of Greek or Cyrillic (or Þ). Signs with ÃÂЂ may
    continue after a space, the others end there. All other steps map characters or runs without a space.
    """
    rules = _rules()
    while True:
        before = part
        if entities:
            part = rules.unescape(part)
        if rules.mixed_up.search(part) and (rules.far.search(part) or rules.is_bad(f" {part} ")):
            raise _EntangledError
        if rules.changed.search(part):
            part = part.translate(_QUOTES)  # first, because it is often enough; the result is the same
            if rules.changed.search(part):
                for step in rules.steps:
                    part = step(part)
        part = unicodedata.normalize("NFC", part)
        if part == before:
            return part


@cache
def _rules() -> _Rules:
    import ftfy
    from ftfy import badness, chardata, fixes

    if ftfy.__version__ != _FTFY_VERSION:
        raise _EntangledError
    pattern = badness.BADNESS_RE.pattern
    ranges = standard_re.findall(r"([^\0-\x7f])-([^\0-\x7f])", pattern)
    suspicious = {c for c in pattern if not c.isascii()}
    suspicious.update(chr(c) for first, last in ranges for c in range(ord(first), ord(last) + 1))
    letters = badness.MOJIBAKE_CATEGORIES["lower_common"] + badness.MOJIBAKE_CATEGORIES["upper_common"]
    others = {c for c in suspicious if not standard_re.match(f"[{letters}]", c)}
    changed = {*_QUOTES, *chardata.LIGATURES, *chardata.WIDTH_MAP, *chardata.CONTROL_CHARS}
    any_of, other, table = (
        standard_re.escape("".join(sorted(characters)))
        for characters in (suspicious, others, map(chr, changed))
    )
    return _Rules(
        mixed_up=standard_re.compile(f"[{other}][{any_of}]|[{any_of}][{other}]|[\x80-\x9fŒœÃÂЂ]"),
        far=standard_re.compile("[ÃÂЂ]"),
        changed=standard_re.compile(f"[{table}\ud800-\udfff]"),
        is_bad=badness.is_bad,
        unescape=fixes.unescape_html,
        steps=(
            fixes.fix_latin_ligatures,
            fixes.fix_character_width,
            fixes.uncurl_quotes,
            fixes.fix_line_breaks,
            fixes.fix_surrogates,
            fixes.remove_terminal_escapes,
            fixes.remove_control_chars,
        ),
    )


@cache
def _word_pattern() -> Any:
    import regex  # the standard library has no \p{L} and \p{N}

    return regex.compile(_WORD.replace("LETTER", r"\p{L}").replace("NUMBER", r"\p{N}"), regex.IGNORECASE)


class _Model(NamedTuple):
    bpe: "BPE"
    symbols: dict[int, str]  # by byte
    words: dict[str, bytes]  # ids of ASCII words that are one token, and of special tokens
    plain_words: dict[str, bytes]  # ids of words of letters only


@cache
def _model() -> _Model:
    from tokenizers.models import BPE

    merges, symbols = pair_merges(), byte_symbols()
    vocabulary = {token: i for i, token in enumerate([*tokens_in_order(), *_SPECIAL])}
    bpe = BPE(vocabulary, merges, end_of_word_suffix="</w>", cache_capacity=0)
    words = {token[:-4]: i for token, i in vocabulary.items() if token.isascii() and token.endswith("</w>")}
    words |= {token: vocabulary[token] for token in _SPECIAL}
    ids = {word: _as_bytes([i]) for word, i in words.items()}
    letters = {word: one for word, one in ids.items() if word.isalpha()}
    return _Model(bpe=bpe, symbols=symbols, words=ids, plain_words=letters)


def tokens_in_order() -> list[str]:
    """Return the vocabulary without its two special tokens, by id."""
    symbols = list(byte_symbols().values())
    return [*symbols, *(symbol + "</w>" for symbol in symbols), *map("".join, pair_merges())]


@cache
def _symbols_by_id() -> tuple[str, ...]:
    return tuple(tokens_in_order())


def pair_merges() -> list[tuple[str, str]]:
    """Return the merges of the byte-pair encoding in order, from the file in open_clip_torch."""
    lines = gzip.decompress(vocabulary_file().read_bytes()).decode("utf-8").split("\n")[1 : _MERGES + 1]
    return [(left, right) for left, right in (line.split() for line in lines)]


def byte_symbols() -> dict[int, str]:
    """Map each byte to a printable character in the vocabulary's order: itself, or the next from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


_parts = _Cache(lambda: _model().plain_words, _ids_of_part)
_words = _Cache(lambda: _model().words, _ids_of_word)


_FOLDER = "tokenizer"  # in a checkpoint
_UNCLEANED = "transformers without cleaning"
_CLASSES = "class names"
_PROBED_WORDS = 200  # of a vocabulary


class Tokenizer(Protocol):
    """A tokenizer that can be stored with the weights."""

    @property
    def vocab_size(self) -> int:
        """The largest token plus one."""

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

    def of_length(self, context_length: int) -> "Tokenizer":
        """Return the tokenizer with another maximum number of tokens."""


def _filling(texts: Sequence[str], tokens: Tensor, length: int, *, padding: int = 0) -> list[str]:
    """Return the texts whose tokens (N, L) have no padding at the end of the context length."""
    if tokens.shape[1] < length:
        return []
    is_full = (tokens[:, length - 1] != padding).tolist()
    return [text for text, full in zip(texts, is_full, strict=True) if full]


@dataclass(frozen=True, kw_only=True)
class ClipTokenizer:
    """CLIP's tokenizer, see ``clipkit.tokenize``. Its vocabulary is part of open_clip_torch."""

    context_length: int = 77
    trim: bool = True
    vocab_size: ClassVar[int] = END_OF_TEXT + 1

    def __call__(self, texts: Sequence[str]) -> Tensor:
        return tokenize(texts, self.context_length, trim=self.trim)

    def count_cut(self, texts: Sequence[str], tokens: Tensor) -> int:
        longer = tokenize(_filling(texts, tokens, self.context_length), self.context_length + 1)
        return int(longer[:, -1].count_nonzero())

    def decode(self, ids: Sequence[int]) -> str:
        symbols, bytes_ = _symbols_by_id(), {symbol: byte for byte, symbol in byte_symbols().items()}
        text = "".join(symbols[one] for one in ids if one < START_OF_TEXT).replace("</w>", " ").rstrip()
        return bytes(bytes_.get(one, ord(" ")) for one in text).decode("utf-8", "replace")

    def store(self, folder: Path) -> Any:
        return VOCABULARY

    def of_length(self, context_length: int) -> "ClipTokenizer":
        return replace(self, context_length=context_length)


@dataclass(frozen=True, kw_only=True)
class ClassTokenizer:
    """Maps names of classes to (N, 1) class numbers, for a classification head."""

    names: tuple[str, ...]

    @property
    def vocab_size(self) -> int:
        return len(self.names)

    def __call__(self, texts: Sequence[str]) -> Tensor:
        try:
            return torch.tensor([self._numbers[" ".join(text.split())] for text in texts]).view(-1, 1).long()
        except KeyError as error:
            name = str(error.args[0])
            raise DataError(
                f"{name[:80]!r} is not one of the model's {len(self.names)} classes: {nearest(name, self.names)} "
                "(its classification head encodes only class names)"
            ) from error

    def count_cut(self, texts: Sequence[str], tokens: Tensor) -> int:
        return 0

    def decode(self, ids: Sequence[int]) -> str:
        return self.names[ids[0]]

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.names)}

    def store(self, folder: Path) -> Any:
        return _CLASSES

    def of_length(self, context_length: int) -> "ClassTokenizer":
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
    _made: Any = None

    @property
    def vocab_size(self) -> int:
        return max(self._library().tokenizer.get_vocab().values(), default=0) + 1

    def __call__(self, texts: Sequence[str]) -> Tensor:
        if not texts:
            return torch.zeros(0, self.context_length, dtype=torch.int64)
        library = self._library()
        ids: Tensor = library(list(texts))
        padding = library.tokenizer.pad_token_id
        if self.trim and library.tokenizer.padding_side == "right":
            used = (ids != padding).any(dim=0).nonzero()
            ids = ids[:, : int(used[-1]) + 1 if len(used) else 1]
        return ids

    def count_cut(self, texts: Sequence[str], tokens: Tensor) -> int:
        library = self._library()
        tokenizer, length = library.tokenizer, self.context_length
        special = True
        if library.tokenizer_mode == "clips":
            length, special = length - 3, False
        elif tokenizer.padding_side == "right" and tokenizer.pad_token_id != tokenizer.eos_token_id:
            texts = _filling(texts, tokens, length, padding=tokenizer.pad_token_id)
        if not texts:
            return 0
        cleaned = [library.clean_fn(text) for text in texts]
        longer = tokenizer(cleaned, truncation=True, max_length=length + 1, add_special_tokens=special)
        return sum(len(row) > length for row in longer["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._library().tokenizer.decode(list(ids), skip_special_tokens=True))

    def _library(self) -> Any:
        if self._made is None:
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
            self._made = library
        return self._made

    def store(self, folder: Path) -> Any:
        tokenizer = self._library().tokenizer
        tokenizer("", truncation=True, max_length=self.context_length)  # the files contain the last length
        tokenizer.save_pretrained(folder / _FOLDER)
        names = ("context_length", "options", "trim")
        return {"kind": "transformers", **{name: getattr(self, name) for name in names}}

    def of_length(self, context_length: int) -> "LibraryTokenizer":
        return replace(self, context_length=context_length, _made=None)


@dataclass(kw_only=True)
class TransformersTokenizer:
    """The tokenizer of a folder as transformers runs it, without cleaning of texts.

    Texts are padded with zeros. Padding has no effect on a causal tower that reads a text at its largest token.

    Attributes:
        source: the folder; read at the first text.
        context_length: length to which texts are cut.
    """

    source: str
    context_length: int
    _made: Any = field(default=None, compare=False, repr=False)

    def __call__(self, texts: Sequence[str]) -> Tensor:
        if not texts:
            return torch.zeros(0, self.context_length, dtype=torch.int64)
        rows = self.rows(texts)
        longest = max(1, *map(len, rows))
        return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])

    def count_cut(self, texts: Sequence[str], tokens: Tensor) -> int:
        if not texts or tokens.shape[1] < self.context_length:
            return 0
        longer = self.rows(texts, self.context_length + 1)
        return sum(len(row) > self.context_length for row in longer)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.library().decode(list(ids), skip_special_tokens=True))

    def rows(self, texts: Sequence[str], length: int = 0) -> list[list[int]]:
        """Return the ids of each text without padding, cut at ``length``, by default the context length."""
        rows: list[list[int]] = self.library()(
            list(texts),
            truncation=True,
            max_length=length or self.context_length,
            return_attention_mask=False,
        )["input_ids"]
        return rows

    def library(self) -> Any:
        """Return transformers' tokenizer; ConfigError if the folder has none that works."""
        if self._made is None:
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # loader processes are forked
            from transformers import AutoTokenizer

            try:
                made = AutoTokenizer.from_pretrained(
                    self.source, trust_remote_code=False, local_files_only=True
                )
            except Exception as error:  # the Rust library raises nothing more specific
                cause = " ".join(str(error).split())[:200]
                raise ConfigError(
                    f"transformers cannot read the tokenizer in {self.source}: {cause}"
                ) from error
            _check_words(made, self.source)
            made.model_max_length = (
                self.context_length
            )  # with which other libraries cut texts after an export
            if made.pad_token is None:
                made.pad_token = made.eos_token
            self._made = made
        return self._made

    @property
    def vocab_size(self) -> int:
        """The largest token plus one."""
        return max(self.library().get_vocab().values(), default=0) + 1

    def store(self, folder: Path) -> Any:
        self.rows([""])  # the files contain the length at which texts were cut last
        self.library().save_pretrained(folder / _FOLDER)
        return {"kind": _UNCLEANED, "context_length": self.context_length}

    def of_length(self, context_length: int) -> "TransformersTokenizer":
        return replace(self, context_length=context_length, _made=None)


def _check_words(library: Any, source: str) -> None:
    """Raise ConfigError if a tokenizer of transformers encodes all words of its vocabulary alike.

    transformers builds a tokenizer without words if files are missing.
    """
    ids = list(library.get_vocab().values())
    step = 1 + len(ids) // _PROBED_WORDS
    words = {library.decode([i], skip_special_tokens=True).strip() for i in ids[::step]} - {""}
    rows = {tuple(row) for row in library(sorted(words))["input_ids"]} if words else set()
    are_alike = len(words) > 1 and len(rows) == 1
    if not words or are_alike:
        raise ConfigError(
            f"the tokenizer in {source} encodes all words alike ({len(ids)} tokens, {len(words)} of them words): "
            "use the folder with all files of the model's tokenizer"
        )


def trained_tokenizer(folder: str, context_length: int) -> TransformersTokenizer:
    """Return the tokenizer in a folder, for clipkit's text transformer, which reads a text at its largest token.

    Raises:
        ConfigError: there is none, or it does not end every text with its largest token.
    """
    name = f"model.tokenizer = {folder!r}"
    if find_spec("transformers") is None:
        raise ConfigError(f"{name} requires transformers: pip install -e '.[export]'")
    if not has_tokenizer(place := Path(folder).expanduser()):
        raise ConfigError(
            f"{name}: no tokenizer there; python -m data tokenizer SOURCE --out FOLDER makes one"
        )
    own = TransformersTokenizer(source=str(place.absolute()), context_length=context_length)
    if end_of_texts(own) is None:
        raise ConfigError(f"{name}: it must end every text with its largest token")
    return own


def stored_tokenizer(folder: Path) -> TransformersTokenizer:
    """Return the tokenizer of a checkpoint of a run with ``model.tokenizer``, of any context length."""
    return TransformersTokenizer(source=str(folder / _FOLDER), context_length=CONTEXT_LENGTH)


def create_tokenizer(shape: Architecture, *, stored: Any = None, folder: Path | None = None) -> Tokenizer:
    """Return the tokenizer of an architecture.

    Args:
        shape: the architecture.
        stored: result of ``Tokenizer.store`` when the checkpoint ``folder`` was written; None if there is none.
        folder: the checkpoint.

    Raises:
        CheckpointError: this version does not support the stored one.
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


def folder_tokenizer(folder: Path, text: TextTower, end: int) -> Tokenizer:
    """Return the tokenizer of a folder of transformers, for clipkit's text tower, which reads the largest token.

    Args:
        folder: the folder.
        text: the text tower.
        end: the token at which transformers reads a text, config.json's ``eos_token_id``.

    Raises:
        CheckpointError: transformers would read texts at another token.
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
    own = TransformersTokenizer(source=str(folder), context_length=text.context_length)
    try:
        largest = max(own.library().get_vocab().values(), default=0)
        if largest >= text.vocab_size:
            raise CheckpointError(
                f"its tokenizer has tokens up to {largest}, and config.json says vocab_size = {text.vocab_size}"
            )
        if end != ANY_END and end_of_texts(own) != end:
            raise CheckpointError(
                f"config.json: texts are read at token {end}, which does not end its tokenizer's texts, or is "
                "not its largest"
            )
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    return own


def end_of_texts(own: TransformersTokenizer) -> int | None:
    """Return the token that ends all texts, cut or not, if it is the largest of the vocabulary; otherwise None."""
    largest = max(own.library().get_vocab().values(), default=0)
    ends = {row[-1] if row else None for row in own.rows([*_PROBES, "a " * 2000])}
    return largest if ends == {largest} else None


def _is_clips(folder: Path) -> bool:
    """Return whether a folder's tokenizer is CLIP's; False if that is unclear."""

    def text_of(name: str) -> str:
        path = folder / name
        if path.stat().st_size > _LARGEST:
            raise ValueError(f"{path} is too large to be CLIP's")
        return path.read_text(encoding="utf-8")

    def mapping_of(name: str) -> dict[str, Any]:
        value = json.loads(text_of(name)) if (folder / name).is_file() else {}
        if not isinstance(value, dict):
            raise ValueError(f"{name} is not an object")
        return value

    try:
        settings = mapping_of("tokenizer_config.json")
        added = {str(key) for key in settings.get("added_tokens_decoder") or {}}
        added |= {str(one) for one in mapping_of("added_tokens.json").values()}
        if settings.get("tokenizer_class") not in _CLIPS_CLASSES or settings.get("auto_map"):
            return False
        if added - {str(number) for number in _SPECIAL_TOKENS}:
            return False
        if (folder / "tokenizer.json").is_file():
            return _is_clips_json(text_of("tokenizer.json"))
        if (folder / "vocab.json").is_file() or (folder / "merges.txt").is_file():
            merges = [line for line in text_of("merges.txt").split("\n") if line.strip()]
            merges = merges[1:] if merges[:1] and merges[0].startswith("#version") else merges
            return _is_clips_vocabulary(mapping_of("vocab.json"), merges)
        return not any(any(folder.glob(name)) for name in ("vocab.txt", "*.model"))
    except (OSError, ValueError, RecursionError, AttributeError, TypeError, KeyError):
        return False


def _is_clips_json(content: str) -> bool:
    stored = json.loads(content)
    model = stored["model"]
    if not _is_clips_vocabulary(model["vocab"], model["merges"]):
        return False
    if {one["id"] for one in stored["added_tokens"]} - _SPECIAL_TOKENS.keys():
        return False
    from tokenizers import Tokenizer

    try:
        made = Tokenizer.from_str(content)
    except Exception:  # the Rust library raises nothing more specific
        return False
    made.no_truncation()
    made.no_padding()
    expected = [[number for number in row if number] for row in tokenize(_PROBES).tolist()]
    return [one.ids for one in made.encode_batch(list(_PROBES))] == expected


def _is_clips_vocabulary(vocabulary: Mapping[str, Any], merges: list[Any]) -> bool:
    tokens = [*tokens_in_order(), *_SPECIAL_TOKENS.values()]
    if vocabulary != {token: number for number, token in enumerate(tokens)}:
        return False
    pairs = [tuple(one.split(" ") if isinstance(one, str) else one) for one in merges]
    return pairs == pair_merges()
