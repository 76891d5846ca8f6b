"""Tests of opening datasets: published folders, shards, image folders, splits, names and damage."""

import json
import logging
import os
import shutil
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from PIL import Image

from clipkit.errors import ConfigError, DataError
from clipkit.samples import MissingSplit
from data.options import PackOptions
from data.pack import pack
from data.shards.writer import DatasetWriter, Record
from eval.__main__ import main
from eval.datasets.catalog import new_card
from eval.datasets.dataset import DEFAULT_TEMPLATES, SampleImages
from eval.readers import open_dataset, open_datasets
from tests.eval.conftest import CLASSES

WriteDataset = Callable[..., Path]


def image_file() -> bytes:
    file = BytesIO()
    Image.fromarray(np.zeros((9, 9, 3), dtype=np.uint8)).save(file, "jpeg")
    return file.getvalue()


def test_published_folder_is_read(write_dataset: WriteDataset) -> None:
    folder = write_dataset(captions=[f"image {i}" for i in range(23)])
    dataset = open_dataset(folder)
    assert (dataset.name, len(dataset), dataset.tasks) == ("colours", 23, ("zero-shot",))
    assert dataset.class_names[:3] == ("red", "green", "blue")
    assert dataset.templates == ("a photo of something {c}.", "{c}")
    assert dataset.labels is not None and dataset.labels.tolist() == [i % 7 for i in range(23)]
    assert dataset.captions is not None and dataset.captions[22] == ("image 22",)
    assert dataset.revision == open_dataset(folder.rename(folder.with_name("moved"))).revision


def test_built_in_digits_are_read() -> None:
    dataset = open_dataset("digits")
    assert (dataset.name, len(dataset), len(dataset.class_names)) == ("digits", 1797, 10)
    assert dataset.tasks == ("zero-shot",)


@pytest.mark.parametrize("ending", ["\n", "", "\r\n"])
def test_blank_class_names_keep_their_place(write_dataset: WriteDataset, ending: str) -> None:
    folder = write_dataset(labels=[0, 3, 5])
    newline = "\r\n" if ending == "\r\n" else "\n"
    text = newline.join(["  cube ", "", "ball", "", "cone", "disc"]) + ending
    (folder / "classnames.txt").write_bytes(text.encode())
    assert open_dataset(folder).class_names == ("cube", "", "ball", "", "cone", "disc")


def test_last_blank_class_name_is_kept(write_dataset: WriteDataset) -> None:
    folder = write_dataset(labels=[0, 1])
    (folder / "classnames.txt").write_text("cube\n\n")
    assert open_dataset(folder).class_names == ("cube", "")


def test_duplicate_and_empty_classes_are_reported(
    write_dataset: WriteDataset, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_dataset(labels=[0, 1, 2], class_names=["missile", "cat", "missile", "dog"])
    with caplog.at_level(logging.WARNING, "eval"):
        assert open_dataset(folder).class_names == ("missile", "cat", "missile", "dog")
    assert [record.getMessage() for record in caplog.records] == [
        "dataset colours: class names shared by several classes: 'missile'",
        "dataset colours: its images show 3 of 4 classes; the names of the others remain possible answers: 'dog'",
    ]


def test_tasks_follow_from_card_labels_captions_and_type(write_dataset: WriteDataset) -> None:
    both = write_dataset("both", captions=["a", "b"] * 11 + ["c"], card={"tasks": ["retrieval", "zero-shot"]})
    assert open_dataset(both).tasks == ("zero-shot", "retrieval")
    pairs = write_dataset("pairs", labels=[None] * 2, captions=["a\n\n b \n", "c"], class_names=None)
    assert open_dataset(pairs).tasks == ("retrieval",)
    assert open_dataset(pairs).captions == (("a", "b"), ("c",))
    typed = write_dataset("typed", captions=["x"] * 23)
    (typed / "dataset_type.txt").write_text("retrieval\n")
    assert open_dataset(typed).tasks == ("retrieval",)


def test_plain_shards_skip_samples_without_captions(
    write_dataset: WriteDataset, caplog: pytest.LogCaptureFixture
) -> None:
    texts = ["a", None, "b", " \n", "c"]
    folder = write_dataset("pairs", labels=[None] * 5, captions=texts, class_names=None, samples_per_shard=2)
    assert "has no caption, others have one" in refusal(folder)  # its card says 5
    (folder / "card.json").unlink()
    with caplog.at_level(logging.WARNING, "eval"):
        dataset = open_dataset(folder)
    told = "dataset pairs: 2 of 5 samples have no caption and are skipped"
    assert [record.getMessage() for record in caplog.records] == [told]
    assert (len(dataset), dataset.tasks, dataset.captions) == (3, ("retrieval",), (("a",), ("b",), ("c",)))
    assert [dataset.images.locate(number)[1] for number in range(3)] == ["s0000000", "s0000002", "s0000004"]
    assert "image s0000002 of" in dataset.describe_image(1)
    assert isinstance(dataset.images, SampleImages)
    samples = dataset.images.samples
    assert [dataset.images.read(number) for number in range(3)] == [samples.read(i, "") for i in (0, 2, 4)]
    every = samples.content_id
    assert dataset.revision == open_dataset(folder).revision != every
    assert "has no caption" in refusal(folder / "test")  # it has nshards.txt, so it must be complete
    (folder / "dataset_type.txt").write_text("retrieval\n")  # a published dataset must be complete
    assert "has no caption" in refusal(folder)


def test_packed_table_is_scored_on_held_out_pairs(tmp_path: Path) -> None:
    rows = []
    for number, captions in enumerate([["one", "uno"], "two\nlines", ["three"]] * 10):
        (tmp_path / f"{number}.jpg").write_bytes(image_file() + bytes([number]))
        rows.append(json.dumps({"path": f"{number}.jpg", "caption": captions}) + "\n")
    (tmp_path / "t.jsonl").write_text("".join(rows))
    report = pack(tmp_path / "t.jsonl", tmp_path / "pairs", PackOptions(test=0.5), progress=False)
    dataset = open_dataset(tmp_path / "pairs")
    assert (dataset.name, dataset.tasks, len(dataset)) == ("pairs", ("retrieval",), report.splits["test"])
    assert set(dataset.captions or ()) == {("one", "uno"), ("two\nlines",), ("three",)}
    assert len(open_dataset(tmp_path / "pairs/train")) == report.splits["train"]


def test_list_of_captions_is_used_if_it_starts_with_the_caption(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "pairs") as writer:
        for number, listed in enumerate([["a", "b"], ["b", "a"], "a", [], ["a", 1, " "], ["a", "a"]]):
            meta = {"captions": listed}
            record = Record(key=f"{number}", image=image_file(), extension="jpg", caption="a", meta=meta)
            writer.write("test", record)
        writer.finish({})
    assert open_dataset(tmp_path / "pairs").captions == (("a", "b"), *[("a",)] * 4, ("a", "a"))


def test_folder_of_images_by_class_is_read(tmp_path: Path) -> None:
    for name in (
        "tabby_cat/1.jpg",
        "tabby_cat/sub/2.JPEG",
        "dog/3.jpg",
        "dog/notes.txt",
        "dog/.4.jpg",
        ".git/5.jpg",
    ):
        (tmp_path / "pets" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "pets" / name).write_bytes(image_file())
    dataset = open_dataset(tmp_path / "pets")
    assert dataset.class_names == ("dog", "tabby cat")
    assert dataset.labels is not None and dataset.labels.tolist() == [0, 1, 1]
    assert dataset.templates == DEFAULT_TEMPLATES
    assert dataset.describe_image(2) == f"dataset pets: image tabby_cat/sub/2.JPEG of {tmp_path / 'pets'}"
    assert dataset.images.read(1) == image_file()
    revision = dataset.revision
    (tmp_path / "pets" / "dog" / "6.jpg").write_bytes(image_file())
    assert open_dataset(tmp_path / "pets").revision != revision


def test_folder_of_images_with_splits_is_read(tmp_path: Path) -> None:
    for name in ("train/dog/1.jpg", "test/dog/1.jpg", "test/cat/2.jpg", "test/cat/3.jpg"):
        (tmp_path / "pets" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "pets" / name).write_bytes(image_file())
    dataset = open_dataset(tmp_path / "pets")
    assert (dataset.class_names, len(dataset)) == (("cat", "dog"), 3)


def put_images(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(image_file())
    return folder


def image_folder(folder: Path) -> Path:
    """Write a folder with one image in each of two classes."""
    for name in ("cat", "cow"):
        (folder / name).mkdir(parents=True)
        (folder / name / "1.jpg").write_bytes(image_file())
    return folder


def test_classes_of_folders_are_collected_from_all_splits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("train/dog/1.jpg", "train/cat/1.jpg", "train/emu/2.jpg", "test/cat/2.jpg", "test/emu/3.jpg"):
        (tmp_path / "pets" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "pets" / name).write_bytes(image_file())
    train, test = open_dataset(tmp_path / "pets", split="train"), open_dataset(tmp_path / "pets")
    assert train.class_names == test.class_names == ("cat", "dog", "emu")
    assert test.labels is not None and test.labels.tolist() == [0, 2]
    assert "the names of the others remain possible answers: 'dog'" in caplog.text
    with pytest.raises(MissingSplit, match="has no split 'val'"):
        open_dataset(tmp_path / "pets", split="val")
    stamp = test.stamp
    os.utime(tmp_path / "pets" / "test" / "cat" / "2.jpg", ns=(1, 1))
    again = open_dataset(tmp_path / "pets")
    assert again.revision == test.revision and again.stamp != stamp


def test_val_folder_used_as_test_is_not_also_val(tmp_path: Path) -> None:
    for name in ("train/dog/1.jpg", "train/cat/2.jpg", "val/dog/3.jpg", "val/cat/4.jpg", "val/cat/5.jpg"):
        (tmp_path / "pets" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "pets" / name).write_bytes(image_file())
    assert len(open_dataset(tmp_path / "pets")) == 3
    with pytest.raises(
        MissingSplit, match="folder 'val' is used"
    ):  # else probes would be tuned on scored images
        open_dataset(tmp_path / "pets", split="val")
    card = new_card("Pets", tmp_path / "pets")
    assert card.splits == {"train": 2, "test": 3}
    with pytest.raises(
        DataError, match=r"restore the missing images, or set 'test' of \[splits\] in its card to 1$"
    ):
        card.check_size("test", 1)
    (tmp_path / "pets" / "test" / "dog").mkdir(parents=True)
    (tmp_path / "pets" / "test" / "dog" / "6.jpg").write_bytes(image_file())
    assert [len(open_dataset(tmp_path / "pets", split=split)) for split in ("val", "test")] == [3, 1]


def test_usual_names_of_splits_are_recognized(tmp_path: Path, write_dataset: WriteDataset) -> None:
    names = [
        f"{split}/{kind}/1.jpg" for split in ("Train", "validation", "Testing") for kind in ("cat", "dog")
    ]
    pets = put_images(tmp_path / "pets", *names, "Train/cat/2.jpg")
    assert [len(open_dataset(pets, split=split)) for split in ("train", "val", "test")] == [3, 2, 2]
    two = put_images(tmp_path / "two", *names, "dev/cat/1.jpg")
    assert f"{two / 'dev'} and {two / 'validation'} would both be the split 'val'" in refusal(two)
    alone = put_images(tmp_path / "alone", "TRAIN/cat/1.jpg", "TRAIN/dog/1.jpg")
    assert "val (valid, validation, dev) and test (testing)" in refusal(alone)
    shards = write_dataset(split="valid")
    assert len(open_dataset(shards, split="val")) == 23


def test_classification_with_one_class_is_rejected(tmp_path: Path, write_dataset: WriteDataset) -> None:
    one = put_images(tmp_path / "one", "images/1.jpg", "images/2.jpg")
    assert "has only one class, 'images': classification needs at least two" in refusal(one)
    table = one / "caps.csv"
    table.write_text("path,caption\nimages/1.jpg,a cat\n")
    for source in (one, table):
        assert open_dataset(source).captions == (("a cat",),)
    (one / "images" / "caps.csv").write_text("")
    assert "no images in folders by class" in refusal(one / "images")
    assert "classification needs at least two" in refusal(
        write_dataset("cats", labels=[0, 0], class_names=["cat"])
    )
    told = write_dataset("told", labels=[0, 0], class_names=["cat"], captions=["a", "b"])
    assert open_dataset(told).tasks == ("retrieval",)
    no_folder: tuple[tuple[str | Path, str], ...] = (
        (table, "is a file"),
        (write_dataset("x") / "card.json", "is a file"),
        ("no", "is not a folder"),
    )
    for wrong, message in no_folder:
        with pytest.raises(ConfigError, match=f"{message}.*expected a local folder"):
            main(["new", "Mine", "--data", str(wrong)])


def test_stamp_detects_changes_of_equal_size_and_time(write_dataset: WriteDataset, tmp_path: Path) -> None:
    """Features are looked up by the stamp."""
    folder, shards = image_folder(tmp_path / "pets"), write_dataset()
    for root, file in ((folder, folder / "cat" / "1.jpg"), (shards, shards / "test" / "0.tar")):
        before, state = open_dataset(root), file.stat()
        content, stamp = file.read_bytes(), before.stamp
        time.sleep(0.02)  # file system clocks are coarse
        file.write_bytes(content[::-1] if root == folder else content.replace(b"IDAT", b"iDAT"))
        os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
        again = open_dataset(root)
        assert again.stamp != stamp and again.revision == before.revision


def test_equal_names_are_lengthened_by_parent_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [image_folder(tmp_path / name) for name in ("A/test", "B/test", "x/B/test", "x/digits", "y")]
    names = [dataset.name for dataset in open_datasets([*folders, "digits"])]
    own = f"{tmp_path.name}-B-test"
    assert names == ["A-test", own, "x-B-test", "x-digits", "y", "digits"]
    assert open_dataset(folders[0]).name == "test"
    monkeypatch.chdir(tmp_path)
    assert [one.name for one in open_datasets(["A/test/", "B/test", "y"])] == ["A-test", "B-test", "y"]
    mistakes: list[tuple[list[str | Path], str]] = [
        (["y", tmp_path / "y"], f"dataset {tmp_path / 'y'} is given twice"),
        (["digits", "digits"], "dataset digits is given twice"),
        (["A/test", "A/../A/test"], "is given twice"),
        (["A/test", "B/test", image_folder(tmp_path / "A-test")], "would both be named"),
    ]
    for given, message in mistakes:
        with pytest.raises(DataError, match=message):
            open_datasets(given)


def refusal(folder: Path | str) -> str:
    with pytest.raises(DataError) as caught:
        open_dataset(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_invalid_image_files_are_rejected(tmp_path: Path) -> None:
    pipe, link = image_folder(tmp_path / "pipe"), image_folder(tmp_path / "link")
    os.mkfifo(pipe / "cat" / "z.png")
    (link / "cat" / "z.png").symlink_to("nothing")
    lost = image_folder(tmp_path / "lost")
    (lost / "dog").symlink_to("nothing")
    with pytest.raises(DataError, match="not a file"):
        open_dataset(pipe).images.read(1)
    assert refusal(link) == f"image {link / 'cat' / 'z.png'}: No such file or directory"
    assert refusal(lost) == f"{lost / 'dog'} is a broken link: fix or remove it"


def test_unreadable_class_folder_is_rejected() -> None:
    with TemporaryDirectory() as name:  # other users cannot read pytest's folder
        root = Path(name)
        root.chmod(0o755)
        image_folder(root / "pets")
        (root / "pets" / "dog").mkdir(mode=0)
        user = os.geteuid()
        os.seteuid(user or 65534)  # root may read everything
        try:
            assert refusal(root / "pets") == (
                f"{root / 'pets' / 'dog'}: cannot read folder: Permission denied"
            )
        finally:
            os.seteuid(user)


def test_names_that_are_not_utf8_are_rejected(tmp_path: Path) -> None:
    odd = os.fsdecode(b"d\xff")
    assert "the name 'd\\udcff' of a dataset or class is not UTF-8" in refusal(image_folder(tmp_path / odd))
    (image_folder(tmp_path / "a") / "cat").rename(tmp_path / "a" / odd)
    assert "the name 'd\\udcff' of a dataset or class is not UTF-8" in refusal(tmp_path / "a")


def test_invalid_datasets_raise_one_line_errors(write_dataset: WriteDataset, tmp_path: Path) -> None:
    assert "no folder, tar or table, nor built in (did you mean 'digits'?)" in refusal("digit")
    assert refusal("~nouser/x").startswith("no dataset '~nouser/x'")
    assert refusal("x" * 5000) == f"cannot read dataset '{'x' * 200}': File name too long"
    (tmp_path / "empty").mkdir()
    assert "no images in folders by class" in refusal(tmp_path / "empty")
    assert "has label 7, but there are 7 class names" in refusal(write_dataset("range", labels=[0, 7]))
    assert "image s0000001" in refusal(tmp_path / "range")
    assert "sample s0000001 of" in refusal(write_dataset("unlabelled", labels=[0, None]))
    assert "has no label, others have one" in refusal(tmp_path / "unlabelled")
    assert "has no caption" in refusal(write_dataset("mute", labels=[0, 1], captions=["a", " \n"]))
    assert "has no {c}" in refusal(write_dataset("template", templates=["a photo of a {}."]))
    assert "tasks ['sing']; known: zero-shot" in refusal(write_dataset("task", card={"tasks": ["sing"]}))
    assert "card.json is not as published" in refusal(write_dataset("list", card={"tasks": [[1]]}))
    hostile_texts = ("[" * 100_000, '{"a":' * 100_000, f'{{"samples": {{"test": {"9" * 5000}}}}}')
    for number, text in enumerate(hostile_texts):
        hostile = write_dataset(f"hostile{number}")
        (hostile / "card.json").write_text(text)
        assert "card.json is not as published" in refusal(hostile)
    split = write_dataset("split", split="train")
    assert refusal(split) == (
        f"dataset split: {split} has no split 'test', only train; pack with --test 0.1, or name the folder of a "
        "split"
    )
    alone = open_dataset(split / "train")
    assert (len(alone), alone.class_names) == (23, CLASSES)
    kind = write_dataset("kind")
    (kind / "dataset_type.txt").write_text("multilable\n")
    assert "of type 'multilable'; known: classification, multilabel" in refusal(kind)
    latin = write_dataset("latin")
    (latin / "classnames.txt").write_bytes("café\n".encode("latin-1"))
    assert "not UTF-8" in refusal(latin)


def test_folder_of_one_split_is_described_by_its_parent(
    write_dataset: WriteDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_dataset(split="val")
    shutil.copytree(folder / "val", folder / "train")
    assert "has no split 'test', only train, val; pack with" in refusal(folder)
    monkeypatch.chdir(folder / "val")
    for place in (folder / "val", "."):
        dataset = open_dataset(place)
        assert (dataset.class_names, dataset.templates) == (CLASSES, ("a photo of something {c}.", "{c}"))
    card = json.loads((folder / "card.json").read_text())
    (folder / "card.json").write_text(json.dumps({**card, "samples": {"val": 24, "test": 23}}))
    assert "its card says 24" in refusal(folder / "val")
    (folder / "val" / "classnames.txt").write_text("\n" * 6 + "own\n")  # its own files take precedence
    assert open_dataset(folder / "val").class_names[6] == "own"


def test_missing_shards_and_samples_are_rejected(write_dataset: WriteDataset) -> None:
    folder = write_dataset()
    (folder / "test" / "1.tar").unlink()
    assert "nshards.txt says '3'" in refusal(folder)
    (folder / "test" / "nshards.txt").unlink()
    assert "shard 1.tar is missing" in refusal(folder)
    (folder / "test" / "2.tar").rename(folder / "test" / "1.tar")
    assert "its card says 23" in refusal(folder)
    card = json.loads((folder / "card.json").read_text())
    (folder / "card.json").write_text(json.dumps({**card, "samples": {"test": 13}}))
    assert len(open_dataset(folder)) == 13
    (folder / "card.json").write_text("[1]")
    assert "card.json is not as published" in refusal(folder)
    (folder / "card.json").write_text("{")
    assert "card.json is not as published" in refusal(folder)
