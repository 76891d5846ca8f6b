"""Tests of image folders: links, files left by programs, wrong layouts, new cards and invalid columns."""

import json
import logging
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import parquet as pq

from clipkit.errors import ConfigError, DataError
from data.pack import pack
from eval import readers
from eval.__main__ import main
from eval.datasets.card import read_card
from eval.datasets.catalog import new_card
from eval.datasets.dataset import EvalDataset, check_dataset, file_images, read_lines
from eval.datasets.targets import find_targets
from eval.metrics.classes import any_label_accuracy
from eval.readers import OpenOptions, Reader, open_dataset


def png(shade: int) -> bytes:
    file = BytesIO()
    Image.new("RGB", (8, 8), (shade, shade, 0)).save(file, "png")
    return file.getvalue()


def fill(folder: Path, *names: str) -> Path:
    """Write images with names such as ``cat/1.png`` into a folder."""
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(png(number))
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(DataError) as caught:
        open_dataset(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_files_left_by_programs_are_ignored(tmp_path: Path) -> None:
    own = ("cat/1.png", "cat/deep/2.PNG", "dog/3.png")
    plain = open_dataset(fill(tmp_path / "plain" / "pets", *own))
    left = (
        "cat/.ipynb_checkpoints/1-checkpoint.png",
        "cat/.thumbnails/1.png",
        "cat/deep/@eaDir/2.png",
        "cat/._1.png",
        "__MACOSX/cat/1.png",
        "@eaDir/1.png",
        ".git/1.png",
    )
    others = fill(tmp_path / "left" / "pets", *own, *left)
    for name in ("cat/Thumbs.db", "cat/.DS_Store", "desktop.ini", "dog/notes.txt"):
        (others / name).write_bytes(b"x")
    found = open_dataset(others)
    assert found.class_names == ("cat", "dog") and found.labels is not None
    assert found.labels.tolist() == [0, 0, 1]
    assert found.revision == plain.revision


def test_links_to_folders_are_followed_and_cycles_rejected(tmp_path: Path) -> None:
    elsewhere = fill(tmp_path / "elsewhere", "4.png", "5.png")
    pets = fill(tmp_path / "pets", "cat/1.png", "dog/2.png")
    (pets / "cat" / "more").symlink_to(elsewhere)
    (pets / "bird").symlink_to(elsewhere)
    found = open_dataset(pets)
    assert found.labels is not None and found.labels.tolist() == [0, 0, 1, 1, 1, 2]
    assert found.images.locate(3)[1] == "cat/more/4.png"
    for name, target in (("cat/loop", "."), ("cat/up", ".."), ("self", "."), ("dog/top", str(tmp_path))):
        link = pets / name
        link.symlink_to(target)
        assert refusal(pets) == f"{link}: link to a folder that contains it"
        link.unlink()
    # two links that point into each other
    (pets / "cat" / "other").symlink_to("../dog")
    (pets / "dog" / "other").symlink_to("../cat")
    assert refusal(pets).endswith(": link to a folder that contains it")


def test_skipped_images_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pets = fill(tmp_path / "pets", "cat/1.png", "dog/2.png", "stray.png", "another.JPG", ".hidden.png")
    with caplog.at_level(logging.WARNING, "eval"):
        assert len(open_dataset(pets)) == 2
    assert [record.getMessage() for record in caplog.records] == [
        "dataset pets: skips images outside the class folders: another.JPG, stray.png"
    ]
    (pets / "dog" / "3.JXL").write_bytes(b"x")
    cause = "JXL images cannot be read: convert them to JPEG or PNG"
    assert refusal(pets) == f"{pets / 'dog' / '3.JXL'}: {cause}"


def test_training_leaves_out_the_same_images_as_evaluation(tmp_path: Path) -> None:
    pets = fill(tmp_path / "pets", "cat/1.png", "cat/deep/2.png", "dog/3.png", "stray.png", "another.png")
    dataset = open_dataset(pets)
    assert dataset.labels is not None
    report = pack(pets, tmp_path / "out", progress=False)
    assert report.bad == {"outside the class folders": 2} and report.packed == len(dataset)
    rows = map(json.loads, (tmp_path / "out/bad_rows.jsonl").read_text().splitlines())
    assert [row["path"] for row in rows] == ["another.png", "stray.png"]
    packed = open_dataset(tmp_path / "out", split="train")
    labels = [dataset.class_names[label] for label in dataset.labels.tolist()]
    assert packed.captions == tuple((label,) for label in labels)
    (pets / "stray.txt").write_text("a cat")  # neither reads classes then
    assert "names of folders are not read as classes" in refusal(pets)
    assert pack(pets, tmp_path / "captioned", progress=False).bad == {"no caption": 4}


@pytest.mark.parametrize("names", ["", "sea lake\nforest\ncity\nannual_crop\n", "city\nforest\nforest\n"])
@pytest.mark.parametrize("ids", [False, True])
def test_packed_classes_are_those_of_the_folder(tmp_path: Path, names: str, ids: bool) -> None:
    folders = ("annual_crop", "forest", "sea lake")
    if ids:
        folders = ("0", "1", "2")
    elif names.startswith("city"):
        folders = ("city", "forest", "FOREST")
    crops, forests, lakes = folders
    land = fill(
        tmp_path / "land",
        f"train/{crops}/1.png", f"train/{forests}/2.png", f"train/{lakes}/3.png",
        f"test/{lakes}/4.png", f"test/{forests}/5.png",
    )  # fmt: skip
    if names:
        (land / "classnames.txt").write_text(names)
    pack(land, tmp_path / "packed", progress=False)
    for split in ("train", "test"):
        folder, packed = (open_dataset(source, split=split) for source in (land, tmp_path / "packed"))
        assert packed.class_names == folder.class_names and packed.tasks == ("zero-shot",)
        assert packed.labels is not None and folder.labels is not None
        # the folder's images are sorted by label
        assert sorted(packed.labels.tolist()) == folder.labels.tolist()
        assert packed.captions is not None
        for label, (caption,) in zip(packed.labels, packed.captions, strict=True):
            assert packed.class_names[label] == caption.replace("_", " ")


def test_splits_with_other_classes_are_not_packed(tmp_path: Path) -> None:
    land = fill(tmp_path / "land", "train/1/1.png", "train/2/2.png", "test/1/3.png", "test/2/4.png")
    for split, names in {"train": "city\nforest\n", "test": "forest\ncity\n"}.items():
        (land / split / "classnames.txt").write_text(names)
    with pytest.raises(
        DataError, match=r"other classes than .*: write the names of all into one file, .*/land/class"
    ):
        pack(land, tmp_path / "packed", progress=False)


def test_images_with_unusual_extensions_are_scored(tmp_path: Path) -> None:
    pets = fill(tmp_path / "pets", "cat/1.png", "cat/2.jpg_large", "cat/photo", "dog/3.jfif", "dog/4.JXL")
    found = open_dataset(pets)
    assert found.labels is not None and found.labels.tolist() == [0, 0, 0, 1, 1]
    (pets / "cat" / "sketch").write_bytes(b"<svg xmlns='http://www.w3.org/2000/svg'/>")
    assert refusal(pets) == f"{pets}/cat/sketch: SVG images cannot be read: convert them to JPEG or PNG"


@pytest.mark.parametrize("name", ["cat/1.TXT", "dog/2.png.txt", "dog/2.caption", "cat/1.json"])
def test_names_of_folders_are_not_classes_if_images_have_captions(tmp_path: Path, name: str) -> None:
    pets = fill(tmp_path / "pets", "cat/1.png", "dog/2.png")
    (pets / "cat" / "1.png.json").write_text('{"title": "1.png"}')
    (pets / "dog" / "notes.txt").write_text("x")
    assert len(open_dataset(pets)) == 2
    (pets / name).write_text('{"caption": "a cat"}')
    assert refusal(pets) == (
        f"{pets / name} may contain captions of an image, so the names of folders are not read as classes: write "
        f"the names of classes into {pets / 'classnames.txt'}, or pack the images with their captions"
    )
    (pets / "classnames.txt").write_text("cat\ndog\n")
    assert open_dataset(pets).class_names == ("cat", "dog")


@pytest.mark.parametrize(
    ("name", "image"),
    [("captions.csv", "cat/1.png"), ("cat/metadata.csv", "1.png"), ("dog/in/A.CSV", "3.png")],
)
def test_names_of_folders_are_not_classes_if_a_table_has_captions(
    tmp_path: Path, name: str, image: str
) -> None:
    pets = fill(tmp_path / "pets", "cat/1.png", "dog/2.png", "dog/in/3.png")
    (pets / name).write_text(f"filename,label\n{image},cat\n")
    assert len(open_dataset(pets)) == 3  # labels are no captions
    (pets / name).write_text("file,comment\nLICENSE,CC BY\n0.png,missing\n")
    assert len(open_dataset(pets)) == 3  # it lists no image
    (pets / name).write_text(f"filename,caption\n{image},a cat\n")
    assert refusal(pets).startswith(
        f"{pets / name} is a table of images and captions, so the names of folders"
    )
    (pets / "classnames.txt").write_text("cat\ndog\n")
    assert open_dataset(pets).class_names == ("cat", "dog")


def test_class_names_file_names_numbered_folders(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    digits = fill(tmp_path / "digits", *(f"test/{number}/1.png" for number in range(11)), "train/2/2.png")
    (digits / "classnames.txt").write_text("".join(f"digit_{number}\n" for number in range(11)))
    with caplog.at_level(logging.WARNING, "eval"):
        found = open_dataset(digits)
    assert found.class_names == tuple(f"digit {number}" for number in range(11))
    assert found.labels is not None and found.labels.tolist() == [*range(11)]
    assert found.images.locate(10)[1] == "10/1.png"  # sorted names would have 10 after 1
    (message,) = caplog.messages
    assert message.endswith(
        "are those of classnames.txt: 0 is 'digit_0', 1 is 'digit_1', 10 is 'digit_10' and 8 more"
    )
    train = open_dataset(digits, split="train")
    assert train.class_names == found.class_names
    assert train.labels is not None and train.labels.tolist() == [2]
    (digits / "classnames.txt").write_text("zero\none\n")
    assert "classnames.txt has 2 lines, but there are 11 folders of classes" in refusal(digits)


def test_wordnet_ids_get_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    places = fill(tmp_path / "places", "val/n02085620/1.png", "val/n01440764/2.png")
    with caplog.at_level(logging.WARNING, "eval"):
        (target,) = find_targets([str(places)])
    assert target.dataset.class_names == ("tench", "Chihuahua")
    assert target.keys == ("n01440764", "n02085620")
    assert target.open_split("test").class_names == ("tench", "Chihuahua")
    assert caplog.messages[-1] == (
        "dataset places: the names of classes are those of the card imagenet1k: n01440764 is 'tench', n02085620 is "
        "'Chihuahua'"
    )
    names = new_card("Places", places).prompt_sets["own"].names
    assert names == {"n01440764": "tench", "n02085620": "Chihuahua"}
    (places / "classnames.txt").write_text("a fish\na dog\n")
    (target,) = find_targets([str(places)])
    assert target.dataset.class_names == ("a fish", "a dog")


@pytest.mark.parametrize("ids", [("n01440764", "n99999999"), ("0", "1"), ("5f3a9c12e", "0b1c2d3e4")])
def test_other_ids_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ids: tuple[str, str]
) -> None:
    folder = fill(tmp_path / "ids", *(f"{key}/1.png" for key in ids))
    with caplog.at_level(logging.WARNING, "eval"):
        (target,) = find_targets([str(folder)])
    assert target.dataset.class_names == tuple(sorted(ids))
    assert caplog.messages[-1] == (
        f"dataset ids: the names of classes look like ids: {', '.join(sorted(ids))}; write their names into "
        "classnames.txt, one per line in ascending order of the ids"
    )


def test_folders_named_like_splits_are_not_classes(tmp_path: Path) -> None:
    flat = fill(tmp_path / "flat", "Test/1.png", "train/2.png")
    assert "contains images in Test, train, which are names of splits, not of classes" in refusal(flat)
    vehicles = open_dataset(fill(tmp_path / "vehicles", "car/1.png", "train/2.png"))  # one is accepted
    assert vehicles.class_names == ("car", "train")


def test_sources_that_are_not_folders_are_rejected(tmp_path: Path) -> None:
    file = tmp_path / "0.zip"
    file.write_bytes(b"x")
    assert refusal(file) == (
        f"no dataset {str(file)!r}: it is no folder, tar or table, nor built in "
        "(known: cues, digits, emoji, glyphs)"
    )
    for source in ("https://", "s3://", "http:///"):
        with pytest.raises(DataError, match=r"expected an address such as https://HOST/FOLDER"):
            open_dataset(source)
    with pytest.raises(DataError, match=r"^no dataset '': name a folder"):
        open_dataset("")


@pytest.mark.parametrize(
    "name", ['it\'s "quoted"', "a/b\\c", "Мои 🐦\n\t\x7f", "imagenet1k", "x" * 5000, "'''\"\"\"\\"]
)
def test_new_card_accepts_any_name(tmp_path: Path, name: str) -> None:
    pets = fill(tmp_path / 'pets " \n', "cat/1.png", "dog/2.png")
    assert main(["new", "--data", str(pets), "--", name]) == 0
    assert read_card(pets / "card.toml").title == name
    (target,) = find_targets([str(pets)])
    assert target.dataset.class_names == ("cat", "dog")


def test_invalid_new_card_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pets = fill(tmp_path / "pets", "cat/1.png", "dog/2.png")
    with pytest.raises(ConfigError, match="is not UTF-8: choose another name"):
        main(["new", "--data", str(pets), "\udcff"])
    assert not (pets / "card.toml").exists()
    monkeypatch.chdir(pets)
    with pytest.raises(ConfigError, match=r"^--data is not a folder"):
        main(["new", "--data", "", "Pets"])
    alike = fill(tmp_path / "alike", "a_b/1.png", "a b/2.png")
    with pytest.raises(DataError, match="has classes with the same name, 'a b': rename them"):
        main(["new", "--data", str(alike), "Alike"])
    assert not (alike / "card.toml").exists()


def test_new_card_can_name_numbered_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "numbers"
    folder.mkdir()
    table = pa.table({"image": [png(i) for i in range(3)], "label": [0, 2, 1]})
    pq.write_table(table, folder / "test.parquet")
    assert main(["new", "--data", str(folder), "Numbers"]) == 0
    assert "add class names under [prompts.own.names]" in capsys.readouterr().out
    path = folder / "card.toml"
    path.write_text(
        path.read_text().replace('0 = "0"', '0 = ["cat", "kitten"]').replace('2 = "2"', '2 = "dog"')
    )
    (target,) = find_targets([str(folder)])
    assert target.dataset.class_names == ("cat", "1", "dog")
    assert target.dataset.synonyms == (("cat", "kitten"), ("1",), ("dog",))
    path.unlink()
    huge = table.set_column(1, "label", pa.array([0, 200_000, 1]))
    pq.write_table(huge, folder / "test.parquet")
    with pytest.raises(DataError, match="has label 200,000, and no class names: number its classes from 0"):
        new_card("Numbers", folder)


LABELS = {
    "1.5": [0.0, 1.5],
    "nan": [0.0, float("nan")],
    "9223372036854775809": pa.array([0, 2**63 + 1], pa.uint64()),
    "b'a'": [b"a", b"b"],
    "datetime.date": pa.array([0, 1], pa.date32()),
    "{'a': 1}": [{"a": 1}, {"a": 1}],
    "1000000000000": [0, 10**12],
}


@pytest.mark.parametrize("said", LABELS)
@pytest.mark.parametrize("named", [True, False])
def test_labels_that_are_not_class_numbers_are_rejected(tmp_path: Path, said: str, named: bool) -> None:
    """Including labels that could be truncated to integers, which would change scores."""
    features = {"label": {"_type": "ClassLabel", "names": ["a", "b"]}} if named else {}
    table = pa.table({"image": [png(0), png(1)], "label": LABELS[said]})
    about = {"huggingface": json.dumps({"info": {"features": features}})}
    (tmp_path / "set").mkdir()
    pq.write_table(table.replace_schema_metadata(about), tmp_path / "set" / "test.parquet")
    assert "row " in refusal(tmp_path / "set")
    assert f" has label {said}" in refusal(tmp_path / "set")
    assert "which is not a class number" in refusal(tmp_path / "set")


def test_columns_of_wrong_types_are_rejected(tmp_path: Path) -> None:
    def said(**columns: Any) -> str:
        path = tmp_path / "set" / "test.parquet"
        path.parent.mkdir(exist_ok=True)
        rows = min(map(len, columns.values()))
        pq.write_table(pa.table({"image": [png(0), png(1)][:rows], **columns}), path)
        return refusal(path.parent)

    assert "row 0 of" in said(labels=[["cat"], ["dog"]])
    assert "has labels ['cat'], which are not class numbers" in said(labels=[["cat"], ["dog"]])
    assert "row 1 of" in said(labels=[[0], [None]])
    assert "has labels [0.5], which are not class numbers" in said(labels=[[0.5], [1.0]])
    assert "has no caption" in said(caption=[1, 2])
    assert said(label=pa.array([], pa.int64())).endswith("test.parquet has no rows")
    floats = pa.table({"image": [png(0), png(1)], "label": [1.0, 0.0]})  # whole floats are accepted
    pq.write_table(floats, tmp_path / "set" / "test.parquet")
    labels = open_dataset(tmp_path / "set").labels
    assert labels is not None and labels.tolist() == [1, 0]


def test_reader_is_added_by_an_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_listed(folder: Path, name: str, options: OpenOptions) -> EvalDataset:
        images = file_images(folder, sorted(folder.glob("*.png")))
        return check_dataset(
            EvalDataset(
                name=name,
                split=options.split,
                images=images,
                revision=images.fingerprint(),
                tasks=("zero-shot",),
                class_names=("cat", "dog"),
                labels=torch.tensor(list(map(int, read_lines(folder / "labels.txt")))),
            )
        )

    listed = Reader(
        recognizes=lambda place, _: isinstance(place, Path) and (place / "labels.txt").is_file(),
        open=open_listed,
    )
    monkeypatch.setattr(readers, "READERS", {"listed": listed, **readers.READERS})
    folder = fill(tmp_path / "pets", "1.png", "2.png", "3.png")
    (folder / "labels.txt").write_text("0\n1\n0\n")
    (target,) = find_targets([str(folder)])
    assert target.dataset.labels is not None and target.dataset.labels.tolist() == [0, 1, 0]
    assert target.dataset.images.read(1) == png(1)
    (folder / "labels.txt").write_text("0\n1\n2\n")
    assert "image 3.png of" in refusal(folder) and "there are 2 class names" in refusal(folder)


def test_names_of_cue_conflict_images_give_textures(tmp_path: Path) -> None:
    fill(tmp_path, "cat/cat1-cat3.png", "cat/cat4-dog2.png", "dog/dog2-cat1.png")
    found = open_dataset(tmp_path)
    assert found.labels is not None and found.labels.tolist() == [0, 0, 1]
    assert found.metadata["texture"].tolist() == [0, 1, 0]
    (tmp_path / "cat" / "cat4-dog2.png").rename(tmp_path / "cat" / "cat4.png")
    assert not open_dataset(tmp_path).metadata


def test_reassessed_labels_of_imagenet_are_read(tmp_path: Path) -> None:
    numbers = {"n01": (1, 4), "n02": (2, 3)}
    fill(tmp_path, *(f"{key}/ILSVRC2012_val_{i:08d}.JPEG" for key, own in numbers.items() for i in own))
    (tmp_path / "real.json").write_text("[[0, 1], [], [1], [1]]")
    found = open_dataset(tmp_path)
    assert found.labels is not None
    assert found.labels.tolist() == [[True, True], [False, True], [False, False], [False, True]]
    estimate = any_label_accuracy(torch.tensor([0, 0, 1, 1]), found.labels)
    assert estimate is not None and estimate.n == 3 and estimate.value == pytest.approx(2 / 3)
    for text in ("[[0], [], [1]]", "[[0], [], [7], [1]]", "[1, 2, 3, 4]", '[["a"], [], [], []]', "{"):
        (tmp_path / "real.json").write_text(text)
        assert "real.json" in refusal(tmp_path)


def test_images_beside_the_scored_split_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pets = fill(tmp_path / "pets", "test/cat/1.png", "test/dog/2.png", "train/cat/3.png", "cat/4.png")
    fill(pets, "extra/dog/5.png")
    (pets / "notes").mkdir()
    (pets / "notes" / "1.md").write_text("x")
    assert len(open_dataset(pets)) == 2
    (message,) = caplog.messages
    assert message == (
        f"dataset pets: scores the images in {pets / 'test'}, and skips those in other folders beside it: "
        "cat, extra"
    )
    caplog.clear()
    open_dataset(pets / "test")
    assert caplog.messages == []


@pytest.mark.parametrize("names", [("train_set", "test_set"), ("Train-images", "val"), ("train1", "test 1")])
def test_names_like_splits_are_refused(tmp_path: Path, names: tuple[str, str]) -> None:
    folder = fill(tmp_path / "pets", *(f"{name}/cat/1.png" for name in names))
    if names[1] == "val":
        fill(folder, "val/1.png")
        (folder / "val" / "cat" / "1.png").unlink()
        (folder / "val" / "cat").rmdir()
    assert "which are names of splits, not of classes" in refusal(folder)


def test_classes_that_begin_like_splits_are_not_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    open_dataset(fill(tmp_path / "places", "test_tube/1.png", "trainer/2.png"))
    assert caplog.messages == []


def test_test_folder_without_class_folders_is_named(tmp_path: Path) -> None:
    pets = fill(tmp_path / "pets", "train/cat/1.png", "train/dog/2.png", "test/3.png")
    assert f"no folder {pets / 'test'} with folders by class, such as {pets / 'test' / 'cat'}" in refusal(
        pets
    )
