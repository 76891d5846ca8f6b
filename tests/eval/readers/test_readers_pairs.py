"""Tests of tables of images and captions, and of folders with captions beside images, as evaluation data."""

import json
import logging
from pathlib import Path

import pytest

from clipkit.errors import DataError
from clipkit.samples import MissingSplit
from eval.datasets.targets import find_targets
from eval.readers import open_dataset
from tests.eval.conftest import png


def fill(folder: Path, *names: str) -> Path:
    for seed, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(png(seed))
    return folder


def test_rows_of_an_image_are_one_image_with_all_captions(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path, "a.png", "b.png")
    table = tmp_path / "pairs.csv"
    table.write_text("image,caption\nb.png,one\na.png,two\n./b.png,three\ngone.png,x\nb.png,one\na.png,\n")
    (target,) = find_targets([str(table)])
    dataset = target.dataset
    assert (dataset.name, dataset.tasks) == ("pairs", ("retrieval",))
    assert dataset.captions == (("one", "three"), ("two",))
    assert [dataset.images.read(i) for i in (0, 1)] == [png(1), png(0)]
    assert dataset.images.locate(0) == (str(tmp_path), "b.png")
    assert caplog.messages == ["dataset pairs: 2 images cannot be used: 1 × missing file, 1 × empty caption"]
    with pytest.raises(MissingSplit, match=r"dataset pairs has no split 'train': .*pairs.csv has test"):
        open_dataset(table, split="train")
    table.write_text("image,caption\ngone.png,x\n")
    with pytest.raises(DataError, match=r"no image of .*pairs.csv can be used: 1 × missing file"):
        open_dataset(table)


def test_karpathys_splits_are_read(tmp_path: Path) -> None:
    images = [
        {"filename": f"{i}.jpg", "split": split, "sentences": [{"raw": f"{i} {n}"} for n in range(5)]}
        for i, split in enumerate(["train", "test", "val", "test", "restval"])
    ]
    fill(tmp_path / "Images", *(str(image["filename"]) for image in images))
    table = tmp_path / "dataset_flickr8k.json"
    table.write_text(json.dumps({"images": images, "dataset": "flickr8k"}))
    captions = {split: open_dataset(table, split=split).captions for split in ("train", "val", "test")}
    assert {split: [own[0] for own in texts or ()] for split, texts in captions.items()} == {
        "train": ["0 0"],
        "val": ["2 0"],
        "test": ["1 0", "3 0"],
    }
    assert len((captions["test"] or ())[0]) == 5


def test_labels_in_a_table_are_classes(tmp_path: Path) -> None:
    fill(tmp_path, "1.png", "2.png", "3.png")
    (tmp_path / "t.tsv").write_text("path\tlabel\n1.png\tdog\n2.png\tcat\n3.png\tdog\n")
    dataset = open_dataset(tmp_path / "t.tsv")
    assert (dataset.tasks, dataset.class_names, dataset.captions) == (("zero-shot",), ("cat", "dog"), None)
    assert dataset.labels is not None and dataset.labels.tolist() == [1, 0, 1]
    (tmp_path / "t.tsv").write_text("path\tlabel\n1.png\tdog\n1.png\tcat\n3.png\tdog\n")
    with pytest.raises(DataError, match=r"1\.png has several labels"):
        open_dataset(tmp_path / "t.tsv")


def test_folders_with_captions_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = fill(tmp_path / "photos", "a.png", "b.png", "in/c.png")
    (folder / "a.txt").write_text("one\ntwo\n")
    (folder / "in/c.txt").write_text("three\n")
    with caplog.at_level(logging.WARNING, "eval"):
        dataset = open_dataset(folder)
    assert (dataset.name, dataset.captions) == ("photos", (("one", "two"), ("three",)))
    assert caplog.messages == ["dataset photos: 1 image cannot be used: 1 × no caption"]
    (folder / "captions.csv").write_text("file,caption\nb.png,other\n")
    (folder / "a.txt").unlink()
    (folder / "in/c.txt").unlink()
    assert open_dataset(folder).captions == (("other",),)
