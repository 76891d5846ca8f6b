"""Tests of the selection of samples: required members, filters on the json, one or all captions."""

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from clipkit.errors import ConfigError, DataError
from clipkit.samples.remote.store import ShardFile
from data.captions import CaptionRule, Filter
from data.order import Order
from data.selection import SelectedShard, Selection
from data.shards.manifest import make_manifest
from data.shards.samples import Shards
from tests.data.json_shards import of_json, shard_of


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep the indexes of temporary shards out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("CLIPKIT_CACHE", str(folder))
        yield folder


def passes(text: str, value: Any) -> bool | None:
    return Filter.of(text).passes({"x": value})


@pytest.mark.parametrize(
    ("text", "value", "expected"),
    [
        ("x >= 256", 256, True), ("x >= 256", 255.9, False), ("x <= 256", 256, True), ("x <= 256", 257, False),
        ("x > 256", 256, False), ("x > 256", 257, True), ("x < 0.5", 0.49, True), ("x < 0.5", 0.5, False),
        ("x = 3", 3.0, True), ("x == 3", 4, False), ("x != 3", 4, True), ("x != 3", 3, False),
        ("x >= 256", "300", True), ("x >= 256", " 3e2 ", True), ("x = 3", "3.0", True), ("x >= 256", "many", None),
        ("x < -1.5", -2, True), ("x>=1e3", 1000, True), ("x >= 1", True, None), ("x >= 1", [5], None),
        ("x >= 1", {"y": 1}, None), ("x >= 1", None, None), ("x = en", "en", True), ("x = en", "EN", False),
        ("x == 'en'", "en", True), ('x != "en"', "de", True), ("x != en", "en", False), ("x = en", 5, False),
        ("x = a b", "a b", True), ("x = true", True, True), ("x = True", True, True), ("x = false", True, False),
        ("x != false", True, True), ("x = 1", True, False), ("x = true", "true", True), ("x = ''", "", True),
        ("x != 3", "three", True), ("x = >", ">", True), ("x < inf", 1e300, True), ("x > 1", float("nan"), None),
        ("x = 1234567890123456789", 1234567890123456700, False),
        ("x = 1234567890123456789", "1234567890123456700", False),
        ("x = 1234567890123456789", " +1234567890123456789 ", True),
        ("x != 1234567890123456789", "1234567890123456788", True),
        ("x > 1234567890123456788", "1234567890123456789", True),
        ("x = 1234567890123456789", 1234567890123456789.0, True),
        ("x = 7", "007", True), ("x = 1_000", "1000", False), ("x = 1000", "1_000", False),
        ("x = 1_000", "1_000", True), ("x >= 1", "1_000", None),
    ],
)  # fmt: skip
def test_values_that_pass_filters(text: str, value: Any, expected: bool | None) -> None:
    assert passes(text, value) is expected


def test_integers_beyond_floats_are_compared_exactly() -> None:
    huge = 10**400
    assert passes("x > 1", huge) is passes("x < 0.5", -huge) is passes("x < inf", huge) is True
    assert passes("x < 0.5", huge) is passes("x > 1", -huge) is False
    assert passes(f"x = {huge}", huge) is passes(f"x = {huge}", str(huge)) is True
    assert passes(f"x = {huge}", huge + 1) is False
    assert passes("x > 1", "9" * 5000) is True  # more digits than Python converts to an int


@pytest.mark.parametrize(
    ("text", "meta", "expected"),
    [
        ("a.b >= 2", {"a": {"b": 3}}, True),
        ("a.b >= 2", {"a": 3}, None),
        ("a.b >= 2", {"a.b": 3}, None),
        ("a.b >= 2", {}, None),
        ("a-b_c = z", {"a-b_c": "z"}, True),
    ],
)
def test_filter_finds_nested_fields(text: str, meta: dict[str, Any], expected: bool | None) -> None:
    assert Filter.of(text).passes(meta) is expected


@pytest.mark.parametrize("text", ["", "x", "x >=", ">= 3", "x ~ 3", "x y = 3", "= =", "x =", "x !="])
def test_invalid_filter_raises_error(text: str) -> None:
    with pytest.raises(ConfigError, match="is not of the form FIELD >= VALUE"):
        Filter.of(text)


@pytest.mark.parametrize("text", ["x >= large", "x < ''", "x > en", "x <= 3 px", "x > nan", "x > 1_000"])
def test_comparison_with_non_number_raises_error(text: str) -> None:
    with pytest.raises(ConfigError, match="which is not a number"):
        Filter.of(text)


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(["width", "a.b", "a-b_c.d", "NSFW", "ünï", "0"]),
    compare=st.sampled_from([">=", "<=", "==", "!=", "=", ">", "<"]),
    value=st.floats(allow_nan=False),
    blanks=st.sampled_from(["", " ", "  "]),
)
def test_filter_is_parsed_and_printed(name: str, compare: str, value: float, blanks: str) -> None:
    read = Filter.of(f"{blanks}{name}{blanks}{compare}{blanks}{value!r}{blanks}")
    assert (read.name, read.compare, read.value) == (name, compare, repr(value))
    assert Filter.of(str(read)) == read


def test_filters_count_excluded_samples_by_cause(tmp_path: Path) -> None:
    samples = of_json(
        {"width": 300, "language": "en"},
        {"width": "400", "language": "en"},
        {"width": 100, "language": "en"},
        {"language": "en"},
        {"width": 500, "language": "de"},
        {"width": None, "language": "en"},
        ["no", "object"],
    )
    samples += [{"txt": "text", "json": "{"}, {"txt": "text"}, {"json": "{}", "cls": "1"}, {"cls": "2"}]
    samples += [{"txt": "text", "json": b"\xff"}, {"txt": "text", "json": "[" * 200_000}]
    filters = (Filter.of("width >= 256"), Filter.of("language = en"))
    opened = SelectedShard(shard_of(tmp_path / "0.tar", samples), Selection(filters=filters), None)
    assert opened.chosen.rows.tolist() == [0, 1] and opened.chosen.captions is None
    assert opened.chosen.dropped == {
        "without caption": 1,
        "not width >= 256": 1,
        "without width": 5,
        "not language = en": 1,
        "unreadable": 3,
    }
    assert sum(opened.chosen.dropped.values()) + len(opened) == len(samples)


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (Selection(), ["t", "tj", "j"]),
        (Selection(need=("image",)), ["t", "tj", "j", "c", ""]),
        (Selection(captions=CaptionRule(fields=("a",))), ["tj", "j"]),
        (Selection(captions=CaptionRule(fields=("txt", "a"))), ["t", "tj", "j"]),
    ],
)
def test_required_members(selection: Selection, expected: list[str], tmp_path: Path) -> None:
    kinds = {
        "t": {"txt": "x"},
        "tj": {"txt": "x", "json": "{}"},
        "j": {"json": "{}"},
        "c": {"cls": "1"},
        "": {},
    }
    opened = SelectedShard(shard_of(tmp_path / "0.tar", list(kinds.values())), selection, None)
    assert [list(kinds)[row] for row in opened.chosen.rows.tolist()] == expected
    assert sum(opened.chosen.dropped.values()) == 5 - len(expected)


def test_identity_of_filters_with_large_integers_has_changed() -> None:
    def former(text: str) -> str:
        said = [["caption", "image"], [text], CaptionRule().which()]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]

    for text, same in (("x = 1234567890123456789", False), ("x > 256", True), ("x = en", True)):
        assert (Selection(filters=(Filter.of(text),)).identity == former(text)) is same


def test_identity_depends_on_rules_that_change_the_selection() -> None:
    filters = tuple(map(Filter.of, ("a > 1", "b > 1")))
    all_of = CaptionRule(choice="all")
    different = [
        Selection(),
        Selection(need=("image",)),
        Selection(filters=filters),
        Selection(filters=filters[:1]),
        Selection(captions=all_of),
        Selection(captions=CaptionRule(choice="all", fields=("a",))),
        Selection(fraction=0.5),
        Selection(fraction=0.25),
    ]
    assert len({selection.identity for selection in different}) == len(different)
    assert Selection(filters=filters).identity == Selection(filters=filters[::-1]).identity
    assert Selection(need=("caption", "image")).identity == Selection().identity
    assert (
        Selection(captions=CaptionRule(prefix="x", templates=("{}", "a {}"))).identity == Selection().identity
    )


metas = st.dictionaries(
    st.sampled_from(["caption", "captions", "more"]),
    st.one_of(
        st.sampled_from(["p", "q", "", " "]),
        st.lists(st.sampled_from(["r", "s", "", 3, None]), max_size=4),
        st.none(),
    ),
)
samples_with_captions = st.lists(
    st.fixed_dictionaries({}, optional={"txt": st.sampled_from(["x", "y", " "]), "json": metas}),
    min_size=1,
    max_size=6,
)


@settings(deadline=None, max_examples=60)
@given(
    samples=st.lists(samples_with_captions, min_size=1, max_size=3),
    fields=st.lists(st.sampled_from(["txt", "captions", "more", "caption"]), min_size=1, unique=True),
)
def test_all_captions_are_drawn_once_per_epoch(
    samples: list[list[dict[str, Any]]], fields: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    rule = CaptionRule(fields=tuple(fields), choice="all")
    folder = tmp_path_factory.mktemp("set")
    expected: list[tuple[str, str, str]] = []
    files = []
    for number, shard in enumerate(
        [*samples, [{"txt": "last", "json": {"captions": ["last"], "more": "last", "caption": "last"}}]]
    ):
        written = [{**one, "json": json.dumps(one["json"])} if "json" in one else one for one in shard]
        files.append(shard_of(folder / f"{number}.tar", written))
        for row, one in enumerate(shard):
            meta, text = one.get("json", {}), one.get("txt")
            if text is None and isinstance(meta.get("caption"), str):
                text = meta["caption"]
            for field in fields:
                found = text if field == "txt" else meta.get(field)
                if field == "captions" and found is None and "txt" not in fields:
                    found = text
                several = found if isinstance(found, list) else [found]
                expected += [
                    (files[-1].url, f"{row:03d}", c) for c in several if isinstance(c, str) and c.strip()
                ]
    shards = Shards.of(files, captions=rule)
    order = Order(shards.counts, seed=1, batch_size=1, window=2)
    epoch = np.concatenate([order.batch(step).ids for step in range(len(shards))])
    read = [shards.read(number) for number in epoch.tolist()]
    got = [(one.shard, one.key, rule.caption(one.fields, one.caption_number, None)) for one in read]
    assert sorted(got, key=repr) == sorted(expected, key=repr)


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the rows that are read from shards."""
    rows: list[int] = []
    read = SelectedShard.read

    def counted(self: SelectedShard, row: int, names: Sequence[str]) -> list[bytes | None]:
        rows.append(row)
        return read(self, row, names)

    monkeypatch.setattr(SelectedShard, "read", counted)
    return rows


@pytest.mark.parametrize("choice", ["first", "all"])
def test_stored_selection_is_used_and_rebuilt_if_damaged(
    choice: str, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metas = [{"width": width, "captions": ["a", "b"][: width % 3]} for width in range(30)]
    file = shard_of(tmp_path / "0.tar", of_json(*metas))
    rule = CaptionRule(fields=("captions",), choice=choice)
    selection = Selection(filters=(Filter.of("width >= 10"),), captions=rule)
    rows = count_reads(monkeypatch)
    first = SelectedShard(file, selection, None).chosen
    assert len(rows) == 30
    again = SelectedShard(file, selection, None).chosen
    assert len(rows) == 30
    kept = [path for path in (own_cache / "index").rglob("*") if selection.identity in path.name]
    assert len(kept) == 1
    whole = kept[0].read_bytes()
    damaged = [whole[:-70], b"", b"x" * 200, whole[:90] + b"\7" + whole[91:]]
    found = [first, again]
    for number, content in enumerate(damaged, 2):
        kept[0].unlink()  # the previous content is still mapped
        kept[0].write_bytes(content)
        found.append(SelectedShard(file, selection, None).chosen)
        assert len(rows) == 30 * number and kept[0].read_bytes() == whole
    for one in found:
        assert np.array_equal(one.rows, first.rows) and one.dropped == first.dropped
        assert (one.captions is None) == (choice == "first")
        if one.captions is not None and first.captions is not None:
            assert np.array_equal(one.captions, first.captions)
    SelectedShard(file, Selection(filters=(Filter.of("width >= 11"),), captions=rule), None)
    assert len(rows) == 180  # other rules select again


def test_changed_shard_is_selected_again(tmp_path: Path) -> None:
    selection = Selection(filters=(Filter.of("width >= 10"),))
    path = tmp_path / "0.tar"
    before = SelectedShard(shard_of(path, of_json({"width": 10}, {"width": 1})), selection, None)
    assert before.chosen.rows.tolist() == [0]
    file = shard_of(path, of_json({"width": 1}, {"width": 20}))
    os.utime(path, ns=(1, 1))
    assert SelectedShard(ShardFile.at(path), selection, None).chosen.rows.tolist() == [1]
    assert file.size == before.file.size


def test_unwritable_cache_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("CLIPKIT_CACHE", str(tmp_path / "file"))
    selection = Selection(filters=(Filter.of("width >= 10"),))
    file = shard_of(tmp_path / "0.tar", of_json({"width": 10}, {"width": 1}))
    assert [SelectedShard(file, selection, None).chosen.rows.tolist() for _ in range(2)] == [[0], [0]]


@given(fractions=st.tuples(st.floats(0.001, 1), st.floats(0.001, 1)))
@settings(max_examples=20, deadline=None)
def test_fraction_is_a_subset_of_larger_fractions(
    fractions: tuple[float, float], tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.getbasetemp() / "many.tar"
    if not file.exists():
        shard_of(file, [{"txt": "a"}] * 2000)
    less, more = sorted(fractions)
    opened = [SelectedShard(ShardFile.at(file), Selection(fraction=one), None) for one in (less, more)]
    rows = [set(one.chosen.rows.tolist()) for one in opened]
    assert rows[0] <= rows[1]
    assert sum(opened[0].chosen.dropped.values()) == 2000 - len(rows[0])
    for chosen, fraction in zip(rows, (less, more), strict=True):
        deviation = (2000 * fraction * (1 - fraction)) ** 0.5
        assert abs(len(chosen) - 2000 * fraction) <= 5 * deviation + 1e-9


def one_sample_shards(folder: Path, count: int) -> list[ShardFile]:
    folder.mkdir()
    return [shard_of(folder / f"{number:05d}.tar", of_json({"n": number})) for number in range(count)]


def names_of(shards: Sequence[ShardFile], selection: Selection) -> set[str]:
    manifest = make_manifest([shards], selection)
    used = Shards(manifest, selection)
    return {Path(used.locate(number)[0]).name for number in range(len(used))}


def test_fraction_of_keys_that_repeat_across_shards(tmp_path: Path) -> None:
    shards = one_sample_shards(tmp_path / "set", 200)
    assert len({SelectedShard(shard, Selection(), None).index.key(0) for shard in shards}) == 1
    tenth, half = (names_of(shards, Selection(fraction=fraction)) for fraction in (0.1, 0.5))
    assert tenth < half and 5 <= len(tenth) <= 38 and 65 <= len(half) <= 135
    # the same samples in a copy, in another order, and with fewer shards
    copies = one_sample_shards(tmp_path / "copy", 200)
    assert names_of(copies[::-1], Selection(fraction=0.5)) == half
    assert names_of(copies[:100], Selection(fraction=0.5)) == half & {shard.name for shard in shards[:100]}


def test_fraction_of_keys_that_repeat_within_a_shard(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        for number in range(400):
            for extension in ("jpg", "txt"):
                info = tarfile.TarInfo(f"{number % 2}.{extension}")
                info.size = 1
                tar.addfile(info, io.BytesIO(b"a"))
    shard = ShardFile.at(tmp_path / "0.tar")
    chosen = SelectedShard(shard, Selection(fraction=0.5), None).chosen
    assert 150 <= len(chosen) <= 250


def test_first_shards_may_have_no_used_sample(tmp_path: Path) -> None:
    shards = one_sample_shards(tmp_path / "set", 20)
    last = Selection(filters=(Filter.of("n >= 15"),))
    assert names_of(shards, last) == {f"{number:05d}.tar" for number in range(15, 20)}
    with pytest.raises(
        DataError, match=r"the first 20 shards have no sample that passes data\.filters: 20 not"
    ):
        make_manifest([shards], Selection(filters=(Filter.of("n >= 20"),)))


def test_filters_that_exclude_everything_raise_error(tmp_path: Path) -> None:
    file = shard_of(tmp_path / "0.tar", of_json({"width": 10}, {}))
    with pytest.raises(DataError) as caught:
        make_manifest([[file]], Selection(filters=(Filter.of("width >= 1000"),)))
    assert str(caught.value) == (
        f"shard {file.url} has no sample that passes data.filters: 1 not width >= 1000, 1 without width"
    )
    with pytest.raises(DataError, match=r"has no sample that is used: 2 outside data\.fraction"):
        make_manifest([[file]], Selection(fraction=1e-9))


def test_excluded_samples_are_listed_by_cause(tmp_path: Path) -> None:
    file = shard_of(tmp_path / "0.tar", [*of_json({"width": 10}, {"width": 20}, {"width": 30}, {}), {}])
    for filters, told in (
        ([], "left out: 1 without caption"),
        (["width != 0"], "left out by data.filters: 1 without width, left out: 1 without caption"),
        (
            ["width >= 30"],
            "left out by data.filters: 2 by width >= 30, 1 without width, left out: 1 without caption",
        ),
        (
            ["width >= 29.96928679943"],
            "left out by data.filters: 2 by width >= 29.97, 1 without width, left out: 1 without caption",
        ),
    ):
        selection = Selection(filters=tuple(map(Filter.of, filters)))
        made = make_manifest([[file]], selection)
        assert made.left_out(selection) == told
        all_count = replace(made, dropped={}).left_out(selection)
        assert all_count == ("left out by data.filters: none" if filters else "")


def test_unknown_caption_field_raises_error(tmp_path: Path) -> None:
    file = shard_of(tmp_path / "0.tar", of_json({"a": "x"}))
    selection = Selection(captions=CaptionRule(fields=("b",), choice="all"))
    with pytest.raises(
        DataError, match=r"none of 1 samples examined has a caption in b .*; json fields with text: a$"
    ):
        make_manifest([[file]], selection)


def test_number_of_captions_is_limited_to_65535(tmp_path: Path) -> None:
    file = shard_of(tmp_path / "0.tar", of_json({"c": ["x"] * 70_000}))
    opened = SelectedShard(file, Selection(captions=CaptionRule(fields=("c",), choice="all")), None)
    assert len(opened) == 65_535 and opened.caption_number(65_534) == 65_534


@pytest.mark.parametrize(
    "text", ["width => 256", "width=<256", "a.b =! en", "a <> 3", "a === 3", "a =>", "a >== 3"]
)
def test_mistyped_operator_raises_error(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Filter.of(text)
    assert str(caught.value) == f"filter {text!r} has no known operator: >=, <=, >, <, = or !="
