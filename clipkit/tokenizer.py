"""CLIP's byte-pair encoding, run by the Rust ``tokenizers`` library.

The ids are those of OpenAI's tokenizer and of open_clip's ``SimpleTokenizer``: text is repaired by ftfy, HTML
entities are resolved twice, white space is folded, and everything is lower case. The vocabulary is the file
that open_clip_torch ships.
"""

import gzip
import html
import importlib.util
import re as standard_re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clipkit.errors import ConfigError, DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["CONTEXT_LENGTH", "END_OF_TEXT", "MAX_CHARACTERS", "START_OF_TEXT", "VOCABULARY", "tokenize"]

CONTEXT_LENGTH = 77
START_OF_TEXT, END_OF_TEXT = 49406, 49407
VOCABULARY = "bpe_simple_vocab_16e6"  # what a checkpoint records as its tokenizer
_MERGES = 49152 - 256 - 2
MAX_CHARACTERS = 100_000  # of one text; at most a few hundred of them can reach the model

# OpenAI's splitting rule: the special tokens, English contractions, runs of letters, single digits, runs of others
_WORD = r"<start_of_text>|<end_of_text>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
_PLAIN = standard_re.compile(r"[ !-%'-~]*")  # printable ASCII without "&": nothing for ftfy or html to do


def tokenize(
    texts: str | Sequence[str], context_length: int = CONTEXT_LENGTH, *, trim: bool = False
) -> Tensor:
    """Texts → (N, L) int64 token ids: start of text, the text, end of text, zeros.

    Args:
        texts: one or many.
        context_length: L. A longer text is cut and still ends with end of text.
        trim: cut L down to the longest text given. Features are the same, the work is less.

    Half of a surrogate pair counts as U+FFFD, as ftfy has it.

    Raises:
        DataError: a text is over 100,000 characters.
        ConfigError: ``context_length`` has no room for start and end.
    """
    if context_length < 2:
        raise ConfigError(f"context_length = {context_length} does not fit: at least 2")
    many = [texts] if isinstance(texts, str) else list(texts)
    rows = _encode(many)
    if trim:
        longest = max((len(row) for row in rows), default=0) + 2
        context_length = min(context_length, longest)
    ids = torch.zeros(len(rows), context_length, dtype=torch.int64)
    for i, row in enumerate(rows):
        row = [START_OF_TEXT, *row[: context_length - 2], END_OF_TEXT]
        ids[i, : len(row)] = torch.tensor(row)
    return ids


def _encode(texts: Sequence[str]) -> list[list[int]]:
    """The ids of each text, without start and end."""
    for text in texts:
        if len(text) > MAX_CHARACTERS:
            raise DataError(f"a text of {len(text)} characters is over the limit of {MAX_CHARACTERS}")
    words = [_split(_clean(text)) for text in texts]
    encoded = _bpe().encode_batch_fast(words, is_pretokenized=True, add_special_tokens=False)
    return [one.ids for one in encoded]


def _clean(text: str) -> str:
    if not _PLAIN.fullmatch(text):
        import ftfy

        text = html.unescape(html.unescape(ftfy.fix_text(text))).strip()
    return " ".join(text.split()).lower()


def _split(text: str) -> list[str]:
    words: list[str] = _word_pattern().findall(text)
    return words


@cache
def _word_pattern() -> Any:
    import regex  # its \p{L} and \p{N}: the standard library has none

    return regex.compile(_WORD, regex.IGNORECASE)


@cache
def _bpe() -> "Tokenizer":
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    merges = _merges()
    symbols = _byte_symbols()
    tokens = [*symbols, *(symbol + "</w>" for symbol in symbols), *("".join(pair) for pair in merges)]
    vocabulary = {token: i for i, token in enumerate([*tokens, "<start_of_text>", "<end_of_text>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.add_special_tokens([AddedToken(token) for token in ("<start_of_text>", "<end_of_text>")])
    return tokenizer


def _merges() -> list[tuple[str, str]]:
    package = importlib.util.find_spec("open_clip")  # found without importing it, which would load far more
    assert package is not None and package.origin is not None
    path = Path(package.origin).with_name(f"{VOCABULARY}.txt.gz")
    lines = gzip.decompress(path.read_bytes()).decode("utf-8").split("\n")[1 : _MERGES + 1]
    return [(left, right) for left, right in (line.split() for line in lines)]


def _byte_symbols() -> list[str]:
    """A printable character for each byte in the vocabulary's order: itself, or the next from U+0100 on."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]
