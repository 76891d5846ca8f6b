"""torchvision's own datasets, of made files in the form that each reads."""

import struct
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from clipkit.errors import ConfigError, DataError
from eval.dataset import EvalDataset, NoSplit
from eval.readers import open_dataset
from eval.readers.torchvision_sets import TORCHVISION_SETS, open_torchvision
from tests.eval.conftest import png

pytest.importorskip("torchvision")


def pixels(data: bytes) -> np.ndarray:
    return np.array(Image.open(BytesIO(data)))


def same_as_torchvision(dataset: EvalDataset, theirs: object) -> None:
    assert dataset.labels is not None and len(dataset) == len(theirs)  # type: ignore[arg-type]
    for number in range(len(dataset)):
        image, label = theirs[number]  # type: ignore[index]
        assert int(dataset.labels[number]) == label
        np.testing.assert_array_equal(pixels(dataset.shards.read(number).image), np.array(image))


def write_mnist(root: Path, count: int) -> None:
    """Files of pixels and labels, as MNIST has them."""
    folder = root / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for split, seed in (("train", 0), ("t10k", 1)):
        random = np.random.default_rng(seed)
        images = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        head = struct.pack(">IIII", 0x803, count, 28, 28)
        (folder / f"{split}-images-idx3-ubyte").write_bytes(head + images.tobytes())
        labels = random.integers(0, 10, count, dtype=np.uint8)
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(
            struct.pack(">II", 0x801, count) + labels.tobytes()
        )


def test_arrays_become_lossless_png(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from torchvision.datasets import MNIST

    write_mnist(tmp_path, 6)
    test, train = (
        open_dataset("torchvision:MNIST", root=tmp_path, split=split) for split in ("test", "train")
    )
    same_as_torchvision(test, MNIST(str(tmp_path), train=False))
    same_as_torchvision(train, MNIST(str(tmp_path), train=True))
    assert (test.name, test.split, test.class_names[:2]) == ("MNIST", "test", ("0 - zero", "1 - one"))
    assert test.revision != train.revision
    assert test.where(3) == "dataset MNIST: picture 3 of torchvision:MNIST (test)"
    with pytest.raises(NoSplit, match="has no split 'val', only train, test"):
        open_dataset("torchvision:MNIST", root=tmp_path, split="val")


def test_files_are_given_as_they_are(tmp_path: Path) -> None:
    from torchvision.datasets import Country211

    for split, names in (("train", "ab"), ("valid", "ab"), ("test", "ab")):
        for seed, name in enumerate(names):
            file = tmp_path / "country211" / split / name / "1.png"
            file.parent.mkdir(parents=True)
            file.write_bytes(png(seed))
    dataset = open_dataset("torchvision:Country211", root=tmp_path, split="val")
    same_as_torchvision(dataset, Country211(str(tmp_path), split="valid"))
    assert [dataset.shards.read(number).image for number in range(2)] == [png(0), png(1)]
    assert dataset.class_names == ("a", "b") and "valid/b/1.png" in dataset.where(1)


def test_a_set_without_splits_says_so(tmp_path: Path) -> None:
    from torchvision.datasets import EuroSAT

    for seed, name in enumerate(("River", "Forest")):
        file = tmp_path / "eurosat" / "2750" / name / f"{name}_1.png"
        file.parent.mkdir(parents=True)
        file.write_bytes(png(seed))
    for split in ("test", "train", "val"):
        with pytest.raises(
            NoSplit, match="EuroSAT has none and gives all its pictures, which is the split 'all'"
        ):
            open_torchvision("EuroSAT", tmp_path, split=split)
    dataset = open_torchvision("EuroSAT", tmp_path, split="all")
    same_as_torchvision(dataset, EuroSAT(str(tmp_path)))
    assert (dataset.split, dataset.class_names) == ("all", ("Forest", "River"))


def test_arguments_of_a_card(tmp_path: Path) -> None:
    from torchvision.datasets import DTD

    root = tmp_path / "dtd" / "dtd"
    for seed in range(4):
        file = root / "images" / f"kind{seed % 2}" / f"{seed}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(png(seed))
    (root / "labels").mkdir()
    (root / "labels/test1.txt").write_text("kind0/0.png\nkind1/1.png\n")
    (root / "labels/test2.txt").write_text("kind1/3.png\nkind0/2.png\n")
    for partition in (1, 2):
        ours = open_torchvision("DTD", tmp_path, arguments={"partition": partition})
        same_as_torchvision(ours, DTD(str(tmp_path), split="test", partition=partition))
    own = {"val": {"split": "test", "partition": 2}}
    same_as_torchvision(
        open_torchvision("DTD", tmp_path, split="val", splits=own), DTD(str(tmp_path), "test", 2)
    )
    with pytest.raises(NoSplit, match="has no split 'test', only val"):
        open_torchvision("DTD", tmp_path, splits=own)


def test_what_is_wrong_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'CIFAR10'"):
        open_torchvision("CIFAR", tmp_path)
    with pytest.raises(DataError, match="say in which folder torchvision's files lie"):
        open_dataset("torchvision:CIFAR10")
    for kind in TORCHVISION_SETS:
        splits = TORCHVISION_SETS[kind]
        with pytest.raises(DataError, match=f"torchvision's {kind} (cannot be read|needs)") as caught:
            open_torchvision(kind, tmp_path / "nothing", split=list(splits)[-1])
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "nothing").exists() or not any((tmp_path / "nothing").rglob("*.*"))
