"""Tests of the choice of captions."""

import json
from collections import Counter
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from clipkit.config import DataConfig
from clipkit.errors import ConfigError, DataError
from data.captions import CaptionRule, drop_words

CHOICES = ("first", "random", "weighted", "all")
META = {
    "caption": "of json",
    "all": ["one", "", "two", " \n\t", 3, None, ["four"]],
    "deep": {"er": {"text": "below", "list": ["x", "y"]}},
    "number": 7,
    "object": {"a": 1},
    "empty": [],
    "blank": "  ",
    "none": None,
    "flag": True,
}

captions = st.text(max_size=8)
json_captions = st.one_of(
    st.none(),
    st.integers(),
    st.booleans(),
    captions,
    st.lists(st.one_of(captions, st.none(), st.integers()), max_size=4),
)
metas = st.dictionaries(st.sampled_from(["caption", "a", "b"]), json_captions)
fields = st.lists(st.sampled_from(["txt", "caption", "a", "b", "c.d"]), min_size=1, max_size=4, unique=True)


def chance(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def merged(text: str | None, meta: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a sample with a caption file and a json."""
    return meta if text is None else {**meta, "txt": text}


def drawn(rule: CaptionRule, text: str | None, meta: dict[str, Any], times: int = 400) -> Counter[str | None]:
    """Count how often each caption was drawn."""
    random = chance()
    return Counter(rule.caption(merged(text, meta), 0, random) for _ in range(times))


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("txt", ["the text"]),
        ("caption", ["of json"]),
        ("all", ["one", "two"]),
        ("deep.er.text", ["below"]),
        ("deep.er.list", ["x", "y"]),
        ("deep.er", []),
        ("deep.er.text.more", []),
        ("deep.missing.text", []),
        ("number", []),
        ("number.x", []),
        ("object", []),
        ("empty", []),
        ("blank", []),
        ("none", []),
        ("flag", []),
        ("missing", []),
        ("all.0", []),
    ],
)
def test_captions_by_field(field: str, expected: list[str]) -> None:
    assert CaptionRule(fields=(field,)).captions_by_field(merged("the text", META)) == [expected]
    first = CaptionRule(fields=(field,)).caption(merged("the text", META), 0, None)
    assert first == (expected[0] if expected else None)


@pytest.mark.parametrize(
    ("text", "meta", "expected"),
    [
        ("text", {"caption": "json"}, "text"),
        (None, {"caption": "json"}, "json"),
        ("", {"caption": "json"}, None),  # the caption file exists but is empty
        (None, {"caption": ["json"]}, None),
        (None, {"caption": 5}, None),
        (None, {}, None),
        ("  text \n", {}, "  text \n"),
    ],
)
def test_json_caption_is_used_without_a_caption_file(
    text: str | None, meta: dict[str, Any], expected: str | None
) -> None:
    assert CaptionRule().caption(merged(text, meta), 0, None) == expected
    count = len(CaptionRule(choice="all").captions_by_field(merged(text, meta))[0])
    assert count == (expected is not None)


def test_first_caption_is_of_the_first_field_with_captions() -> None:
    rule = CaptionRule(fields=("missing", "blank", "all", "txt"))
    assert rule.caption(merged("text", META), 0, None) == "one"
    assert rule.caption({"txt": "text"}, 0, None) == "text"
    assert rule.caption({}, 0, None) is None


def test_random_choice_is_uniform() -> None:
    seen = drawn(
        CaptionRule(fields=("txt", "all", "missing", "deep.er.list"), choice="random"), "text", META, 1000
    )
    assert set(seen) == {"text", "one", "two", "x", "y"}
    assert all(abs(count - 200) < 70 for count in seen.values())


def test_weighted_choice_draws_a_field_and_then_a_caption() -> None:
    rule = CaptionRule(fields=("txt", "all", "missing"), choice="weighted", weights=(1, 2, 100))
    seen = drawn(rule, "text", META, 1200)  # the weight of missing fields goes to the others
    assert set(seen) == {"text", "one", "two"}
    assert all(abs(count - 400) < 90 for count in seen.values())
    assert drawn(rule, None, {"all": "only"}) == {"only": 400}
    assert drawn(rule, " ", {}) == {None: 400}


def test_captions_by_number() -> None:
    rule = CaptionRule(fields=("all", "txt", "deep.er.list"), choice="all")
    found = [rule.caption(merged("text", META), number, None) for number in range(6)]
    assert found == ["one", "two", "text", "x", "y", None]


@given(
    st.lists(st.text(alphabet="abc", min_size=1, max_size=3), min_size=1, max_size=9), st.integers(0, 2**32)
)
def test_dropped_words_are_some_in_order_but_never_all(words: list[str], seed: int) -> None:
    for probability in (0.0, 0.4, 0.999):
        kept = drop_words("  ".join(words), probability, chance(seed)).split()
        remaining = iter(words)
        assert kept and all(word in remaining for word in kept)
        assert kept == drop_words(" ".join(words), probability, chance(seed)).split()
        if not probability:
            assert kept == words


def test_each_word_is_dropped_with_the_probability() -> None:
    random = chance()
    words = [f"w{i}" for i in range(20)]
    seen = Counter(word for _ in range(2000) for word in drop_words(" ".join(words), 0.3, random).split())
    assert all(abs(seen[word] - 1400) < 100 for word in words)
    alone = Counter(drop_words("a b", 0.99, random) for _ in range(2000))
    assert abs(alone["a"] - alone["b"]) < 300 and alone["a b"] < 20


def test_templates_and_prefix() -> None:
    plain = CaptionRule(templates=("a photo of {}", "{}, {}!", "no place"), prefix="<en> ")
    assert drawn(plain, "a {} cat", {}).keys() == {
        "<en> a photo of a {} cat",
        "<en> a {} cat, a {} cat!",
        "<en> no place",
    }
    one = CaptionRule(templates=("[{}]",))
    assert one.caption({"txt": "x"}, 0, None) == "[x]" and not one.draws
    assert CaptionRule(prefix="p: ").caption({"txt": "x"}, 0, None) == "p: x"
    assert CaptionRule(prefix="p: ", templates=("{}",)).caption({"txt": " "}, 0, None) is None
    assert (
        CaptionRule(templates=(r"\1 \g<0> {} {0} {{}}",)).caption({"txt": "x"}, 0, None)
        == r"\1 \g<0> x {0} {x}"
    )


def test_rules_that_draw() -> None:
    assert [CaptionRule(choice=choice, weights=(1,)).draws for choice in CHOICES] == [
        False,
        True,
        True,
        False,
    ]
    assert CaptionRule(templates=("{}", "a {}")).draws


@pytest.mark.parametrize(
    ("fields", "names", "expected"),
    [
        (("txt",), ("jpg", "txt", "json"), ["txt"]),
        (("txt",), ("jpg", "json"), ["json"]),
        (("txt", "a"), ("jpg", "txt", "json"), ["txt", "json"]),
        (("caption",), ("jpg", "txt", "json"), ["json"]),
        (("caption",), ("jpg", "caption", "json"), ["caption"]),
        (("captions",), ("jpg", "txt", "json"), ["txt", "json"]),
        (("Sci.txt", "com.txt"), ("jpg", "sci.txt", "json"), ["sci.txt", "json"]),
        (("Sci.txt", "com.txt"), ("jpg", "sci.txt", "com.txt", "json"), ["sci.txt", "com.txt"]),
        (("syn.text", "txt"), ("jpg", "txt", "syn.json", "paug.json", "json"), ["txt", "syn.json"]),
        (("syn.json",), ("jpg", "syn.json"), ["syn.json"]),
    ],
)
def test_only_members_that_may_contain_captions_are_read(
    fields: tuple[str, ...], names: tuple[str, ...], expected: list[str]
) -> None:
    assert CaptionRule(fields=fields).select_members(names) == expected


def test_texts_and_json_members_become_fields() -> None:
    rule = CaptionRule(fields=("Sci.txt", "syn.text", "names.de"), choice="all")
    members = {
        "jpg": b"\xff\xd8",
        "sci.txt": "Turdus merula ü".encode(),
        "syn.json": b'{"text": ["a bird", "", "a thrush"]}',
        "json": b'{"names": {"de": "Amsel"}, "syn": 1}',
        "txt": b"caf\xe9",
    }
    fields = rule.parse(members)
    assert fields["txt"] == "caf\udce9" and fields["syn"] == {"text": ["a bird", "", "a thrush"]}
    assert rule.captions_by_field(fields) == [["Turdus merula ü"], ["a bird", "a thrush"], ["Amsel"]]
    with pytest.raises(DataError, match=r"^its syn\.json does not parse: "):
        rule.parse({"syn.json": b"{"})


def test_which_depends_on_fields_and_choice() -> None:
    assert (
        len(
            {
                CaptionRule(fields=of, choice=how).which()
                for of in (("a",), ("a", "b"), ("b", "a"))
                for how in CHOICES
            }
        )
        == 12
    )
    assert CaptionRule(prefix="x", templates=("{}",)).which() == CaptionRule().which()


@given(
    text=st.one_of(st.none(), captions),
    meta=metas,
    of=fields,
    choice=st.sampled_from(CHOICES),
    seed=st.integers(0, 2**32),
    templates=st.lists(st.sampled_from(["{}", "a {}"]), max_size=2),
)
def test_drawn_caption_is_one_of_the_sample_or_none(
    text: str | None, meta: dict[str, Any], of: list[str], choice: str, seed: int, templates: list[str]
) -> None:
    weights = tuple(range(1, len(of) + 1)) if choice == "weighted" else ()
    rule = CaptionRule(
        fields=tuple(of), choice=choice, weights=weights, templates=tuple(templates), prefix="> "
    )
    there = [caption for captions in rule.captions_by_field(merged(text, meta)) for caption in captions]
    assert all(isinstance(caption, str) and caption.strip() for caption in there)
    found = rule.caption(merged(text, meta), 0, chance(seed))
    assert found == rule.caption(merged(text, meta), 0, chance(seed))
    if found is None:
        assert not there
    else:
        assert found in {f"> {around.replace('{}', one)}" for one in there for around in templates or ["{}"]}
    assert json.loads(json.dumps(asdict(rule)))["fields"] == of


parts = st.text(alphabet="ab ._", max_size=6)


@given(parts=st.lists(parts, min_size=1, max_size=5), index=st.integers(0, 6))
def test_split_texts_are_captions_of_their_own(parts: list[str], index: int) -> None:
    rule = CaptionRule(fields=("txt",), choice="all", split="<br>|<p>")
    expected = [part.strip() for part in parts if part.strip()]
    assert rule.captions_by_field({"txt": "<br>".join(parts)}) == [expected]
    assert rule.captions_by_field({"txt": ["<p>".join(parts), None]}) == [expected]
    found = rule.caption({"txt": "<br>".join(parts)}, index, None)
    assert found == (expected[index] if index < len(expected) else None)
    assert rule.which() != CaptionRule(fields=("txt",), choice="all").which()


@pytest.mark.parametrize("split", ["(", "a(b)", "", "x*"])
def test_separators_that_split_nothing_sensible_are_refused(split: str) -> None:
    if not split:
        assert DataConfig(caption_split=split).caption_split == ""
        return
    with pytest.raises(
        ConfigError, match=r"data\.caption_split = .* expected a regular expression without groups"
    ):
        DataConfig(caption_split=split)
