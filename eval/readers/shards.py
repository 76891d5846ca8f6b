"""Reader of WebDataset shards with text files next to them, the layout in which most datasets are published.

CLIP_benchmark and DataComp publish such datasets, and data/shards/writer.py writes them. A sample has an image and

- a ``cls``, the number of its class;
- an ``npy``: a multi-hot label if ``dataset_type.txt`` says ``multilabel``, otherwise metadata columns;
- or captions, one per line.

Extensions: ``card.json`` may list ``"tasks"`` and states the number of samples; a sample's json may list its
captions as ``"captions"``, the first of which is in the caption file; with the dataset type
``image_caption_selection``, the first caption of an image is right and the others are wrong.

In shards without ``card.json``, ``dataset_type.txt`` and ``nshards.txt`` (crawled pairs), samples without a caption
are skipped and counted in the log. In all others, an incomplete sample is an error.

Letters in shape comments: N samples, C classes.
"""

import logging
import math
import os
import re
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clipkit.errors import DataError
from clipkit.files import counted, redact_url
from clipkit.samples import (
    IMAGE_EXTENSIONS,
    MissingSplit,
    ShardSamples,
    decode_text,
    find_image,
    find_source,
    find_split,
    join_place,
    usable_texts,
)
from clipkit.samples.remote import ShardFile, Unreachable, list_folder
from data.captions import TEXT, CaptionRule, is_utf8
from data.shards.manifest import list_members, suggest_members
from eval.datasets.dataset import (
    DEFAULT_TEMPLATES,
    TEST,
    EvalDataset,
    SampleImages,
    check_dataset,
    hash_values,
    read_json_file,
    read_lines,
    read_templates,
    read_text_file,
)
from eval.tasks import TASKS

_SET_MARKS = ("card.json", "dataset_type.txt")  # files of published datasets
_TYPES = ("classification", "multilabel", "retrieval", "image_caption_selection")
_log = logging.getLogger("eval")

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Members:
    """Where the images and captions of shards are, as ``data.image`` and ``data.captions`` of a training.

    Attributes:
        image: the member with the image; "" for the only one with an image's extension.
        captions: text members and json fields.
        optional: whether a dataset without such images, or without such captions, is read by the usual names.
    """

    image: str = ""
    captions: tuple[str, ...] = (TEXT,)
    optional: bool = False


class _SetCard(msgspec.Struct, kw_only=True):
    """What is read from ``card.json``: numbers of samples by split, and tasks."""

    samples: dict[str, int] = {}
    tasks: list[str] | None = None


def open_published(
    place: Path | str,
    samples: ShardSamples,
    name: str,
    *,
    split: str,
    metadata_names: Sequence[str],
    members: Members,
) -> EvalDataset:
    """Bind labels, captions and metadata to the samples of one split of a published dataset.

    Args:
        place: the dataset, a local folder or URL, or some of its tars. A local folder may be a single split's; then
            the files in its parent describe the dataset.
        metadata_names: names of all columns of each sample's ``npy``.
        members: where images and captions are.
    """
    is_part = names_files(place, (".tar",))
    if is_part:
        place = place.parent if isinstance(place, Path) else place.rpartition("/")[0]
    root, split_in_card = _find_description(place, split)
    card = read_json_file(join_place(root, "card.json"), _SetCard) or _SetCard()
    kind = (*read_lines(join_place(root, "dataset_type.txt")), "")[0].lower()
    if kind not in ("", *_TYPES):
        raise DataError(f"dataset {name} is of type {kind[:40]!r}; known: {', '.join(_TYPES)}")
    class_names = tuple(read_lines(join_place(root, "classnames.txt")))

    shards = _Published(name, samples, members)
    card_count = None if is_part else card.samples.get(split_in_card)
    shards.check_images(split_in_card, card_count=card_count)
    images = SampleImages(samples, samples.files, member=shards.image)
    multilabel = kind == "multilabel"
    annotations = shards.read_annotations(arrays=multilabel or bool(metadata_names))
    all_captions = annotations.captions
    if members.optional and not any(all_captions):
        all_captions = annotations.usual_captions
    revision = ""
    if all_captions != annotations.usual_captions:
        revision = hash_values(images.fingerprint(), members.captions)

    labels: Tensor | None = None
    captions: tuple[tuple[str, ...], ...] | None = None
    if multilabel:
        labels = shards.stack_labels(annotations.arrays, classes=len(class_names))
    else:
        labels = shards.stack_class_numbers(annotations.labels)
        if labels is None and not any(all_captions) and len(samples):
            raise shards.nothing_usable("a label (.cls) or a caption")
        if any(all_captions) and not all(all_captions):
            if labels is not None or _is_complete(place) or _is_complete(root):
                raise shards.fault(all_captions.index(()), "has no caption, others have one")
            captioned = [i for i, texts in enumerate(all_captions) if texts]
            skipped = len(samples) - len(captioned)
            _log.warning(
                "dataset %s: %d of %d samples have no caption and are skipped", name, skipped, len(samples)
            )
            images = images.select(captioned)
            all_captions = [all_captions[i] for i in captioned]
        if any(all_captions):
            captions = tuple(all_captions)

    tasks: tuple[str, ...] = ("zero-shot",)
    if card.tasks is not None:
        tasks = tuple(task for task in TASKS if task in card.tasks)
        if not tasks or len(tasks) != len(card.tasks):
            raise DataError(f"dataset {name}: card.json has tasks {card.tasks}; known: {', '.join(TASKS)}")
    elif kind == "image_caption_selection":
        tasks = ("compositional",)
    elif kind == "retrieval" or (labels is None and captions):
        tasks = ("retrieval",)
    broken = [i for i, texts in enumerate(all_captions) if not is_utf8("".join(texts))]
    if broken:
        shard, key = images.locate(broken[0])
        what = f"{counted(len(broken), 'sample')} with a caption that is not UTF-8"
        if captions and not all(TASKS[task].fits == "labels" for task in tasks):
            raise DataError(
                f"dataset {name}: {what}, the first is {key} of {shard}: write the captions in UTF-8"
            )
        _log.warning("dataset %s: %s: captions are ignored", name, what)
        captions = None
    choices = None
    if kind == "image_caption_selection" and captions:
        choices, captions = captions, None
    return check_dataset(
        EvalDataset(
            name=name,
            split=split,
            images=images,
            revision=revision,
            tasks=tasks,
            class_names=class_names,
            templates=read_templates(root) or DEFAULT_TEMPLATES,
            labels=labels,
            captions=captions,
            choices=choices,
            metadata=shards.stack_metadata(annotations.arrays, metadata_names),
        )
    )


def _find_description(place: Path | str, split: str) -> tuple[Path | str, str]:
    """Return the folder whose files describe a dataset, and the name of the split there."""
    if split == TEST and isinstance(place, Path) and any(place.glob("*.tar")):
        folder = place.absolute()
        marks = (*_SET_MARKS, "classnames.txt")
        if not _has_any(folder, marks) and _has_any(folder.parent, marks):
            return folder.parent, folder.name
    return place, split


def _is_complete(place: Path | str) -> bool:
    return _has_any(place, (*_SET_MARKS, "nshards.txt"))


def _has_any(place: Path | str, names: Sequence[str]) -> bool:
    return any(read_text_file(join_place(place, name)) is not None for name in names)


# --------------------------------------------------------------------------------------------------------------
# Labels, captions and arrays of all samples; no image is read.


@dataclass(frozen=True, kw_only=True)
class _Annotations:
    """By sample: ``cls``, captions, captions by the usual names, and ``npy`` if it is needed."""

    labels: list[int | None]
    captions: list[tuple[str, ...]]
    usual_captions: list[tuple[str, ...]]
    arrays: list[Array | None]


class _Published:
    """The samples of one split of a dataset."""

    def __init__(self, name: str, samples: ShardSamples, members: Members) -> None:
        self.name = name
        self.samples = samples
        self.members = members
        self.image = members.image.lower()
        if members.optional and not any(self.image in samples.members(i) for i in range(len(samples))):
            self.image = ""

    def fault(self, i: int, what: str, *, separator: str = " ") -> DataError:
        shard, key = self.samples.locate(i)
        return DataError(f"dataset {self.name}: sample {key} of {shard}{separator}{what}")

    def nothing_usable(self, what: str) -> DataError:
        shard = self.samples.open_shard(0)
        rule = CaptionRule(fields=self.members.captions)
        hint = ""
        for setting, member in suggest_members(shard, rule, self.members.image).items():
            hint = hint or ": add"
            hint += f" data.{setting}={member}" if self.members.optional else f" --{setting} {member}"
        names = list_members(shard.index.names)
        return DataError(f"dataset {self.name}: no sample has {what}; members: {names}{hint}")

    def check_images(self, split: str, *, card_count: int | None) -> None:
        """Check that each sample has one image, and that there are as many as the card states."""
        if self.samples.faults:
            raise DataError(
                f"dataset {self.name}: {self.samples.faults[0]}: neighbouring files with the same name up to the "
                "first dot are one sample"
            )
        extensions = (self.image,) if self.image else IMAGE_EXTENSIONS
        complete = 0
        for i in range(len(self.samples)):
            images = [member for member in self.samples.members(i) if member in extensions]
            if len(images) > 1:
                option = "data.image" if self.members.optional else "--image"
                raise self.fault(i, f"has several images, {', '.join(images)}: choose one with {option}")
            has_array = not self.image and bool(find_image(self.samples.members(i)))
            complete += bool(images) or has_array
        if not complete and len(self.samples):
            raise self.nothing_usable("an image")
        if complete < len(self.samples) or card_count not in (None, complete):
            expected = f", its card says {card_count}" if card_count is not None else ""
            raise DataError(
                f"dataset {self.name}: split {split!r} has {counted(complete, 'sample')} with an image and "
                f"{len(self.samples) - complete} without{expected}; fetch or write it again"
            )

    def read_annotations(self, *, arrays: bool) -> _Annotations:
        rule = CaptionRule(fields=self.members.captions)
        usual_rule = CaptionRule()
        annotations = _Annotations(labels=[], captions=[], usual_captions=[], arrays=[])
        for i in range(len(self.samples)):
            shard, row = self.samples.find(i)
            names = shard.index.members(row)
            needed = {"cls", "txt", "json", *rule.select_members(names), *usual_rule.select_members(names)}
            if arrays:
                needed.add("npy")
            try:
                members = shard.read_present(row, needed)
                fields = rule.parse(members)
                captions = _list_captions(rule, fields)
                usual = captions if rule == usual_rule else _list_captions(usual_rule, fields)
                annotations.labels.append(_parse_label(members["cls"]) if "cls" in members else None)
                annotations.captions.append(captions)
                annotations.usual_captions.append(usual)
                annotations.arrays.append(parse_npy(members["npy"]) if "npy" in members else None)
            except DataError as error:
                raise self.fault(i, str(error), separator=": ") from error
        return annotations

    def stack_class_numbers(self, numbers: Sequence[int | None]) -> Tensor | None:
        """Return labels, (N,) int64; None if no sample has one."""
        labels = [label for label in numbers if label is not None]
        if not labels:
            return None
        if len(labels) < len(numbers):
            raise self.fault(numbers.index(None), "has no label, others have one")
        return torch.tensor(labels)

    def stack_labels(self, arrays: Sequence[Array | None], *, classes: int) -> Tensor:
        """Return multi-hot labels, (N, C) bool, from (C,) zeros and ones; ``classes`` is 0 without class names."""
        width = classes or next((array.size for array in arrays if array is not None), 0)
        expected = f"labels of {width} classes"
        if classes:
            expected += ", the lines of classnames.txt with the blank ones"
        rows = np.zeros((len(arrays), width), dtype=np.bool_)
        self._fill_rows(rows, arrays, expected)
        return torch.from_numpy(rows)  # (N, C)

    def stack_metadata(self, arrays: Sequence[Array | None], names: Sequence[str]) -> dict[str, Tensor]:
        """Return the columns of each ``npy``: (N,) int64, or float64 if some value is not an integer."""
        if not names:
            return {}
        rows = np.zeros((len(arrays), len(names)))  # float64 is exact for integers up to 2^53
        self._fill_rows(rows, arrays, f"{counted(len(names), 'column')}: {', '.join(names)}")
        columns = {}
        for column, name in enumerate(names):
            values = torch.from_numpy(rows[:, column].copy())  # (N,)
            are_integers = bool((values == values.round()).all()) and bool((values.abs() < 2**53).all())
            columns[name] = values.to(torch.int64) if are_integers else values
        return columns

    def _fill_rows(self, rows: Array, arrays: Sequence[Array | None], expected: str) -> None:
        """Fill (N, W) rows with the ``npy`` of each sample, whose values must be exact in the rows' dtype."""
        for i, array in enumerate(arrays):
            if array is None:
                raise self.fault(i, f"has no npy, expected {expected}")
            if array.size != rows.shape[1]:
                raise self.fault(i, f"has {counted(array.size, 'value')} in its npy, expected {expected}")
            values = array.reshape(-1)
            rows[i] = values
            if not (rows[i] == values).all() or not np.isfinite(values).all():
                kind = "0 and 1" if rows.dtype == np.bool_ else "finite numbers"
                raise self.fault(i, f"has an npy with values other than {kind}")


def _list_captions(rule: CaptionRule, fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the lines of all texts that a rule names.

    With the usual names these are the captions that a sample's json lists if the first one is its caption.
    """
    texts = list(chain.from_iterable(rule.captions_by_field(fields)))
    captions = fields.get("captions")
    if rule.fields != (TEXT,) or not isinstance(captions, list) or captions[:1] != texts[:1]:
        captions = "\n".join(texts).split("\n")
    return tuple(usable_texts(captions))


def _parse_label(data: bytes) -> int:
    text = decode_text(data).strip()
    if not (text.isdecimal() and len(text) < 19):
        raise DataError(f"label {text[:40]!r} is not a whole number")
    return int(text)


def parse_npy(data: bytes) -> Array:
    """Return the array of numbers in an ``npy`` file; nothing is unpickled."""
    file = BytesIO(data)
    try:
        with warnings.catch_warnings(action="ignore"):
            array: Array = np.lib.format.read_array(file, allow_pickle=False)
    except Exception as error:  # numpy's parser raises many exception types
        raise DataError(f"its npy cannot be read: {' '.join(str(error).split())[:100]}") from error
    if array.dtype.kind not in "biuf":
        raise DataError(f"its npy contains {array.dtype} values; only arrays of numbers are read")
    if file.read(1):
        raise DataError(f"its npy has more bytes than the {array.size} values that its header states")
    return array


# --------------------------------------------------------------------------------------------------------------
# Where datasets are: addresses at Hugging Face, a dataset's name below a root, the shards of a split.

_HUB_HOSTS = ("huggingface.co", "hf.co")
# https://HOST/datasets/OWNER/NAME, perhaps with /tree/BRANCH and a folder, as in a browser
_HUB_PAGE = re.compile(
    r"(https?://([^/]+)/datasets/[\w.-]+/[\w.-]+)(?:/(?:tree|raw|resolve|blob)/([^/]+)(/.*?)?)?/?",
    flags=re.ASCII,
)
_PROBES = (f"{TEST}/nshards.txt", "classnames.txt", "dataset_type.txt")
_REMEMBERED = 60.0  # seconds
_unreachable: dict[str, tuple[float, str]] = {}  # by root: when it did not respond, and the message


def resolve_address(source: str) -> str:
    """Return where the files of a source are.

    For a dataset's page at Hugging Face, ``https://huggingface.co/datasets/OWNER/NAME/tree/BRANCH`` (as
    CLIP_benchmark takes it), that is ``…/resolve/BRANCH``; the default branch is ``main``. Other sources are
    returned unchanged.
    """
    hosts = {*_HUB_HOSTS, urlsplit(os.environ.get("HF_ENDPOINT", "")).netloc}
    page = _HUB_PAGE.fullmatch(source)
    if page is None or page[2] not in hosts:
        return source.rstrip("/") if source.startswith("http") else source
    return f"{page[1]}/resolve/{page[3] or 'main'}{page[4] or ''}".rstrip("/")


def find_published(root: str | Path, names: Sequence[str]) -> str | None:
    """Find a dataset below a folder of datasets by one of its names, and return it as a source to open.

    For the name ``vtab/dtd`` these folders are tried in order: ``wds_vtab-dtd``, ``wds_vtab-dtd_test`` (names of
    CLIP_benchmark and DataComp), ``vtab-dtd`` and ``vtab/dtd``; for ``sugar_crepe-swap_obj`` and ``aro-relation``
    also the files ``sugar_crepe/swap_obj.json`` (or in its ``data``) and ``aro/visual_genome_relation.json``; for
    ``flickr8k-Expert``, ``flickr8k/ExpertAnnotations.txt``. All formats are found, except in stores that do
    not list their folders.
    """
    when, message = _unreachable.get(str(root), (-math.inf, ""))
    if time.monotonic() - when < _REMEMBERED:
        raise Unreachable(message)
    try:
        for name in names:
            flat = name.replace("/", "-")
            published = flat if flat.startswith("wds_") else f"wds_{flat}"
            for candidate in dict.fromkeys((published, f"{published}_test", flat, name)):
                folder = join_place(root, candidate)
                if isinstance(folder, Path):
                    if folder.expanduser().is_dir():
                        return str(folder.expanduser())
                elif _is_dataset(resolve_address(folder)):
                    return folder
            family, _, part = flat.partition("-")
            for pattern in ("{}.json", "data/{}.json", "visual_genome_{}.json", "{}Annotations.txt"):
                file = join_place(root, family, pattern.format(part))
                if part and isinstance(file, Path) and file.expanduser().is_file():
                    return str(file.expanduser())
    except Unreachable as error:
        _unreachable[str(root)] = (time.monotonic(), str(error))
        raise
    return None


def _is_dataset(address: str) -> bool:
    """Return whether there is a dataset; a web server, which may not list folders, is asked for typical files."""
    is_web = address.startswith(("http://", "https://"))
    try:
        if is_web:
            return _has_any(address, _PROBES)
        folders = (address, f"{address}/{TEST}", f"{address}/data")
        return any(list_folder(folder, ("",)) for folder in folders)
    except Unreachable:
        raise
    except DataError as error:
        # a file that a web server lacks is no error, so the server failed: do not retry for every dataset
        if is_web:
            raise Unreachable(str(error)) from error
        # there is no such bucket, dataset or revision, or no permission to read it
        return False


def names_files(place: str | Path, suffixes: tuple[str, ...]) -> bool:
    """Return whether a place names a file or a pattern of files with these suffixes, and not a folder."""
    return str(place).partition("?")[0].endswith(suffixes) and not Path(place).is_dir()


def files_of_split(name: str, place: str | Path, split: str, suffixes: tuple[str, ...]) -> list[ShardFile]:
    """Return the files of a split of a dataset, or those that are named.

    Files whose names state no split are the test split.
    """
    stated = ""
    if names_files(place, suffixes):
        files = list(find_source(str(place), split=split).files)
    else:
        try:
            stated, files = find_split(place, split, suffixes)
        except MissingSplit as error:
            advice = "; pack with --test 0.1, or name the folder of a split" if split == TEST else ""
            raise MissingSplit(f"dataset {name}: {error}{advice}") from error
    if not stated and split != TEST:
        raise MissingSplit(
            f"dataset {name} has no split {split!r}: all of {redact_url(str(place))} is for testing"
        )
    stems = {file.name.removesuffix(".tar") for file in files}
    are_numbered = all(map(str.isdecimal, stems))  # published shards are 0.tar … N-1.tar
    if are_numbered and not names_files(place, suffixes):
        missing = set(range(len(files))) - set(map(int, stems))
        if missing:
            folder = files[0].shown.rpartition("/")[0]
            raise DataError(f"shard {min(missing)}.tar is missing in {folder}; fetch the dataset again")
    return files
