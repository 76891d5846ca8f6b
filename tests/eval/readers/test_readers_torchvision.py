"""Tests of torchvision's datasets on synthetic files in the format of each dataset."""

import json
import pickle
import struct
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from clipkit.errors import ConfigError, DataError
from clipkit.samples import MissingSplit
from eval.datasets.dataset import EvalDataset
from eval.readers import open_dataset
from eval.readers.torchvision import TORCHVISION_SETS, open_torchvision
from tests.eval.conftest import png

pytest.importorskip("torchvision")


def pixels(data: bytes) -> np.ndarray:
    return np.array(Image.open(BytesIO(data)))


def same_as_torchvision(dataset: EvalDataset, theirs: object) -> None:
    assert dataset.labels is not None and len(dataset) == len(theirs)  # type: ignore[arg-type]
    for number in range(len(dataset)):
        image, label = theirs[number]  # type: ignore[index]
        assert int(dataset.labels[number]) == label
        np.testing.assert_array_equal(pixels(dataset.images.read(number)), np.array(image))


def write_mnist(root: Path, count: int) -> None:
    """Write random images and labels in MNIST's format."""
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
    assert test.describe_image(3) == "dataset MNIST: image 3 of torchvision:MNIST (test)"
    with pytest.raises(MissingSplit, match="has no split 'val', only train, test"):
        open_dataset("torchvision:MNIST", root=tmp_path, split="val")


def test_image_files_are_returned_unchanged(tmp_path: Path) -> None:
    from torchvision.datasets import Country211

    for split, names in (("train", "ab"), ("valid", "ab"), ("test", "ab")):
        for seed, name in enumerate(names):
            file = tmp_path / "country211" / split / name / "1.png"
            file.parent.mkdir(parents=True)
            file.write_bytes(png(seed))
    dataset = open_dataset("torchvision:Country211", root=tmp_path, split="val")
    same_as_torchvision(dataset, Country211(str(tmp_path), split="valid"))
    assert [dataset.images.read(number) for number in range(2)] == [png(0), png(1)]
    assert dataset.class_names == ("a", "b") and "valid/b/1.png" in dataset.describe_image(1)


def test_dataset_without_splits_has_only_split_all(tmp_path: Path) -> None:
    from torchvision.datasets import EuroSAT

    for seed, name in enumerate(("River", "Forest")):
        file = tmp_path / "eurosat" / "2750" / name / f"{name}_1.png"
        file.parent.mkdir(parents=True)
        file.write_bytes(png(seed))
    for split in ("test", "train", "val"):
        with pytest.raises(MissingSplit, match="EuroSAT has only the split 'all' with all images"):
            open_torchvision("EuroSAT", tmp_path, split=split)
    dataset = open_torchvision("EuroSAT", tmp_path, split="all")
    same_as_torchvision(dataset, EuroSAT(str(tmp_path)))
    assert (dataset.split, dataset.class_names) == ("all", ("Forest", "River"))


def test_arguments_select_splits_of_torchvision(tmp_path: Path) -> None:
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


def put(root: Path, name: str, content: bytes | str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def jpg(seed: int) -> bytes:
    file = BytesIO()
    Image.open(BytesIO(png(seed))).save(file, "jpeg")
    return file.getvalue()


def write_all(root: Path) -> None:
    """Write two images of each dataset with a simple format, the second class first where possible."""
    scipy = pytest.importorskip("scipy.io")
    random = np.random.default_rng(0)
    put(root, "food-101/meta/test.json", json.dumps({"pie": ["pie/1"], "bun": ["bun/2"]}))
    put(root, "fgvc-aircraft-2013b/data/variants.txt", "737\nA 380\n")
    put(root, "fgvc-aircraft-2013b/data/images_variant_test.txt", "1 A 380\n2 737\n")
    put(root, "oxford-iiit-pet/annotations/test.txt", "pug_1 2 2 1\nbengal_2 1 1 1\n")
    put(root, "gtsrb/GT-final_test.csv", "Filename;ClassId\n1.jpg;7\n2.jpg;3\n")
    put(root, "SUN397/ClassName.txt", "/a/abbey\n/b/bus/inside\n")
    for seed, name in enumerate(
        [
            "food-101/images/pie/1.jpg", "food-101/images/bun/2.jpg", "fgvc-aircraft-2013b/data/images/1.jpg",
            "fgvc-aircraft-2013b/data/images/2.jpg", "oxford-iiit-pet/images/pug_1.jpg",
            "oxford-iiit-pet/images/bengal_2.jpg", "gtsrb/GTSRB/Final_Test/Images/1.jpg",
            "gtsrb/GTSRB/Final_Test/Images/2.jpg", "SUN397/b/bus/inside/sun_1.jpg", "SUN397/a/abbey/sun_2.jpg",
            "flowers-102/jpg/image_00001.jpg", "flowers-102/jpg/image_00002.jpg",
            "rendered-sst2/test/positive/1.png", "rendered-sst2/test/negative/2.png",
            "stanford_cars/cars_test/1.jpg", "stanford_cars/cars_test/2.jpg",
            "caltech101/101_ObjectCategories/owl/image_0001.jpg",
            "caltech101/101_ObjectCategories/bee/image_0001.jpg",
            "caltech101/101_ObjectCategories/BACKGROUND_Google/image_0001.jpg",
        ]
    ):  # fmt: skip
        put(root, name, jpg(seed) if name.endswith("jpg") else png(seed))
    (root / "caltech101/Annotations").mkdir()
    (root / "stanford_cars/devkit").mkdir()
    scipy.savemat(root / "flowers-102/setid.mat", {"tstid": np.array([2, 1])})
    scipy.savemat(root / "flowers-102/imagelabels.mat", {"labels": np.array([5, 3])})
    cars = np.array([("1.jpg", 2), ("2.jpg", 1)], dtype=[("fname", "O"), ("class", "u1")])
    scipy.savemat(root / "stanford_cars/cars_test_annos_withlabels.mat", {"annotations": cars})
    scipy.savemat(
        root / "stanford_cars/devkit/cars_meta.mat", {"class_names": np.array(["a", "b"], dtype="O")}
    )
    scipy.savemat(
        root / "test_32x32.mat",
        {
            "X": random.integers(0, 256, (32, 32, 3, 2), dtype=np.uint8),
            "y": np.array([[10], [2]], dtype=np.uint8),
        },
    )
    for name in ("train", "test", "unlabeled"):
        put(
            root,
            f"stl10_binary/{name}_X.bin",
            random.integers(0, 256, 2 * 3 * 96 * 96, dtype=np.uint8).tobytes(),
        )
        put(root, f"stl10_binary/{name}_y.bin", bytes([4, 1]))
    put(root, "stl10_binary/class_names.txt", "\n".join("abcdefghij"))
    pixels_of_a_face = " ".join(map(str, random.integers(0, 256, 48 * 48)))
    put(root, "fer2013/fer2013.csv", f"emotion,pixels,Usage\n6,{pixels_of_a_face},PublicTest\n")
    data = {"data": random.integers(0, 256, (2, 3072), dtype=np.uint8)}
    put(root, "cifar-10-batches-py/test_batch", pickle.dumps({**data, "labels": [3, 1]}))
    put(root, "cifar-10-batches-py/batches.meta", pickle.dumps({"label_names": list("abcdefghij")}))


@pytest.mark.parametrize(
    ("kind", "labels"),
    [
        ("Food101", [1, 0]),
        ("FGVCAircraft", [1, 0]),
        ("OxfordIIITPet", [1, 0]),
        ("GTSRB", [7, 3]),
        ("SUN397", [0, 1]),
        ("Flowers102", [2, 4]),
        ("RenderedSST2", [0, 1]),
        ("StanfordCars", [1, 0]),
        ("Caltech101", [0, 1]),
        ("SVHN", [0, 2]),
        ("STL10", [3, 0]),
        ("FER2013", [6]),
        ("CIFAR10", [3, 1]),
    ],
)
def test_labels_and_images_equal_torchvision(
    kind: str, labels: list[int], every_set: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Labels and paths are read from undocumented attributes, which the next version may change."""
    import torchvision.datasets as theirs

    for module in (theirs.flowers102, theirs.fer2013, theirs.stl10, theirs.cifar, theirs.svhn):
        monkeypatch.setattr(module, "check_integrity", lambda *_, **__: True)
    splits = TORCHVISION_SETS[kind]
    split = "test" if "test" in splits else "all"
    ours = open_torchvision(kind, every_set, split=split)
    assert ours.labels is not None and ours.labels.tolist() == labels
    if kind == "SUN397":  # torchvision has the order of the disk
        assert [Path(ours.images.locate(number)[1]).name for number in range(2)] == ["sun_2.jpg", "sun_1.jpg"]
    else:
        same_as_torchvision(ours, getattr(theirs, kind)(str(every_set), **splits[split]))


@pytest.fixture(scope="module")
def every_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("torchvision")
    write_all(root)
    return root


def test_missing_files_and_unknown_names_raise_one_line_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'CIFAR10'"):
        open_torchvision("CIFAR", tmp_path)
    with pytest.raises(DataError, match="name the folder of torchvision's files"):
        open_dataset("torchvision:CIFAR10")
    for kind in TORCHVISION_SETS:
        splits = TORCHVISION_SETS[kind]
        with pytest.raises(DataError, match=f"torchvision's {kind} (cannot be read|needs)") as caught:
            open_torchvision(kind, tmp_path / "nothing", split=list(splits)[-1])
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "nothing").exists() or not any((tmp_path / "nothing").rglob("*.*"))
