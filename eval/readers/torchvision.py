"""torchvision's own datasets, as files of encoded images where they are files, else as lossless PNG.

Each is listed with its splits and what torchvision calls them; what ImageNet calls ``val`` is what it is tested on.
Several have none: torchvision gives all their images whatever is asked for, so the split of these is ``all``, and
asking for another one is refused rather than answered with the same images.
"""

import hashlib
import importlib
import inspect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
import torch

from clipkit.errors import ConfigError, DataError, nearest
from data.shards.samples import Sample
from eval.datasets.dataset import DEFAULT_TEMPLATES, TEST, EvalDataset, Images, NoSplit, some
from eval.readers.files import FileImages, checked_set, png_of

__all__ = ["ALL", "TORCHVISION_SETS", "ArrayImages", "NotFetched", "check_known", "open_torchvision"]

ALL = "all"  # the split of a set that has no splits


class NotFetched(DataError):
    """The files of a set are not where they are looked for, or not all of them."""


Splits = Mapping[str, Mapping[str, Any]]  # our name of a split → what torchvision's class is told


def _split(**names: str) -> Splits:
    return {ours: {"split": theirs} for ours, theirs in names.items()}


_BY_TRAIN: Splits = {"train": {"train": True}, "test": {"train": False}}
_TRAIN_TEST = _split(train="train", test="test")
_TRAIN_VAL_TEST = _split(train="train", val="val", test="test")
_WHOLE: Splits = {ALL: {}}

TORCHVISION_SETS: Mapping[str, Splits] = {
    "CIFAR10": _BY_TRAIN,
    "CIFAR100": _BY_TRAIN,
    "Caltech101": _WHOLE,
    "Caltech256": _WHOLE,
    "Country211": _split(train="train", val="valid", test="test"),
    "DTD": _TRAIN_VAL_TEST,
    "EuroSAT": _WHOLE,
    "FER2013": _TRAIN_TEST,
    "FGVCAircraft": _TRAIN_VAL_TEST,
    "FashionMNIST": _BY_TRAIN,
    "Flowers102": _TRAIN_VAL_TEST,
    "Food101": _TRAIN_TEST,
    "GTSRB": _TRAIN_TEST,
    "ImageNet": _split(train="train", test="val"),  # a second name would have probes tuned on the test
    "KMNIST": _BY_TRAIN,
    "MNIST": _BY_TRAIN,
    "OxfordIIITPet": _split(train="trainval", test="test"),
    "RenderedSST2": _TRAIN_VAL_TEST,
    "STL10": _TRAIN_TEST,
    "SUN397": _WHOLE,
    "SVHN": _TRAIN_TEST,
    "StanfordCars": _TRAIN_TEST,
    "USPS": _BY_TRAIN,
}
_FILES = ("_image_files", "_images", "_samples", "samples")  # where torchvision's classes keep paths
_NOT_THERE = re.compile(
    r"not found|doesn't exist|No such file|download=True|not present", flags=re.IGNORECASE
)
_SAID = 300  # characters of what torchvision says
_LABELS = ("_labels", "targets", "labels", "y")


def open_torchvision(
    kind: str,
    root: Path,
    *,
    name: str = "",
    split: str = TEST,
    splits: Splits | None = None,
    arguments: Mapping[str, Any] | None = None,
    download: bool = False,
) -> EvalDataset:
    """One of torchvision's sets; its class names are torchvision's ``.classes``, unchanged, for cards to bind to.

    Args:
        kind: the name of the class, such as "CIFAR10".
        root: the folder in which its files lie, as torchvision takes it.
        name: of the dataset; ``kind`` if empty.
        split: "train", "val", "test", or "all" of those without splits.
        splits: what the class is told for each split, if not what ``TORCHVISION_SETS`` says; with it other classes
            than those can be opened.
        arguments: more that the class is told, such as ``{"partition": 2}`` of DTD; they win over the split's.
        download: fetch its files if they are not there.

    Raises:
        NoSplit: torchvision has no such split of it.
        DataError: its files are not there, or a library that reads them.
        ConfigError: there is no such set.
    """
    name = name or kind
    if splits is None:
        check_known(kind)
        splits = TORCHVISION_SETS[kind]
    if not hasattr(importlib.import_module("torchvision.datasets"), kind):
        raise ConfigError(f"the installed torchvision has no dataset {kind[:40]}")
    if split not in splits:
        raise NoSplit(_about_split(name, kind, split, splits))
    told = {**splits[split], **(arguments or {})}
    dataset = _made(name, kind, root, told, download)
    files, labels = _files(dataset), _labels(name, dataset)
    order = list(range(len(labels)))
    if files is not None and split == ALL:  # SUN397's are in the order in which the disk has them
        order.sort(key=lambda number: files[number])
    _check_labels(name, dataset, labels)
    pictures: Images
    if files is None:
        pictures = ArrayImages(dataset, f"torchvision:{kind}", split)
    else:
        pictures = FileImages(root, [files[number] for number in order])
    return checked_set(
        EvalDataset(
            name=name,
            split=split,
            class_names=_class_names(dataset),
            templates=DEFAULT_TEMPLATES,
            shards=pictures,
            labels=torch.tensor([labels[number] for number in order]),
            captions=None,
            revision=pictures.fingerprint(),
            tasks=("zero-shot",),
        )
    )


def check_known(kind: str) -> None:
    """Make sure that there is a set of this name, before its files are looked for.

    Raises:
        ConfigError: there is none.
    """
    if kind not in TORCHVISION_SETS:
        raise ConfigError(f"no dataset torchvision:{kind[:40]}: {nearest(kind[:40], TORCHVISION_SETS)}")


def _about_split(name: str, kind: str, split: str, splits: Splits) -> str:
    if ALL in splits:
        return (
            f"dataset {name} has no split {split!r}: torchvision's {kind} has none and gives all its images, "
            f"which is the split {ALL!r}"
        )
    return f"dataset {name} has no split {split!r}, only {some(list(splits))}"


def _made(name: str, kind: str, root: Path, told: Mapping[str, Any], download: bool) -> Any:
    made = getattr(importlib.import_module("torchvision.datasets"), kind)
    if download:
        told = {**told, "download": True}
    try:
        return made(root=str(root), **told)
    except ModuleNotFoundError as error:
        raise DataError(f"dataset {name}: torchvision's {kind} needs {error.name}: pip install it") from error
    except (RuntimeError, OSError, ValueError, TypeError, KeyError) as error:
        said = shorten(str(error), _SAID, placeholder=" …").rstrip(
            "."
        )  # between words, so that no path is cut
        fault = NotFetched if _NOT_THERE.search(said) and "pip install" not in said else DataError
        if said.startswith("Dataset not found"):
            said = "its files are not there"
        fetched = ""
        if "download" in inspect.signature(made).parameters:
            fetched = f"; torchvision.datasets.{kind}({str(root)!r}, download=True) may fetch it"
        raise fault(
            f"dataset {name}: torchvision's {kind} cannot be read in {root}: {said}{fetched}"
        ) from error


def _files(dataset: Any) -> list[Path] | None:
    """The files of its images; None for a set of arrays."""
    for attribute in _FILES:
        found = getattr(dataset, attribute, None)
        if isinstance(found, list) and found and len(found) == len(dataset):
            first = [one[0] if isinstance(one, tuple) else one for one in found]
            if all(isinstance(one, str | Path) for one in first):
                return [Path(one) for one in first]
    return None


def _labels(name: str, dataset: Any) -> list[int]:
    for attribute in _LABELS:
        found = getattr(dataset, attribute, None)
        if found is not None and len(found) == len(dataset):
            return [int(label) for label in found]
    for attribute in ("_samples", "samples"):
        found = getattr(dataset, attribute, None)
        if (
            isinstance(found, list)
            and len(found) == len(dataset)
            and all(one[1] is not None for one in found)
        ):
            return [int(one[1]) for one in found]
    raise DataError(f"dataset {name}: torchvision gives no labels for this split")


def _check_labels(name: str, dataset: Any, labels: Sequence[int]) -> None:
    """That they are those which torchvision gives with its images, of a few."""
    if not labels:
        raise DataError(f"dataset {name} has no image")
    for number in {0, len(labels) // 2, len(labels) - 1}:
        try:
            image, given = dataset[number]
            image.close()
        except (OSError, SyntaxError) as error:
            raise DataError(f"dataset {name}: image {number} does not decode: {error}") from error
        assert int(given) == labels[number], f"torchvision has changed where {name} keeps its labels"


def _class_names(dataset: Any) -> tuple[str, ...]:
    """Its keys; of ImageNet the WordNet ids, as its classes are lists of names. Some sets have none."""
    found = getattr(dataset, "wnids", None) or getattr(dataset, "classes", None) or ()
    return tuple(map(str, found))


class ArrayImages:
    """Images that torchvision has in memory or unpacks itself, as lossless PNG.

    Args:
        dataset: torchvision's.
        shown: its name in messages.
        split: of it.
    """

    def __init__(self, dataset: Any, shown: str, split: str) -> None:
        self._dataset, self._shown, self._split = dataset, shown, split

    def __len__(self) -> int:
        return len(self._dataset)

    def locate(self, number: int) -> tuple[str, str]:
        """The set, and the image's number in its split."""
        return f"{self._shown} ({self._split})", str(number)

    def read(self, number: int) -> Sample:
        """One image.

        Raises:
            DataError: it does not decode.
        """
        shard, key = self.locate(number)
        try:
            with self._dataset[number][0] as picture:
                image = png_of(picture)
        except (OSError, SyntaxError, ValueError) as error:
            raise DataError(f"it does not decode: {' '.join(str(error).split())[:200]}") from error
        return Sample(
            id=number,
            shard=shard,
            key=key,
            image=image,
            caption=None,
            label=None,
            meta={},
            caption_number=0,
        )

    def stamp(self) -> str:
        """The fingerprint, which is of what the images hold."""
        return self.fingerprint()

    def fingerprint(self) -> str:
        """16 hexadecimal digits of all pixels where there is an array of them; else of some images."""
        digest = hashlib.sha256(f"{len(self)}".encode())
        data = getattr(self._dataset, "data", None)
        if data is not None:
            digest.update(np.ascontiguousarray(data).data)
        else:
            step = max(1, len(self) // 100)
            for number in range(0, len(self), step):
                digest.update(self.read(number).image)
        return digest.hexdigest()[:16]
