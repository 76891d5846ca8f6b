"""CLIP's byte-pair encoding: the Rust ``tokenizers`` library behind a memory of the parts of texts.

The ids are those of OpenAI's tokenizer and of open_clip's ``SimpleTokenizer``: text is repaired by ftfy, HTML
entities are resolved twice, white space is folded, and everything is lower case. The vocabulary is the file
that open_clip_torch ships.

A text is cut at its spaces, and the ids of each part are looked up. Only a part that is not in memory is repaired,
split into words and, where a word is new as well, encoded. That is exact because no word and no entity reaches over
a space, nor does any repair but one, that of a wrong encoding ("schÃ¶n"): a text with a sign of that goes through
ftfy as a whole. Nothing here locks, warns or starts threads, so that threads and forked processes may tokenize.
"""

import gzip
import html
import re as standard_re
import unicodedata
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex

import numpy as np
import torch
from torch import Tensor

from clipkit.errors import ConfigError, DataError
from clipkit.open_clip_package import vocabulary_file

if TYPE_CHECKING:
    from tokenizers.models import BPE

__all__ = [
    "CONTEXT_LENGTH", "END_OF_TEXT", "MAX_CHARACTERS", "START_OF_TEXT", "VOCABULARY", "byte_symbols",
    "pair_merges", "tokenize", "tokens_in_order",
]  # fmt: skip

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
_PLAIN = standard_re.compile(r"[\t\n\f\r -%'-~]*")
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
    if _PLAIN.fullmatch(part):
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
    if _PLAIN.fullmatch(text):
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
