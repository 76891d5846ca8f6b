"""Tests of the table reader: formats, columns, escaped cells. tests/data/test_pack.py covers bad rows."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from clipkit.errors import DataError
from clipkit.samples.table import SUFFIXES, Table, safe_cell

KINDS = [".csv", ".tsv", ".jsonl", ".parquet"]


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


def read(path: Path, **more: str | Sequence[str] | None) -> list[tuple[object, object]]:
    given: dict[str, object] = {"image_column": None, "caption_column": None, **more}
    return [(row.path, row.caption) for row in Table(path, **given)]  # type: ignore[arg-type]


@pytest.mark.parametrize("suffix", KINDS)
def test_only_the_requested_columns_are_required(tmp_path: Path, suffix: str) -> None:
    assert suffix in SUFFIXES
    both = write_table(tmp_path / f"both{suffix}", ["text", "more", "path"], [("one", "x", "a.jpg")])
    for need in (("image",), ("caption",), ("image", "caption")):
        assert read(both, need=need) == [("a.jpg", "one")]
    paths = write_table(tmp_path / f"paths{suffix}", ["path"], [("a.jpg",), ("b.jpg",)])
    assert read(paths, need=("image",)) == [("a.jpg", None), ("b.jpg", None)]
    captions = write_table(tmp_path / f"captions{suffix}", ["id", "title"], [("1", "one")])
    assert read(captions, need=("caption",)) == [(None, "one")]
    with pytest.raises(DataError, match="which column is the caption"):
        read(paths, need=("caption",))
    with pytest.raises(DataError, match="which column is the image"):
        read(captions)
    with pytest.raises(DataError, match="no column 'titel'"):
        read(paths, need=("image",), caption_column="titel")


def test_row_without_a_column_has_a_cause(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("id,path\n1\n2,a.jpg\n")
    rows = list(Table(path, image_column=None, caption_column=None, need=("image",)))
    assert [(row.number, row.path, row.cause) for row in rows] == [
        (1, None, "too few columns"),
        (2, "a.jpg", ""),
    ]


def test_image_column_is_not_read_for_captions(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    struct = [{"bytes": b"x", "path": "a.jpg"}]
    path = tmp_path / "t.parquet"
    parquet.write_table(pyarrow.table({"image": struct, "text": ["one"]}), path)
    assert read(path, need=("caption",)) == [(None, "one")]
    for more in ({"need": ("image",)}, {"need": ("caption",), "image_column": "image"}):
        with pytest.raises(DataError, match="column 'image' contains struct"):
            read(path, **more)


def test_empty_json_key_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"path": "a.jpg", "": "nothing"}\n')
    assert read(path, need=("image",)) == [("a.jpg", None)]


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r\ufffd"))))
def test_captions_round_trip_through_csv(tmp_path: Path, captions: list[str]) -> None:
    rows = [("a.jpg", text) for text in captions]
    assert [
        caption for _, caption in read(write_table(tmp_path / "t.csv", ["path", "caption"], rows))
    ] == captions


@given(st.text(alphabet="'=+-@\t\r\n＝ab ,\"", max_size=6))
def test_safe_cell_is_no_formula_and_reads_back_exactly(text: str) -> None:
    cell = safe_cell(text)
    assert not cell.startswith(("=", "+", "-", "@", "\t", "\r", "\n", "＝"))
    assert cell == text or cell == f"'{text}"
    with TemporaryDirectory() as folder:
        path = Path(folder, "labels.csv")
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["picture", "source", "label_1", "probability_1"])
            writer.writerow(["a.png", "folder", cell, "1.0"])
        (row,) = Table(path, image_column=None, caption_column="label_1")
        assert row.caption == text or row.cause  # an empty label is an error


def test_cells_of_other_tables_are_not_unescaped(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text("path,caption\n'=a.png,'@home\n")
    (row,) = Table(path, image_column=None, caption_column=None)
    assert (row.path, row.caption) == ("'=a.png", "'@home")


@pytest.mark.parametrize("folder", ["annotations", "Flickr8k_text", "other"])
def test_images_are_found_beside_a_folder_of_annotations(tmp_path: Path, folder: str) -> None:
    table = tmp_path / "coco" / folder / "captions.csv"
    table.parent.mkdir(parents=True)
    table.write_text("image,caption\n1.jpg,a cat\n")
    image = tmp_path / "coco" / "val2017" / "1.jpg"
    image.parent.mkdir()
    image.write_bytes(b"")
    found = Table(table, image_column=None, caption_column=None).find_image("1.jpg")
    # images of another dataset may have the same names
    assert (found == image) == (folder != "other")
