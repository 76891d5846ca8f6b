"""Tests of the writer of dataset folders: readers find all samples, and no incomplete folder appears."""

import json
import os
import tarfile
from pathlib import Path

import pytest
from webdataset.tariterators import group_by_keys, tar_file_expander

from clipkit.errors import DataError
from data.shards.writer import DatasetWriter, Record


def record(number: int) -> Record:
    return Record(key=f"{number:04d}", image=b"%d" % number, extension="png", caption=f"caption {number} ü")


def test_layout_of_the_dataset_folder(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "set"
    with DatasetWriter(out, samples_per_shard=3) as writer:
        for number in range(7):
            writer.write("train", record(number))
        writer.write("test", Record(key="a/b", image=b"x", extension="jpg", label=3, meta={"z": 1, "a": "ü"}))
        writer.extra_file_path("LICENSE").write_text("free")
        assert not out.exists()
        writer.finish({"name": "sét"}, class_names=["cat", "dög"], templates=["a {c}."])
    files = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    assert files == [
        "LICENSE", "card.json", "classnames.txt", "test/0.tar", "test/nshards.txt", "train/0.tar", "train/1.tar",
        "train/2.tar", "train/nshards.txt", "zeroshot_classification_templates.txt",
    ]  # fmt: skip
    assert json.loads((out / "card.json").read_bytes()) == {"name": "sét", "samples": {"train": 7, "test": 1}}
    assert (out / "classnames.txt").read_bytes() == "cat\ndög\n".encode()
    assert (out / "zeroshot_classification_templates.txt").read_bytes() == b"a {c}.\n"
    assert (out / "train" / "nshards.txt").read_bytes() == b"3\n"
    assert os.listdir(tmp_path / "deep") == ["set"]  # noqa: PTH208
    samples = []
    for name in ("train/0.tar", "train/1.tar", "train/2.tar", "test/0.tar"):
        with (out / name).open("rb") as stream:
            read = group_by_keys(tar_file_expander([{"url": name, "stream": stream}]))
            samples += [{key: sample[key] for key in sample if key != "__url__"} for sample in read]
    assert samples[:7] == [
        {"__key__": f"{n:04d}", "png": b"%d" % n, "txt": f"caption {n} ü".encode()} for n in range(7)
    ]
    assert samples[7] == {"__key__": "a/b", "jpg": b"x", "cls": b"3", "json": '{"a": "ü", "z": 1}'.encode()}


def test_equal_records_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        with DatasetWriter(tmp_path / name) as writer:
            for number in range(5):
                writer.write("train", record(number))
            writer.finish({"name": "same"})
    for path in ("train/0.tar", "card.json"):
        assert (tmp_path / "one" / path).read_bytes() == (tmp_path / "two" / path).read_bytes()
    with tarfile.open(tmp_path / "one" / "train" / "0.tar") as tar:
        assert {(member.mtime, member.uname, member.gname) for member in tar} == {(0, "", "")}


def test_error_leaves_no_files(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), DatasetWriter(tmp_path / "set") as writer:
        writer.write("train", record(0))
        raise RuntimeError
    with DatasetWriter(tmp_path / "set") as writer:
        writer.write("train", record(0))  # never finished
    assert list(tmp_path.iterdir()) == []


def test_existing_files_are_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    for name in ("file", "full"):
        with pytest.raises(DataError, match="already exists"):
            DatasetWriter(tmp_path / name)
    (tmp_path / "empty").mkdir()
    with DatasetWriter(tmp_path / "empty") as writer:
        writer.write("train", record(0))
        writer.finish({})
    assert (tmp_path / "empty" / "card.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "full"]


@pytest.mark.parametrize("lines", [["cat\ndog"], ["cat", "dog\n"], ["a\u2028b"], ["a\rb"]])
def test_class_name_with_line_break_is_rejected(lines: list[str], tmp_path: Path) -> None:
    with (
        pytest.raises(DataError, match=r"classnames\.txt needs one entry per line"),
        DatasetWriter(tmp_path / "set") as writer,
    ):
        writer.write("train", record(0))
        writer.finish({}, class_names=lines)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("key", "extension"), [("1.5", "png"), ("", "png"), ("a/", "png"), ("1", "pt"), ("1", "PNG")]
)
def test_unreadable_record_raises_assertion_error(key: str, extension: str) -> None:
    with pytest.raises(AssertionError):
        Record(key=key, image=b"", extension=extension)


def test_repeated_key_raises_assertion_error(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "set") as writer:
        writer.write("train", record(0))
        writer.write("test", record(0))
        with pytest.raises(AssertionError, match="twice"):
            writer.write("train", record(0))
