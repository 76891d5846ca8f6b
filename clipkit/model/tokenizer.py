"""How texts become a model's tokens: CLIP's byte-pair encoding, or a tokenizer of the transformers library.

open_clip cleans texts before it hands them to such a tokenizer, transformers itself does not: there is a kind for
each, so that a model gets the tokens that it was trained with.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, SupportsIndex

import numpy as np
import torch
from torch import Tensor

from clipkit.errors import CheckpointError, ConfigError, DataError, nearest
from clipkit.files.open_clip import make_tokenizer, vocabulary_file
from clipkit.model.architectures import Architecture, TextTower

if TYPE_CHECKING:
    from tokenizers.models import BPE

__all__ = [
    "ANY_END",
    "CONTEXT_LENGTH",
    "END_OF_TEXT",
    "MAX_CHARACTERS",
    "START_OF_TEXT",
    "VOCABULARY",
    "ClassTokenizer",
    "ClipTokenizer",
    "LibraryTokenizer",
    "Tokenizer",
    "TransformersTokenizer",
    "byte_symbols",
    "end_of_texts",
    "folder_tokenizer",
    "has_tokenizer",
    "pair_merges",
    "tokenize",
    "tokenizer_of",
    "tokens_in_order",
]


# --------------------------------------------------------------------------------------------------------------
# CLIP's byte-pair encoding: the Rust ``tokenizers`` library behind a memory of the parts of texts.
#
# The ids are those of OpenAI's tokenizer and of open_clip's ``SimpleTokenizer``: text is repaired by ftfy, HTML
# entities are resolved twice, white space is folded, and everything is lower case. The vocabulary is the file
# that open_clip_torch ships.
#
# A text is cut at its spaces, and the ids of each part are looked up. Only a part that is not in memory is
# repaired, split into words and, where a word is new as well, encoded. That is exact because no word and no
# entity reaches over a space, nor does any repair but one, that of a wrong encoding ("schÃ¶n"): a text with a
# sign of that goes through ftfy as a whole. Nothing here locks, warns or starts threads, so that threads and
# forked processes may tokenize.

CONTEXT_LENGTH = 77
START_OF_TEXT, END_OF_TEXT = 49406, 49407
VOCABULARY = "bpe_simple_vocab_16e6"  # what a checkpoint records as its tokenizer
_MERGES = 49152 - 256 - 2
_LONGEST_CONTEXT = 1_000_000  # tokens, as of an architecture
MAX_CHARACTERS = 100_000  # of one text; at most a few hundred of them can reach the model

# OpenAI's splitting rule: the special tokens, English contractions, runs of letters, single digits, runs of others
_WORD = r"<start_of_text>|<end_of_text>|'s|'t|'re|'ve|'m|'ll|'d|[LETTER]+|[NUMBER]|[^\sLETTERNUMBER]+"
_ASCII_WORD = standard_re.compile(_WORD.replace("LETTER", "a-z").replace("NUMBER", "0-9"))  # of lower case
_SPECIAL = ("<start_of_text>", "<end_of_text>")
# ASCII that neither ftfy nor html changes but for its white space, which is folded: no control characters, no "&"
_PLAIN_ASCII = standard_re.compile(r"[\t\n\f\r -%'-~]*")
_READ_FTFY = "6.3.1"  # the version whose rules _repaired follows; with another one, ftfy sees the whole text


def tokenize(
    texts: str | Sequence[str], context_length: int = CONTEXT_LENGTH, *, trim: bool = False
) -> Tensor:
    """Texts → (N, L) int64 token ids: start of text, the text, end of text, zeros.

    Args:
        texts: one or many.
        context_length: L, from 2 to 1,000,000. A longer text is cut and still ends with end of text.
        trim: cut L down to the longest text given. Features are the same, the work is less.

    Half of a surrogate pair counts as U+FFFD, as ftfy has it.

    Raises:
        DataError: a text is over 100,000 characters, or no string.
        ConfigError: ``context_length`` has no room for start and end, or is out of all bounds.
    """
    if not isinstance(context_length, SupportsIndex) or not 2 <= context_length <= _LONGEST_CONTEXT:
        raise ConfigError(
            f"context_length = {context_length!r} does not fit: at least 2, at most {_LONGEST_CONTEXT}"
        )
    context_length = int(context_length)
    many = [texts] if isinstance(texts, str) else _list_of_strings(texts)
    longest = max(map(len, many), default=0)
    if longest > MAX_CHARACTERS:
        raise DataError(f"a text of {longest} characters is over the limit of {MAX_CHARACTERS}")
    room = 2 * (context_length - 2)  # bytes
    rows = _rows(many, room)
    if trim:
        context_length = max(map(len, rows), default=0) // 2 + 2
    start, end, width = _as_bytes([START_OF_TEXT]), _as_bytes([END_OF_TEXT]), 2 * context_length
    padded = b"".join([(start + row + end).ljust(width, b"\0") for row in rows])
    ids = np.frombuffer(padded, np.uint16).astype(np.int64)
    return torch.from_numpy(ids).view(len(rows), context_length)


def _list_of_strings(texts: Sequence[str]) -> list[str]:
    if isinstance(texts, bytes) or not isinstance(texts, Iterable):
        raise DataError(f"texts must be a list of strings, not {type(texts).__name__}")
    many = list(texts)
    for kind in set(map(type, many)):
        if not issubclass(kind, str):
            raise DataError(f"texts must be strings, but one is of type {kind.__name__}")
    return many


class _Memory(dict[str, bytes]):
    """The ids of short strings, two bytes each: some known from the start, the others worked out when first met.

    When it is full it forgets all but the start: what is frequent is soon back, and reading needs no bookkeeping.
    Longer strings are worked out each time, so that no text, however made, makes it grow on. Threads may share it:
    at worst two of them work out the same ids.
    """

    LIMIT = 2**17  # strings; both memories, full of emoji and Cyrillic, took 40 MB
    LONGEST = 32  # characters, and ids

    def __init__(self, start: Callable[[], dict[str, bytes]], work_out: Callable[[str], bytes]) -> None:
        super().__init__()
        self._start, self._work_out = start, work_out

    def __missing__(self, string: str) -> bytes:
        if not self:
            self.update(self._start())
            return self[string]
        ids = self._work_out(string)
        if len(string) <= self.LONGEST and len(ids) <= 2 * self.LONGEST:
            if len(self) >= self.LIMIT:
                self.clear()
                self.update(self._start())
            self[string] = ids
        return ids


class _EntangledError(Exception):
    """The ids of this part depend on the rest of its text."""


def _rows(texts: list[str], room: int) -> list[bytes]:
    """The ids of each text, the first ``room`` bytes of them."""
    rows = []
    join, ids_of = b"".join, _parts.__getitem__
    for text in texts:
        # ASCII is remembered in lower case only, but not an HTML entity: its name may have capitals
        if text.isascii() and "&" not in text:
            parts = text.lower().split(" ")
        else:
            parts = [part.lower() if part.isascii() and "&" not in part else part for part in text.split(" ")]
        try:
            ids = join(map(ids_of, parts))
        except _EntangledError:
            ids = _ids_of_entangled(text)
        rows.append(ids[:room])
    return rows


def _ids_of_part(part: str) -> bytes:
    """The ids of what stands between two spaces, given in lower case if it is ASCII without "&".

    Raises _EntangledError.
    """
    if part.isascii():  # the most frequent first: a word, a word with a mark
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
        # ftfy too resolves entities, in the lines before the first that has a "<": whether it does must not matter
        if "\n" in part or len(part) > 1000:  # of entities in entities it takes quadratic time: not twice
            raise _EntangledError
        resolved = _repaired(part, entities=True)
        if resolved != repaired and _cleaned(resolved) != clean:
            raise _EntangledError
    return _ids_of_clean(clean)


def _ids_of_entangled(text: str) -> bytes:
    import ftfy

    return _ids_of_clean(_cleaned(ftfy.fix_text(text)))


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


# the quotes that ftfy makes straight
_QUOTES = dict.fromkeys(map(ord, "\u02bc\u2018\u2019\u201a\u201b"), "'")
_QUOTES |= dict.fromkeys(map(ord, "\u201c\u201d\u201e\u201f"), '"')


class _Rules(NamedTuple):
    """What ftfy's steps look for, and the steps."""

    mixed_up: standard_re.Pattern[str]  # found wherever ``is_bad`` finds something
    far: standard_re.Pattern[str]  # characters of the signs that reach over a space
    changed: standard_re.Pattern[str]  # all that the steps change
    is_bad: Callable[[str], bool]
    unescape: Callable[[str], str]
    steps: tuple[Callable[[str], str], ...]


def _repaired(part: str, *, entities: bool) -> str:
    """What ``ftfy.fix_text`` makes of a part, whatever stands before and after its spaces.

    ftfy repeats its steps until nothing changes. One of them mends a wrong encoding. It starts when ``is_bad``
    finds a sign anywhere in a line, so a part with a sign is entangled with its line. As of version 6.3.1, each
    sign holds a control character from U+0080 to U+009F, one of ŒœÃÂЂ, or two neighbours out of some 400
    suspicious characters which are not both letters of Greek or Cyrillic (or Þ). Signs with ÃÂЂ may go on behind a
    space, the others end at it at the latest. All other steps map characters or runs without a space.

    Raises _EntangledError.
    """
    rules = _rules()
    while True:
        before = part
        if entities:
            part = rules.unescape(part)
        if rules.mixed_up.search(part) and (rules.far.search(part) or rules.is_bad(f" {part} ")):
            raise _EntangledError
        if rules.changed.search(part):
            part = part.translate(_QUOTES)  # ahead of its turn, as more is rarely needed; the end is the same
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

    if ftfy.__version__ != _READ_FTFY:
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
    import regex  # its \p{L} and \p{N}: the standard library has none

    return regex.compile(_WORD.replace("LETTER", r"\p{L}").replace("NUMBER", r"\p{N}"), regex.IGNORECASE)


class _Model(NamedTuple):
    bpe: "BPE"
    symbols: dict[int, str]  # what stands for each byte
    words: dict[str, bytes]  # ids of the ASCII words that are one token, the special ones too
    plain_words: dict[str, bytes]  # those of letters only


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
    """The vocabulary without its two special tokens; a token's place is its id."""
    symbols = list(byte_symbols().values())
    return [*symbols, *(symbol + "</w>" for symbol in symbols), *map("".join, pair_merges())]


def pair_merges() -> list[tuple[str, str]]:
    """The pairs of the byte-pair encoding in their order, from the file that open_clip_torch ships."""
    lines = gzip.decompress(vocabulary_file().read_bytes()).decode("utf-8").split("\n")[1 : _MERGES + 1]
    return [(left, right) for left, right in (line.split() for line in lines)]


def byte_symbols() -> dict[int, str]:
    """A printable character for each byte in the vocabulary's order: itself, or the next from U+0100 on."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


_parts = _Memory(lambda: _model().plain_words, _ids_of_part)
_words = _Memory(lambda: _model().words, _ids_of_word)


# --------------------------------------------------------------------------------------------------------------

_FOLDER = "tokenizer"  # of a checkpoint
_UNCLEANED = "transformers without cleaning"
_CLASSES = "class names"
_SHOWN = 200  # characters of a library's message


class Tokenizer(Protocol):
    """Turns texts into token ids, and can be stored beside the weights."""

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """N texts → (N, L) int64."""

    def store(self, folder: Path) -> Any:
        """Write the files it needs into a checkpoint folder; returns what the model card records."""

    def of_length(self, context_length: int) -> "Tokenizer":
        """The same for texts of up to that many tokens."""


@dataclass(frozen=True, kw_only=True)
class ClipTokenizer:
    """CLIP's own, see ``clipkit.tokenize``; with ``trim`` a batch is as long as its longest text."""

    context_length: int = 77
    trim: bool = True

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """N texts → (N, L) int64."""
        return tokenize(texts, self.context_length, trim=self.trim)

    def store(self, folder: Path) -> Any:
        """Nothing to write: the vocabulary comes with open_clip_torch."""
        return VOCABULARY

    def of_length(self, context_length: int) -> "ClipTokenizer":
        """The same for texts of up to that many tokens."""
        return replace(self, context_length=context_length)


@dataclass(frozen=True, kw_only=True)
class ClassTokenizer:
    """The number of the class that a text is the name of; for a head in the text tower's place."""

    names: tuple[str, ...]

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """N class names → (N, 1) int64.

        Raises:
            DataError: a text is no class's name.
        """
        try:
            return torch.tensor([self._numbers[" ".join(text.split())] for text in texts]).view(-1, 1).long()
        except KeyError as error:
            name = str(error.args[0])
            raise DataError(
                f"{name[:80]!r} is none of the model's {len(self.names)} classes: {nearest(name, self.names)} "
                "(its head reads no other text)"
            ) from error

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.names)}

    def store(self, folder: Path) -> Any:
        """Nothing to write: the names are in the architecture."""
        return _CLASSES

    def of_length(self, context_length: int) -> "ClassTokenizer":
        """Itself: a name is one token."""
        return self


@dataclass(kw_only=True)
class LibraryTokenizer:
    """A tokenizer of transformers with open_clip's cleaning of texts before it.

    Attributes:
        source: a folder, or a name on the Hugging Face hub; read at the first text.
        context_length: L; texts are padded to it, or cut.
        options: open_clip's ``tokenizer_kwargs``.
        trim: cut what is padding in all rows off.
    """

    source: str
    context_length: int
    options: dict[str, Any] = field(default_factory=dict)
    trim: bool = False
    _made: Any = None

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """N texts → (N, L) int64.

        Raises:
            ConfigError: the tokenizer cannot be had.
        """
        if not texts:
            return torch.zeros(0, self.context_length, dtype=torch.int64)
        library = self._library()
        ids: Tensor = library(list(texts))
        padding = library.tokenizer.pad_token_id
        if self.trim and library.tokenizer.padding_side == "right":
            used = (ids != padding).any(dim=0).nonzero()
            ids = ids[:, : int(used[-1]) + 1 if len(used) else 1]
        return ids

    def _library(self) -> Any:
        if self._made is None:
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # loader processes are forked
            from clipkit.files.hub import from_hub

            with from_hub(self.source):
                self._made = make_tokenizer(self.source, self.context_length, **self.options)
        return self._made

    def store(self, folder: Path) -> Any:
        """Write the tokenizer's files, so that the checkpoint needs no network."""
        self._library().tokenizer.save_pretrained(folder / _FOLDER)
        return {
            "kind": "transformers",
            "context_length": self.context_length,
            "options": self.options,
            "trim": self.trim,
        }

    def of_length(self, context_length: int) -> "LibraryTokenizer":
        """The same for texts of up to that many tokens."""
        return replace(self, context_length=context_length, _made=None)


@dataclass(kw_only=True)
class TransformersTokenizer:
    """The tokenizer of a folder as transformers itself runs it: texts are not cleaned before.

    Rows end where their text does, with zeros behind. For a tower that reads a text at its largest token and sees
    nothing behind it, that is the same as any padding.

    Attributes:
        source: the folder; read at the first text.
        context_length: L, of the longest text; more is cut.
    """

    source: str
    context_length: int
    _made: Any = field(default=None, compare=False, repr=False)

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """N texts → (N, L) int64, L that of the longest.

        Raises:
            ConfigError: the tokenizer cannot be had.
        """
        if not texts:
            return torch.zeros(0, self.context_length, dtype=torch.int64)
        rows = self.rows(texts)
        longest = max(1, *map(len, rows))
        return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])

    def rows(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, cut, without padding; errors as for a call."""
        rows: list[list[int]] = self.library()(
            list(texts), truncation=True, max_length=self.context_length, return_attention_mask=False
        )["input_ids"]
        return rows

    def library(self) -> Any:
        """transformers' object.

        Raises:
            ConfigError: it cannot be had, or has not enough in it.
        """
        if self._made is None:
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # loader processes are forked
            from transformers import AutoTokenizer

            try:
                made = AutoTokenizer.from_pretrained(
                    self.source, trust_remote_code=False, local_files_only=True
                )
            except Exception as error:  # the Rust library raises nothing more special
                cause = " ".join(str(error).split())[:_SHOWN]
                raise ConfigError(
                    f"transformers does not read the tokenizer in {self.source}: {cause}"
                ) from error
            made.model_max_length = self.context_length  # as other libraries will cut texts after an export
            if made.pad_token is None:
                made.pad_token = made.eos_token
            self._made = made
        return self._made

    def store(self, folder: Path) -> Any:
        """Write the tokenizer's files into a checkpoint."""
        self.library().save_pretrained(folder / _FOLDER)
        return {"kind": _UNCLEANED, "context_length": self.context_length}

    def of_length(self, context_length: int) -> "TransformersTokenizer":
        """The same for texts of up to that many tokens."""
        return replace(self, context_length=context_length, _made=None)


def tokenizer_of(shape: Architecture, *, stored: Any = None, folder: Path | None = None) -> Tokenizer:
    """The tokenizer that goes with an architecture.

    Args:
        shape: the architecture.
        stored: what ``Tokenizer.store`` returned when the checkpoint ``folder`` was written; None for none.
        folder: that checkpoint.

    Raises:
        CheckpointError: this version cannot make the stored one.
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
            raise CheckpointError(f"{folder}: the stored tokenizer does not fit: {error!r}") from error
    if stored is None or (stored == _CLASSES and shape.text.classes):
        return shape.text.tokenizer()
    if stored != VOCABULARY:
        raise CheckpointError(f"{folder}: tokenizer {stored!r} is unknown to this version")
    return ClipTokenizer(context_length=shape.text.context_length, trim=shape.text.any_length)


# --------------------------------------------------------------------------------------------------------------
# Which tokenizer belongs to a ``CLIPModel`` that lies in a folder of transformers: CLIP's own, or the folder's.
#
# clipkit's tokenizer is taken only where the folder has the same one, or none at all. Any other runs by
# transformers.

ANY_END = 2  # in files from before transformers read this setting; the largest token of a text is meant
_LARGEST = 16 * 2**20  # bytes of a file; CLIP's largest has 3.6 MB
_CLIPS_CLASSES = (
    None, "CLIPTokenizer", "CLIPTokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend",
)  # fmt: skip
_SPECIAL_TOKENS = {START_OF_TEXT: "<|startoftext|>", END_OF_TEXT: "<|endoftext|>"}
_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "vocab.txt", "*.model")
# nothing that clipkit repairs and others do not
_PROBES = ("A photo of the Cat's 12 dogs, they'll run!", "x  Y\tz", "eine Straße", "猫の写真", "")


def has_tokenizer(folder: Path) -> bool:
    """Whether there are files of a tokenizer at all."""
    return any(any(folder.glob(name)) for name in _FILES)


def folder_tokenizer(folder: Path, text: TextTower, end: int) -> Tokenizer:
    """The tokenizer of the folder's model, for our own text tower, which reads a text at its largest token.

    Args:
        folder: of transformers.
        text: the text tower.
        end: the token at which transformers reads a text, config.json's ``eos_token_id``.

    Raises:
        CheckpointError: the texts would be read at another token than transformers does.
    """
    if not has_tokenizer(folder) or _is_clips(folder):
        if text.vocab_size <= END_OF_TEXT:
            raise CheckpointError(
                f"config.json: vocab_size = {text.vocab_size} is less than CLIP's tokenizer has"
            )
        if end not in (ANY_END, END_OF_TEXT):
            raise CheckpointError(
                f"config.json: texts are read at token {end}, and CLIP's tokenizer ends them with {END_OF_TEXT}"
            )
        return ClipTokenizer(context_length=text.context_length)
    own = TransformersTokenizer(source=str(folder), context_length=text.context_length)
    try:
        _check(own, text, end)
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    return own


def _check(own: TransformersTokenizer, text: TextTower, end: int) -> None:
    largest = max(own.library().get_vocab().values(), default=0)
    if largest >= text.vocab_size:
        raise CheckpointError(
            f"its tokenizer has tokens up to {largest}, and config.json says vocab_size = {text.vocab_size}"
        )
    if end != ANY_END and end_of_texts(own) != end:
        raise CheckpointError(
            f"config.json: texts are read at token {end}, which is not the one that its tokenizer ends them "
            "with, or not its largest"
        )


def end_of_texts(own: TransformersTokenizer) -> int | None:
    """The token with which all texts end, cut or not, if it is the largest that there is; else None."""
    largest = max(own.library().get_vocab().values(), default=0)
    ends = {row[-1] if row else None for row in own.rows([*_PROBES, "a " * 2000])}
    return largest if ends == {largest} else None


def _is_clips(folder: Path) -> bool:
    """Whether the folder's tokenizer is CLIP's own; what cannot be told is not."""
    try:
        settings = _object(folder / "tokenizer_config.json")
        added = {str(key) for key in settings.get("added_tokens_decoder") or {}}
        added |= {str(one) for one in _object(folder / "added_tokens.json").values()}
        if settings.get("tokenizer_class") not in _CLIPS_CLASSES or settings.get("auto_map"):
            return False
        if added - {str(number) for number in _SPECIAL_TOKENS}:
            return False
        if (folder / "tokenizer.json").is_file():
            return _is_clips_json(_text(folder / "tokenizer.json"))
        if (folder / "vocab.json").is_file() or (folder / "merges.txt").is_file():
            merges = [line for line in _text(folder / "merges.txt").splitlines() if line.strip()]
            merges = merges[1:] if merges[:1] and merges[0].startswith("#version") else merges
            return _is_clips_vocabulary(_object(folder / "vocab.json"), merges)
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
    except Exception:  # the Rust library raises nothing more special
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


def _object(path: Path) -> dict[str, Any]:
    value = json.loads(_text(path)) if path.is_file() else {}
    if not isinstance(value, dict):
        raise ValueError(f"{path} does not hold an object")
    return value


def _text(path: Path) -> str:
    if path.stat().st_size > _LARGEST:
        raise ValueError(f"{path} is too large to be CLIP's")
    return path.read_text(encoding="utf-8")
