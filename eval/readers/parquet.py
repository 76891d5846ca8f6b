"""Reader of Hugging Face's datasets: parquet files with embedded images; dataset scripts are never run.

The columns decide what the dataset is:

    image, label                                  classification; class names from the schema, else the labels
    image, labels (lists)                         multi-label classification
    image, caption (text or list)                 retrieval; rows with the same image are one image
    image, caption, negative_caption              a right and a wrong caption (SugarCrepe)
    image, true_caption, false_caption            the same (ARO: relation, attribution)
    image, correct_caption, hard_text_1 …         a right caption and several wrong ones (ARO: order)
    image_0, image_1, caption_0, caption_1        Winoground
    cue, candidates, associations, and images     WinoGAViL

Letters in shape comments: N images, C classes.
"""

import json
import logging
import re
from collections.abc import Sequence
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clipkit.errors import DataError
from clipkit.samples import (
    CAPTION_COLUMNS,
    IMAGE_COLUMNS,
    IMAGE_EXTENSIONS,
    SPLIT_NAMES,
    MissingSplit,
    ParquetSamples,
    digest_key,
    find_column,
    join_place,
    parse_captions,
    plain_name,
    usable_texts,
)
from eval.datasets.dataset import EvalDataset, SampleImages, check_dataset, file_images, make_multi_hot
from eval.readers.shards import files_of_split

if TYPE_CHECKING:
    import pyarrow as pa

_log = logging.getLogger("eval")
ASSOCIATION = "association"  # metadata of WinoGAViL: 1 where an image belongs to the cue

# columns of special datasets
_WINOGROUND = ("image_0", "image_1", "caption_0", "caption_1")
_WINOGAVIL = ("cue", "candidates", "associations")
_WINOGAVIL_IMAGES = ("candidates_images", "candidate_images", "images")  # columns of lists of images
_WINOGAVIL_FOLDERS = ("images", "winogavil_images", "winogavil_images_dir")  # of files NAME.jpg
_RIGHT_AND_WRONG = (
    ("true_caption", re.compile(r"false_caption")),
    ("correct_caption", re.compile(r"hard_text_\d+")),
    ("caption", re.compile(r"negative_caption")),
)
# common column names, compared in the form of ``plain_name``
_LABEL = ("label", "labels", "fine_label", "cls", "class")

PARQUET_SUFFIXES = (".parquet", ".pq")
_MAX_LABEL = 10**7  # larger numbers are not labels
_MAX_CELLS = 10**10  # of a multi-hot label


def open_hugging_face(place: Path | str, files: ParquetSamples, name: str, *, split: str) -> EvalDataset:
    """Bind the columns of one split of a dataset in parquet files.

    Args:
        place: a file, or the folder, local or in a store; ``hf://datasets/OWNER/NAME`` at Hugging Face.
    """
    if not len(files):
        raise DataError(f"dataset {name}: {files.files[0].shown} has no rows")
    table = _Table(files, name, split)
    columns = set(files.schema.names)
    if columns >= set(_WINOGROUND):  # two images per item, each with its own caption and the other's
        choices: list[tuple[str, ...]] = []
        for row, (first, second) in enumerate(zip(*files.columns("caption_0", "caption_1"), strict=True)):
            if not (isinstance(first, str) and isinstance(second, str)):
                raise table.fault(row, "lacks a caption")
            choices += [(first, second), (second, first)]
        items = torch.arange(len(files)).repeat_interleave(2)  # (N,)
        cells = list(product(range(len(files)), ("image_0", "image_1")))
        images = SampleImages(files, files.files, cells=cells)
        return table.dataset(images, "compositional", choices=tuple(choices), items=items)
    if columns >= set(_WINOGAVIL):
        return _winogavil(table, place)
    image = table.find_image_column()
    if not image:
        raise DataError(
            f"dataset {name}: its columns are {_listed(files.schema.names)}; expected one with images, or several "
            "of which one is called image (name a table of paths itself, not its folder)"
        )
    files.check_one_image_per_row(image)
    images = SampleImages(files, files.files, member=image)
    for right, pattern in _RIGHT_AND_WRONG:
        wrong = sorted(filter(pattern.fullmatch, columns))
        if right in columns and wrong:
            choices = []
            for row, texts in enumerate(zip(*files.columns(right, *wrong), strict=True)):
                options = usable_texts(list(texts))
                if len(options) < len(texts):
                    raise table.fault(row, f"lacks one of {', '.join((right, *wrong))}")
                choices.append(tuple(options))
            return table.dataset(images, "compositional", choices=tuple(choices))
    label = table.find_label_column()
    others = [name for name in files.schema.names if plain_name(name) not in _LABEL and name != label]
    caption = find_column(CAPTION_COLUMNS, others)
    if label and not _is_text(files.schema, caption):
        caption = ""
    if label:
        labels, names = _read_labels(table, label, place)
        captions = None
        task = "zero-shot"
        if caption and labels.ndim == 1:
            try:
                captions = table.captions(caption)
            except DataError as error:  # the column may be a description of some images
                _log.warning("%s: the column is not used", error)
            if captions and not names:
                _log.warning(
                    "dataset %s: the classes of column %s have no names, so the task is retrieval of column %s",
                    name,
                    label,
                    caption,
                )
                task = "retrieval"
        return table.dataset(images, task, class_names=names, labels=labels, captions=captions)
    if caption:
        captions = table.captions(caption)
        if str(files.schema.field(caption).type) in ("string", "large_string"):
            images, captions = _group_rows(table, images, captions)
        return table.dataset(images, "retrieval", captions=captions)
    raise DataError(
        f"dataset {name}: its columns are {_listed(files.schema.names)}; none is a label or a caption"
    )


def _group_rows(
    table: "_Table", images: SampleImages, captions: Sequence[tuple[str, ...]]
) -> tuple[SampleImages, tuple[tuple[str, ...], ...]]:
    """Make one image of the rows with the same encoded image, with the captions of all, as of tables."""
    first_rows: dict[bytes, int] = {}
    groups: dict[bytes, dict[str, None]] = {}
    for row, texts in enumerate(captions):
        try:
            key = digest_key(images.read(row))
        except DataError as error:
            raise table.fault(row, f"has a bad image: {error}") from error
        first_rows.setdefault(key, row)
        groups.setdefault(key, {}).update(dict.fromkeys(texts))
    if len(groups) < len(images):
        images = images.select(list(first_rows.values()))
    return images, tuple(map(tuple, groups.values()))


def _is_text(schema: "pa.Schema", column: str) -> bool:
    return column in schema.names and "string" in str(schema.field(column).type)


class _Table:
    """The rows of one split, and what the schema's own metadata says about columns."""

    def __init__(self, files: ParquetSamples, name: str, split: str) -> None:
        self.files = files
        self.name = name
        self.split = split
        self._features: dict[str, Any] = {}
        try:
            about = json.loads((files.schema.metadata or {}).get(b"huggingface", b"{}"))
            features = about["info"]["features"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return
        if isinstance(features, dict):
            self._features = features

    def dataset(self, images: SampleImages, task: str, **parts: Any) -> EvalDataset:
        return check_dataset(
            EvalDataset(name=self.name, split=self.split, images=images, tasks=(task,), **parts)
        )

    def fault(self, row: int, what: str) -> DataError:
        folder = self.files.files[0].shown.rpartition("/")[0]
        return DataError(f"dataset {self.name}: row {row} of {folder} {what}")

    def feature(self, column: str) -> dict[str, Any]:
        """Return what the schema says about a column, or about the items of its lists."""
        feature = self._features.get(column)
        if isinstance(feature, list) and feature:
            feature = feature[0]
        if not isinstance(feature, dict):
            return {}
        inner = feature.get("feature")
        return inner if isinstance(inner, dict) else feature

    def find_label_column(self) -> str:
        """Return the only column of labels by the schema, or the one with the most usual name, or ""."""
        names: list[str] = self.files.schema.names
        typed = self._select_columns(names, "ClassLabel")
        return typed[0] if len(typed) == 1 else find_column(_LABEL, typed or names)

    def find_image_column(self) -> str:
        """Return the column of images by the schema or a usual name, or the only column of bytes, or ""."""
        encoded = self.files.members(0)
        names = self._select_columns(encoded, "Image") or encoded
        return names[0] if len(names) == 1 else find_column(IMAGE_COLUMNS, names)

    def _select_columns(self, names: Sequence[str], kind: str) -> list[str]:
        return [name for name in names if self.feature(name).get("_type") == kind]

    def captions(self, column: str) -> tuple[tuple[str, ...], ...]:
        captions = []
        for row, value in enumerate(self.files.columns(column)[0]):
            texts = tuple(parse_captions(value))
            if not texts:
                raise self.fault(row, f"has no {column}")
            captions.append(texts)
        return tuple(captions)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(name[:40] for name in names[:20])


def _texts_in_splits(table: _Table, column: str, place: Path | str) -> set[str]:
    """Return the different texts of a column in all splits; splits in a store are not fetched for this."""
    texts = set(table.files.columns(column)[0])
    unread: list[str] = []
    for split in SPLIT_NAMES:
        if split == table.split:
            continue
        if not isinstance(place, Path):
            unread.append(split)
            continue
        try:
            files = ParquetSamples(files_of_split(table.name, place, split, PARQUET_SUFFIXES))
            if column in files.schema.names:
                texts.update(text for text in files.columns(column)[0] if isinstance(text, str) and text)
        except MissingSplit:
            continue
        except DataError:
            unread.append(split)
    if unread:
        _log.warning(
            "dataset %s: classes are the texts in column %s; those that only split %s has are no possible answers",
            table.name,
            column,
            " or ".join(unread),
        )
    return texts


def _read_labels(table: _Table, column: str, place: Path | str) -> tuple[Tensor, tuple[str, ...]]:
    """Return labels, (N,) int64 or (N, C) bool, and class names: the schema's, else the sorted labels."""
    (values,) = table.files.columns(column)
    names: tuple[str, ...] = ()
    listed = table.feature(column).get("names")
    if isinstance(listed, list):
        names = tuple(map(str, listed))
    if None in values:
        raise table.fault(values.index(None), f"has no {column}")
    multilabel = isinstance(values[0], list)
    numbers: dict[str, int] = {}
    if isinstance(values[0], str):
        names = names or tuple(sorted(_texts_in_splits(table, column, place)))
        numbers = {name: i for i, name in enumerate(names)}
    rows: list[list[int]] = []
    for row, value in enumerate(values):
        labels: list[int] = []
        for label in value if multilabel else [value]:
            if numbers:
                label = numbers.get(label, "")
            if isinstance(label, float) and label.is_integer():  # a column with gaps may be stored as floats
                label = int(label)
            if not isinstance(label, int) or abs(label) > _MAX_LABEL:
                what = (
                    "which are not class numbers" if multilabel else "which is not a class number, 0 or more"
                )
                raise table.fault(row, f"has {column} {repr(value)[:40]}, {what}")
            labels.append(int(label))
        rows.append(labels)
    if not multilabel:
        return torch.tensor(rows).flatten(), names
    classes = len(names) or 1 + max(chain.from_iterable(rows), default=0)
    if len(rows) * classes > _MAX_CELLS:
        raise table.fault(0, f"and others have labels up to {classes - 1}: {column} is not a list of classes")
    for row, labels in enumerate(rows):
        if labels and not 0 <= min(labels) <= max(labels) < classes:
            raise table.fault(row, f"has the labels {labels[:20]}, but there are {classes} class names")
    return make_multi_hot(rows, classes), names  # (N, C)


def _winogavil(table: _Table, place: Path | str) -> EvalDataset:
    """Open WinoGAViL: cues with candidate images, of which a few belong to the cue (Bitton et al. 2022,
    2207.12576).

    Every candidate of every cue is an image, so an image may occur several times. ``items`` is the cue's number and
    ``captions`` the cue.
    """
    cells: list[tuple[int, int]] = []
    names: list[str] = []
    cues: list[tuple[str, ...]] = []
    associated: list[int] = []
    columns = table.files.columns(*_WINOGAVIL)
    for row, (cue, candidates, associations) in enumerate(zip(*columns, strict=True)):
        images = _parse_names(candidates)
        chosen = set(_parse_names(associations))
        distinct = set(images)
        if not isinstance(cue, str) or not chosen or not chosen <= distinct or len(distinct) < len(images):
            raise DataError(
                f"dataset {table.name}: row {row} has no cue, repeated candidates, or associations that are not "
                "candidates"
            )
        for i, name in enumerate(images):
            cells.append((row, i))
            names.append(name)
            cues.append((cue,))
            associated.append(int(name in chosen))
    return table.dataset(
        _candidate_images(table, place, cells, names),
        "compositional",
        captions=tuple(cues),
        items=torch.tensor([row for row, _ in cells]),
        metadata={ASSOCIATION: torch.tensor(associated)},
    )


def _candidate_images(
    table: _Table, place: Path | str, cells: Sequence[tuple[int, int]], names: Sequence[str]
) -> SampleImages:
    """Return WinoGAViL's images: in a column of lists, or files in a folder next to the Parquet files."""
    from pyarrow import types

    files = table.files
    for column in _WINOGAVIL_IMAGES:
        if column not in files.schema.names:
            continue
        kind = files.schema.field(column).type
        if types.is_list(kind) and not types.is_string(kind.value_type):
            return SampleImages(files, files.files, cells=[(row, f"{column}[{i}]") for row, i in cells])
    for inside in _WINOGAVIL_FOLDERS:
        folder = join_place(place, inside)
        if not isinstance(folder, Path) or not folder.is_dir():
            continue
        paths = []
        for name in names:
            files_of_name = (folder / f"{name}.{extension}" for extension in IMAGE_EXTENSIONS)
            path = next(filter(Path.is_file, files_of_name), None)
            if path is None or "/" in name or name.startswith("."):
                raise DataError(f"dataset {table.name}: no image of {name[:40]!r} in {folder}")
            paths.append(path)
        return file_images(folder, paths)
    raise DataError(
        f"dataset {table.name}: neither a column candidates_images with images nor a folder images with NAME.jpg"
    )


def _parse_names(value: Any) -> list[str]:
    # some copies of WinoGAViL store lists as JSON
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return []
    if not isinstance(value, list):
        return []
    return [name for name in value if isinstance(name, str)]
