"""Hugging Face's datasets, as parquet files with their pictures in them; no script of theirs is run.

What a set is follows from its columns:

    image, label                                  classification; class names from the schema, else the labels
    image, labels (lists)                         the same with several labels a picture
    image, caption (a text or a list of them)     retrieval
    image, caption, negative_caption              one right caption and a wrong one (SugarCrepe)
    image, true_caption, false_caption            the same (ARO: relation, attribution)
    image, correct_caption, hard_text_1 …         one right caption and several wrong ones (ARO: order)
    image_0, image_1, caption_0, caption_1        Winoground
    cue, candidates, associations, and pictures   WinoGAViL

Letters in shape comments: N pictures, C classes.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from clipkit.errors import DataError
from eval.dataset import DEFAULT_TEMPLATES, TEST, EvalDataset, Pictures
from eval.readers.caption_tables import how_to_pack
from eval.readers.checks import checked_set
from eval.readers.parquet_files import ParquetFiles, open_parquet_files
from eval.readers.parquet_pictures import ParquetPictures
from eval.readers.published import CACHE_GB
from eval.readers.winogavil import open_winogavil

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["open_hugging_face"]

_WINOGROUND = ("image_0", "image_1", "caption_0", "caption_1")
_WINOGAVIL = ("cue", "candidates", "associations")
_RIGHT_AND_WRONG = (
    ("true_caption", re.compile(r"false_caption")),
    ("correct_caption", re.compile(r"hard_text_\d+")),
    ("caption", re.compile(r"negative_caption")),
)
_IMAGE = ("image", "img", "images", "picture", "jpg", "png", "webp")
_LABEL = ("label", "labels", "fine_label", "cls", "class")
_MOST_LABEL = 10**7  # no set has as many classes: what is more is a number of something else
_MOST_CELLS = 10**10  # of a multi-hot label
_CAPTION = ("caption", "captions", "text", "txt", "sentences", "raw")


@dataclass(frozen=True, kw_only=True)
class _Set:
    """One split, before it is known what it is."""

    name: str
    split: str
    files: ParquetFiles
    features: dict[str, Any]  # what the schema's own metadata says of columns

    def dataset(self, pictures: Pictures, tasks: tuple[str, ...], **parts: Any) -> EvalDataset:
        blank: dict[str, Any] = {"class_names": (), "labels": None, "captions": None}
        return checked_set(
            EvalDataset(
                name=self.name,
                split=self.split,
                templates=DEFAULT_TEMPLATES,
                shards=pictures,
                revision=pictures.fingerprint(),
                tasks=tasks,
                **(blank | parts),
            )
        )

    def fault(self, row: int, what: str) -> DataError:
        file = self.files.files[0].shown.rpartition("/")[0]
        return DataError(f"dataset {self.name}: row {row} of {file} {what}")


def open_hugging_face(
    place: Path | str,
    name: str,
    *,
    split: str = TEST,
    image: str = "",
    caption: str = "",
    cache_gb: float = CACHE_GB,
) -> EvalDataset:
    """One split of a dataset in parquet files, in a folder of this machine or a store.

    Args:
        place: the folder; ``hf://datasets/OWNER/NAME`` at Hugging Face.
        name: of the dataset.
        split: which of its splits.
        image: the column of the pictures, if it is not plain which it is.
        caption: the column of the captions, likewise.
        cache_gb: how much of remote files this machine keeps.

    Raises:
        NoSplit: it has no such split.
        DataError: a file is missing or damaged, or its columns are of no known kind.
    """
    files = open_parquet_files(name, place, split, cache_gb)
    if not len(files):
        raise DataError(f"dataset {name}: {files.files[0].shown} has no rows")
    one = _Set(name=name, split=split, files=files, features=_features(files.schema))
    columns = set(files.schema.names)
    if columns >= set(_WINOGROUND):
        return _winoground(one)
    if columns >= set(_WINOGAVIL):
        return open_winogavil(place, name, split=split, files=files)
    for column in filter(None, (image, caption)):
        if column not in columns:
            raise DataError(f"dataset {name} has no column {column!r}, only {_listed(files.schema.names)}")
    image = image or _image_column(one)
    for right, pattern in _RIGHT_AND_WRONG:
        wrong = sorted(filter(pattern.fullmatch, columns))
        if right in columns and wrong:
            return _choices(one, image, [right, *wrong])
    label, texts = _label_column(one), caption or _first(_CAPTION, columns)
    if label is not None:
        return _classification(one, image, label, texts)
    if texts is not None:
        captions = _captions(one, texts)
        return one.dataset(ParquetPictures(files, [image]), ("retrieval",), captions=captions)
    raise DataError(
        f"dataset {name}: its columns are {_listed(files.schema.names)}; none is a label or a caption"
    )


def _features(schema: "pa.Schema") -> dict[str, Any]:
    try:
        about = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = about["info"]["features"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return features if isinstance(features, dict) else {}


def _listed(names: Sequence[str]) -> str:
    return ", ".join(name[:40] for name in names[:20])


def _first(known: Sequence[str], columns: set[str]) -> str | None:
    return next((name for name in known if name in columns), None)


def _kind(one: _Set, column: str) -> str:
    """What the schema's own metadata calls a column, or the values of its lists."""
    feature = one.features.get(column)
    if isinstance(feature, list) and feature:
        feature = feature[0]
    if isinstance(feature, dict) and isinstance(feature.get("feature"), dict):
        feature = feature["feature"]
    return str(feature.get("_type", "")) if isinstance(feature, dict) else ""


def _image_column(one: _Set) -> str:
    names = one.files.schema.names
    said = [name for name in names if _kind(one, name) == "Image"]
    found = said[0] if len(said) == 1 else _first(_IMAGE, set(said or names))
    if found is None:
        table = one.files.files[0]
        packed = how_to_pack(None if table.is_remote else Path(table.url))
        raise DataError(
            f"dataset {one.name}: its columns are {_listed(names)}; none is called image (a table of "
            f"paths is packed first: {packed})"
        )
    return found


def _label_column(one: _Set) -> str | None:
    names = one.files.schema.names
    said = [name for name in names if _kind(one, name) == "ClassLabel"]
    return said[0] if len(said) == 1 else _first(_LABEL, set(said or names))


def _class_names(one: _Set, column: str) -> tuple[str, ...]:
    feature = one.features.get(column)
    if isinstance(feature, list) and feature:
        feature = feature[0]
    if isinstance(feature, dict) and isinstance(feature.get("feature"), dict):
        feature = feature["feature"]
    names = feature.get("names") if isinstance(feature, dict) else None
    return tuple(map(str, names)) if isinstance(names, list) else ()


def _classification(one: _Set, image: str, column: str, caption: str | None) -> EvalDataset:
    (values,) = one.files.columns(column)
    names = _class_names(one, column)
    if missing := [row for row, value in enumerate(values) if value is None]:
        raise one.fault(missing[0], f"has no {column}")
    if isinstance(values[0] if values else 0, str):
        names = names or tuple(sorted(set(values)))
        number = {key: i for i, key in enumerate(names)}
        if other := [row for row, value in enumerate(values) if value not in number]:
            shown = repr(values[other[0]][:40])
            raise one.fault(other[0], f"has {column} {shown}, which is none of the classes in its schema")
        values = [number[value] for value in values]
    several = isinstance(values[0] if values else 0, list)
    labels = _multi_hot(one, column, values, len(names)) if several else _numbers(one, column, values)
    if names and not several and (labels >= len(names)).any():
        row = int((labels >= len(names)).nonzero()[0])
        raise one.fault(row, f"has label {values[row]}, but its schema names {len(names)} classes")
    return one.dataset(
        ParquetPictures(one.files, [image]),
        ("zero-shot",),
        class_names=names,
        labels=labels,
        captions=None if caption is None or several else _captions(one, caption),
    )


def _numbers(one: _Set, column: str, values: Sequence[Any]) -> Tensor:
    """(N,) int64 of the values of a column; 2.0 is 2 too: some programs make floats of a column with gaps."""
    labels = [_whole(value) for value in values]
    if None in labels:
        row = labels.index(None)
        shown = repr(values[row])[:40]
        raise one.fault(row, f"has {column} {shown}, which is no number of a class, 0 or more")
    return torch.tensor(labels, dtype=torch.int64)


def _whole(value: Any) -> int | None:
    """A label as a number; None where it is none."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return int(value) if isinstance(value, int) and abs(value) <= _MOST_LABEL else None


def _multi_hot(one: _Set, column: str, values: Sequence[Sequence[Any]], classes: int) -> Tensor:
    """(N, C) bool of lists of labels."""
    numbers = [[_whole(label) for label in own] for own in values]
    if wrong := [row for row, own in enumerate(numbers) if None in own]:
        shown = repr(values[wrong[0]])[:40]
        raise one.fault(wrong[0], f"has {column} {shown}, which are no numbers of classes")
    found = [[label for label in own if label is not None] for own in numbers]
    classes = classes or 1 + max((label for own in found for label in own), default=0)
    if len(found) * classes > _MOST_CELLS:
        raise one.fault(0, f"and others have labels up to {classes - 1}: {column} is no list of classes")
    labels = np.zeros((len(found), classes), dtype=np.bool_)
    for row, own in enumerate(found):
        if any(not 0 <= label < classes for label in own):
            raise one.fault(row, f"has the labels {own[:20]}, but there are {classes} class names")
        labels[row, own] = True
    return torch.from_numpy(labels)  # (N, C)


def _captions(one: _Set, column: str) -> tuple[tuple[str, ...], ...]:
    found = []
    for row, value in enumerate(one.files.columns(column)[0]):
        listed = value if isinstance(value, list) else [value]
        own = tuple(text.strip() for text in listed if isinstance(text, str) and text.strip())
        if not own:
            raise one.fault(row, f"has no {column}")
        found.append(own)
    return tuple(found)


def _choices(one: _Set, image: str, columns: Sequence[str]) -> EvalDataset:
    """One right caption of each picture, and wrong ones."""
    choices = []
    for row, own in enumerate(zip(*one.files.columns(*columns), strict=True)):
        if not all(isinstance(text, str) and text.strip() for text in own):
            raise one.fault(row, f"lacks one of {', '.join(columns)}")
        choices.append(tuple(text.strip() for text in own))
    return one.dataset(ParquetPictures(one.files, [image]), ("compositional",), choices=tuple(choices))


def _winoground(one: _Set) -> EvalDataset:
    """Two pictures an item, each with its own caption and the other's."""
    choices = []
    for row, (first, second) in enumerate(zip(*one.files.columns("caption_0", "caption_1"), strict=True)):
        if not (isinstance(first, str) and isinstance(second, str)):
            raise one.fault(row, "lacks a caption")
        choices += [(first, second), (second, first)]
    items = torch.arange(len(one.files)).repeat_interleave(2)  # (N,)
    pictures = ParquetPictures(one.files, ["image_0", "image_1"])
    return one.dataset(pictures, ("compositional",), choices=tuple(choices), items=items)
