"""Packing tables of all kinds, with good rows and every kind of bad one."""

import csv
import io
import json
import os
import random
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from webdataset.tariterators import group_by_keys, tar_file_expander

from clipkit.errors import ConfigError, DataError
from clipkit.table import Table
from data.pack import LONGEST_CAPTION, _picture, pack


def encoded(kind: str, side: tuple[int, int] = (40, 30), mode: str = "RGB") -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (side[1], side[0], 3), dtype=np.uint8)
    picture = Image.fromarray(noise).convert(mode)
    buffer = io.BytesIO()
    picture.save(buffer, kind)
    return buffer.getvalue()


def write_table(path: Path, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Path:
    """A table of the kind that the suffix names."""
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


def samples(folder: Path) -> dict[str, dict[str, bytes]]:
    """Split train as webdataset reads it, by key."""
    found = {}
    for shard in sorted((folder / "train").glob("*.tar"), key=lambda path: int(path.stem)):
        with shard.open("rb") as stream:  # ours to close: webdataset leaves its own open
            for sample in group_by_keys(tar_file_expander([{"url": shard.name, "stream": stream}])):
                found[sample["__key__"]] = sample
    return found


def bad_rows(folder: Path) -> list[tuple[int, str | None, str]]:
    lines = (folder / "bad_rows.jsonl").read_text().splitlines()
    return [(line["row"], line["path"], line["cause"]) for line in map(json.loads, lines)]


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A folder that holds one picture of each kind, and a table beside it may name them."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name, kind in (("a.jpg", "JPEG"), ("b.png", "PNG"), ("c.webp", "WEBP"), ("d.gif", "GIF")):
        (folder / name).write_bytes(encoded(kind))
    return folder


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_every_kind_of_table(pictures: Path, tmp_path: Path, suffix: str) -> None:
    captions = ["a cat,\nand a dog", 'the "best" one', "naïve café 🐈"]
    rows = [
        (f"pictures/{name}", text) for name, text in zip(("a.jpg", "b.png", "c.webp"), captions, strict=True)
    ]
    table = write_table(tmp_path / f"table{suffix}", ["filepath", "caption"], rows)
    report = pack(table, tmp_path / "out", samples_per_shard=2, progress=False)
    assert (report.packed, report.bad, report.bad_rows) == (3, {}, None)
    found = samples(tmp_path / "out")
    assert list(found) == ["000000001", "000000002", "000000003"]
    assert [sample["txt"].decode() for sample in found.values()] == captions
    for sample, (name, extension) in zip(
        found.values(), [("a.jpg", "jpg"), ("b.png", "png"), ("c.webp", "webp")], strict=True
    ):
        assert sample[extension] == (pictures / name).read_bytes()
    assert (tmp_path / "out/train/nshards.txt").read_text() == "2\n"
    card = json.loads((tmp_path / "out/card.json").read_text())
    assert card["samples"] == {"train": 3}
    assert card["columns"] == {"image": "filepath", "caption": "caption"}
    assert not (tmp_path / "out/bad_rows.jsonl").exists()


def test_bad_rows_are_counted_and_listed_and_never_fatal(pictures: Path, tmp_path: Path) -> None:
    jpeg, png = encoded("JPEG", (200, 200)), encoded("PNG", (200, 200))
    (pictures / "half.jpg").write_bytes(jpeg[: len(jpeg) // 2])
    (pictures / "half.png").write_bytes(png[: len(png) // 2])
    (pictures / "text.jpg").write_text("not a picture")
    (pictures / "empty.jpg").write_bytes(b"")
    header = b"P6 20000 20000 255 "
    (pictures / "bomb.ppm").write_bytes(header + b"0")
    with (pictures / "large.jpg").open("wb") as file:
        file.truncate(65 * 2**20)
    os.mkfifo(pictures / "pipe.jpg")
    rows = [
        ("a.jpg", "good", ""),
        ("missing.jpg", "x", "missing file"),
        ("a.jpg/deeper.jpg", "x", "missing file"),
        ("half.jpg", "x", "broken or truncated picture"),
        ("half.png", "x", "broken or truncated picture"),
        ("text.jpg", "x", "not a picture of a known format"),
        ("empty.jpg", "x", "empty file"),
        ("bomb.ppm", "x", "picture of more than 100,000,000 pixels"),
        ("large.jpg", "x", "file of more than 64 MiB"),
        ("pipe.jpg", "x", "not a file"),
        (".", "x", "not a file"),
        ("nul\0.jpg", "x", "file cannot be read"),
        ("https://example.org/a.jpg", "x", "a web address, not a file: download it first"),
        ("", "x", "no path"),
        ("b.png", " ", "empty caption"),
        ("b.png", "x" * (LONGEST_CAPTION + 1), "caption of more than 10,000 characters"),
        ("b.png", "also good", ""),
    ]
    table = write_table(pictures / "table.csv", ["path", "text"], [row[:2] for row in rows])
    report = pack(table, tmp_path / "out", progress=False)
    assert report.packed == 2
    expected = [(number, row[0], row[2]) for number, row in enumerate(rows, 1) if row[2]]
    assert bad_rows(tmp_path / "out") == expected
    assert report.bad["broken or truncated picture"] == 2
    assert sum(report.bad.values()) == len(expected)
    assert report.bad_rows == tmp_path / "out/bad_rows.jsonl"
    assert json.loads((tmp_path / "out/card.json").read_text())["bad_rows"] == report.bad
    assert list(samples(tmp_path / "out")) == ["000000001", "000000017"]


def test_bad_lines_of_json(pictures: Path) -> None:
    lines = [
        '{"image": "a.jpg", "caption": "good"}',
        "",
        '{"image": "a.jpg", "caption": "open',
        '["a.jpg", "x"]',
        '{"image": "a.jpg"}',
        '{"image": 7, "caption": "x"}',
        '{"image": "a.jpg", "caption": ["x"]}',
        '{"image": "a.jpg", "caption": "' + "x" * 2**20 + '"}',
        '{"image": "a.jpg", "caption": "\\ud800"}',
        '{"image": ' + "[" * 99_999,
        '{"image": "a.jpg", "caption": "good", "more": "x"}',
    ]
    (pictures / "table.jsonl").write_text("\ufeff" + "\n".join(lines))
    report = pack(pictures / "table.jsonl", pictures / "out", progress=False)
    assert report.packed == 2
    assert bad_rows(pictures / "out") == [
        (2, None, "not JSON"),
        (3, None, "not a JSON object"),
        (4, "a.jpg", "empty caption"),
        (5, None, "path is not text"),
        (6, "a.jpg", "caption is not text"),
        (7, None, "a line longer than 1,048,576 bytes"),
        (8, "a.jpg", "caption is not UTF-8"),
        (9, None, "not JSON"),
    ]


def test_bad_lines_of_csv(pictures: Path) -> None:
    table = b"path,caption\na.jpg,good\na.jpg\n\na.jpg,caf\xe9\na.jpg,fine,more\n"
    (pictures / "table.csv").write_bytes(table + b'a.jpg,"' + b"x" * 140_000 + b"\na.jpg,last\n")
    report = pack(pictures / "table.csv", pictures / "out", progress=False)
    assert report.packed == 3
    assert [(row, cause.partition(" (")[0]) for row, _, cause in bad_rows(pictures / "out")] == [
        (2, "too few columns"),
        (3, "caption is not UTF-8"),
        (5, "a field longer than 131,072 characters"),
    ]


def test_a_quote_that_swallows_rows_is_no_caption(pictures: Path) -> None:
    (pictures / "t.tsv").write_text('path\tcaption\na.jpg\t"it" they said\nb.png\t"open\na.jpg\tlost\n')
    report = pack(pictures / "t.tsv", pictures / "out", progress=False)
    assert (report.packed, report.bad) == (1, {"a quote that does not end": 1})


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
def test_columns_and_delimiters_are_told(pictures: Path, text: str, encoding: str) -> None:
    (pictures / "table.csv").write_text(text, encoding=encoding)
    report = pack(pictures / "table.csv", pictures / "out", progress=False)
    assert report.packed == 1
    assert samples(pictures / "out")["000000001"]["txt"].decode().startswith("one")


def test_named_columns_and_columns_that_cannot_be_told(pictures: Path) -> None:
    table = write_table(pictures / "t.csv", ["what", "wherefrom"], [("one", "a.jpg")])
    with pytest.raises(DataError, match=r"which column is the image\? .*columns are what, wherefrom"):
        pack(table, pictures / "out", progress=False)
    with pytest.raises(DataError, match=r"which column is the caption\? Say --caption-column"):
        pack(table, pictures / "out", image_column="wherefrom", progress=False)
    with pytest.raises(DataError, match=r"no column 'wherefrm' \(did you mean 'wherefrom'\?\)"):
        pack(table, pictures / "out", image_column="wherefrm", caption_column="what", progress=False)
    report = pack(table, pictures / "out", image_column="wherefrom", caption_column="what", progress=False)
    assert report.packed == 1


def test_tables_that_are_none(pictures: Path) -> None:
    (pictures / "table.xlsx").write_bytes(b"x")
    (pictures / "table.parquet").write_bytes(b"x" * 100)
    (pictures / "empty.csv").write_bytes(b"")
    (pictures / "empty.jsonl").write_bytes(b"\n\n")
    (pictures / "header.csv").write_text("path,caption\n")
    for name, message in [
        ("nowhere.csv", "is not a file"),
        ("table.xlsx", "not .xlsx"),
        ("table.parquet", "not a Parquet file"),
        ("empty.csv", "columns are none"),
        ("empty.jsonl", "no JSON object"),
        ("header.csv", "it has no rows"),
    ]:
        with pytest.raises(DataError, match=message):
            pack(pictures / name, pictures / "out", progress=False)
    assert not (pictures / "out").exists()
    assert not list(pictures.glob(".out*"))


def test_a_column_of_pictures_is_refused(pictures: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    struct = [{"bytes": b"x", "path": "a.jpg"}]
    parquet.write_table(pyarrow.table({"image": struct, "text": ["x"]}), pictures / "t.parquet")
    with pytest.raises(DataError, match="column 'image' holds struct"):
        pack(pictures / "t.parquet", pictures / "out", progress=False)


def test_no_usable_row_names_the_causes_and_leaves_nothing(pictures: Path) -> None:
    rows = [("a.png", "x"), ("b.jpg", "x"), ("a.jpg", "")]
    table = write_table(pictures / "t.csv", ["path", "caption"], rows)
    with pytest.raises(DataError, match=r"2 × missing file \(row 1: 'a.png'\); 1 × empty caption"):
        pack(table, pictures / "out", progress=False)
    assert not (pictures / "out").exists()
    assert not list(pictures.glob(".out*"))


def test_suffixes_do_not_matter_and_other_formats_become_png(pictures: Path) -> None:
    (pictures / "really.png").write_bytes(encoded("JPEG"))
    (pictures / "grey.tif").write_bytes(encoded("TIFF", mode="L"))
    (pictures / "cmyk.tif").write_bytes(encoded("TIFF", mode="CMYK"))
    Image.new("I;16", (8, 8)).save(pictures / "deep.tif")
    clear = Image.new("P", (8, 8))
    clear.putpalette([0, 0, 0, 255, 0, 0])
    clear.save(pictures / "clear.gif", transparency=0)
    names = ["really.png", "d.gif", "grey.tif", "cmyk.tif", "deep.tif", "clear.gif"]
    table = write_table(pictures / "t.csv", ["path", "caption"], [(name, name) for name in names])
    report = pack(table, pictures / "out", progress=False)
    assert report.bad == {"more than 8 bits a pixel: convert it first": 1}
    found = samples(pictures / "out")
    assert found["000000001"]["jpg"] == (pictures / "really.png").read_bytes()
    modes = {
        sample["txt"].decode(): Image.open(io.BytesIO(sample["png"])).mode
        for sample in found.values()
        if "png" in sample
    }
    assert modes == {"d.gif": "RGB", "grey.tif": "L", "cmyk.tif": "RGB", "clear.gif": "RGBA"}


def test_max_side_reduces_only_larger_pictures(pictures: Path) -> None:
    large = Image.effect_noise((300, 100), 50).convert("RGB")
    turned = Image.Exif()
    turned[0x0112] = 6  # stored on its side
    large.save(pictures / "large.jpg", exif=turned)
    large.save(pictures / "large.png")
    large.save(pictures / "large.webp")
    names = ["a.jpg", "large.jpg", "large.png", "large.webp"]
    table = write_table(pictures / "t.csv", ["path", "caption"], [(name, name) for name in names])
    pack(table, pictures / "out", max_side=60, progress=False)
    found = list(samples(pictures / "out").values())
    assert found[0]["jpg"] == (pictures / "a.jpg").read_bytes()
    sizes = [
        Image.open(io.BytesIO(sample[kind])).size
        for sample, kind in zip(found[1:], ("jpg", "png", "webp"), strict=True)
    ]
    assert sizes == [(20, 60), (60, 20), (60, 20)]


@pytest.mark.parametrize("setting", ["max_side", "samples_per_shard"])
def test_settings_are_checked(pictures: Path, setting: str) -> None:
    with pytest.raises(ConfigError, match=f"{setting} = 0"):
        pack(pictures / "t.csv", pictures / "out", **{setting: 0})  # type: ignore[arg-type]


def test_ctrl_c_leaves_nothing_half_made(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = write_table(pictures / "t.csv", ["path", "caption"], [("a.jpg", "x")] * 50)
    rows = Table._delimited

    def interrupted(self: Table):  # type: ignore[no-untyped-def]
        for row in rows(self):
            if row.number == 40:
                raise KeyboardInterrupt
            yield row

    monkeypatch.setattr(Table, "_delimited", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pack(table, pictures / "out", progress=False)
    assert not list(pictures.glob("*out*"))
    assert not list(pictures.glob(".out*"))
    assert not [thread for thread in threading.enumerate() if "Pool" in thread.name]


def test_absolute_paths_and_the_order_of_rows(pictures: Path, tmp_path: Path) -> None:
    names = [random.Random(0).choice(["a.jpg", "b.png", "c.webp"]) for _ in range(100)]
    table = write_table(
        tmp_path / "t.csv", ["path", "caption"], [(str(pictures / name), name) for name in names]
    )
    pack(table, tmp_path / "out", samples_per_shard=30, progress=False)
    assert [sample["txt"].decode() for sample in samples(tmp_path / "out").values()] == names


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.data())
def test_no_broken_picture_raises_anything_else(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"]))
    good = bytearray(encoded(kind, (16, 12)))
    for _ in range(data.draw(st.integers(1, 8))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    broken = bytes(good[: data.draw(st.integers(1, len(good)))])
    Image.init()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            stored, extension = _picture(broken, data.draw(st.sampled_from([None, 8])))
        except Exception as error:
            assert type(error).__name__ == "_BadRow"
        else:
            assert stored
            assert extension in ("jpg", "png", "webp")
