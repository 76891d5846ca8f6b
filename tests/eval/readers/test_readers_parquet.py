"""Tests of Hugging Face's datasets as parquet files: kinds of columns, and reading by row groups."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from clipkit import CLIP
from clipkit.errors import DataError
from clipkit.samples import MissingSplit
from eval.datasets.dataset import EvalDataset
from eval.features.encoder import Encoder
from eval.readers import open_dataset
from tests.clipkit.samples.remote import servers
from tests.clipkit.samples.remote.servers import Nginx
from tests.clipkit.samples.remote.test_hub import use
from tests.eval.conftest import png

impatient = servers.impatient
nginx = servers.nginx


def image(seed: int, *, of: str = "image") -> dict[str, Any]:
    return {"bytes": f"{of} {seed}".encode(), "path": None}


def write(
    file: Path, columns: dict[str, Any], *, features: dict[str, Any] | None = None, group: int = 2
) -> Path:
    """Write a parquet file with small row groups and Hugging Face's metadata of features."""
    file.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(columns)
    if features is not None:
        about = json.dumps({"info": {"features": features}})
        table = table.replace_schema_metadata({"huggingface": about})
    pq.write_table(table, file, row_group_size=group)
    return file


def images(count: int, *, start: int = 0) -> list[dict[str, Any]]:
    return [image(seed) for seed in range(start, start + count)]


def read(dataset: EvalDataset) -> list[bytes]:
    return [dataset.images.read(number) for number in range(len(dataset))]


def refusal(source: Path | str, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        open_dataset(source, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_classification_is_read(tmp_path: Path) -> None:
    features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": ["b", "a", "c"]}}
    for number, labels in enumerate([[0, 2, 1], [1, 1]]):
        file = tmp_path / "pets/data" / f"test-{number:05d}-of-00002.parquet"
        write(file, {"image": images(len(labels), start=3 * number), "label": labels}, features=features)
    write(
        tmp_path / "pets/data/train-00000-of-00001.parquet",
        {"image": images(1), "label": [2]},
        features=features,
    )
    dataset = open_dataset(tmp_path / "pets")
    assert (dataset.name, dataset.tasks, dataset.class_names) == ("pets", ("zero-shot",), ("b", "a", "c"))
    assert dataset.labels is not None and dataset.labels.tolist() == [0, 2, 1, 1, 1]
    assert read(dataset) == [b"image %d" % seed for seed in range(5)]
    assert dataset.describe_image(4).endswith("test-00001-of-00002.parquet")
    assert "row 4, image of" in dataset.describe_image(4)
    assert len(open_dataset(tmp_path / "pets", split="train")) == 1
    with pytest.raises(MissingSplit, match=r"has no split 'val', only test, train"):
        open_dataset(tmp_path / "pets", split="val")
    revision = dataset.revision
    (tmp_path / "pets").rename(tmp_path / "moved")
    assert open_dataset(tmp_path / "moved").revision == revision
    (tmp_path / "moved/data/test-00001-of-00002.parquet").unlink()
    assert "part 1 of 2 is missing next to" in refusal(tmp_path / "moved")


@pytest.mark.parametrize("column", ["filename", "photo", "pixels.bytes"])
@pytest.mark.parametrize("plain", [True, False])
def test_column_of_bytes_with_another_name_has_the_images(tmp_path: Path, column: str, plain: bool) -> None:
    content = [image["bytes"] for image in images(3)]
    columns = {column: content if plain else images(3), "label": [0, 1, 0], "id": ["a", "b", "c"]}
    write(tmp_path / "set/test.parquet", columns)
    assert read(open_dataset(tmp_path / "set")) == content
    write(tmp_path / "set/test.parquet", {**columns, "image": ["a.jpg", "b.jpg", "c.jpg"]})  # paths
    assert read(open_dataset(tmp_path / "set")) == content
    write(tmp_path / "set/test.parquet", {**columns, "mask": content[::-1]})
    if column != "pixels.bytes":
        assert read(open_dataset(tmp_path / "set")) == content
        return
    assert "expected one with images, or several of which one is called image" in refusal(tmp_path / "set")
    write(tmp_path / "set/test.parquet", {**columns, "mask": content, "img": content})
    assert open_dataset(tmp_path / "set").images.locate(0)[1] == "row 0, img"


def test_text_and_multiple_labels_are_read_and_invalid_ones_rejected(tmp_path: Path) -> None:
    words = open_dataset(
        write(tmp_path / "words/test.parquet", {"img": images(3), "label": ["dog", "cat", "dog"]}).parent
    )
    assert words.class_names == ("cat", "dog") and words.labels is not None
    assert words.labels.tolist() == [1, 0, 1]
    listed = {"_type": "Sequence", "feature": {"_type": "ClassLabel", "names": ["x", "y", "z"]}}
    columns = {"image": images(2), "labels": [[0, 2], [1]]}
    several = open_dataset(
        write(tmp_path / "several/test.parquet", columns, features={"labels": listed}).parent
    )
    assert several.labels is not None and several.labels.tolist() == [
        [True, False, True],
        [False, True, False],
    ]
    single = {"label": {"_type": "ClassLabel", "names": ["x", "y"]}}
    beyond = write(
        tmp_path / "beyond/test.parquet", {"image": images(3), "label": [0, 1, 2]}, features=single
    )
    assert "image row 2, image of" in refusal(beyond.parent)
    assert "has label 2, but there are 2 class names" in refusal(beyond.parent)
    secret = write(tmp_path / "secret/test.parquet", {"image": images(2), "label": [0, -1]})
    assert "has label -1: labels begin at 0" in refusal(secret.parent)
    outside = {"image": images(2), "labels": [[0], [3]]}
    high = write(tmp_path / "high/test.parquet", outside, features={"labels": listed})
    assert "row 1 of" in refusal(high.parent) and "there are 3 class names" in refusal(high.parent)


def test_captions_are_read(tmp_path: Path) -> None:
    columns = {"image": images(2), "caption": [["a", " b "], ["c"]], "filename": ["1.jpg", "2.jpg"]}
    dataset = open_dataset(write(tmp_path / "flickr/TEST/0000.parquet", columns).parent)
    assert (dataset.captions, dataset.tasks) == ((("a", "b"), ("c",)), ("retrieval",))
    assert dataset.name == "TEST"
    lacking = write(tmp_path / "x/test/0.parquet", {"image": images(2), "caption": [["a"], []]})
    assert "row 1 of" in refusal(lacking.parents[1]) and "has no caption" in refusal(lacking.parents[1])


@pytest.mark.parametrize(
    "columns",
    [
        ("caption", "negative_caption"),
        ("true_caption", "false_caption"),
        ("correct_caption", "hard_text_1", "hard_text_2"),
    ],
)
def test_choices_between_captions_are_read(tmp_path: Path, columns: Sequence[str]) -> None:
    texts = {name: [f"{name} {row}" for row in range(3)] for name in columns}
    dataset = open_dataset(write(tmp_path / "x/test.parquet", {"images": images(3), **texts}).parent)
    assert dataset.choices == tuple(tuple(f"{name} {row}" for name in columns) for row in range(3))
    assert (dataset.tasks, dataset.items) == (("compositional",), None)


def test_winoground_is_read(tmp_path: Path) -> None:
    columns = {
        "id": [0, 1],
        "image_0": [image(0), image(2)],
        "image_1": [image(1), image(3)],
        "caption_0": ["a b", "c d"],
        "caption_1": ["b a", "d c"],
    }
    dataset = open_dataset(write(tmp_path / "winoground/test.parquet", columns).parent)
    assert read(dataset) == [b"image %d" % seed for seed in range(4)]
    assert dataset.choices == (("a b", "b a"), ("b a", "a b"), ("c d", "d c"), ("d c", "c d"))
    assert dataset.items is not None and dataset.items.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("kind", ["column", "files", "json"])
def test_winogavil_is_read(tmp_path: Path, kind: str) -> None:
    names = [["owl", "moon", "bed"], ["owl", "sun"]]
    chosen = [["owl", "moon"], ["sun"]]
    columns: dict[str, Any] = {"cue": ["night", "day"], "candidates": names, "associations": chosen}
    if kind == "column":
        columns["candidates_images"] = [[image(0, of=one) for one in own] for own in names]
    else:
        for one in {one for own in names for one in own}:
            (tmp_path / "w/images").mkdir(parents=True, exist_ok=True)
            (tmp_path / f"w/images/{one}.jpg").write_bytes(f"{one} 0".encode())
    if kind == "json":
        columns |= {key: [json.dumps(own) for own in columns[key]] for key in ("candidates", "associations")}
    dataset = open_dataset(write(tmp_path / "w/test.parquet", columns).parent)
    assert read(dataset) == [b"owl 0", b"moon 0", b"bed 0", b"owl 0", b"sun 0"]
    assert dataset.captions == (("night",),) * 3 + (("day",),) * 2
    assert dataset.items is not None and dataset.items.tolist() == [0, 0, 0, 1, 1]
    assert dataset.metadata["association"].tolist() == [1, 1, 0, 0, 1]
    if kind == "column":
        fewer = {**columns, "candidates_images": [[image(0, of="owl")], [image(0, of="owl")]]}
        write(tmp_path / "w/test.parquet", fewer)
        with pytest.raises(DataError, match="there are 1 images, no number 1"):
            open_dataset(tmp_path / "w").images.read(1)
    write(tmp_path / "w/test.parquet", {**columns, "associations": [["owl"], ["cat"]]})
    assert "row 1 has no cue, repeated candidates, or associations" in refusal(tmp_path / "w")


def test_invalid_files_raise_one_line_errors(tmp_path: Path) -> None:
    bad = tmp_path / "bad/test.parquet"
    write(bad, {"image": images(2), "label": [0, 1]}).write_bytes(b"PAR1" + b"\0" * 50 + b"PAR1")
    assert "test.parquet cannot be read" in refusal(bad.parent)
    odd = write(tmp_path / "odd/test.parquet", {"image": images(2), "size": [0, 1]})
    assert refusal(odd.parent) == "dataset odd: its columns are image, size; none is a label or a caption"
    two = write(tmp_path / "two/test-00000-of-00002.parquet", {"image": images(2), "label": [0, 1]})
    write(two.with_name("test-00001-of-00002.parquet"), {"image": images(2), "label": ["a", "b"]})
    assert "has other columns than" in refusal(two.parent)
    paths = write(tmp_path / "paths/test.parquet", {"image": ["1.jpg"], "label": [0]})
    assert "its columns are image, label; expected one with images" in refusal(paths.parent)
    lost = {"image": [image(0), {"bytes": None, "path": "1.jpg"}], "label": [0, 0]}
    dataset = open_dataset(write(tmp_path / "lost/test.parquet", lost).parent)
    with pytest.raises(DataError, match="it contains only the path of an image"):
        dataset.images.read(1)


def test_broken_images_are_named(tmp_path: Path, model: CLIP) -> None:
    stored = [{"bytes": png(seed) if seed % 5 else b"no image", "path": None} for seed in range(1, 12)]
    dataset = open_dataset(write(tmp_path / "x/test.parquet", {"image": stored, "label": [0] * 11}).parent)
    with pytest.raises(DataError, match=r"dataset x: image row 4, image of .*/test\.parquet: "):
        Encoder(model).images(dataset)


def test_files_and_converted_branches_are_read_from_the_hub(
    tmp_path: Path, nginx: Nginx, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("huggingface_hub")
    features = {"label": {"_type": "ClassLabel", "names": ["no", "yes"]}}
    file = write(tmp_path / "test.parquet", {"image": images(5), "label": [0, 1, 1, 0, 1]}, features=features)
    name = "data/test-00000-of-00001.parquet"
    nginx.put(f"datasets/who/pets/resolve/main/{name}", file.read_bytes())
    there = (nginx.html / "datasets/who/pets/resolve/main" / name).stat()
    etag = f"{int(there.st_mtime):x}-{there.st_size:x}"  # in nginx's format
    entry = {"type": "file", "path": name, "size": there.st_size, "oid": etag}
    readme = {"type": "file", "path": "README.md", "size": 3, "oid": "3" * 40}
    nginx.put("about", b'{"id": "who/pets", "_id": "1", "sha": "1", "siblings": [], "tags": []}')
    folder = {"type": "directory", "path": "data", "size": 0, "oid": "2" * 40}
    nginx.put("top", json.dumps([readme, folder]).encode())
    nginx.put("data", json.dumps([entry]).encode())
    nginx.add("""
        location /api/ { add_header X-Error-Code RepoNotFound always; return 401; }
        location /api/datasets/who/pets { default_type application/json; try_files /about =404; }
        location = /api/datasets/who/pets/tree/main { default_type application/json; try_files /top =404; }
        location = /api/datasets/who/pets/tree/main/data { default_type application/json; try_files /data =404; }
        location /api/datasets/who/pets/tree/main/ { add_header X-Error-Code EntryNotFound always; return 404; }
    """)
    use(nginx.url("").rstrip("/"), monkeypatch)
    dataset = open_dataset("hf://datasets/who/pets")
    assert (dataset.name, dataset.class_names) == ("pets", ("no", "yes"))
    assert read(dataset) == [b"image %d" % seed for seed in range(5)]
    assert dataset.describe_image(0).endswith(f"hf://datasets/who/pets/{name}")
    assert len(open_dataset("pets", root="hf://datasets/who")) == 5

    sample = {"image": images(2), "caption": [["a"], ["b"]]}
    content = write(tmp_path / "0000.parquet", sample).read_bytes()
    etag_of = nginx.html / "datasets/who/script/resolve/refs/convert/parquet/TEST/test/0000.parquet"
    nginx.put(str(etag_of.relative_to(nginx.html)), content)
    entry = {"type": "file", "path": "TEST/test/0000.parquet", "size": len(content)}
    entry["oid"] = f"{int(etag_of.stat().st_mtime):x}-{len(content):x}"
    nginx.put("converted", json.dumps([entry]).encode())
    api = "/api/datasets/who/script"
    nginx.add(f"""
        location /api/ {{ add_header X-Error-Code EntryNotFound always; return 404; }}
        location = {api} {{ default_type application/json; try_files /about =404; }}
        location = {api}/revision/main {{ default_type application/json; try_files /about =404; }}
        location = {api}/revision/refs/convert/parquet {{ default_type application/json; try_files /about =404; }}
        location = {api}/tree/main {{ default_type application/json; try_files /tree =404; }}
        location = {api}/tree/refs/convert/parquet {{ default_type application/json; try_files /root =404; }}
        location = {api}/tree/refs/convert/parquet/TEST {{
            default_type application/json; try_files /inside =404;
        }}
        location = {api}/tree/refs/convert/parquet/TEST/test {{
            default_type application/json; try_files /converted =404;
        }}
    """)
    nginx.put("tree", json.dumps([readme]).encode())
    for name, path in (("root", "TEST"), ("inside", "TEST/test")):
        nginx.put(name, json.dumps([{**folder, "path": path}]).encode())
    converted = open_dataset("hf://datasets/who/script")
    assert converted.captions == (("a",), ("b",)) and read(converted) == [b"image 0", b"image 1"]


def test_single_file_is_read(tmp_path: Path) -> None:
    file = write(tmp_path / "set.parquet", {"image": images(3), "caption": [["a", "b"], ["c"], ["d"]]})
    dataset = open_dataset(file)
    assert (dataset.name, dataset.captions) == ("set", (("a", "b"), ("c",), ("d",)))
    assert read(dataset) == [b"image 0", b"image 1", b"image 2"]
    with pytest.raises(MissingSplit, match="has no split 'train'"):
        open_dataset(file, split="train")


def test_rows_with_several_images_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "data/test-00000-of-00001.parquet"
    write(file, {"image": [[image] for image in images(5)], "label": [0, 1, 0, 1, 0]})
    assert len(open_dataset(tmp_path)) == 5
    pairs = [[image] for image in images(4)] + [images(2)]
    for values in (pairs, [[one["bytes"] for one in own] for own in pairs]):
        write(file, {"image": values, "label": [0, 1, 0, 1, 0]})
        assert refusal(tmp_path) == (
            f"{file} has several images in one row of column 'image': write one row per image"
        )


def test_text_labels_of_all_splits_are_classes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "data/train-00000-of-00001.parquet", {"image": images(3), "label": ["a", "b", "c"]})
    write(tmp_path / "data/test-00000-of-00001.parquet", {"image": images(2), "label": ["c", "a"]})
    dataset = open_dataset(tmp_path)
    assert dataset.labels is not None
    assert (dataset.class_names, dataset.labels.tolist()) == (("a", "b", "c"), [2, 0])
    assert "its images show 2 of 3 classes" in caplog.text
    assert open_dataset(tmp_path, split="train").class_names == ("a", "b", "c")


@pytest.mark.parametrize(
    ("picture", "caption"),
    [("Image", "Caption"), ("photo", "title"), ("File Path", "alt-text"), ("image", "prompt")],
)
def test_columns_have_the_names_that_pack_knows(tmp_path: Path, picture: str, caption: str) -> None:
    thumbnails = [b"x", b"y", b"z"]
    write(tmp_path / "test.parquet", {"thumb": thumbnails, picture: images(3), caption: ["a", "b", "c"]})
    dataset = open_dataset(tmp_path)
    assert (dataset.tasks, dataset.captions) == (("retrieval",), (("a",), ("b",), ("c",)))
    assert read(dataset) == [image["bytes"] for image in images(3)]


def test_splits_that_cannot_be_read_do_not_prevent_scoring(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = tmp_path / "pets/data"
    write(data / "test-00000-of-00001.parquet", {"image": images(2), "label": ["dog", "cat"]})
    write(data / "train-00000-of-00002.parquet", {"image": images(1), "label": ["owl"]})  # one of two parts
    write(data / "validation-00000-of-00001.parquet", {"image": images(2), "label": ["", "fox"]})
    assert open_dataset(tmp_path / "pets").class_names == ("cat", "dog", "fox")
    assert "only split train has" in caplog.messages[0]
    write(data / "validation-00000-of-00001.parquet", {"image": images(2)})  # without labels
    (data / "train-00000-of-00002.parquet").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    assert open_dataset(tmp_path / "pets").class_names == ("cat", "dog")


def test_captions_are_scored_if_classes_have_no_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    columns = {"image": images(3), "Label": [0, 1, 2], "text": ["a", "b", "c"]}
    write(tmp_path / "test.parquet", columns)
    dataset = open_dataset(tmp_path)
    assert dataset.tasks == ("retrieval",)
    assert dataset.labels is not None
    message = "the classes of column Label have no names, so the task is retrieval of column text"
    assert caplog.messages == [f"dataset {tmp_path.name}: {message}"]
    write(tmp_path / "test.parquet", {**columns, "text": ["a", None, "c"]})
    dataset = open_dataset(tmp_path)
    assert (dataset.tasks, dataset.captions) == (("zero-shot",), None)
    assert caplog.messages[-1].endswith("has no text: the column is not used")
    write(tmp_path / "test.parquet", {**columns, "text": [1, 2, 3]})
    assert open_dataset(tmp_path).captions is None


def test_rows_with_the_same_image_are_one_image(tmp_path: Path) -> None:
    rows = [image(seed) for seed in (0, 0, 1, 0, 1)]
    write(tmp_path / "test.parquet", {"image": rows, "caption": ["a", "b", "c", "b", "d"]})
    dataset = open_dataset(tmp_path)
    assert dataset.captions == (("a", "b"), ("c", "d"))
    assert read(dataset) == [b"image 0", b"image 1"]
    assert "row 2, image of" in dataset.describe_image(1)


def test_columns_and_captions_are_those_of_training(tmp_path: Path) -> None:
    """Of several possible columns, and of lists written as text."""
    columns: dict[str, Any] = {
        "photo": [b"other 0", b"other 1"],
        "jpg": [b"image 0", b"image 1"],
        "captions": [["other"], ["other"]],
        "text": ['["a cat", "a pet"]', "['c' 'd']"],
    }
    dataset = open_dataset(write(tmp_path / "test.parquet", columns))
    assert read(dataset) == [b"image 0", b"image 1"]
    assert dataset.captions == (("a cat", "a pet"), ("c", "d"))
