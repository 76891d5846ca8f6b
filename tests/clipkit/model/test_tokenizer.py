"""Tests of the tokenizer: ids equal open_clip's for all texts, with and without its cache."""

import html
import json
import random
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import ftfy
import pytest
import torch
from hypothesis import given, settings, strategies as st

from clipkit.errors import ConfigError, DataError
from clipkit.model import tokenizer
from clipkit.model.tokenizer import (
    END_OF_TEXT,
    START_OF_TEXT,
    ClassTokenizer,
    ClipTokenizer,
    LibraryTokenizer,
    TransformersTokenizer,
    tokenize,
)
from tests.clipkit.stored_models import write_word_tokenizer

# Unicode classes with special treatment in cleaning or splitting
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
# all assigned characters up to the emoji of the supplementary planes, to cover all scripts
LETTERS = [
    chr(c) for c in range(1, 0x1FBFF) if unicodedata.category(chr(c)) != "Cn" and not 0xD800 <= c <= 0xDFFF
]


@cache
def open_clips_tokenizer() -> Any:
    from open_clip import SimpleTokenizer

    return SimpleTokenizer()


def strings(count: int) -> Iterator[str]:
    """Yield texts of every kind, the same in each call."""
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


def test_ids_of_5000_strings_equal_open_clip() -> None:
    texts = list(strings(5_000))
    assert len(texts) == 5_000
    for start in range(0, len(texts), 1000):
        batch = texts[start : start + 1000]
        ours, theirs = tokenize(batch), open_clips_tokenizer()(batch)
        assert ours.dtype == theirs.dtype
        differing = [ascii(batch[i]) for i in (ours != theirs).any(dim=1).nonzero().flatten().tolist()]
        assert not differing


def test_ids_of_the_vocabulary_equal_open_clip() -> None:
    oracle = open_clips_tokenizer()
    texts = [oracle.decode([i]) for i in range(0, START_OF_TEXT, 5)]
    assert torch.equal(tokenize(texts, 20), oracle(texts, 20))


@settings(deadline=None)
@given(texts=st.lists(st.text(st.characters(exclude_categories=[]), max_size=60), max_size=4))
def test_ids_of_random_texts_equal_open_clip(texts: list[str]) -> None:
    """Characters include lone surrogates."""
    assert torch.equal(tokenize(texts), open_clips_tokenizer()(texts))


@pytest.mark.parametrize("context_length", [2, 3, 5, 16, 77, 200])
def test_any_context_length_ends_with_end_of_text(context_length: int) -> None:
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


def test_single_texts_empty_lists_and_iterators() -> None:
    assert tokenize("a cat").shape == (1, 77)
    assert tokenize([]).shape == (0, 77)
    assert tokenize(text for text in ["a", "b"]).shape == (2, 77)  # type: ignore[arg-type]
    assert torch.equal(tokenize("a cat"), tokenize("A  CAT\n"))


def test_too_long_text_and_invalid_context_length_raise_errors() -> None:
    with pytest.raises(DataError, match="100001 characters is over the limit of 100000"):
        tokenize(["short", "a" * 100_001])
    for length in (1, 0, -5):
        with pytest.raises(ConfigError, match="is not a number from 2 to"):
            tokenize("a cat", length)


def test_forked_process_prints_nothing() -> None:
    code = (
        "import os\nfrom clipkit import tokenize\ntokenize(['a b', 'c'] * 50)\n"
        "if not os.fork(): tokenize(['a b', 'c'] * 50); os._exit(0)\n"
        "raise SystemExit(os.wait()[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# Parts of a clean text are tokenized alone and cached. The tests below check that ids equal those of whole texts.

# texts whose parts affect each other when they are cleaned, and some that only seem to
ENTANGLED = [
    "schÃ¶n und gut", "voilÃ  le travail", "Ã la mode", "a Ã b", "x Â y", "Â Â", "na Â ", "â€œnewâ€� car",
    "5 â‚¬ in", "ГўВЂВ A", "вЂ™ s", "cafÃ© naïve", "café, naïve", "œ x", "cœur œuvre", "Œ. a", " Å£ x", "Ð Ñ",
    "à² b", "«é» ©", "½ é®", "&amp;amp;amp; b", "&amp;amp;amp; <b>", "<b> &amp;amp;amp;", "&EACUTE; a",
    "&EACUTE; <a", "a\n<b\n&EACUTE;", "&EACUTE;\n<b", "&EACUTE; x\n<b &EACUTE;", "&Dagger; &dagger; A",
    "AT&T &AMP; Q&A", "&Atilde;&copy; a", "&#195; b", "&#xC2; c", "＆amp; ＜b", "a\x0bb c", "a\x1cb", "é\x85 b",
    "\x1b[1;31mÉ\x1b[0m e", "ŉ ʼn ﬁ", "“a” ‘b’ é”", "e\u0301 \u0301e", "한 \u1112\u1161\u11ab", "Σ Σ ΑΣ\nΣ",
    "\ud83d \ude00", "a\u2028b\u2029c \r\n d", "\u3000 ｱ ﾊﾞ", "&" + "amp;" * 300, "é&amp;" * 200,
]  # fmt: skip
SIGNS = "".join(c for c in ftfy.badness.BADNESS_RE.pattern if not c.isascii())
PIECES = st.sampled_from(
    [
        *SIGNS,
        *"aZ9 .,?'& \n\t",
        *AWKWARD,
        *ENTANGLED,
        "&amp;",
        "&lt;",
        "&Atilde;",
        "&#160;",
        "<",
        " ",
        " Ã ",
        "Â ",
    ]
)
MIXED = st.lists(PIECES, max_size=10).map("".join)


@pytest.fixture
def forgetful() -> Iterator[None]:
    """Clear the caches before and after the test."""
    memories = (tokenizer._parts, tokenizer._words)
    for memory in memories:
        memory.clear()
    yield
    for memory in memories:
        memory.clear()


def clean_text(text: str) -> str:
    """Clean a text as OpenAI's tokenizer does."""
    return " ".join(html.unescape(html.unescape(ftfy.fix_text(text))).split()).lower()


def of_whole_texts(texts: list[str]) -> list[list[int]]:
    """Ids of each text without splitting it into parts, padded as by ``tokenize``."""
    clean = [clean_text(text) for text in texts]
    words = [map(tokenizer._words.__getitem__, tokenizer._word_pattern().findall(one)) for one in clean]
    rows = [[START_OF_TEXT, *memoryview(b"".join(word)).cast("H"), END_OF_TEXT] for word in words]
    longest = max(map(len, rows), default=2)
    return [row + [0] * (longest - len(row)) for row in rows]


def test_ids_of_texts_with_encoding_errors_equal_open_clip() -> None:
    texts = [*ENTANGLED, *(f"{a} {b}" for a in ENTANGLED[:24] for b in ENTANGLED[:24])]
    assert torch.equal(tokenize(texts), open_clips_tokenizer()(texts))


@settings(deadline=None, max_examples=400)
@given(texts=st.lists(MIXED, max_size=4))
def test_ids_of_parts_equal_ids_of_whole_texts(texts: list[str]) -> None:
    assert tokenize(texts, 10**6, trim=True).tolist() == of_whole_texts(texts)


@settings(deadline=None, max_examples=400)
@given(text=st.text(st.characters(max_codepoint=127)))
def test_ids_of_ascii_equal_those_of_the_general_path(text: str) -> None:
    assert tokenize([text], 10**6, trim=True).tolist() == of_whole_texts([text])


def test_ascii_pattern_splits_as_the_general_one() -> None:
    pairs = [chr(a) + chr(b) for a in range(128) for b in range(128)]
    texts = [*pairs, *("'" + pair for pair in pairs), *("a'" + pair for pair in pairs)]
    texts = [clean_text(text) for text in texts]
    pattern = tokenizer._word_pattern()
    assert all(tokenizer._ASCII_WORD.findall(text) == pattern.findall(text) for text in texts)


def test_initially_known_words_are_one_token() -> None:
    model = tokenizer._load_bpe()
    assert len(model.words) > len(model.plain_words) > 25_000
    specials = {"<start_of_text>", "<end_of_text>"}
    wrong = [
        word for word in model.words.keys() - specials if tokenizer._encode_word(word) != model.words[word]
    ]
    assert not wrong
    assert all(tokenizer._ASCII_WORD.findall(word) == [word] for word in model.plain_words)


def test_cache_size_is_bounded(forgetful: None, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenize("a é")
    start = len(tokenizer._parts), len(tokenizer._words)
    monkeypatch.setattr(tokenizer._Cache, "LIMIT", max(start) + 50)
    texts = [f"{i} é{i} x{i}y, &{i}; “{i}” ж{i}ж" for i in range(500)]
    for begin in range(0, 500, 20):
        batch = texts[begin : begin + 20]
        assert torch.equal(tokenize(batch), open_clips_tokenizer()(batch))
        for memory in (tokenizer._parts, tokenizer._words):
            assert len(memory) <= tokenizer._Cache.LIMIT


def test_long_parts_are_not_cached(forgetful: None) -> None:
    tokenize("a é")
    before = len(tokenizer._parts) + len(tokenizer._words)
    tokenize(["a" * 50_000, "é" * 50_000, "é." * 20, "&amp;" * 50, "１" * 33, "😀" * 32, "Ã©" * 100])
    kept = [*tokenizer._parts.items(), *tokenizer._words.items()]
    assert max(len(string) for string, _ in kept) <= tokenizer._Cache.LONGEST
    assert max(len(ids) for _, ids in kept) <= 2 * tokenizer._Cache.LONGEST
    assert len(kept) <= before + 5  # single characters


def test_threads_share_the_cache(forgetful: None, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"{word} {i}, “{word}{i}” é{i % 40}ж" for i, word in enumerate(WORDS * 40)]
    expected = tokenize(texts)
    monkeypatch.setattr(tokenizer._Cache, "LIMIT", len(tokenizer._load_bpe().words) + 200)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(tokenize, [texts] * 32))
    assert all(torch.equal(result, expected) for result in results)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1],), "texts must be strings, but number 0 is of type int"),
        ((["a", None],), "texts must be strings, but number 1 is of type NoneType"),
        ((None,), "texts must be a list of strings, not NoneType"),
        ((b"a",), "texts must be a list of strings, not bytes"),
        ((["a"], 10**12), "context_length = 1000000000000 is not a number from 2 to 1000000"),
        ((["a"], "77"), "context_length = '77' is not a number"),
        ((["a"], 2.5), "context_length = 2.5 is not a number"),
    ],
)
def test_invalid_argument_types_raise_one_line_error(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=f"^{message}"):
        tokenize(*arguments)


@given(
    st.lists(st.lists(st.sampled_from(["a", "red", "hat", "Dogs!"]), max_size=9), max_size=6), st.booleans()
)
@settings(max_examples=50)
def test_cut_texts_of_clips_tokenizer_are_counted(words: list[list[str]], trim: bool) -> None:
    texts = [" ".join(row) for row in words]
    clips = ClipTokenizer(context_length=7, trim=trim)
    expected = sum(int(row.count_nonzero()) > 7 for row in tokenize(texts, 77))
    assert clips.count_cut(texts, clips(texts)) == expected


@pytest.mark.parametrize(
    "kind", ["open_clip", "trimmed", "transformers", "padded with the end", "left", "clips"]
)
def test_cut_texts_of_library_tokenizers_are_counted(kind: str, tmp_path: Path) -> None:
    write_word_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"pad_token": "</s>"} if kind == "padded with the end" else {}
    config |= {"padding_side": "left"} if kind == "left" else {}
    config |= {"cls_token": "<s>"} if kind == "clips" else {}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    library = LibraryTokenizer(
        source=str(tmp_path),
        context_length=8,
        trim=kind != "open_clip",
        options={"tokenizer_mode": "clips"} if kind == "clips" else {},
    )
    plain = TransformersTokenizer(source=str(tmp_path), context_length=8)
    own = plain if kind == "transformers" else library
    longest = 5 if kind == "clips" else 6  # words
    for lengths in ([1, longest], [longest + 1], [longest, longest + 1, 2, 30], [], [1, 2]):
        texts = ["dog " * count for count in lengths]
        assert own.count_cut(texts, own(texts)) == sum(count > longest for count in lengths)


def test_class_names_are_not_cut() -> None:
    names = ClassTokenizer(names=("a", "b"))
    assert names.count_cut(["a"], names(["a"])) == 0
