"""Tests of tables with several rows for an image: they become one sample with all captions."""

import io
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from PIL import Image

from clipkit.config import DataConfig, PixelsConfig
from clipkit.errors import ConfigError, DataError
from clipkit.samples import Row, RowsByKey, digest_key, merge_rows
from data.__main__ import main
from data.captions import CaptionRule
from data.options import PackOptions
from data.pack import pack, pack_into_cache
from data.selection import Selection
from data.shards.manifest import make_manifest
from data.shards.samples import Shards, find_shards
from data.training_data import packed_images

NAMES = ("a.png", "b.png", "c.png", "sub/a.png")


def encoded(number: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (5, 4), (number, 0, 0)).save(buffer, "png")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the images NAMES."""
    folder = tmp_path_factory.mktemp("images")
    (folder / "sub").mkdir()
    for number, name in enumerate(NAMES):
        (folder / name).write_bytes(encoded(number))
    return folder


def json_lines(path: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(out: Path, split: str = "train") -> dict[str, tuple[bytes, str | None, dict[str, Any]]]:
    """Return image, caption and json of the samples of a packed folder, by key."""
    shards = Shards.of(find_shards(str(out), split=split), captions=CaptionRule(fields=("txt", "captions")))
    found = {}
    for number in range(len(shards)):
        sample = shards.read(number)
        text = sample.fields.pop("txt", None)
        found[sample.key] = sample.image, text, sample.fields
    return found


def bad_rows(out: Path) -> list[tuple[int, str | None, str]]:
    lines = map(json.loads, (out / "bad_rows.jsonl").read_text().splitlines())
    return [(line["row"], line["path"], line["cause"]) for line in lines]


def test_rows_of_an_image_equal_a_row_with_a_list(folder: Path, tmp_path: Path) -> None:
    images = [{"image": name, "caption": [f"{name} {i}" for i in range(5)]} for name in NAMES]
    rows = [{"image": image["image"], "caption": text} for image in images for text in image["caption"]]
    by_list = pack(
        json_lines(folder / "lists.jsonl", images), tmp_path / "lists", PackOptions(test=1), progress=False
    )
    by_row = pack(
        json_lines(folder / "rows.jsonl", rows), tmp_path / "rows", PackOptions(test=1), progress=False
    )
    assert (by_list.summary, by_row.summary) == (
        "4 rows, 4 images with 5 captions each",
        "20 rows, 4 images with 5 captions each",
    )
    lists, grouped = read(tmp_path / "lists", "test"), read(tmp_path / "rows", "test")
    assert list(grouped.values()) == list(lists.values())
    assert list(grouped) == ["000000001", "000000006", "000000011", "000000016"]  # the first row of each


spellings = st.sampled_from(["{}", "./{}", ".//./{}", "file://{folder}/{}", "{folder}//{}", ".\\{}"])


@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(
        st.tuples(st.sampled_from(NAMES), spellings, st.sampled_from("vwxyz"), st.integers(0, 1)), min_size=1
    )
)
def test_shuffled_rows_are_grouped_by_file(
    rows: list[tuple[str, str, str, int]], folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    out = tmp_path_factory.mktemp("out")
    lines = [
        {"image": spelling.format(name, folder=folder), "caption": text, "n": n}
        for name, spelling, text, n in rows
    ]
    report = pack(json_lines(folder / "t.jsonl", lines), out, progress=False)
    expected: dict[str, tuple[str, list[str], list[int]]] = {}
    for number, (name, _, text, n) in enumerate(rows, 1):
        _, texts, values = expected.setdefault(name, (f"{number:09d}", [], []))
        texts.append(text)
        values.append(n)
    found = read(out)
    assert list(found) == [key for key, _, _ in expected.values()]
    for name, (key, texts, values) in expected.items():
        distinct = list(dict.fromkeys(texts))
        image, caption, meta = found[key]
        assert (image, caption) == ((folder / name).read_bytes(), distinct[0])
        assert meta.get("captions", [caption]) == distinct
        assert meta["n"] == (values if len(set(values)) > 1 else values[0])
    counts = [len(set(texts)) for _, texts, _ in expected.values()]
    assert (report.rows, report.packed, report.captions) == (
        len(rows),
        len(counts),
        (min(counts), max(counts)),
    )
    assert report.marks["equal captions"] == len(rows) - sum(counts)


def test_rows_stay_samples_without_grouping(folder: Path, tmp_path: Path) -> None:
    rows = [{"image": "a.png", "caption": text} for text in ("x", "y", "x")]
    table = json_lines(folder / "t.jsonl", rows)
    report = pack(table, tmp_path / "out", PackOptions(group=False), progress=False)
    assert report.summary == "3 pairs"
    assert {key: caption for key, (_, caption, _) in read(tmp_path / "out").items()} == {
        "000000001": "x",
        "000000002": "y",
        "000000003": "x",
    }


def test_bad_rows_of_a_group_are_listed_one_by_one(folder: Path, tmp_path: Path) -> None:
    (folder / "broken.png").write_bytes(b"no image")
    pairs = [
        ("a.png", ""), ("gone.png", "one"), ("a.png", "first"), ("broken.png", "one"), ("./gone.png", "two"),
        ("a.png", "x" * 10_001), ("broken.png", "two"), ("a.png", "second"), ("b.png", "only"),
    ]  # fmt: skip
    table = json_lines(folder / "t.jsonl", [{"image": name, "caption": text} for name, text in pairs])
    report = pack(table, tmp_path / "out", progress=False)
    assert sorted(bad_rows(tmp_path / "out")) == [
        (1, "a.png", "empty caption"),
        (2, "gone.png", "missing file"),
        (4, "broken.png", "not an image in a known format"),
        (5, "./gone.png", "missing file"),
        (6, "a.png", "caption of more than 10,000 characters"),
        (7, "broken.png", "not an image in a known format"),
    ]
    assert report.summary == "3 rows, 2 images with 1 to 2 captions"
    found = read(tmp_path / "out")
    assert {key: meta.get("captions") for key, (_, _, meta) in found.items()} == {
        "000000003": ["first", "second"],
        "000000009": None,
    }


def test_rows_beyond_the_limit_are_bad_rows(folder: Path, tmp_path: Path) -> None:
    rows = [{"image": ("a.png", "b.png")[i % 2], "caption": f"caption {i}"} for i in range(204)]
    report = pack(json_lines(folder / "t.jsonl", rows), tmp_path / "out", progress=False)
    assert report.summary == "200 rows, 2 images with 100 captions each"
    cause = "more than 100 rows of one image (--no-group makes a sample of each)"
    assert report.bad == {cause: 4}
    assert [row for row, _, _ in bad_rows(tmp_path / "out")] == [201, 202, 203, 204]
    lists = [{"image": "a.png", "caption": [f"{i} {j}" for j in range(40)]} for i in range(3)]
    with pytest.raises(DataError, match="3 × more than 100 captions"):
        pack(json_lines(folder / "t.jsonl", lists), tmp_path / "none", progress=False)


def test_columns_that_differ_become_lists(folder: Path, tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"image": "a.png", "caption": "one", "id": 7, "box": [1, 2], "late": True},
        {"image": "b.png", "caption": "one", "id": 8},
        {"image": "a.png", "caption": "two", "id": 7, "box": [3, 4], "more": {"x": 1}, "late": 1},
    ]
    pack(json_lines(folder / "t.jsonl", rows), tmp_path / "out", progress=False)
    assert [meta for _, _, meta in read(tmp_path / "out").values()] == [
        {
            "captions": ["one", "two"],
            "id": 7,
            "box": [[1, 2], [3, 4]],
            "late": [True, 1],
            "more": [None, {"x": 1}],
        },
        {"id": 8},
    ]


def test_group_by_another_column(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = folder / "t.csv"
    lines = ["a.png,one,7,x", "b.png,two,8,x", "a.png,three,7,y", "c.png,four,7,z", "c.png,five,,z"]
    table.write_text("image,caption,id,more\n" + "\n".join([*lines, "sub/a.png,six,,z"]) + "\n")
    assert (
        main(["pack", str(table), str(tmp_path / "out"), "--group-by", "id", "--fields", "", "--quiet"]) == 0
    )
    output = capsys.readouterr().out
    assert "6 rows, 4 images with 1 to 3 captions" in output
    assert "1 row with another image than the first row of the group" in " ".join(output.split())
    assert [(caption, meta) for _, caption, meta in read(tmp_path / "out").values()] == [
        ("one", {"captions": ["one", "three", "four"], "id": "7"}),
        ("two", {"id": "8"}),
        ("five", {"id": None}),  # without a value, a row is alone
        ("six", {"id": None}),
    ]
    table.write_text("image,caption,id\ngone.png,one,7\na.png,two,7\ngone.png,three,7\nb.png,four,8\n")
    pack(table, tmp_path / "gone", PackOptions(group_by="id"), progress=False)
    assert bad_rows(tmp_path / "gone") == [
        (1, "gone.png", "missing file"),
        (2, "a.png", "missing file"),
        (3, "gone.png", "missing file"),
    ]


def test_group_by_the_image_column(folder: Path, tmp_path: Path) -> None:
    rows = [{"image": name, "caption": f"{i}"} for i, name in enumerate(["a.png", "b.png", "./a.png"])]
    table = json_lines(folder / "t.jsonl", rows)
    same = pack(table, tmp_path / "image", PackOptions(group_by="image"), progress=False)
    assert same.summary == "3 rows, 2 images with 1 to 2 captions"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"group_by": "caption"}, "'caption' is the column of captions: name another column"),
        ({"group_by": "idd"}, "has no such column 'idd' .*did you mean 'id'"),
        ({"group_by": "id", "group": False}, "--group-by and --no-group exclude each other"),
    ],
)
def test_invalid_groups_raise_error(
    folder: Path, tmp_path: Path, options: dict[str, Any], error: str
) -> None:
    (folder / "t.csv").write_text("image,caption,id\na.png,x,1\n")
    with pytest.raises((ConfigError, DataError), match=error):
        pack(folder / "t.csv", tmp_path / "out", PackOptions(**options), progress=False)
    with pytest.raises(ConfigError, match="is a folder of images"):
        pack(folder / "sub", tmp_path / "out", PackOptions(group_by="id"), progress=False)


def test_groups_span_tables(folder: Path, tmp_path: Path) -> None:
    first = json_lines(
        folder / "1.jsonl", [{"image": "a.png", "caption": "one"}, {"image": "sub/a.png", "caption": "two"}]
    )
    second = json_lines(
        folder / "sub" / "2.jsonl",
        [{"image": "a.png", "caption": "three"}, {"image": "../b.png", "caption": "four"}],
    )
    pack([first, second], tmp_path / "out", progress=False)
    found = read(tmp_path / "out")
    assert {key: meta.get("captions", [caption]) for key, (_, caption, meta) in found.items()} == {
        "000000001": ["one"],
        "000000002": ["two", "three"],
        "000000004": ["four"],
    }


@pytest.mark.parametrize("form", ["bytes", "struct", "paths"])
def test_images_in_parquet_are_grouped_by_content(folder: Path, tmp_path: Path, form: str) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    names = [random.Random(1).choice(NAMES) for _ in range(40)]
    contents = [(folder / name).read_bytes() for name in names]
    column: list[object] = list(contents)
    if form == "struct":  # all images have the same name, as in some sets of the hub
        column = [{"bytes": content, "path": "image.png"} for content in contents]
    elif form == "paths":
        column = [{"bytes": None, "path": name} for name in names]
        column = arrow.array(column, arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())]))
    captions = [f"caption {i}" for i in range(40)]
    write_table(arrow.table({"image": column, "caption": captions}), folder / "t.parquet")
    pack(folder / "t.parquet", tmp_path / "out", progress=False)
    expected: dict[bytes, list[str]] = {}
    for content, caption in zip(contents, captions, strict=True):
        expected.setdefault(content, []).append(caption)
    assert {image: meta["captions"] for image, _, meta in read(tmp_path / "out").values()} == expected


def test_training_draws_from_all_captions(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CLIPKIT_CACHE", str(tmp_path / "cache"))
    rows = [{"image": "a.png", "caption": f"caption {i}"} for i in range(3)]
    table = json_lines(folder / "t.jsonl", [*rows, {"image": "b.png", "caption": "only"}])
    shards = find_shards(str(table))
    message = capsys.readouterr().err
    assert "packed 4 rows, 2 images with 1 to 3 captions of" in message
    rule = CaptionRule(fields=("captions",), choice="random")
    samples = Shards.of(shards, captions=rule)
    generator = np.random.default_rng(0)
    drawn = []
    for number in range(len(samples)):
        sample = samples.read(number)
        drawn.append({rule.caption(sample.fields, 0, generator) for _ in range(50)})
    assert drawn == [{"caption 0", "caption 1", "caption 2"}, {"only"}]
    every = Shards.of(shards, captions=CaptionRule(fields=("captions",), choice="all"))
    assert len(every) == 4
    manifest = make_manifest([shards], Selection())
    for captions, notes in ((("txt",), 1), (("captions",), 0)):
        config = DataConfig(train=str(table), captions=captions)
        found = packed_images(config, PixelsConfig(), manifest, rank0=True, broadcast=bytes).notes
        assert len(found) == notes
        assert all("data.captions=captions data.caption_choice=random" in note for note in found)


def test_groups_are_stored_outside_of_memory() -> None:
    random_order = random.Random(0)
    numbers = [random_order.randrange(3000) for _ in range(20_000)]
    first: dict[int, int] = {}
    later: dict[int, list[int]] = {}
    groups = RowsByKey()
    for number, image in enumerate(numbers, 1):
        row = Row(number=number, path="x", caption=str(number), progress=0)
        groups.add(number, row, digest_key(str(image).encode()))
        begin = first.setdefault(image, number)
        later.setdefault(begin, []).append(number)
    for rows in later.values():
        assert [groups.position(number) for number in rows] == list(range(len(rows)))
        assert [row.number for row in groups.stored_rows(rows[0])] == rows[1:]


def test_values_nested_too_deeply_do_not_end_a_merge() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    rows = [Row(number=i, path="x", caption="c", progress=0, others={"deep": deep}) for i in (1, 2)]
    groups = RowsByKey()
    for row in rows:
        groups.add(row.number, row, digest_key(b"x"))
    assert groups.position(2) == 0  # used by itself, where it becomes a bad row
    assert merge_rows(rows).others["deep"] == [deep, deep]


def test_cached_packs_of_earlier_versions_are_not_used(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLIPKIT_CACHE", str(tmp_path / "cache"))
    table = json_lines(folder / "t.jsonl", [{"image": "a.png", "caption": "x"}])
    now = pack_into_cache([table])
    monkeypatch.setattr("data.pack._REVISION", 4)
    assert pack_into_cache([table]) != now
