"""Tests of folders of images as samples."""

import json
import pickle
from pathlib import Path

import pytest

from clipkit.errors import DataError
from clipkit.samples import FolderSamples


def write(root: Path, **files: str) -> Path:
    for name, content in files.items():
        path = root / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def test_captions_beside_images_are_a_field(tmp_path: Path) -> None:
    write(
        tmp_path,
        a_PNG="1",
        a_txt="one\n\n two ",
        sub__b_jpg="22",
        sub__b_json='{"captions": ["x", "y"]}',
        c_png="",
    )
    samples = FolderSamples(tmp_path)
    assert [samples.locate(i)[1] for i in range(3)] == ["a.PNG", "c.png", "sub/b.jpg"]
    assert [samples.fields(i) for i in range(3)] == [
        {"captions": ["one", "two"]},
        {"captions": []},
        {"captions": ["x", "y"]},
    ]
    assert samples.members(0) == ["png"] and samples.read(2, "jpg") == b"22"
    with pytest.raises(DataError, match=r"^empty file$"):
        samples.read(1, "png")
    again = pickle.loads(pickle.dumps(samples))
    content_id = samples.content_id
    assert again.key(2) == str(tmp_path / "sub/b.jpg") and again.content_id == content_id
    (tmp_path / "sub/b.jpg").write_bytes(b"333")
    assert FolderSamples(tmp_path).content_id != content_id


def test_subfolders_are_classes(tmp_path: Path) -> None:
    write(tmp_path, cat__1_png="1", dog__2_png="2", dog__3_jxl="jxl")
    (tmp_path / "dog/3.jxl").write_bytes(b"\0\0\0\x0cJXL \r\n\x87\n")
    samples = FolderSamples(tmp_path)
    assert [samples.fields(i) for i in range(2)] == [{"class": "cat"}, {"class": "dog"}]
    assert samples.caption_column == "class" and samples.captions_from == "names of folders"
    for use in (samples.fields, lambda i: samples.read(i, "jxl")):
        with pytest.raises(DataError, match="JXL images cannot be read"):
            use(2)
    (tmp_path / "dog/2.json").write_text(json.dumps({"caption": "a dog"}))
    captioned = FolderSamples(tmp_path)
    assert captioned.fields(1) == {"captions": ["a dog"]}


def test_splits_in_any_case_are_not_classes(tmp_path: Path) -> None:
    write(tmp_path, Train__1_png="1", Test__2_png="2")
    assert FolderSamples(tmp_path).caption_column == "captions"
