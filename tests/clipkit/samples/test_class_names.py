"""Tests of names of classes that are in a folder each."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from clipkit.errors import DataError
from clipkit.samples import are_ids, read_class_names


@pytest.mark.parametrize(
    "names",
    [
        ["n01440764", "n02085620"],
        ["0", "1", "10"],
        ["000", "001"],
        ["class_0", "Class 1"],
        ["5f3a9c12e", "0b1c2d3e4"],
        ["123e4567-e89b-12d3-a456-426614174000"],
    ],
)
def test_ids_are_recognized(names: list[str]) -> None:
    assert are_ids(names)


@pytest.mark.parametrize(
    "names", [[], ["cat", "1"], ["n01440764", "dog"], ["facade", "decade"], ["boeing 737"], ["b2"]]
)
def test_names_are_not_ids(names: list[str]) -> None:
    assert not are_ids(names)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    count=st.integers(2, 30),
    first=st.integers(0, 2),
    width=st.integers(1, 4),
    line_end=st.sampled_from(["\n", "\r\n"]),
    end=st.sampled_from(["", "\n", "\n\n"]),
)
def test_lines_name_numbered_folders(
    tmp_path: Path, count: int, first: int, width: int, line_end: str, end: str
) -> None:
    names = [f"name {number}" for number in range(count)]
    (tmp_path / "classnames.txt").write_bytes((line_end.join(names) + end).encode("utf-8-sig"))
    subfolders = [f"{number:0{width}d}" for number in range(first, first + count)]
    assert read_class_names(tmp_path, sorted(subfolders)) == (
        names,
        {subfolder: label for label, subfolder in enumerate(subfolders)},
    )


def test_numbers_from_0_are_labels(tmp_path: Path) -> None:
    (tmp_path / "classnames.txt").write_text("a\nb\nc\nd\n")
    assert read_class_names(tmp_path, ["0", "3"]) == ([*"abcd"], {"0": 0, "3": 3})
    for subfolders in (["1", "3"], ["0", "4"], ["n01440764", "n02085620"]):  # which lines is unknown
        with pytest.raises(
            DataError, match=r"classnames.txt has 4 lines, but there are 2 folders of classes"
        ):
            read_class_names(tmp_path, subfolders)


def test_lines_may_be_the_names_of_folders(tmp_path: Path) -> None:
    assert read_class_names(tmp_path, ["cat", "Big_Dog"]) is None
    (tmp_path / "classnames.txt").write_text("bird\nbig dog\ncat\n")
    assert read_class_names(tmp_path, ["Big_Dog", "cat"]) == (
        ["bird", "big dog", "cat"],
        {"Big_Dog": 1, "cat": 2},
    )
    with pytest.raises(DataError, match=r"classnames.txt does not contain 'fish', which is a folder: add it"):
        read_class_names(tmp_path, ["cat", "fish"])
    (tmp_path / "classnames.txt").write_bytes(b"\xff\xff")
    with pytest.raises(DataError, match=r"classnames.txt cannot be read as UTF-8 text"):
        read_class_names(tmp_path, ["cat"])


def test_lines_name_ids_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "classnames.txt").write_text("tench\nChihuahua\n")
    names, labels = read_class_names(tmp_path, ["n02085620", "n01440764"]) or ([], {})
    assert (names, labels) == (["tench", "Chihuahua"], {"n01440764": 0, "n02085620": 1})


def test_folders_with_the_same_name_are_one_class(tmp_path: Path) -> None:
    (tmp_path / "classnames.txt").write_text("one\nseven\nsea gull\n")
    _, labels = read_class_names(tmp_path, ["Seven", "seven", "sea_gull"]) or ([], {})
    assert labels == {"Seven": 1, "seven": 1, "sea_gull": 2}
