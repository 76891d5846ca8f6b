"""Token ids are those of open_clip's tokenizer, whatever the text."""

import random
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clipkit.errors import ConfigError, DataError
from clipkit.tokenizer import END_OF_TEXT, START_OF_TEXT, tokenize

# the classes of Unicode that the cleaning or the splitting treats in a way of its own
AWKWARD = [
    "", " ", "\t\n\r\x0b\x0c", "\x00", "\x1b[31mred\x1b[0m", "\x7f\x85", "\u00a0\u2003\u3000",
    "\u200b\u200d\ufeff\u2060",
    "é", "e\u0301", "ﬁ ﬂ", "Å Å K", "İI ıi", "ß ẞ", "ſtreet 'ſ", "Ω µ", "naïve café", "Ñandú", "Æther", "straße",
    "😀", "👩‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪", "👍🏽", "1️⃣", "❤️",
    "١٢٣", "१२३", "１２３", "Ⅳ", "½", "x²", "①", "𝟘𝟙𝟚", "〇",
    "한국어", "日本語", "ภาษาไทย", "עברית", "العربية", "ਪੰਜਾਬੀ",
    "&amp;", "&amp;amp;", "&amp;amp;amp;", "&lt;b&gt;", "&nbsp;", "&#39;", "&#x1F600;", "&#xD800;", "&#0;",
    "&eacute", "&bogus;",
    "<b>&amp;</b>", "a&b", "AT&T", "&", "R&amp;D", "&copy 2020",
    "<start_of_text>", "<end_of_text>", "<END_OF_TEXT>", "a<end_of_text>b", "<|endoftext|>", "&lt;end_of_text&gt;",
    "<start_of_text><end_of_text>", "<ſtart_of_text>", "<end_of_text", "</w>", "a</w>b",
    "it's", "IT'S", "we'll've", "'tis", "''", "don’t", "l’été", "“quoted”", "…", "—", "--", "!!!", "?!", "*_~`",
    "#$%",
    "schÃ¶n", "âœ”", "Ã©tÃ©", "ï»¿bom", "\ufffd", "â€™",
    "\ud800", "a\udfffb", "\ud83d\ude00", "x\ud83d", "a" * 300, "ab " * 200, "!" * 200, "1" * 100, "é" * 100,
    "😀" * 60,
    "Supercalifragilisticexpialidocious", "https://example.com/a?b=c&d=e#f", "user@example.com", "C:\\x\\y.jpg",
    "IMG_1234.JPG", "3.14159", "1,000,000", "50%", "€20", "A4-size", "24/7", "\\n", "{c}", "%s",
]  # fmt: skip
WORDS = [
    "a",
    "photo",
    "of",
    "the",
    "cat's",
    "dogs",
    "isn't",
    "small",
    "bird",
    "on",
    "wooden",
    "1999",
    "Paris",
]
# all assigned characters up to the supplementary planes' emoji, so that every script has its turn
LETTERS = [
    chr(c) for c in range(1, 0x1FBFF) if unicodedata.category(chr(c)) != "Cn" and not 0xD800 <= c <= 0xDFFF
]


@cache
def open_clips_tokenizer() -> Any:
    from open_clip import SimpleTokenizer

    return SimpleTokenizer()


def strings(count: int) -> Iterator[str]:
    """Texts of every kind, the same each time."""
    draw = random.Random(0)
    kinds = [
        lambda: " ".join(draw.choices(WORDS, k=draw.randint(1, 12))),
        lambda: draw.choice(["", " ", "\n"]).join(draw.choices(AWKWARD, k=draw.randint(1, 4))),
        lambda: " ".join(draw.choices([*WORDS, *AWKWARD], k=draw.randint(2, 8))),
        lambda: "".join(draw.choices("etaoinshrdlu", k=draw.randint(1, 24))),
        lambda: "".join(chr(draw.randrange(1, 128)) for _ in range(draw.randint(1, 30))),
        lambda: "".join(draw.choices(LETTERS, k=draw.randint(1, 8))),
        lambda: "".join(draw.choices("!.-=*#~_'&;<>/", k=draw.randint(1, 16))),
    ]
    yield from AWKWARD
    for i in range(count - len(AWKWARD)):
        yield kinds[i % len(kinds)]()


def test_twenty_thousand_strings_have_open_clips_ids() -> None:
    texts = list(strings(20_000))
    assert len(texts) == 20_000
    for start in range(0, len(texts), 1000):
        batch = texts[start : start + 1000]
        ours, theirs = tokenize(batch), open_clips_tokenizer()(batch)
        assert ours.dtype == theirs.dtype
        differing = [ascii(batch[i]) for i in (ours != theirs).any(dim=1).nonzero().flatten().tolist()]
        assert not differing


def test_every_entry_of_the_vocabulary_has_open_clips_ids() -> None:
    oracle = open_clips_tokenizer()
    texts = [oracle.decode([i]) for i in range(0, START_OF_TEXT, 5)]
    assert torch.equal(tokenize(texts, 20), oracle(texts, 20))


@settings(deadline=None)
@given(texts=st.lists(st.text(st.characters(exclude_categories=[]), max_size=60), max_size=4))
def test_any_text_has_open_clips_ids(texts: list[str]) -> None:
    """Halves of surrogate pairs are among the characters."""
    assert torch.equal(tokenize(texts), open_clips_tokenizer()(texts))


@pytest.mark.parametrize("context_length", [2, 3, 5, 16, 77, 200])
def test_shorter_and_longer_contexts_end_with_end_of_text(context_length: int) -> None:
    texts = ["", "a cat", "a photo of a cat " * 30, "<end_of_text>"]
    ids = tokenize(texts, context_length)
    assert ids.shape == (4, context_length)
    assert torch.equal(ids, open_clips_tokenizer()(texts, context_length))
    assert (ids == END_OF_TEXT).any(dim=1).all()
    assert (ids[:, 0] == START_OF_TEXT).all()


def test_trimmed_ids_are_the_first_columns() -> None:
    texts = ["a cat", "", "a photo of two cats"]
    whole, trimmed = tokenize(texts), tokenize(texts, trim=True)
    assert trimmed.shape == (3, 7)
    assert torch.equal(whole[:, :7], trimmed)
    assert not whole[:, 7:].any()
    assert tokenize([""], trim=True).tolist() == [[START_OF_TEXT, END_OF_TEXT]]
    assert tokenize(["cat " * 100], trim=True).shape == (1, 77)
    assert tokenize(["cat " * 100], 10, trim=True).shape == (1, 10)


def test_one_text_none_and_repeated_calls() -> None:
    assert tokenize("a cat").shape == (1, 77)
    assert tokenize([]).shape == (0, 77)
    assert tokenize(text for text in ["a", "b"]).shape == (2, 77)  # type: ignore[arg-type]
    assert torch.equal(tokenize("a cat"), tokenize("A  CAT\n"))


def test_what_does_not_fit_is_one_clear_error() -> None:
    with pytest.raises(DataError, match="100001 characters is over the limit of 100000"):
        tokenize(["short", "a" * 100_001])
    for length in (1, 0, -5):
        with pytest.raises(ConfigError, match="at least 2"):
            tokenize("a cat", length)


def test_a_forked_process_says_nothing() -> None:
    code = (
        "import os\nfrom clipkit import tokenize\ntokenize(['a b', 'c'] * 50)\n"
        "if not os.fork(): tokenize(['a b', 'c'] * 50); os._exit(0)\n"
        "raise SystemExit(os.wait()[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
