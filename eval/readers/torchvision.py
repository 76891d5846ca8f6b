"""Reader of torchvision's datasets: their original image files if there are any, otherwise lossless PNG.

``TORCHVISION_SETS`` lists each dataset's splits by torchvision's arguments. ImageNet's ``val`` is the test split.
Datasets for which torchvision has no splits have the single split "all".
"""

import hashlib
import importlib
import re
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
import torch

from clipkit.errors import ConfigError, DataError, Unavailable, nearest
from clipkit.samples import MissingSplit, Samples, pillow_errors
from eval.datasets.dataset import (
    TEST,
    EvalDataset,
    SampleImages,
    check_dataset,
    encode_png,
    file_images,
    list_some,
)

ALL = "all"  # the split of a dataset without splits


Splits = Mapping[str, Mapping[str, Any]]  # by our name, arguments of torchvision's class


def _make_splits(**names: str) -> Splits:
    return {name: {"split": torchvision_name} for name, torchvision_name in names.items()}


_TRAIN_FLAG: Splits = {"train": {"train": True}, "test": {"train": False}}
_TRAIN_TEST = _make_splits(train="train", test="test")
_TRAIN_VAL_TEST = _make_splits(train="train", val="val", test="test")
_ALL_IMAGES: Splits = {ALL: {}}

TORCHVISION_SETS: Mapping[str, Splits] = {
    "CIFAR10": _TRAIN_FLAG,
    "CIFAR100": _TRAIN_FLAG,
    "Caltech101": _ALL_IMAGES,
    "Caltech256": _ALL_IMAGES,
    "Country211": _make_splits(train="train", val="valid", test="test"),
    "DTD": _TRAIN_VAL_TEST,
    "EuroSAT": _ALL_IMAGES,
    "FER2013": _TRAIN_TEST,
    "FGVCAircraft": _TRAIN_VAL_TEST,
    "FashionMNIST": _TRAIN_FLAG,
    "Flowers102": _TRAIN_VAL_TEST,
    "Food101": _TRAIN_TEST,
    "GTSRB": _TRAIN_TEST,
    "ImageNet": _make_splits(train="train", test="val"),  # torchvision's only labelled held-out split
    "KMNIST": _TRAIN_FLAG,
    "MNIST": _TRAIN_FLAG,
    "OxfordIIITPet": _make_splits(train="trainval", test="test"),
    "RenderedSST2": _TRAIN_VAL_TEST,
    "STL10": _TRAIN_TEST,
    "SUN397": _ALL_IMAGES,
    "SVHN": _TRAIN_TEST,
    "StanfordCars": _TRAIN_TEST,
    "USPS": _TRAIN_FLAG,
}
# attributes in which torchvision's classes keep paths and labels
_FILES = ("_image_files", "_images", "_samples", "samples")
_LABELS = ("_labels", "targets", "labels", "y")
_NOT_THERE = re.compile(
    r"not found|doesn't exist|No such file|download=True|not present", flags=re.IGNORECASE
)
_LONGEST = 300  # characters of torchvision's message


def open_torchvision(
    kind: str,
    root: Path,
    *,
    name: str = "",
    split: str = TEST,
    arguments: Mapping[str, Any] | None = None,
) -> EvalDataset:
    """Open one of torchvision's datasets; class names are torchvision's ``.classes``.

    Args:
        kind: the name of the class, such as "CIFAR10".
        root: the folder of its files, as torchvision takes it.
        split: "train", "val", "test", or "all" for datasets without splits.
        arguments: further arguments such as ``{"partition": 2}`` for DTD; they override the split's.
    """
    name = name or kind
    check_known(kind)
    splits = TORCHVISION_SETS[kind]
    kinds = importlib.import_module("torchvision.datasets")
    if split not in splits:
        reason = f", only {list_some(list(splits))}"
        if ALL in splits:
            reason = f": torchvision's {kind} has only the split {ALL!r} with all images"
        raise MissingSplit(f"dataset {name} has no split {split!r}{reason}")
    options = {**splits[split], **(arguments or {})}
    try:
        dataset = getattr(kinds, kind)(root=str(root), **options)
    except (ImportError, AttributeError, RuntimeError, OSError, ValueError, TypeError, KeyError) as error:
        message = shorten(str(error), _LONGEST, placeholder=" …")  # cuts between words, not in a path
        message = f"dataset {name}: torchvision's {kind} cannot be read in {root}: {message}"
        if _NOT_THERE.search(message) and "pip install" not in message:
            raise Unavailable(message, cause="missing") from error
        raise DataError(message) from error
    files = _list_files(dataset)
    labels = _list_labels(name, dataset)
    if not labels:
        raise DataError(f"dataset {name} has no image")
    for i in {0, len(labels) // 2, len(labels) - 1}:  # check that images and labels correspond
        try:
            image, label = dataset[i]
            image.close()
        except (OSError, SyntaxError) as error:
            raise DataError(f"dataset {name}: image {i} does not decode: {error}") from error
        assert int(label) == labels[i], f"torchvision has changed where {name} stores its labels"
    if files is None:
        images = SampleImages(ArraySamples(dataset, f"torchvision:{kind} ({split})"))
    else:
        if split == ALL:  # SUN397's files are in directory order
            pairs = sorted(zip(files, labels, strict=True), key=itemgetter(0))
            files = [file for file, _ in pairs]
            labels = [label for _, label in pairs]
        images = file_images(root, files)
    # ImageNet's classes are lists of names, so its WordNet ids are the keys; some datasets have no class names
    names = getattr(dataset, "wnids", None) or getattr(dataset, "classes", None) or ()
    return check_dataset(
        EvalDataset(
            name=name,
            split=split,
            images=images,
            tasks=("zero-shot",),
            class_names=tuple(map(str, names)),
            labels=torch.tensor(labels),
        )
    )


def check_known(kind: str) -> None:
    """Raise ConfigError if there is no dataset of this name."""
    if kind not in TORCHVISION_SETS:
        raise ConfigError(f"no dataset torchvision:{kind[:40]}: {nearest(kind[:40], TORCHVISION_SETS)}")


def _list_files(dataset: Any) -> list[Path] | None:
    files = []
    for entry in _list_entries(dataset, _FILES):
        file = entry[0] if isinstance(entry, tuple) else entry
        if not isinstance(file, str | Path):
            return None
        files.append(Path(file))
    return files or None


def _list_labels(name: str, dataset: Any) -> list[int]:
    labels = _list_entries(dataset, _LABELS)
    if not labels:
        labels = [entry[1] for entry in _list_entries(dataset, ("_samples", "samples"))]
    if None in labels:
        raise DataError(f"dataset {name}: torchvision has no labels for this split")
    return list(map(int, labels))


def _list_entries(dataset: Any, attributes: Sequence[str]) -> list[Any]:
    """Return the first of these attributes that has an entry for each image; [] if there is none."""
    for attribute in attributes:
        values = getattr(dataset, attribute, None)
        if values is not None and len(values) == len(dataset):
            return list(values)
    return []


class ArraySamples(Samples):
    """Images that torchvision holds in memory or unpacks itself, as lossless PNG.

    Args:
        dataset: torchvision's dataset.
        shown: its name in messages.
    """

    def __init__(self, dataset: Any, shown: str) -> None:
        self._dataset = dataset
        self._shown = shown

    def __len__(self) -> int:
        return len(self._dataset)

    def key(self, i: int) -> str:
        return str(i)

    def locate(self, i: int) -> tuple[str, str]:
        return self._shown, self.key(i)

    def members(self, i: int) -> Sequence[str]:
        return ["png"]

    def fields(self, i: int) -> dict[str, Any]:
        return {}

    def read(self, i: int, member: str) -> bytes:
        with pillow_errors(), self._dataset[i][0] as image:
            return encode_png(image)

    @property
    def content_id(self) -> str:
        """16 hexadecimal digits that depend on all pixels if they are in one array, else on 100 images."""
        digest = hashlib.sha256(f"{len(self)}".encode())
        data = getattr(self._dataset, "data", None)
        if data is not None:
            digest.update(np.ascontiguousarray(data).data)
        else:
            for i in range(0, len(self), max(1, len(self) // 100)):
                digest.update(self.read(i, ""))
        return digest.hexdigest()[:16]
