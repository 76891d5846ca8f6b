"""Tests of json field names: names that no sample has are rejected at the start; rare fields are accepted."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from clipkit.errors import DataError
from clipkit.samples import value_at
from data.captions import CaptionRule, Filter, leaf_fields
from data.selection import SelectedShard, Selection
from data.shards.manifest import make_manifest
from tests.data.json_shards import of_json, shard_of


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep the indexes of temporary shards out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("CLIPKIT_CACHE", str(folder))
        yield folder


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the rows that are read from shards."""
    rows: list[int] = []
    read = SelectedShard.read

    def counted(self: SelectedShard, row: int, names: Sequence[str]) -> list[bytes | None]:
        rows.append(row)
        return read(self, row, names)

    monkeypatch.setattr(SelectedShard, "read", counted)
    return rows


def refusal(samples: Sequence[dict[str, Any]], selection: Selection, path: Path, *, shards: int = 1) -> str:
    """Return the error for shards of these samples; empty if there is none."""
    files = [shard_of(path / f"{number}.tar", samples) for number in range(shards)]
    try:
        make_manifest([files], selection)
    except DataError as error:
        assert "\n" not in str(error)
        return str(error)
    return ""


METAS = of_json(
    *[{"width": 300, "caption": "x", "alt": {"en": "y"}, "tags": ["z"], "none": None} for _ in range(3)]
)
THERE = "available fields: alt.en, caption, tags, width"


@pytest.mark.parametrize("shards", [1, 3, 12])
@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("widht", f"did you mean 'width'? {THERE}"),
        ("WIDTH", f"did you mean 'width'? {THERE}"),
        ("alt.de", f"did you mean 'alt.en'? {THERE}"),
        ("similarity", THERE),
        ("none", THERE),
    ],
)
def test_unknown_filter_field_lists_available_fields(
    name: str, hint: str, shards: int, tmp_path: Path
) -> None:
    selection = Selection(filters=(Filter.of("width >= 1"), Filter.of(f"{name} >= 1")))
    said = refusal(METAS, selection, tmp_path, shards=shards)
    looked = 3 * min(shards, 8)
    assert said == (
        f"data.filters names the json field {name!r}, which none of {looked} samples examined has: {hint}"
    )


@pytest.mark.parametrize("choice", ["first", "random", "weighted", "all"])
@pytest.mark.parametrize("shards", [1, 3, 12])
def test_unknown_caption_field_lists_available_fields(shards: int, choice: str, tmp_path: Path) -> None:
    rule = CaptionRule(fields=("captoin",), choice=choice, weights=(1.0,))
    said = refusal(METAS, Selection(captions=rule), tmp_path, shards=shards)
    looked = 3 * min(shards, 8)
    assert said.startswith(
        f"none of {looked} samples examined has a caption in captoin (data.captions or --captions); members: "
    )
    assert f"txt ({looked})" in said and said.endswith("json fields with text: alt.en, caption, tags")


@pytest.mark.parametrize("choice", ["first", "all"])
@pytest.mark.parametrize("shards", [1, 12])
def test_caption_field_without_json_suggests_caption_files(shards: int, choice: str, tmp_path: Path) -> None:
    rule = CaptionRule(fields=("alt",), choice=choice)
    said = refusal([{"txt": "text"}] * 2, Selection(captions=rule), tmp_path, shards=shards)
    looked = 2 * min(shards, 8)
    assert said.startswith(
        f"none of {looked} samples examined has a caption in alt (data.captions or --captions); "
    )
    assert f"txt ({looked})" in said
    assert said.endswith(
        "json fields with text: none: set data.captions=txt (training) or --captions txt (commands)"
    )


def test_fields_without_text_and_hostile_names_are_reported(tmp_path: Path) -> None:
    said = refusal([{"json": '{"text": "x"}'}] * 2, Selection(), tmp_path)
    assert said == (
        "none of 2 samples examined has a caption in txt (data.captions or --captions); "
        "members: jpg (2), json (2); json fields with text: text"
    )
    said = refusal(METAS, Selection(captions=CaptionRule(fields=("width",))), tmp_path)
    assert said == (
        "none of 3 samples examined has a caption in width (data.captions or --captions); "
        "members: jpg (3), json (3), txt (3); json fields with text: alt.en, caption, tags"
    )
    hostile = [{"json": json.dumps({"a\x1b[2J\n": "1", "x" * 99: "2", "": "3"})}]
    said = refusal(hostile, Selection(captions=CaptionRule(fields=("z",))), tmp_path)
    assert said.isprintable() and said.endswith(f"json fields with text: , a\\x1b[2J\\n, {'x' * 40}…")
    many = [{"json": json.dumps({f"f{number:03d}": "1" for number in range(500)})}]
    said = refusal(many, Selection(captions=CaptionRule(fields=("z",))), tmp_path)
    assert said.endswith("f018, f019 and 180 more")


@pytest.mark.parametrize("where", [0, 7, 29])
@pytest.mark.parametrize("shard", [0, 1])
@pytest.mark.parametrize("over", [Selection(captions=CaptionRule(fields=("rare",))), None])
def test_rare_field_is_accepted(over: Selection | None, shard: int, where: int, tmp_path: Path) -> None:
    selection = over or Selection(filters=(Filter.of("rare = x"),))
    metas: list[dict[str, Any]] = [{"width": 1} for _ in range(30)]
    files = []
    for number in range(2):
        here = [
            meta | ({"rare": "x"} if (number, row) == (shard, where) else {})
            for row, meta in enumerate(metas)
        ]
        files.append(shard_of(tmp_path / f"{number}.tar", of_json(*here)))
    assert make_manifest([files], selection).counts.sum() == (60 if over else 1)


def test_empty_captions_and_broken_json_are_not_unknown_fields(tmp_path: Path) -> None:
    assert refusal([{"txt": " "}, {"txt": ""}], Selection(), tmp_path) == ""
    rule = CaptionRule(fields=("a",))
    assert refusal([{"json": "{"}, {"json": "["}], Selection(captions=rule), tmp_path) == ""
    assert refusal([{"txt": "x"}], Selection(captions=CaptionRule(fields=("txt", "a"))), tmp_path) == ""


def test_one_sample_is_read_if_it_has_the_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [shard_of(tmp_path / f"{number}.tar", METAS) for number in range(3)]
    rows = count_reads(monkeypatch)
    for fields in (("txt",), ("caption",), ("none", "tags")):
        make_manifest([files], Selection(captions=CaptionRule(fields=fields)))
        assert rows == [0]
        rows.clear()


def test_leaf_fields_have_the_names_used_in_filters() -> None:
    deep: dict[str, Any] = {"leaf": 1}
    for _ in range(9):
        deep = {"down": deep}
    meta = {"a": {"b": [1], "c": {"d": False}, "none": None, "empty": {}}, "x.y": 1, "e": "", "deep": deep}
    found = dict(leaf_fields(meta))
    assert found == {"a.b": [1], "a.c.d": False, "e": ""}
    assert all(value_at(meta, name) == value for name, value in found.items())
    assert len(dict(leaf_fields({str(number): number for number in range(10_000)}))) == 200
