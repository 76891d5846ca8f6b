"""Tests of the readers of SugarCrepe's and ARO's JSON files with folders of images."""

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from clipkit.errors import DataError
from clipkit.samples import MissingSplit
from eval.readers import open_dataset
from eval.readers.benchmarks import CroppedSamples
from tests.clipkit.deep_images import tiff_of
from tests.eval.conftest import png

PAIRS = {
    "0": {"filename": "1.jpg", "caption": "a dog on a cat", "negative_caption": "a cat on a dog"},
    "7": {"filename": "1.jpg", "caption": "red", "negative_caption": "blue"},  # numbers have gaps
}
BOX = {"bbox_x": 3, "bbox_y": 5, "bbox_w": 8, "bbox_h": 4}


def write(file: Path, content: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def refusal(file: Path, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        open_dataset(file, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_sugar_crepe_is_read(tmp_path: Path) -> None:
    file = write(tmp_path / "data/swap_obj.json", PAIRS)
    assert "no folder images or val2017 next to" in refusal(file)
    (tmp_path / "val2017").mkdir()
    assert "1.jpg: No such file" in refusal(file)
    (tmp_path / "val2017/1.jpg").write_bytes(png(1))
    dataset = open_dataset(file)
    assert (dataset.name, dataset.tasks) == ("swap_obj", ("compositional",))
    assert dataset.choices == (("a dog on a cat", "a cat on a dog"), ("red", "blue"))
    assert [dataset.images.read(number) for number in range(2)] == [png(1)] * 2
    assert dataset.describe_image(1) == f"dataset swap_obj: image 1.jpg of {tmp_path / 'val2017'}"
    with pytest.raises(MissingSplit):
        open_dataset(file, split="train")


def test_images_of_aro_are_cropped_to_the_box(tmp_path: Path) -> None:
    entries = [
        {
            "image_path": "a.png",
            "true_caption": "x on y",
            "false_caption": "y on x",
            "relation_name": name,
            **BOX,
        }
        for name in ("on", "behind", "on")
    ]
    write(tmp_path / "images/a.png", "")
    (tmp_path / "images/a.png").write_bytes(png(1))
    dataset = open_dataset(write(tmp_path / "visual_genome_relation.json", entries))
    assert dataset.metadata["relation"].tolist() == [1, 0, 1]
    assert dataset.metadata["symmetric"].tolist() == [0, 0, 0]
    whole, part = (np.array(Image.open(BytesIO(one))) for one in (png(1), dataset.images.read(0)))
    np.testing.assert_array_equal(part, whole[5:9, 3:11])
    outside = open_dataset(write(tmp_path / "outside.json", [{**entries[0], "bbox_x": 4000}]))
    with pytest.raises(DataError, match=r"its box .* is outside its 24 x 21 pixels"):
        outside.images.read(0)
    (tmp_path / "images/a.png").write_bytes(b"nothing")
    with pytest.raises(DataError, match="image does not decode"):
        dataset.images.read(0)


def test_aro_is_grouped_by_relation_or_attributes(tmp_path: Path) -> None:
    entry = {"image_path": "a.png", "true_caption": "x", "false_caption": "y"}
    write(tmp_path / "images/a.png", "")
    relations = ("near", "riding on", "on", "above")
    file = write(tmp_path / "relation.json", [{**entry, "relation_name": relation} for relation in relations])
    assert open_dataset(file).metadata["symmetric"].tolist() == [1, 1, 0, 0]
    pairs = (["red", "small"], ["red", "big"], ["red", "small"])
    file = write(tmp_path / "attribution.json", [{**entry, "attributes": pair} for pair in pairs])
    metadata = open_dataset(file).metadata
    assert {name: column.tolist() for name, column in metadata.items()} == {"attribute": [1, 0, 1]}
    assert open_dataset(write(tmp_path / "order.json", [entry])).metadata == {}


def test_datasets_are_opened_by_card_name(tmp_path: Path) -> None:
    (tmp_path / "coco/val2017").mkdir(parents=True)
    (tmp_path / "coco/val2017/1.jpg").write_bytes(png(1))
    (tmp_path / "aro/images").mkdir(parents=True)
    (tmp_path / "aro/images/a.png").write_bytes(png(1))
    write(tmp_path / "sugar_crepe/data/swap_obj.json", PAIRS)
    entry = {"image_path": "a.png", "true_caption": "x", "false_caption": "y"}
    write(tmp_path / "aro/visual_genome_relation.json", [entry])
    sugar, aro = (open_dataset(name, root=tmp_path) for name in ("sugar_crepe-swap_obj", "aro-relation"))
    assert (sugar.name, len(sugar), aro.name, len(aro)) == ("sugar_crepe-swap_obj", 2, "aro-relation", 1)
    with pytest.raises(DataError, match="nor a dataset under"):
        open_dataset("sugar_crepe-add_att", root=tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not as published"),
        ("[" * 100_000, "is not as published"),
        ([], "has no entries"),
        ([1], "is not as published"),
        ([{"a": 1}], "lacks an image, a right or a wrong caption"),
        ({"0": {**PAIRS["0"], "caption": " "}}, "entry 0 of"),
        ({"0": {**PAIRS["0"], "filename": "../1.jpg"}}, "names an image outside its folder"),
        ({"0": {**PAIRS["0"], "filename": "/etc/hostname"}}, "names an image outside its folder"),
        ({"0": {**PAIRS["0"], **BOX, "bbox_x": -1}}, "Expected `int` >= 0"),
    ],
)
def test_invalid_files_raise_one_line_errors(tmp_path: Path, content: Any, said: str) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images/1.jpg").write_bytes(png(1))
    assert said in refusal(write(tmp_path / "x.json", content))


def test_box_of_a_deep_image_keeps_its_values(tmp_path: Path) -> None:
    values = np.arange(64, dtype="<u2").reshape(8, 8) * 1000
    (tmp_path / "a.tif").write_bytes(tiff_of(values))
    (tmp_path / "b.tif").write_bytes(tiff_of(values, photometric=0))
    samples = CroppedSamples(tmp_path, [tmp_path / "a.tif", tmp_path / "b.tif"], [(1, 2, 4, 3)] * 2)
    with Image.open(BytesIO(samples.read(0, ""))) as cropped:
        assert cropped.format == "PNG" and np.array_equal(np.asarray(cropped), values[2:5, 1:5])
    with pytest.raises(DataError, match="a box cannot be cropped from"):
        samples.read(1, "")
