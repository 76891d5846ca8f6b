"""Tests of which files in a folder are images."""

import io
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from PIL import Image

from clipkit.errors import DataError
from clipkit.samples import decode_image, files_below, find_image, images_below
from clipkit.samples.formats import check_image

HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"
UNREADABLE = {
    "JXL": b"\0\0\0\x0cJXL \r\n\x87\n",
    "PSD": b"8BPS\0\1",
    "SVG": b"<?xml version='1.0'?>\n<!-- a drawing -->\n<svg width='1'/>",
    "EXR": b"v/1\x01\2\0\0\0",
}


def encoded(kind: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (3, 2), "red").save(file, kind)
    return file.getvalue()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "JPEG2000"]),
    name=st.sampled_from(
        ["photo", "a.jpg_large", "a.jpg!d", "a.JPG?w=90", "a.jpg.1", "a.jxl", "b.image", "a.jpg~"]
    ),
)
def test_images_are_recognized_by_content(tmp_path: Path, kind: str, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(encoded(kind))
    if kind == "TIFF" and name == "a.jxl":  # raw formats of cameras begin like TIFF
        assert check_image(path) == "JXL images cannot be read: convert them to JPEG or PNG"
    else:
        assert check_image(path) == ""


@pytest.mark.parametrize("name", UNREADABLE)
def test_images_that_cannot_be_read_are_named(tmp_path: Path, name: str) -> None:
    cause = f"{name} images cannot be read: convert them to JPEG or PNG"
    (tmp_path / "photo").write_bytes(UNREADABLE[name])
    assert check_image(tmp_path / "photo") == cause
    with pytest.raises(DataError, match=cause):  # such as a JXL called .jpg
        decode_image(UNREADABLE[name])


@pytest.mark.parametrize("name", ["a.psd", "b.DNG", "c.jxl", "d.svg", "e.cr2"])
def test_images_that_cannot_be_read_are_named_by_extension(tmp_path: Path, name: str) -> None:
    for content in (b"", b"x", encoded("TIFF")):
        (tmp_path / name).write_bytes(content)
        assert check_image(tmp_path / name) == (
            f"{name[2:].upper()} images cannot be read: convert them to JPEG or PNG"
        )


def test_other_files_are_no_images(tmp_path: Path) -> None:
    contents = {
        "Thumbs.db": encoded("JPEG"),
        "a.jpg.json": b"{}",
        "a.xmp": b"<x:xmpmeta/>",
        "a.AAE": b"<?xml version='1.0'?><plist/>",
        "README": b"BMW and P5 cars, PNG images",
        "clip.m4v": b"\0\0\0\x18ftypmp42",
        "page": b"<!DOCTYPE html><svg/>",
        "sound": b"RIFF\0\0\0\0WAVE",
        "empty": b"",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    os.mkfifo(tmp_path / "pipe")
    assert len(list(files_below(tmp_path))) == len(contents) + 1
    assert list(images_below(tmp_path)) == []


def test_only_files_with_unknown_extensions_are_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["a.jpg", "b.JPEG", "c.png", "c.txt", "d.json", "e.webp", "f", "g.jfif"]
    for name in names:
        (tmp_path / name).write_bytes(encoded("PNG"))
    opened: list[str] = []
    original = Path.open

    def spy(path: Path, mode: str) -> object:
        opened.append(path.name)
        return original(path, mode)

    monkeypatch.setattr(Path, "open", spy)
    assert [path.name for path, _ in images_below(tmp_path)] == [
        "a.jpg",
        "b.JPEG",
        "c.png",
        "e.webp",
        "f",
        "g.jfif",
    ]
    assert opened == ["f"]


def test_broken_links_with_unknown_extensions_are_listed(tmp_path: Path) -> None:
    (tmp_path / "photo").symlink_to("nowhere")
    (tmp_path / "note.txt").symlink_to("nowhere")
    assert list(images_below(tmp_path)) == [
        (tmp_path / "photo", "cannot read file: No such file or directory")
    ]


def test_paths_that_are_too_long_are_listed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.jpg").touch()
    (tmp_path / "b").mkdir()
    here = Path.cwd()
    os.chdir(tmp_path / "b")
    try:
        for _ in range(40):
            os.mkdir("d" * 120)  # noqa: PTH102 - relative to the current folder
            os.chdir("d" * 120)
        Path("2.jpg").touch()
    finally:
        os.chdir(here)
    (image, problem), (folder, cause) = images_below(tmp_path)
    assert (image, problem) == (tmp_path / "a" / "1.jpg", "")
    assert cause == "cannot read folder: File name too long"
    assert folder.is_relative_to(tmp_path / "b")


@pytest.mark.parametrize(
    ("members", "image"),
    [
        (("npy", "txt"), ""),
        (("txt", "image.npy"), "image.npy"),
        (("image.npz", "image.npy"), "image.npz"),
        (("image.npy", "png"), "png"),
    ],
)
def test_arrays_are_images_by_their_name_and_without_another_image(
    members: tuple[str, ...], image: str
) -> None:
    assert find_image(members) == image
