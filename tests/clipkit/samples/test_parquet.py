"""Tests of random access to the rows of Parquet files."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from clipkit.errors import DataError
from clipkit.samples import ParquetSamples, Table
from clipkit.samples.remote import ShardFile

arrow = pytest.importorskip("pyarrow")


def open_parquet(path: Path, columns: dict[str, Any], group: int = 3) -> ParquetSamples:
    from pyarrow.parquet import write_table

    half = len(next(iter(columns.values()))) // 2
    files = []
    for part, rows in enumerate((slice(None, half), slice(half, None))):
        file = path / f"{part}.parquet"
        table = arrow.table({name: values[rows] for name, values in columns.items()})
        write_table(table, file, row_group_size=group)
        files.append(ShardFile.at(file))
    return ParquetSamples(files)


def test_rows_are_read_in_any_order(tmp_path: Path) -> None:
    images = [{"bytes": b"image %d" % i, "path": None} for i in range(20)]
    lists = [[b"first %d" % i, b"second %d" % i] for i in range(20)]
    columns = {
        "day": [date(2020, 1, 1 + i) for i in range(20)],
        "thumbs": lists,
        "image": images,
        "n": [*range(20)],
    }
    samples = open_parquet(tmp_path, columns)
    assert len(samples) == 20 and samples.members(0) == ["image", "thumbs"]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda i: samples.read(i, "image"), range(20))) == [
            b"image %d" % i for i in range(20)
        ]
    assert samples.group_reads == 8  # 4 of each file
    again = pickle.loads(pickle.dumps(samples))
    assert again.read(13, "thumbs") == b"first 13" and again.read(13, "thumbs[1]") == b"second 13"
    assert again.fields(13) == {"day": "2020-01-14", "n": 13}
    assert again.locate(13) == (str(tmp_path / "1.parquet"), "row 13")
    assert again.content_id == samples.content_id
    with pytest.raises(DataError, match="there are 2 images, no number 2"):
        samples.read(0, "thumbs[2]")


def test_files_have_the_same_columns(tmp_path: Path) -> None:
    open_parquet(tmp_path, {"image": [b"1", b"2"]})
    (tmp_path / "0.parquet").rename(tmp_path / "2.parquet")
    open_parquet(tmp_path, {"image": [b"1", b"2"], "more": [1, 2]})
    with pytest.raises(DataError, match=r"2\.parquet has other columns than .*1\.parquet"):
        ParquetSamples([ShardFile.at(tmp_path / "1.parquet"), ShardFile.at(tmp_path / "2.parquet")])


def test_few_row_groups_are_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = open_parquet(tmp_path, {"image": [b"image %d" % i for i in range(60)]}, group=5)
    assert [samples.read(i, "") for i in range(60)] == [b"image %d" % i for i in range(60)]
    assert samples.group_reads == 12
    monkeypatch.setattr("clipkit.samples.table.parquet._KEPT_BYTES", 1)
    again = pickle.loads(pickle.dumps(samples))
    for i in (0, 1, 7, 12, 8, 0):  # groups 0, 0, 1, 2, 1, 0: the last two are kept
        assert again.read(i, "image") == b"image %d" % i
    assert again.group_reads == 4


@pytest.mark.parametrize("name", ["photo", "File Path", "Image"])
def test_column_with_a_common_name_precedes_others(tmp_path: Path, name: str) -> None:
    samples = open_parquet(tmp_path, {"thumb": [b"1", b"2"], name: [b"3", b"4"]})
    assert samples.members(0) == [name, "thumb"] and samples.read(1, "") == b"4"


def open_table(path: Path) -> Table:
    return Table(path, image_column=None, caption_column=None, encoded=True)


IMAGE_NAMES = ("photo", "jpg", "image", "png", "img", "images", "picture", "file", "webp")


@pytest.mark.parametrize(("first", "second"), list(permutations(IMAGE_NAMES, 2)))
def test_all_commands_choose_the_same_column_of_images(tmp_path: Path, first: str, second: str) -> None:
    columns = {first: [b"1", b"2"], second: [b"3", b"4"], "text": ["x", "y"]}
    samples = open_parquet(tmp_path, columns)
    table = open_table(tmp_path / "0.parquet")
    assert samples.image_column == table.image_column
    assert samples.read(0, "") == table.read_image(0)


def test_images_in_structs_are_found_wherever_their_bytes_are(tmp_path: Path) -> None:
    rows = [{"path": "a.png", "bytes": b"1"}, {"path": "b.png", "bytes": b"2"}]
    samples = open_parquet(tmp_path, {"shot": rows, "text": ["x", "y"]})
    assert samples.image_column == open_table(tmp_path / "0.parquet").image_column == "shot"
