"""Tests of captions in files beside images."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from clipkit.samples.image_folder import (
    CAPTION_SUFFIXES,
    find_caption_file,
    find_captions,
    list_texts,
    read_captions,
)


def folder_of(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("a text")
    return root


@pytest.mark.parametrize(
    "name", ["1.txt", "1.TXT", "1.Caption", "1.cap", "1.tags", "1.jpg.txt", "1.JPG.text"]
)
def test_texts_beside_images_are_captions(tmp_path: Path, name: str) -> None:
    image = tmp_path / ("1.JPG" if "JPG" in name else "1.jpg")
    file = folder_of(tmp_path, image.name, name, "2.txt", "other.txt", "a/1.txt") / name
    assert find_captions([image]) == file
    assert read_captions(file) == ["a text"]


@pytest.mark.parametrize(
    "name", ["2.txt", "1.xmp", "1.AAE", "1.xml", "1.mov", "1.jpg.json", "1.json", ".1.txt", "1"]
)
def test_other_files_are_not_captions(tmp_path: Path, name: str) -> None:
    folder_of(tmp_path, "1.jpg", name)
    if name.endswith(".json"):  # as Google Takeout and labelme write them
        (tmp_path / name).write_text('{"title": "1.jpg", "description": "a cat", "shapes": []}')
    assert find_captions([tmp_path / "1.jpg"]) is None


def test_files_are_preferred_in_the_order_of_their_suffixes(tmp_path: Path) -> None:
    names = [f"a{suffix}" for suffix in CAPTION_SUFFIXES]
    folder_of(tmp_path, "a.jpg", "a.TXT", *names)
    for name in (names[0], "a.TXT", *names[1:]):
        assert find_caption_file(tmp_path / "a.jpg", list_texts) == tmp_path / name
        (tmp_path / name).unlink()


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    captions=st.lists(st.text(st.characters(categories=["L", "N", "P"]), min_size=1), min_size=1, max_size=4),
    encoding=st.sampled_from(["utf-8", "utf-8-sig", "utf-16"]),
)
def test_captions_are_read_in_any_encoding(tmp_path: Path, captions: list[str], encoding: str) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes("\r\n".join(captions).encode(encoding))
    assert read_captions(file) == captions
    file = tmp_path / "a.json"
    for fields in ({"captions": captions}, {"caption": captions}, {"caption": captions[0]}):
        file.write_bytes(json.dumps(fields, ensure_ascii=False).encode(encoding))
        assert read_captions(file) == (captions[:1] if fields == {"caption": captions[0]} else captions)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "[1]", "{}", '{"caption": null}', '{"caption": 3}'])
def test_json_without_captions(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    assert read_captions(tmp_path / "a.json") == []
    assert read_captions(tmp_path / "missing.txt") == []


def test_lines_end_only_at_line_feeds_and_carriage_returns(tmp_path: Path) -> None:
    file = tmp_path / "1.txt"
    lines = ["a cat\u2028sits", "a\x0bdog\x0cruns", "a\x85bird\x1cflies", "", "last"]
    file.write_bytes("\r\n".join([*lines, ""]).encode())
    assert read_captions(file) == lines
    file.write_bytes("\r".join(lines).encode())
    assert read_captions(file) == lines
    file.write_bytes(b"")
    assert read_captions(file) == []


@pytest.mark.parametrize("blank", ["", " \n\n"])
def test_files_without_captions_do_not_hide_others(tmp_path: Path, blank: str) -> None:
    image = tmp_path / "1.png"
    (tmp_path / "1.txt").write_text(blank)
    assert find_caption_file(image, list_texts) == tmp_path / "1.txt"
    (tmp_path / "1.json").write_text('{"caption": ""}')
    assert find_caption_file(image, list_texts) == tmp_path / "1.txt"
    (tmp_path / "1.png.json").write_text('{"caption": "a cat"}')
    assert find_caption_file(image, list_texts) == tmp_path / "1.png.json"
    (tmp_path / "1.txt").write_text("a dog")
    assert find_caption_file(image, list_texts) == tmp_path / "1.txt"
