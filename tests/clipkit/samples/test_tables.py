"""Tests of tables as samples: random access to the rows of an image, and to encoded images."""

import io
import json
import pickle
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from PIL import Image

from clipkit.errors import DataError
from clipkit.samples import Table, TableSamples


def encoded(value: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (3, 2), (value, 0, 0)).save(buffer, "png")
    return buffer.getvalue()


def open_tables(*paths: Path, need: Sequence[str] = ("image", "caption"), **options: Any) -> TableSamples:
    tables = [
        Table(path, image_column=None, caption_column=None, encoded=True, need=need, others=None)
        for path in paths
    ]
    return TableSamples(tables, **options)


def write_lines(path: Path, rows: Sequence[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.sampled_from(["{}.png", "./{}.png", "x/../{}.png"]),
            st.text("uv ", max_size=3),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_samples_are_the_images_in_the_order_of_their_first_rows(
    tmp_path: Path, rows: list[tuple[str, str, str]]
) -> None:
    (tmp_path / "x").mkdir(exist_ok=True)
    for name in "abc":
        (tmp_path / f"{name}.png").write_bytes(encoded(ord(name)))
    lines = [
        {"image": spelling.format(name), "caption": text, "n": n}
        for n, (name, spelling, text) in enumerate(rows)
    ]
    samples = open_tables(write_lines(tmp_path / "t.jsonl", lines))
    expected: dict[object, list[tuple[int, str]]] = {}
    for number, (name, _, text) in enumerate(rows):
        expected.setdefault(name if text.strip() else number, []).append((number, text.strip()))
    assert len(samples) == len(expected)
    order = [*range(len(samples))]
    random.Random(0).shuffle(order)
    for i in order:
        name, group = [*expected.items()][i]
        assert [row.number for row in samples.rows(i)] == [number + 1 for number, _ in group]
        if isinstance(name, int):  # a row without a caption
            with pytest.raises(DataError, match=r"^empty caption$"):
                samples.read(i, "image")
            assert samples.cause(i) == "empty caption"
            continue
        numbers = [number for number, _ in group]
        assert samples.fields(i) == {
            "caption": [text for _, text in group],
            "n": numbers if len(numbers) > 1 else numbers[0],
        }
        assert samples.read(i, *samples.members(i)) == encoded(ord(name))
    assert samples.repeated == len(rows) - len(expected)


def test_causes_of_bad_rows(tmp_path: Path) -> None:
    (tmp_path / "empty.png").touch()
    lines: list[dict[str, object]] = [
        {"image": "gone.png", "caption": "x"},
        {"image": "", "caption": "x"},
        {"image": 7, "caption": "x"},
        {"image": "https://host/1.png", "caption": "x"},
        {"image": "empty.png", "caption": "x"},
        {"image": ".", "caption": "x"},
        {"image": "a.png", "caption": ["x", 1]},
    ]
    samples = open_tables(write_lines(tmp_path / "t.jsonl", lines))
    causes = []
    for i in range(len(samples)):
        with pytest.raises(DataError) as caught:
            samples.read(i, "image")
        causes.append(str(caught.value))
    assert causes == [
        "missing file",
        "no path",
        "path is not text",
        "a web address, not a file: download it first",
        "empty file",
        "not a file",
        "caption is neither a string nor a list of strings",
    ]
    assert [samples.key(i) for i in (0, 1, 3)] == [str(tmp_path / "gone.png"), "2", "https://host/1.png"]
    assert samples.locate(0) == (str(tmp_path / "t.jsonl"), str(tmp_path / "gone.png"))


def test_captions_need_no_image_and_images_need_no_caption(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded(1))
    table = tmp_path / "t.csv"
    table.write_text("image,caption\na.png,\na.png,two\n,three\n")
    images = open_tables(table, need=("image",))
    assert [images.cause(i) for i in range(len(images))] == ["", "no path"]
    assert images.fields(0) == {"caption": ["two"]} and images.read(0, "image") == encoded(1)
    table.write_text("caption\none\n\n two \n")
    texts = open_tables(table, need=("caption",), group=False)
    assert [texts.fields(i) for i in range(len(texts))] == [{"caption": ["one"]}, {"caption": ["two"]}]
    assert not texts.members(0) and texts.key(1) == "2"


@pytest.mark.parametrize("form", ["bytes", "struct", "paths"])
def test_encoded_images_are_read_by_row(tmp_path: Path, form: str) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    (tmp_path / "images").mkdir()
    contents = [encoded(i % 7) for i in range(30)]
    column: list[object] = list(contents)
    if form != "bytes":
        struct = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
        values = []
        for i, content in enumerate(contents):
            (tmp_path / f"images/{i % 7}.png").write_bytes(content)
            values.append({"bytes": content if form == "struct" else None, "path": f"{i % 7}.png"})
        column = arrow.array(values, struct)
    captions = [f"caption {i}" for i in range(30)]
    write_table(arrow.table({"image": column, "caption": captions}), tmp_path / "1.parquet", row_group_size=4)
    write_table(arrow.table({"image": column, "caption": captions}), tmp_path / "2.parquet", row_group_size=4)
    samples = open_tables(tmp_path / "1.parquet", tmp_path / "2.parquet")
    assert len(samples) == 7  # equal images of both tables
    rows = open_tables(tmp_path / "1.parquet", tmp_path / "2.parquet", group=False)
    again = pickle.loads(pickle.dumps(rows))
    assert len(rows) == len(again) == 60 and rows.content_id == again.content_id != samples.content_id
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda i: again.read(i, "image"), range(60))) == contents * 2
    assert again.fields(31) == {"caption": ["caption 1"]}


def test_images_are_found_in_a_folder_beside_the_table(tmp_path: Path) -> None:
    for folder, name in (("Images", "a.png"), ("other", "c.png")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(encoded(1))
    table = tmp_path / "captions.txt"
    table.write_text("image,caption\ngone.png,x\na.png,one\na.png,two\n")
    samples = open_tables(table)
    assert samples.key(1) == str(tmp_path / "Images/a.png")
    assert samples.fields(1) == {"caption": ["one", "two"]} and samples.read(1, "image") == encoded(1)
    with pytest.raises(DataError, match="missing file"):
        samples.read(0, "image")
    (tmp_path / "a.png").write_bytes(encoded(2))  # the folder of the table comes first
    assert open_tables(table).read(1, "image") == encoded(2)


def test_rows_before_damage_are_samples(tmp_path: Path) -> None:
    import gzip

    content = gzip.compress(b"image,caption\n" + b"".join(b"a.png,%d\n" % i for i in range(99_999)), 1)
    (tmp_path / "t.csv.gz").write_bytes(content[: len(content) // 2])
    samples = open_tables(tmp_path / "t.csv.gz", group=False)
    assert 1000 < len(samples) < 99_999
    assert samples.damage.endswith("t.csv.gz is damaged: it is cut off") or "damaged" in samples.damage
    assert samples.cause(len(samples) - 1) == samples.damage and samples.cause(0) == ""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("caption", "'caption' is the column of captions: name another column"),
        ("imag", r"no such column 'imag' \(did you mean 'image'\?\)"),
    ],
)
def test_columns_that_cannot_group_rows_are_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "t.csv").write_text("image,caption\na.png,a\n")
    table = Table(tmp_path / "t.csv", image_column=None, caption_column=None)
    with pytest.raises(DataError, match=message):
        TableSamples([table], group_by=name)


@pytest.mark.parametrize("reverse", [False, True])
def test_every_row_is_looked_up_in_the_folders_beside_the_table(tmp_path: Path, reverse: bool) -> None:
    names = [f"{folder}{i}.png" for folder in ("A", "B") for i in range(25)]
    for name in names:
        path = tmp_path / name[0] / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encoded(1))
    (tmp_path / "here.png").write_bytes(encoded(2))
    names = sorted(["here.png", *names], reverse=reverse)
    table = write_lines(tmp_path / "t.jsonl", [{"image": name, "caption": "text"} for name in names])
    samples = open_tables(table)
    images = [image for i in range(len(samples)) if (image := samples.path(i)) is not None]
    assert [image.name for image in images] == names
    assert all(image.is_file() for image in images)
