"""Tests of packing tables of all kinds, with good rows and every kind of bad one."""

import csv
import io
import json
import math
import os
import random
import subprocess
import sys
import threading
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from webdataset.tariterators import group_by_keys, tar_file_expander

from clipkit.errors import ConfigError, DataError
from clipkit.samples.table import Table
from clipkit.samples.table.base import LONGEST_CAPTION
from data.__main__ import main
from data.captions import CaptionRule, Filter
from data.options import PackOptions
from data.pack import _draw_split, pack, pack_into_cache
from data.selection import Selection
from data.shards.manifest import make_manifest
from data.shards.samples import Shards, find_shards


def encoded(kind: str, side: tuple[int, int] = (40, 30), mode: str = "RGB") -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (side[1], side[0], 3), dtype=np.uint8)
    image = Image.fromarray(noise).convert(mode)
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def write_table(path: Path, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Path:
    """Write a table in the format of the suffix."""
    if path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        columns = {name: [row[index] for row in rows] for index, name in enumerate(header)}
        parquet.write_table(pyarrow.table(columns), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(dict(zip(header, row, strict=True))) + "\n" for row in rows))
    else:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writerows([header, *rows])
    return path


def samples(folder: Path, split: str = "train") -> dict[str, dict[str, bytes]]:
    """Read a split with webdataset; return the samples by key."""
    found = {}
    for shard in sorted((folder / split).glob("*.tar"), key=lambda path: int(path.stem)):
        with shard.open("rb") as stream:  # opened here, as webdataset does not close its files
            for sample in group_by_keys(tar_file_expander([{"url": shard.name, "stream": stream}])):
                found[sample["__key__"]] = sample
    return found


def bad_rows(folder: Path) -> list[tuple[int, str | None, str]]:
    lines = (folder / "bad_rows.jsonl").read_text().splitlines()
    return [(line["row"], line["path"], line["cause"]) for line in map(json.loads, lines)]


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Write a folder with one image of each kind, for tables next to it."""
    folder = tmp_path / "images"
    folder.mkdir()
    for name, kind in (("a.jpg", "JPEG"), ("b.png", "PNG"), ("c.webp", "WEBP"), ("d.gif", "GIF")):
        (folder / name).write_bytes(encoded(kind))
    return folder


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_tables_of_every_format_are_packed(images: Path, tmp_path: Path, suffix: str) -> None:
    captions = ["a cat,\nand a dog", 'the "best" one', "naïve café 🐈"]
    rows = [
        (f"images/{name}", text) for name, text in zip(("a.jpg", "b.png", "c.webp"), captions, strict=True)
    ]
    table = write_table(tmp_path / f"table{suffix}", ["filepath", "caption"], rows)
    report = pack(table, tmp_path / "out", PackOptions(samples_per_shard=2), progress=False)
    assert (report.packed, report.bad, report.bad_rows) == (3, {}, None)
    found = samples(tmp_path / "out")
    assert list(found) == ["000000001", "000000002", "000000003"]
    assert [sample["txt"].decode() for sample in found.values()] == captions
    for sample, (name, extension) in zip(
        found.values(), [("a.jpg", "jpg"), ("b.png", "png"), ("c.webp", "webp")], strict=True
    ):
        assert sample[extension] == (images / name).read_bytes()
    assert (tmp_path / "out/train/nshards.txt").read_text() == "2\n"
    card = json.loads((tmp_path / "out/card.json").read_text())
    assert card["samples"] == {"train": 3}
    assert card["columns"] == {"image": "filepath", "caption": "caption"} and card["fields"] == {}
    assert not (tmp_path / "out/bad_rows.jsonl").exists()


def test_bad_rows_are_counted_and_listed(images: Path, tmp_path: Path) -> None:
    jpeg, png = encoded("JPEG", (200, 200)), encoded("PNG", (200, 200))
    (images / "half.jpg").write_bytes(jpeg[: len(jpeg) // 2])
    (images / "half.png").write_bytes(png[: len(png) // 2])
    (images / "text.jpg").write_text("not an image")
    (images / "empty.jpg").write_bytes(b"")
    header = b"P6 20000 20000 255 "
    (images / "bomb.ppm").write_bytes(header + b"0")
    with (images / "large.jpg").open("wb") as file:
        file.truncate(65 * 2**20)
    os.mkfifo(images / "pipe.jpg")
    rows = [
        ("a.jpg", "good", ""),
        ("missing.jpg", "x", "missing file"),
        ("a.jpg/deeper.jpg", "x", "missing file"),
        ("half.jpg", "x", "broken or truncated image"),
        ("half.png", "x", "broken or truncated image"),
        ("text.jpg", "x", "not an image in a known format"),
        ("empty.jpg", "x", "empty file"),
        ("bomb.ppm", "x", "image of more than 100,000,000 pixels"),
        ("large.jpg", "x", "file of more than 64 MiB"),
        ("pipe.jpg", "x", "not a file"),
        (".", "x", "not a file"),
        ("nul\0.jpg", "x", "cannot read file"),
        ("https://example.org/a.jpg", "x", "a web address, not a file: download it first"),
        ("", "x", "no path"),
        ("b.png", " ", "empty caption"),
        ("b.png", "x" * (LONGEST_CAPTION + 1), "caption of more than 10,000 characters"),
        ("b.png", "also good", ""),
    ]
    table = write_table(images / "table.csv", ["path", "text"], [row[:2] for row in rows])
    report = pack(table, tmp_path / "out", progress=False)
    assert report.packed == 2
    expected = [(number, row[0], row[2]) for number, row in enumerate(rows, 1) if row[2]]
    assert bad_rows(tmp_path / "out") == expected
    assert report.bad["broken or truncated image"] == 2
    assert sum(report.bad.values()) == len(expected)
    assert report.bad_rows == tmp_path / "out/bad_rows.jsonl"
    assert json.loads((tmp_path / "out/card.json").read_text())["bad_rows"] == report.bad
    assert list(samples(tmp_path / "out")) == ["000000001", "000000017"]


def test_bad_lines_of_json_are_listed(images: Path) -> None:
    lines = [
        '{"image": "a.jpg", "caption": "good"}',
        "",
        '{"image": "a.jpg", "caption": "open',
        '["a.jpg", "x"]',
        '{"image": "a.jpg"}',
        '{"image": 7, "caption": "x"}',
        '{"image": "a.jpg", "caption": ["x", 7]}',
        '{"image": "a.jpg", "caption": "' + "x" * 2**20 + '"}',
        '{"image": "a.jpg", "caption": "\\ud800"}',
        '{"image": ' + "[" * 99_999,
        '{"image": "a.jpg", "caption": "good", "more": "x"}',
    ]
    (images / "table.jsonl").write_text("\ufeff" + "\n".join(lines))
    report = pack(images / "table.jsonl", images / "out", PackOptions(group=False), progress=False)
    assert report.packed == 2
    assert bad_rows(images / "out") == [
        (2, None, "not JSON"),
        (3, None, "not a JSON object"),
        (4, "a.jpg", "no caption"),
        (5, None, "path is not text"),
        (6, "a.jpg", "caption is neither a string nor a list of strings"),
        (7, None, "an object longer than 1,048,576 characters"),
        (8, "a.jpg", "caption is not UTF-8"),
        (9, None, "not JSON"),
    ]


def test_bad_lines_of_csv_are_listed(images: Path) -> None:
    table = b"path,caption\na.jpg,good\na.jpg\n\na.jpg,caf\xe9\na.jpg,fine,more\n"
    (images / "table.csv").write_bytes(table + b'a.jpg,"' + b"x" * 140_000 + b"\na.jpg,last\n")
    report = pack(images / "table.csv", images / "out", PackOptions(group=False), progress=False)
    assert report.packed == 2
    assert [(row, cause.partition(" (")[0]) for row, _, cause in bad_rows(images / "out")] == [
        (2, "too few columns"),
        (3, "caption is not UTF-8"),
        (4, "more cells than columns: put cells that contain ',' in quotes"),
        (5, "a field longer than 131,072 characters"),
    ]


def test_missing_closing_quote_is_a_bad_row(images: Path) -> None:
    (images / "t.tsv").write_text('path\tcaption\na.jpg\t"it" they said\nb.png\t"open\na.jpg\tnot lost\n')
    report = pack(images / "t.tsv", images / "out", PackOptions(group=False), progress=False)
    assert report.packed == 2
    [(row, _, cause)] = bad_rows(images / "out")
    assert row == 2 and cause.startswith('a quote (") that is not closed')


def test_tables_as_datasets_publish_them_are_packed(images: Path) -> None:
    for folder in ("images", "more"):
        (images / folder).mkdir()
    (images / "images/a b.jpg").write_bytes((images / "a.jpg").read_bytes())
    (images / "more/100%.png").write_bytes((images / "b.png").read_bytes())
    turns = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "one"}]
    coco = {
        "images": [{"id": 3, "file_name": "a.jpg"}],
        "annotations": [{"image_id": 3, "caption": "one"}, {"image_id": 3, "caption": "two"}],
    }
    tables: dict[str, tuple[str, list[str], list[str]]] = {
        "captions.txt": ("image,caption\na.jpg,one\nb.png,two , x\n", ["one"], ["a.jpg"]),
        "flickr.token.txt": ("a.jpg#0\tone\nb.png#0\ttwo\n", ["one", "two"], ["a.jpg", "b.png"]),
        "train.tsv": ("one\ta.jpg\ntwo\tb.png\n", ["one", "two"], ["a.jpg", "b.png"]),
        "windows.csv": ("path,text\nimages\\a b.jpg,one\n", ["one"], ["a.jpg"]),
        "excel.csv": ("sep=;\npath;text\na.jpg;one, x\n", ["one, x"], ["a.jpg"]),
        "urls.csv": (
            f"path,text\nfile://{images}/images/a%20b.jpg,one\nfile://{images}/more/100%25.png,two\n",
            ["one", "two"],
            ["a.jpg", "b.png"],
        ),
        "captions.json": (json.dumps(coco), ["one"], ["a.jpg"]),
        "llava.json": (json.dumps([{"image": "a.jpg", "conversations": turns}]), ["one"], ["a.jpg"]),
    }
    for number, (name, (content, captions, files)) in enumerate(tables.items()):
        (images / name).write_text(content)
        out = images / f"out{number}"
        report = pack(images / name, out, progress=False)
        found = samples(out).values()
        assert [sample["txt"].decode() for sample in found] == captions, name
        assert [sample.get("jpg", sample.get("png")) for sample in found] == [
            (images / file).read_bytes() for file in files
        ]
        if name == "captions.txt":
            assert report.bad == {"more cells than columns: put cells that contain ',' in quotes": 1}
        if name == "captions.json":
            assert [json.loads(sample["json"])["captions"] for sample in found] == [["one", "two"]]
        if name == "llava.json":
            assert report.left_out == {
                "conversations": "except the first answer of each, which is the caption"
            }


def test_report_counts_the_rows_of_the_file(images: Path) -> None:
    rows = [f"a.jpg,number {i}" for i in range(12)]
    rows[2] = 'a.jpg,"the wall'
    (images / "t.csv").write_text("\n".join(["path,caption", *rows]) + "\n")
    report = pack(images / "t.csv", images / "out", progress=False)
    assert (report.rows, sum(report.bad.values())) == (11, 1)
    assert [(row, path) for row, path, _ in bad_rows(images / "out")] == [(3, "a.jpg")]
    (images / "all.csv").write_text("path,caption\na.jpg,red, parked\nb.png,one black, one white\n")
    with pytest.raises(
        DataError,
        match=r"2 × more cells than columns: put cells that contain ',' in quotes \(row 1: 'a.jpg'\)",
    ):
        pack(images / "all.csv", images / "none", progress=False)


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("Image Path\tCaption\na.jpg\tone, two; three\n", "utf-8"),  # tabs in a .csv
        ("path;text;more\na.jpg;one, two; \n", "utf-8-sig"),
        ("path|title\r\na.jpg|one\r\n", "utf-16"),
        ('id,url,"FILENAME",description\n1,http://x,a.jpg,one\n', "utf-8"),
        ("filepath,title,caption\na.jpg,not this,one\n", "utf-8"),
    ],
)
def test_columns_and_delimiters_are_guessed(images: Path, text: str, encoding: str) -> None:
    (images / "table.csv").write_text(text, encoding=encoding)
    report = pack(images / "table.csv", images / "out", progress=False)
    assert report.packed == 1
    assert samples(images / "out")["000000001"]["txt"].decode().startswith("one")


def test_ambiguous_columns_raise_error_unless_named(images: Path) -> None:
    table = write_table(images / "t.csv", ["what", "wherefrom"], [("one", "a.jpg")])
    with pytest.raises(DataError, match=r"which column is the image\? .*columns are what, wherefrom"):
        pack(table, images / "out", progress=False)
    with pytest.raises(DataError, match=r"which column is the caption\? Set --caption-column"):
        pack(table, images / "out", PackOptions(image_column="wherefrom"), progress=False)
    with pytest.raises(DataError, match=r"no column 'wherefrm' \(did you mean 'wherefrom'\?\)"):
        pack(
            table, images / "out", PackOptions(image_column="wherefrm", caption_column="what"), progress=False
        )
    report = pack(
        table, images / "out", PackOptions(image_column="wherefrom", caption_column="what"), progress=False
    )
    assert report.packed == 1


def test_invalid_tables_raise_error(images: Path) -> None:
    (images / "table.xlsx").write_bytes(b"x")
    (images / "table.parquet").write_bytes(b"x" * 100)
    (images / "empty.csv").write_bytes(b"")
    (images / "empty.jsonl").write_bytes(b"\n\n")
    (images / "header.csv").write_text("path,caption\n")
    for name, message in [
        ("nowhere.csv", "is not a file"),
        ("table.xlsx", "not .xlsx"),
        ("table.parquet", "cannot be read as Parquet"),
        ("empty.csv", "empty.csv is empty"),
        ("empty.jsonl", "no JSON object"),
        ("header.csv", "it has no rows"),
    ]:
        with pytest.raises(DataError, match=message):
            pack(images / name, images / "out", progress=False)
    assert not (images / "out").exists()
    assert not list(images.glob(".out*"))


def test_column_of_other_values_raises_error(images: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    struct = [{"pixels": b"x", "path": "a.jpg"}]
    parquet.write_table(pyarrow.table({"image": struct, "text": ["x"]}), images / "t.parquet")
    with pytest.raises(DataError, match="column 'image' contains struct"):
        pack(images / "t.parquet", images / "out", progress=False)


def test_only_bad_rows_raise_error_with_causes(images: Path) -> None:
    rows = [("a.png", "x"), ("b.jpg", "x"), ("a.jpg", "")]
    table = write_table(images / "t.csv", ["path", "caption"], rows)
    message = r"2 × missing file \(row 1: 'a.png'\); 1 × empty caption.*; paths are relative to .*images$"
    with pytest.raises(DataError, match=message):
        pack(table, images / "out", progress=False)
    assert not (images / "out").exists()
    assert not list(images.glob(".out*"))


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Write a folder of 200 images, each twice."""
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(200):
        Image.new("RGB", (2, 2), (number, 0, 0)).save(folder / f"{number}.png")
        (folder / f"copy of {number}.png").write_bytes((folder / f"{number}.png").read_bytes())
    return folder


def held_out(folder: Path) -> set[str]:
    """Return the captions of split test; check that train has all others."""
    test, train = (
        {sample["txt"].decode() for sample in samples(folder, split).values()} for split in ("test", "train")
    )
    assert not test & train
    assert len(test | train) == 400
    return test


def test_split_depends_on_the_bytes_of_the_image(many: Path, tmp_path: Path) -> None:
    names = [path.name for path in many.iterdir()]
    found = []
    for number, share in enumerate([0.2, 0.2, 0.3]):
        random.Random(number).shuffle(names)
        rows = [(str(many / name), name) for name in names]
        table = write_table(tmp_path / f"{number}.csv", ["path", "caption"], rows)
        report = pack(
            table, tmp_path / f"out{number}", PackOptions(test=share, samples_per_shard=50), progress=False
        )
        found.append(held_out(tmp_path / f"out{number}"))
        assert report.splits == {"train": 400 - len(found[-1]), "test": len(found[-1])}
        assert report.packed == 400
    first, again, more = found
    assert first == again  # in any order
    assert first < more
    assert 40 < len(first) < 120
    assert {name.removeprefix("copy of ") for name in first} == {n for n in first if "copy" not in n}
    card = json.loads((tmp_path / "out0/card.json").read_text())
    assert (card["test"], card["tasks"]) == (0.2, ["retrieval"])


@pytest.mark.parametrize(("image", "first"), [(b"a", 0xCA97), (b"b", 0x3E23), (b"c", 0x2E7D)])
def test_split_is_determined_by_the_start_of_sha_256(image: bytes, first: int) -> None:
    assert _draw_split(image, first / 2**16) == "train"
    assert _draw_split(image, (first + 1) / 2**16) == "test"
    assert (_draw_split(image, 0.0), _draw_split(image, 1.0)) == ("train", "test")


def test_no_test_split_by_default(images: Path) -> None:
    table = write_table(images / "t.csv", ["path", "caption"], [("a.jpg", "x")])
    assert pack(table, images / "out", progress=False).splits == {"train": 1}
    assert "tasks" not in json.loads((images / "out/card.json").read_text())
    assert pack(table, images / "all", PackOptions(test=1), progress=False).splits == {"test": 1}


def test_folder_names_become_classes(tmp_path: Path) -> None:
    for name in ("cat/1.png", "cat/inside/2.png", "a  dog/3.png"):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded("PNG"))
    (tmp_path / "photos/cat").rename(tmp_path / "elsewhere")
    (tmp_path / "photos/cat").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "photos/cat/loop").symlink_to(tmp_path / "photos")
    found = pack(tmp_path / "photos", tmp_path / "out")
    assert found.bad == {"link to a folder that contains it": 1}
    assert [sample["txt"].decode() for sample in samples(tmp_path / "out").values()] == [
        "a dog",
        "cat",
        "cat",
    ]
    assert (tmp_path / "out/classes.txt").read_text() == "a dog\ncat\n"
    (tmp_path / "photos/cat/1.txt").write_text("a cat")  # caption files take precedence over class names
    assert pack(tmp_path / "photos", tmp_path / "captions").bad["no caption"] == 2
    (tmp_path / "photos/cat/1.txt").unlink()
    (tmp_path / "photos/cat").rename(tmp_path / "photos/train")
    with pytest.raises(DataError, match=r"no caption.*; expected a .txt file"):
        pack(tmp_path / "photos", tmp_path / "splits")
    (tmp_path / "photos/train").rename(tmp_path / "photos/bird")
    (tmp_path / "photos/bird/1.txt").write_text("a bird")
    found = pack(tmp_path / "photos", tmp_path / "captioned")
    assert found.bad["no caption"] == 2
    (tmp_path / "photos/bird/1.png").rename(tmp_path / "photos/cover.png")
    found = pack(tmp_path / "photos", tmp_path / "mixed")
    assert found.bad == {"outside the class folders": 1, "link to a folder that contains it": 1}
    assert found.classes == ["a dog", "bird"]


def test_lists_of_captions_are_stored(images: Path) -> None:
    rows: list[tuple[object, ...]] = [
        (["one", " two ", "", None],),
        (["only"],),
        ("with a\nline break",),
        ([],),
        (list(map(str, range(101))),),
        (["x", {}],),
        (["x", "y" * (LONGEST_CAPTION + 1)],),
    ]
    (images / "t.jsonl").write_text(
        "".join(json.dumps({"path": "a.jpg", "caption": caption}) + "\n" for (caption,) in rows)
    )
    report = pack(images / "t.jsonl", images / "out", PackOptions(group=False), progress=False)
    assert report.marks["several captions"] == 1
    found = samples(images / "out")
    assert [one["txt"].decode() for one in found.values()] == ["one", "only", "with a\nline break"]
    listed = [json.loads(one["json"])["captions"] if "json" in one else None for one in found.values()]
    assert listed == [["one", "two"], None, ["with a\nline break"]]
    assert [(row, cause) for row, _, cause in bad_rows(images / "out")] == [
        (4, "no caption"),
        (5, "more than 100 captions"),
        (6, "caption is neither a string nor a list of strings"),
        (7, "caption of more than 10,000 characters"),
    ]


def make_meta(folder: Path) -> list[dict[str, Any]]:
    """Return the json of each sample."""
    return [json.loads(sample["json"]) for sample in samples(folder).values()]


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_other_columns_become_fields(images: Path, tmp_path: Path, suffix: str) -> None:
    header = ["width", "path", "language", "caption", "alt text"]
    rows = [
        ("128", "images/a.jpg", "en", "one", "first"),
        ("256", "images/b.png", "de", "two", "second"),
        ("1024", "images/c.webp", "en", "three", "third"),
    ]
    table = write_table(tmp_path / f"table{suffix}", header, rows)
    report = pack(table, tmp_path / "out", progress=False)
    names = {"width": "width", "language": "language", "alt text": "alt_text"}
    assert (report.packed, report.fields, report.left_out) == (3, names, {})
    assert json.loads((tmp_path / "out/card.json").read_text())["fields"] == names
    assert make_meta(tmp_path / "out") == [
        {"width": width, "language": language, "alt_text": alt} for width, _, language, _, alt in rows
    ]
    # filters and captions of a training can use the fields
    selection = Selection(
        filters=(Filter.of("width >= 256"), Filter.of("language = en")),
        captions=CaptionRule(fields=("alt_text",)),
    )
    data = Shards(make_manifest([find_shards(str(tmp_path / "out"))], selection), selection)
    assert len(data) == 1 and data.read(0).key == "000000003"
    assert selection.captions.caption(data.read(0).fields, 0, None) == "third"
    some = pack(table, tmp_path / "some", PackOptions(fields=("language",)), progress=False)
    assert some.fields == {"language": "language"} and make_meta(tmp_path / "some")[1] == {"language": "de"}
    assert pack(table, tmp_path / "none", PackOptions(fields=()), progress=False).fields == {}
    assert not any("json" in sample for sample in samples(tmp_path / "none").values())
    with pytest.raises(DataError, match=r"has no column 'widht' .*'width'"):
        pack(table, tmp_path / "wrong", PackOptions(fields=("widht",)), progress=False)


def test_json_values_keep_their_types(images: Path, tmp_path: Path) -> None:
    others: list[dict[str, Any]] = [
        {"n": 7, "x": 0.5, "yes": True, "none": None, "deep": {"er": [1, {"a": "é"}]}, "text": "007"},
        {
            "n": math.nan,
            "x": [math.inf, 1],
            "half": "a \ud83d",
            "": "no name",
            "captions": "own",
            "captions_": 1,
        },
        {"a.b": 1, "a_b": 2, "a b": 3, "\ud800": 4},
    ]
    lines = [json.dumps({"path": "images/a.jpg", "caption": ["one", "two"], **other}) for other in others]
    (tmp_path / "t.jsonl").write_text("\n".join(lines) + "\n")
    report = pack(tmp_path / "t.jsonl", tmp_path / "out", PackOptions(group=False), progress=False)
    both = {"captions": ["one", "two"]}  # captions of the sample, from where evaluation reads them
    assert make_meta(tmp_path / "out") == [
        others[0] | both,
        {"n": None, "x": [None, 1], "half": "a ?", "captions__": "own", "captions_": 1} | both,
        {"a_b_": 1, "a_b": 2, "a_b__": 3, "_": 4} | both,
    ]
    assert report.fields["captions"] == "captions__" and report.fields["a b"] == "a_b__"
    assert report.fields["?"] == "_"


def test_column_has_the_same_field_name_in_every_row(images: Path, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"image width": 1},
        {"image width": 2, "image_width": 3},
        {"image_width": 4},
    ]
    rows += [{}] * 200  # more lines than the table reads to find its columns
    rows += [{"late one": 5}, {"late_one": 6}, {"late one": 7, "image width": 8}]
    lines = [json.dumps({"path": "images/a.jpg", "caption": "x", **row}) for row in rows]
    (tmp_path / "t.jsonl").write_text("\n".join(lines) + "\n")
    report = pack(tmp_path / "t.jsonl", tmp_path / "out", PackOptions(group=False), progress=False)
    names = {
        "image width": "image_width_",
        "image_width": "image_width",
        "late one": "late_one",
        "late_one": "late_one_",
    }
    assert report.fields == names
    found = [json.loads(sample.get("json", b"{}")) for sample in samples(tmp_path / "out").values()]
    assert found == [{names[column]: value for column, value in row.items()} for row in rows]


def test_row_that_exceeds_the_number_of_columns_is_bad(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data.pack._MOST_FIELDS", 2)
    rows = [{"a": 1}, {"b": 1}, {"c": 1}, {"a": 2}]
    lines = [json.dumps({"path": "images/a.jpg", "caption": "x", **row}) for row in rows]
    (tmp_path / "t.jsonl").write_text("\n".join(lines) + "\n")
    report = pack(tmp_path / "t.jsonl", tmp_path / "out", PackOptions(group=False), progress=False)
    assert report.packed == 3
    assert bad_rows(tmp_path / "out") == [
        (3, "images/a.jpg", "more than 2 different columns in the table (select some with --fields)")
    ]


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet"])
def test_columns_of_the_same_name_are_reported(
    images: Path, tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    header = ["path", "s", "caption", "s", "caption", "n"]
    row = ["images/a.jpg", "first", "one", "second", "two", "3"]
    table = tmp_path / f"t{suffix}"
    if suffix == ".parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.table([pyarrow.array([cell]) for cell in row], names=header), table)
    else:
        write_table(table, header, [row])
    report = pack(table, tmp_path / "out", progress=False)
    assert make_meta(tmp_path / "out") == [{"s": "first", "n": "3"}]
    assert samples(tmp_path / "out")["000000001"]["txt"] == b"one"
    why = "2 columns have this name: only the first is used"
    assert report.left_out == {"caption": why, "s": why}
    assert main(["pack", str(table), str(tmp_path / "again"), "--quiet", "--fields", "n"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert f"columns left out: 'caption' ({why})" in output and "'s'" not in output


def test_parquet_maps_become_json_objects(images: Path, tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    of_text = pyarrow.map_(pyarrow.string(), pyarrow.int64())
    columns: dict[str, tuple[Any, list[Any], list[Any]]] = {  # type, values, values in the json
        "map": (of_text, [[("a", 1), ("b", None)], None, []], [{"a": 1, "b": None}, None, {}]),
        "list": (pyarrow.list_(of_text), [[[("a", 1)]], None, [None]], [[{"a": 1}], None, [None]]),
        "deep": (
            pyarrow.struct([("m", pyarrow.map_(pyarrow.large_string(), of_text))]),
            [{"m": [("a", [("b", 1)])]}, None, {"m": None}],
            [{"m": {"a": {"b": 1}}}, None, {"m": None}],
        ),
        "numbers": (
            pyarrow.map_(pyarrow.int64(), of_text),
            [[(1, [("a", 2)])], None, []],
            [[[1, {"a": 2}]], None, []],
        ),
    }
    arrays = {name: pyarrow.array(values, kind) for name, (kind, values, _) in columns.items()}
    first = {"path": ["images/a.jpg"] * 3, "caption": ["x"] * 3}
    parquet.write_table(pyarrow.table({**first, **arrays}), tmp_path / "t.parquet")
    pack(tmp_path / "t.parquet", tmp_path / "out", PackOptions(group=False), progress=False)
    assert make_meta(tmp_path / "out") == [
        {name: wanted[row] for name, (*_, wanted) in columns.items()} for row in range(3)
    ]


@pytest.mark.parametrize("column", ["caption ", " caption", "caption"])
def test_other_column_named_caption_becomes_a_field(images: Path, tmp_path: Path, column: str) -> None:
    line = {"path": "images/a.jpg", "title": "one", column: "two"}
    (tmp_path / "t.jsonl").write_text(json.dumps(line) + "\n")
    report = pack(tmp_path / "t.jsonl", tmp_path / "out", PackOptions(caption_column="title"), progress=False)
    assert report.fields == {column: "caption_"}
    assert make_meta(tmp_path / "out") == [{"caption_": "two"}]


def test_parquet_types_are_converted_to_json(images: Path, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    nanoseconds = 1_577_934_245_123_456_789
    moment = datetime(2020, 1, 2, 3, 4, 5, tzinfo=UTC)
    typed: dict[str, tuple[Any, Any, Any]] = {  # type, value, value in the json
        "int": (pyarrow.int64(), 2**60, 2**60),
        "float": (pyarrow.float32(), 0.5, 0.5),
        "nan": (pyarrow.float64(), math.nan, None),
        "null": (pyarrow.string(), None, None),
        "bool": (pyarrow.bool_(), True, True),
        "date": (pyarrow.date32(), date(2020, 1, 2), "2020-01-02"),
        "moment": (pyarrow.timestamp("ms", "UTC"), moment, "2020-01-02T03:04:05+00:00"),
        "exact": (pyarrow.timestamp("ns"), nanoseconds, "2020-01-02T03:04:05.123456"),
        "late": (pyarrow.timestamp("s"), 10**12, None),  # the year 33658
        "times": (pyarrow.list_(pyarrow.timestamp("ns")), [nanoseconds], ["2020-01-02T03:04:05.123456"]),
        "lasting": (pyarrow.duration("ms"), timedelta(seconds=1.5), 1.5),
        "money": (pyarrow.decimal128(9, 2), Decimal("12.50"), 12.5),
        "kind": (pyarrow.dictionary(pyarrow.int32(), pyarrow.string()), "en", "en"),
        "boxes": (pyarrow.list_(pyarrow.list_(pyarrow.int32())), [[1, 2], [3]], [[1, 2], [3]]),
        "deep": (pyarrow.struct([("binary", pyarrow.bool_())]), {"binary": True}, {"binary": True}),
    }
    bytes_ = {
        "image": pyarrow.array([{"bytes": b"x" * 100, "path": "a"}]),
        "thumb": pyarrow.array([b"x"], pyarrow.large_binary()),
    }
    columns = {name: pyarrow.array([value], kind) for name, (kind, value, _) in typed.items()}
    first = {"path": ["images/a.jpg"], "caption": ["one"]}
    parquet.write_table(pyarrow.table({**bytes_, **first, **columns}), tmp_path / "t.parquet")
    report = pack(
        tmp_path / "t.parquet",
        tmp_path / "out",
        PackOptions(image_column="path", caption_column="caption"),
        progress=False,
    )
    assert make_meta(tmp_path / "out") == [{name: wanted for name, (_, _, wanted) in typed.items()}]
    assert report.fields == {name: name for name in typed}
    assert report.left_out == {
        "image": "it contains struct<bytes: binary, path: string>",
        "thumb": "it contains large_binary",
    }
    assert pack(
        tmp_path / "t.parquet",
        tmp_path / "few",
        PackOptions(image_column="path", fields=("thumb", "int")),
        progress=False,
    ).fields == {"int": "int"}


def test_csv_cells_are_stored_as_text(images: Path, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(
        ",path,caption,code,score,captions\n0,images/a.jpg,one,007,,many\n1,images/b.png,two,1e3,0.5,\n"
        "2,images/c.webp,three\n"
    )
    report = pack(tmp_path / "t.csv", tmp_path / "out", progress=False)
    assert report.left_out == {"": "it has no name"} and report.packed == 3
    assert make_meta(tmp_path / "out") == [
        {"code": "007", "score": None, "captions_": "many"},
        {"code": "1e3", "score": "0.5", "captions_": None},
        {"code": None, "score": None, "captions_": None},
    ]


def test_rows_with_large_columns_are_bad(images: Path, tmp_path: Path) -> None:
    deep = '{"path": "images/a.jpg", "caption": "x", "deep": ' + "[" * 900 + "]" * 900 + "}\n"
    good = json.dumps({"path": "images/a.jpg", "caption": "x", "large": "x" * 1000}) + "\n"
    (tmp_path / "t.jsonl").write_text(good + deep)
    report = pack(tmp_path / "t.jsonl", tmp_path / "deep", PackOptions(group=False), progress=False)
    assert report.packed + sum(report.bad.values()) == 2
    assert make_meta(tmp_path / "deep")[0] == {"large": "x" * 1000}
    names = [f"f{number}" for number in range(9)]
    rows = [("images/a.jpg", "x", *["é" * length] * 9) for length in (1000, 60_000)]
    table = write_table(tmp_path / "t.csv", ["path", "caption", *names], rows)
    report = pack(table, tmp_path / "out", PackOptions(group=False), progress=False)
    assert (report.packed, report.bad) == (
        1,
        {"other columns of more than 1 MiB (select some with --fields)": 1},
    )
    assert (
        pack(
            table, tmp_path / "some", PackOptions(fields=tuple(names[:8]), group=False), progress=False
        ).packed
        == 2
    )


def test_command_prints_stored_and_omitted_columns(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.csv").write_text(",path,caption,width,alt text\n0,images/a.jpg,one,7,x\n")
    assert main(["pack", str(tmp_path / "t.csv"), str(tmp_path / "out"), "--quiet"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "stored as fields for data.filters and data.captions: alt text as alt_text, width" in said
    assert "columns left out: '' (it has no name)" in said
    assert main(["pack", str(tmp_path / "t.csv"), str(tmp_path / "b"), "--fields", "width", "--quiet"]) == 0
    assert "data.captions: width packed" in " ".join(capsys.readouterr().out.split())


def test_rotated_and_transparent_images_are_counted(images: Path) -> None:
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.new("RGB", (4, 2), "red").save(images / "turned.jpg", exif=turned)
    Image.new("RGBA", (4, 2), (255, 0, 0, 9)).save(images / "clear.png")
    rows = [(name, "x") for name in ("a.jpg", "turned.jpg", "clear.png", "clear.png")]
    table = write_table(images / "t.csv", ["path", "caption"], rows)
    report = pack(table, images / "out", PackOptions(group=False), progress=False)
    assert (report.marks["not upright"], report.marks["transparent"]) == (1, 2)
    found = samples(images / "out")
    assert Image.open(io.BytesIO(found["000000002"]["jpg"])).size == (2, 4)
    assert found["000000003"]["png"] == (images / "clear.png").read_bytes()
    report = pack(
        table,
        images / "out2",
        PackOptions(keep_orientation=True, background="#fff", group=False),
        progress=False,
    )
    assert (report.marks["not upright"], report.marks["transparent"]) == (1, 2)
    found = samples(images / "out2")
    assert found["000000002"]["jpg"] == (images / "turned.jpg").read_bytes()
    assert Image.open(io.BytesIO(found["000000003"]["png"])).getpixel((0, 0)) == (255, 246, 246)
    card = json.loads((images / "out2/card.json").read_text())
    assert (card["keep_orientation"], card["background"]) == (True, "#fff")
    with pytest.raises(ConfigError, match="'wite' is not a color: use a color such as white or #ffffff"):
        pack(table, images / "out3", PackOptions(background="wite"))


def test_ctrl_c_leaves_no_files(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = write_table(images / "t.csv", ["path", "caption"], [("a.jpg", "x")] * 50)
    rows = Table.__iter__

    def interrupted(self: Table):  # type: ignore[no-untyped-def]
        for row in rows(self):
            if row.number == 40:
                raise KeyboardInterrupt
            yield row

    monkeypatch.setattr(Table, "__iter__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pack(table, images / "out", progress=False)
    assert not list(images.glob("*out*"))
    assert not list(images.glob(".out*"))
    assert not [thread for thread in threading.enumerate() if "Pool" in thread.name]


def test_absolute_paths_are_packed_in_order_of_rows(images: Path, tmp_path: Path) -> None:
    names = [random.Random(0).choice(["a.jpg", "b.png", "c.webp"]) for _ in range(100)]
    table = write_table(
        tmp_path / "t.csv", ["path", "caption"], [(str(images / name), name) for name in names]
    )
    pack(table, tmp_path / "out", PackOptions(samples_per_shard=30, group=False), progress=False)
    assert [sample["txt"].decode() for sample in samples(tmp_path / "out").values()] == names


@pytest.mark.parametrize("suffix", [".TXT", ".caption", ".json", ".tags"])
def test_captions_beside_images_are_not_replaced_by_names_of_folders(tmp_path: Path, suffix: str) -> None:
    for name in ("00000/1", "00001/2"):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".png").write_bytes(encoded("PNG"))
        caption = f"caption of {path.name}"
        path.with_suffix(suffix).write_text(
            json.dumps({"caption": caption}) if suffix == ".json" else caption
        )
    (tmp_path / "photos/00000/1.png.json").write_text('{"title": "1.png"}')
    (tmp_path / "photos/00001/3.png").write_bytes(encoded("PNG"))
    report = pack(tmp_path / "photos", tmp_path / "out", progress=False)
    assert report.caption_column == f"{suffix.lower()} files"
    captions = [sample["txt"].decode() for sample in samples(tmp_path / "out").values()]
    assert captions == ["caption of 1", "caption of 2"]
    assert report.bad == {"no caption": 1}
    assert not (tmp_path / "out/classes.txt").exists()


def test_names_of_numbered_classes_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("0/1.png", "2/1.png", "10/1.png"):
        (tmp_path / "photos" / name).parent.mkdir(parents=True)
        (tmp_path / "photos" / name).write_bytes(encoded("PNG"))
    assert main(["pack", "--quiet", str(tmp_path / "photos"), str(tmp_path / "ids")]) == 0
    assert "look like ids, such as '0': write" in " ".join(capsys.readouterr().out.split())
    (tmp_path / "photos/classnames.txt").write_text("cat\nbird\ndog\n")
    (tmp_path / "photos/0/1.txt").write_text("0 0.5 0.5 1 1")
    report = pack(tmp_path / "photos", tmp_path / "out", progress=False)
    assert report.caption_column == "classnames.txt"
    captions = [sample["txt"].decode() for sample in samples(tmp_path / "out").values()]
    assert captions == ["cat", "dog", "bird"]
    assert (tmp_path / "out/classes.txt").read_text() == "bird\ncat\ndog\n"


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_images_that_metadata_does_not_list_are_reported(tmp_path: Path, suffix: str) -> None:
    for name in ("1.png", "a/2.png", "a/3.png", "4.png", "5", "b.txt", "6.png"):
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "photos" / name).write_bytes(b"text" if name == "b.txt" else encoded("PNG"))
    (tmp_path / "photos/7.jxl").touch()
    rows = {
        "1.png": "one",
        ".\\a//2.png": "two",
        "a/../4.png": "",
        "missing.png": "x",
        f"file://{tmp_path}/photos/6%2Epng": "y",
    }
    table = tmp_path / f"photos/metadata{suffix}"
    if suffix == ".csv":
        write_table(table, ["file_name", "text"], list(rows.items()))
    else:
        table.write_text(
            "".join(json.dumps({"file_name": name, "text": text}) + "\n" for name, text in rows.items())
        )
    report = pack(tmp_path / "photos", tmp_path / "out", progress=False)
    assert report.packed == 3
    jxl = "JXL images cannot be read: convert them to JPEG or PNG"
    unlisted = f"not listed in metadata{suffix}"
    assert report.bad == {unlisted: 2, "empty caption": 1, "missing file": 1, jxl: 1}
    lines = [json.loads(line) for line in (tmp_path / "out/bad_rows.jsonl").read_text().splitlines()]
    assert [(line["row"], line["path"], line["cause"]) for line in lines[2:]] == [
        (None, "5", unlisted),
        (None, "7.jxl", jxl),
        (None, "a/3.png", unlisted),
    ]


def test_files_of_other_programs_are_not_captions(tmp_path: Path) -> None:
    for name in ("cat/1.png", "dog/2.png"):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded("PNG"))
        path.with_suffix(".png.json").write_text(
            '{"title": "1.png", "description": "", "photoTakenTime": {}}'
        )
        path.with_suffix(".xmp").write_text("<x:xmpmeta/>")
        path.with_suffix(".AAE").write_text("<plist/>")
    report = pack(tmp_path / "photos", tmp_path / "out", progress=False)
    assert (report.packed, report.caption_column) == (2, "names of folders")


def test_images_with_unusual_extensions_are_packed(tmp_path: Path) -> None:
    for name in ("cat/1.png", "cat/2.jfif", "dog/photo", "dog/3.jpg_large"):
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "photos" / name).write_bytes(encoded("PNG"))
    for name in ("4.jxl", "5.jpg"):
        (tmp_path / "photos/dog" / name).write_bytes(b"\0\0\0\x0cJXL \r\n\x87\n")
    found = pack(tmp_path / "photos", tmp_path / "out", progress=False)
    assert found.splits == {"train": 4}
    assert found.bad == {"JXL images cannot be read: convert them to JPEG or PNG": 2}


def test_folder_is_packed_again_after_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLIPKIT_CACHE", str(tmp_path / "cache"))
    for name in ("cat/1.png", "dog/2.png"):
        (tmp_path / "photos" / name).parent.mkdir(parents=True)
        (tmp_path / "photos" / name).write_bytes(encoded("PNG"))
    (tmp_path / "photos/cat/1.png").chmod(0o644)
    first = pack_into_cache([tmp_path / "photos"])
    assert pack_into_cache([tmp_path / "photos"]) == first
    (tmp_path / "photos/cat/1.png").chmod(0o600)  # unreadable files become readable in this way
    second = pack_into_cache([tmp_path / "photos"])
    (tmp_path / "photos/dog/2.txt").write_text("a dog")
    assert len({first, second, pack_into_cache([tmp_path / "photos"])}) == 3


HOLD = """
import sys
from pathlib import Path
from data.shards.writer import DatasetWriter
with DatasetWriter(Path(sys.argv[1])):
    print("writing", flush=True)
    sys.stdin.read()
"""


def test_second_command_is_refused_while_the_first_packs(images: Path, tmp_path: Path) -> None:
    table = write_table(images / "pairs.csv", ["path", "caption"], [["a.jpg", "a"], ["b.png", "b"]])
    command = [sys.executable, "-c", HOLD, str(tmp_path / "out")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None and first.stdout.readline() == "writing\n"
        expected = (
            rf"another process \(process {first.pid} on \S+\) is writing to {tmp_path}/out: wait for it"
        )
        with pytest.raises(ConfigError, match=expected):
            pack(table, tmp_path / "out", progress=False)
        first.kill()
        first.wait()
    assert pack(table, tmp_path / "out", progress=False).splits["train"] > 0
    assert not (tmp_path / ".out.writing").exists()


def write_parts(folder: Path) -> list[list[str]]:
    """Write images in two subfolders; return rows of a table that lists them with captions."""
    rows = [["x/1.png", "a red car"], ["y/2.png", "a blue car"]]
    for name, _ in rows:
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_bytes(encoded("PNG"))
    return rows


@pytest.mark.parametrize("name", ["captions.csv", "B.TSV", "c.jsonl", "d.parquet"])
def test_packing_and_training_read_the_same_table_of_a_folder(tmp_path: Path, name: str) -> None:
    rows = write_parts(tmp_path / "f")
    (tmp_path / "f/y/3.png").write_bytes(encoded("PNG"))
    table = write_table(tmp_path / "f" / name.lower(), ["path", "text"], rows)
    table.rename(tmp_path / "f" / name)
    report = pack(tmp_path / "f", tmp_path / "out", progress=False)
    captions = [row[1] for row in rows]
    assert [sample["txt"].decode() for sample in samples(tmp_path / "out").values()] == captions
    assert report.bad == {f"not listed in {name}": 1}
    trained = Path(find_shards(str(tmp_path / "f"))[0].url).parents[1]
    assert [sample["txt"].decode() for sample in samples(trained).values()] == captions


def test_named_columns_of_a_table_precede_files_of_captions(tmp_path: Path) -> None:
    write_table(tmp_path / "f.csv", ["photo", "words"], write_parts(tmp_path / "f"))
    (tmp_path / "f.csv").rename(tmp_path / "f/a.csv")
    (tmp_path / "f/x/1.txt").write_text("other")
    assert pack(tmp_path / "f", tmp_path / "out", progress=False).bad == {"no caption": 1}  # no such column
    pack(tmp_path / "f", tmp_path / "named", PackOptions(caption_column="words"), progress=False)
    captions = [sample["txt"].decode() for sample in samples(tmp_path / "named").values()]
    assert captions == ["a red car", "a blue car"]


@pytest.mark.parametrize(
    "names",
    [
        ["a.csv", "b.csv"],
        ["x/metadata.csv", "y/metadata.jsonl"],
        ["y/LIST.CSV"],
        ["captions.txt"],
        ["a.JSON"],
    ],
)
def test_names_of_folders_do_not_replace_captions_of_tables(tmp_path: Path, names: list[str]) -> None:
    rows = write_parts(tmp_path / "f")
    for name in names:
        table = tmp_path / "f" / name
        if name == "a.JSON":
            table.write_text(json.dumps([{"image": path, "caption": text} for path, text in rows]))
        else:
            listed = [[os.path.relpath(tmp_path / "f" / path, table.parent), text] for path, text in rows]
            write_table(table, ["image", "caption"], listed)
    with pytest.raises(DataError, match=r"contains several tables|is a table of images") as error:
        pack(tmp_path / "f", tmp_path / "out", progress=False)
    assert any(name in str(error.value) for name in names) and "\n" not in str(error.value)
    if names != ["a.csv", "b.csv"]:
        (tmp_path / "f/classnames.txt").write_text("x\ny\n")
        pack(tmp_path / "f", tmp_path / "out", progress=False)
        captions = [sample["txt"].decode() for sample in samples(tmp_path / "out").values()]
        assert captions == ["x", "y"]


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("sources.csv", "file,comment\nLICENSE,CC BY\n"),
        ("README.csv", "file,description\nREADME,text\nhttp://host/1.png,text\n"),
        (".captions.csv", "path,caption\nx/1.png,a red car\n"),
        ("labels.csv", "path,label\nx/1.png,x\n"),
        ("x/labels.csv", "path,Label\n1.png,x\n"),
        ("y/sources.csv", "file,comment\n9.png,missing\n"),
        ("y/long.csv", f"file,comment\n{'a' * 5000}.png,long name\n"),
        ("late.csv", "file,comment\n" + "9.png,missing\n" * 1000 + "x/1.png,too late\n"),
    ],
)
def test_other_tables_in_class_folders_are_ignored(tmp_path: Path, name: str, lines: str) -> None:
    write_parts(tmp_path / "f")
    for text in ("LICENSE", "README"):
        (tmp_path / "f" / text).write_text("text")
    (tmp_path / "f" / name).write_text(lines)
    pack(tmp_path / "f", tmp_path / "out", progress=False)
    assert [sample["txt"].decode() for sample in samples(tmp_path / "out").values()] == ["x", "y"]


@pytest.mark.parametrize("names", [["quality.csv"], ["quality.csv", "more.csv"]])
def test_files_of_captions_precede_tables_in_packing_and_training(tmp_path: Path, names: list[str]) -> None:
    folder = tmp_path / "b"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.jpg").write_bytes(encoded("JPEG"))
        (folder / f"{number}.txt").write_text(f"caption {number}")
    for name in names:
        write_table(folder / name, ["file", "comment"], [["0.jpg", "blurry"]])
    report = pack(folder, tmp_path / "out", progress=False)
    assert (report.packed, report.bad) == (3, {})
    trained = Path(find_shards(str(folder))[0].url).parents[1]
    for out in (tmp_path / "out", trained):
        captions = [sample["txt"].decode() for sample in samples(out).values()]
        assert captions == ["caption 0", "caption 1", "caption 2"]


def test_only_tables_that_list_images_conflict(tmp_path: Path) -> None:
    rows = write_parts(tmp_path / "f")
    write_table(tmp_path / "f/captions.csv", ["path", "caption"], rows)
    (tmp_path / "f/sources.csv").write_text("file,comment\nLICENSE,CC BY\n")
    pack(tmp_path / "f", tmp_path / "out", progress=False)
    captions = [sample["txt"].decode() for sample in samples(tmp_path / "out").values()]
    assert captions == ["a red car", "a blue car"]


def test_several_tables_named_metadata_are_an_error(tmp_path: Path) -> None:
    rows = write_parts(tmp_path / "f")
    for name in ("metadata.csv", "metadata.jsonl"):
        write_table(tmp_path / "f" / name, ["file_name", "text"], rows)
    message = r"f contains metadata\.csv and metadata\.jsonl: remove one of them"
    with pytest.raises(DataError, match=message):
        pack(tmp_path / "f", tmp_path / "out", progress=False)
    with pytest.raises(DataError, match=message):
        find_shards(str(tmp_path / "f"))


def test_message_counts_packed_tables(
    images: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CLIPKIT_CACHE", str(images.parent / "cache"))
    for name, file in (("t1.csv", "a.jpg"), ("t2.csv", "b.png")):
        write_table(images / name, ["path", "text"], [[file, f"caption of {file}"]])
    find_shards(f"{images}/t*.csv")
    assert f"packed 2 pairs of 2 tables such as {images}/t1.csv into" in capsys.readouterr().err


def test_a_column_or_folders_named_split_decide_the_split(tmp_path: Path) -> None:
    rows = []
    (images := tmp_path / "images").mkdir()
    for i, split in enumerate(["train", "test", "dev", "training", "restval"]):
        Image.new("RGB", (9, 9), (i, 0, 0)).save(images / f"{i}.png")
        rows.append({"filepath": f"images/{i}.png", "caption": f"caption {i}", "split": split})
    table = tmp_path / "t.csv"
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    expected = {"train": 3, "test": 1, "val": 1}
    assert dict(pack(table, tmp_path / "all", progress=False).splits) == expected
    some = PackOptions(fields=())
    assert dict(pack(table, tmp_path / "few", some, progress=False).splits) == expected
    for split in ("train", "Test"):
        for i in range(2):
            (tmp_path / "folder" / split).mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (9, 9), (0, i, len(split))).save(tmp_path / "folder" / split / f"{i}.png")
            (tmp_path / "folder" / split / f"{i}.txt").write_text(f"{split} {i}")
    report = pack(tmp_path / "folder", tmp_path / "out", progress=False)
    assert dict(report.splits) == {"train": 2, "test": 2}
