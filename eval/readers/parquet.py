"""Hugging Face's datasets, as parquet files with their images in them; no script of theirs is run.

What a set is follows from its columns:

    image, label                                  classification; class names from the schema, else the labels
    image, labels (lists)                         the same with several labels per image
    image, caption (a text or a list of them)     retrieval
    image, caption, negative_caption              one right caption and a wrong one (SugarCrepe)
    image, true_caption, false_caption            the same (ARO: relation, attribution)
    image, correct_caption, hard_text_1 …         one right caption and several wrong ones (ARO: order)
    image_0, image_1, caption_0, caption_1        Winoground
    cue, candidates, associations, and images   WinoGAViL

Letters in shape comments: N images, C classes.
"""

import hashlib
import json
import os
import re
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clipkit.errors import DataError
from clipkit.files.patterns import IMAGE_EXTENSIONS
from clipkit.files.terminal import shown
from data.remote.cache import shard_cache
from data.remote.store import ShardFile, Unreachable
from data.shards.samples import Sample
from eval.datasets.dataset import DEFAULT_TEMPLATES, TEST, EvalDataset, Images, NoSplit, some
from eval.readers.files import FileImages, beside, checked_set, how_to_pack
from eval.readers.shards import CACHE_GB, files_in, versions_of

if TYPE_CHECKING:
    import pyarrow as pa

    from data.remote.cache import ShardCache

__all__ = [
    "ASSOCIATION",
    "ParquetFiles",
    "ParquetImages",
    "has_parquet",
    "open_hugging_face",
    "open_parquet_files",
    "open_winogavil",
    "reading",
]


# --------------------------------------------------------------------------------------------------------------
# The parquet files of a dataset, as Hugging Face keeps them: which belong to a split, and their columns.
#
# Files are ``data/SPLIT-00000-of-00002.parquet``, ``SPLIT/0000.parquet``, ``SPLIT.parquet`` or the like; those
# that name no split are taken for the one that is scored, if no other file names one. Of a dataset at Hugging
# Face that has none, such as one made by a script, those are read to which the hub has converted it.

_PART = re.compile(r"(?:(.*?)[-_.])?(\d{4,5})-of-(\d{4,5})(?:[-_.][0-9a-f]+)?", flags=re.ASCII)
_NAMES = {"val": ("val", "validation", "valid", "dev"), "train": ("train",), TEST: (TEST,)}
# folders of a dataset that hold its files; the last is what the hub names those of nlphuji's retrieval sets
_INSIDE = ("", "data", "default", "TEST")
_CONVERTED = "@refs/convert/parquet"  # the branch where the hub puts what it converts
_HUB_DATASET = re.compile(r"hf://datasets/[\w.-]+/[\w.-]+", flags=re.ASCII)
_FETCHING = 2  # files at a time


@dataclass(frozen=True, kw_only=True, eq=False)
class ParquetFiles:
    """The files of one split, in order.

    Attributes:
        files: where they lie.
        groups: by file, the number of rows of each of its row groups.
        marks: by file, a hash of its footer, which changes with the sizes and places of all that is in it.
        schema: of all of them.
        cache: where copies of remote ones are kept.
    """

    files: tuple[ShardFile, ...]
    groups: tuple[tuple[int, ...], ...]
    marks: tuple[str, ...]
    schema: "pa.Schema"
    cache: "ShardCache | None"

    def __len__(self) -> int:
        return sum(map(sum, self.groups))

    def path(self, number: int) -> Path:
        """A file of this machine; whoever asks opens it at once."""
        file = self.files[number]
        return self.cache.fetch(file) if self.cache is not None else Path(file.url)

    def columns(self, *names: str) -> list[list[Any]]:
        """The values of these columns, which should be small ones, of all rows."""
        from pyarrow import parquet as pq

        found: list[list[Any]] = [[] for _ in names]
        for number, file in enumerate(self.files):
            with reading(file.shown), pq.ParquetFile(self.path(number)) as opened:
                for group in range(opened.num_row_groups):
                    table = opened.read_row_group(group, columns=list(names), use_threads=False)
                    if len(table) != self.groups[number][group]:
                        raise DataError(
                            f"{file.shown} has {len(table)} rows where its footer states another number"
                        )
                    for values, name in zip(found, names, strict=True):
                        values += table.column(name).to_pylist()
        return found


@contextmanager
def reading(shown: str) -> Iterator[None]:
    """Tell what pyarrow raises for a damaged file; some damage to a footer ends the process even so."""
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, OSError, ValueError, LookupError, MemoryError, OverflowError) as error:
        raise DataError(f"{shown} cannot be read: {' '.join(str(error).split())[:200]}") from error


def has_parquet(place: str | Path, split: str) -> bool:
    """Whether there are parquet files of a split; on this machine also where there are such of other splits."""
    if _candidates(place, split):
        return True
    return isinstance(place, Path) and any(_candidates(place, other) for other in _NAMES)


def open_parquet_files(name: str, place: Path | str, split: str, cache_gb: float) -> ParquetFiles:
    """The files of a split; remote ones are fetched now.

    Raises:
        NoSplit: there are none of this split.
        DataError: one is missing, cannot be read, or has other columns than the first; pyarrow is not there.
    """
    try:
        from pyarrow import parquet as pq
    except ImportError as error:
        raise DataError("parquet files need: pip install -e '.[eval]'") from error
    files = _of_split(name, place, split)
    cache = shard_cache([file.url for file in files], cache_gb or 1e-9)
    if cache is not None:
        cache.prefetch(files, threads=_FETCHING)
    groups, marks, schema = [], [], None
    for file in files:
        path = cache.fetch(file) if cache is not None else Path(file.url)
        with reading(f"dataset {name}: {file.shown}"):
            about = pq.read_metadata(path)
            own = about.schema.to_arrow_schema()
            groups.append(tuple(about.row_group(number).num_rows for number in range(about.num_row_groups)))
        if schema is not None and own.remove_metadata() != schema.remove_metadata():
            raise DataError(f"dataset {name}: {file.shown} has other columns than {files[0].shown}")
        schema = schema or own
        marks.append(_mark(path))
    if cache is not None:
        cache.close()  # all are here
    return ParquetFiles(files=files, groups=tuple(groups), marks=tuple(marks), schema=schema, cache=cache)


def _mark(path: Path) -> str:
    import hashlib

    with path.open("rb") as file:
        size = file.seek(-8, 2)
        length = int.from_bytes(file.read(4), "little")
        file.seek(max(0, size - length))
        return hashlib.sha256(file.read(length)).hexdigest()[:16]


def _of_split(name: str, place: Path | str, split: str) -> tuple[ShardFile, ...]:
    found = _candidates(place, split)
    by_split: dict[str, list[ShardFile]] = {}
    for own, file in found:
        by_split.setdefault(own, []).append(file)
    for wanted in (*_NAMES.get(split, (split,)), *([""] if split == TEST and set(by_split) <= {""} else [])):
        if wanted in by_split:
            files = sorted(by_split[wanted], key=lambda file: (len(file.name), file.name))
            _check_parts(name, files)
            return tuple(files)
    there = some(sorted(filter(None, by_split))) or "files that name none"
    where = shown(str(place))
    raise NoSplit(
        f"dataset {name} has no split {split!r}: {where} has {there}"
        if found
        else f"dataset {name}: no parquet file in {where}, nor in its folder data"
    )


def _check_parts(name: str, files: Sequence[ShardFile]) -> None:
    """That all parts are there which the names of the others speak of."""
    parts = [match for file in files if (match := _PART.fullmatch(_stem(file)))]
    if not parts:
        return
    stated, there = int(parts[0][3]), {int(part[2]) for part in parts}
    if len(parts) != len(files) or {int(part[3]) for part in parts} != {stated} or len(there) != len(parts):
        raise DataError(f"dataset {name}: {files[0].shown} and its neighbours are of more than one set")
    if missing := sorted(set(range(stated)) - there):
        raise DataError(
            f"dataset {name}: part {missing[0]} of {stated} is missing beside {files[0].shown}; fetch it again"
        )


def _stem(file: ShardFile) -> str:
    return file.name.removesuffix(".parquet")


def _candidates(place: str | Path, split: str) -> list[tuple[str, ShardFile]]:
    """All parquet files with the name of their split, empty where none is named."""
    found = _in_folders(place, split)
    if not found and isinstance(place, str) and _HUB_DATASET.fullmatch(place):
        try:
            return _in_folders(f"{place}{_CONVERTED}", split)
        except Unreachable:
            raise
        except DataError:  # there is no such branch
            return []
    return found


def _in_folders(place: str | Path, split: str) -> list[tuple[str, ShardFile]]:
    names = _NAMES.get(split, (split,))
    found = []
    for inside in _INSIDE:
        folder = beside(place, inside) if inside else place
        found += [(_split_of(file), file) for file in _parquet_in(folder)]
        for name in names:
            found += [(name, file) for file in _parquet_in(beside(folder, name))]
        if found:
            break  # each look is a question to the store
    return found


def _split_of(file: ShardFile) -> str:
    stem = _stem(file)
    if (part := _PART.fullmatch(stem)) is not None:
        return part[1] or ""
    known = {name for names in _NAMES.values() for name in names}
    first = re.split(r"[-_.]", stem)[0]
    return first if first in known else ""


def _parquet_in(folder: str | Path) -> list[ShardFile]:
    if isinstance(folder, Path):
        return [ShardFile.at(path) for path in sorted(folder.glob("*.parquet"))] if folder.is_dir() else []
    return sorted(
        (file for file in files_in(folder) if file.name.endswith(".parquet")), key=lambda file: file.url
    )


# --------------------------------------------------------------------------------------------------------------
# The images in columns of parquet files, a row group at a time, never all of them.
#
# Letters in shape comments: N images.

_KEPT_BYTES = 256 << 20  # of row groups that were read; the last one stays whatever its size
_MAX_GROUP_BYTES = 4 << 30
_MAX_IMAGE_BYTES = 256 << 20


class ParquetImages:
    """Random access to encoded images; reading is safe from several threads, also after a fork.

    Args:
        files: where they are.
        columns: that hold images: structs with ``bytes``, or bytes, or lists of one of these.
        cells: (N, 3) int64, of each image its row, the number of its column, and its place in the list that
            stands there, 0 where none does.

    Attributes:
        group_reads: how many row groups this process has read.
    """

    def __init__(
        self, files: ParquetFiles, columns: Sequence[str], cells: npt.NDArray[np.int64] | None = None
    ) -> None:
        if cells is None:
            rows = np.repeat(np.arange(len(files)), len(columns))
            cells = np.stack(
                [rows, np.tile(np.arange(len(columns)), len(files)), np.zeros_like(rows)], axis=1
            )
        self._files, self._columns, self._cells = files, tuple(columns), cells
        self._groups = [(file, group) for file, own in enumerate(files.groups) for group in range(len(own))]
        self._starts = [0, *accumulate(count for own in files.groups for count in own)]
        self._forget()

    def _forget(self) -> None:
        self._kept: OrderedDict[tuple[int, int], Any] = OrderedDict()  # by group and column, their values
        self._lock, self._reading = Lock(), [Lock() for _ in self._files.files]
        self._process = os.getpid()
        self.group_reads = 0

    def __getstate__(self) -> dict[str, Any]:
        left = ("_kept", "_lock", "_reading")
        return {name: value for name, value in vars(self).items() if name not in left}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()

    def __len__(self) -> int:
        return len(self._cells)

    def locate(self, number: int) -> tuple[str, str]:
        """The file, and the image's row of the dataset and column."""
        row, column, place = self._cells[number].tolist()
        file = self._groups[self._group_of(row)][0]
        inside = f"[{place}]" if place else ""
        return self._files.files[file].shown, f"row {row}, {self._columns[column]}{inside}"

    def read(self, number: int) -> Sample:
        """One image.

        Raises:
            DataError: its file cannot be read, or it has none.
        """
        row, column, place = self._cells[number].tolist()
        group = self._group_of(row)
        values = self._values(group, column)
        image = _bytes_of(values[row - self._starts[group]], place)
        file, key = self.locate(number)
        return Sample(
            id=number,
            shard=file,
            key=key,
            image=image,
            caption=None,
            label=None,
            meta={},
            caption_number=0,
        )

    def fingerprint(self) -> str:
        """16 hexadecimal digits that change with the files' sizes and layout, or with which cells are used."""
        digest = hashlib.sha256(repr((self._files.marks, self._columns)).encode())
        digest.update(np.ascontiguousarray(self._cells).tobytes())
        return digest.hexdigest()[:16]

    def stamp(self) -> str:
        """The same, which also changes when a file was written anew."""
        states = versions_of(self._files.files)
        return hashlib.sha256(repr((self.fingerprint(), states)).encode()).hexdigest()[:16]

    def _group_of(self, row: int) -> int:
        return bisect_right(self._starts, row) - 1

    def _values(self, group: int, column: int) -> Any:
        """A column of a row group, read by one thread while others that need it wait."""
        if self._process != os.getpid():  # locks may have been held while we were forked
            self._forget()
        key = (group, column)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        file, within = self._groups[group]
        with self._reading[file]:
            with self._lock:
                if key in self._kept:
                    return self._kept[key]
            values = self._read(file, within, self._columns[column])
            with self._lock:
                self._kept[key] = values
                self.group_reads += 1
                while len(self._kept) > 1 and sum(one.nbytes for one in self._kept.values()) > _KEPT_BYTES:
                    self._kept.popitem(last=False)
        return values

    def _read(self, file: int, group: int, column: str) -> Any:
        from pyarrow import parquet as pq

        shown = self._files.files[file].shown
        with reading(shown), pq.ParquetFile(self._files.path(file)) as opened:
            size = opened.metadata.row_group(group).total_byte_size
            if size > _MAX_GROUP_BYTES:
                raise DataError(f"{shown} has a row group of {size} bytes: write smaller ones")
            values = opened.read_row_group(group, columns=[column], use_threads=False).column(column)
            if len(values) != self._files.groups[file][group]:
                raise DataError(f"{shown} has {len(values)} rows where its footer states another number")
            return values


def _bytes_of(value: Any, place: int) -> bytes:
    """The image of a cell: pyarrow's scalar of bytes, of a struct with them, or of a list of either."""
    from pyarrow import types

    if not value.is_valid:
        raise DataError("there is no image")
    if types.is_list(value.type) or types.is_large_list(value.type) or types.is_fixed_size_list(value.type):
        if not 0 <= place < len(value.values):
            raise DataError(f"there are {len(value.values)} images, none is number {place}")
        value = value.values[place]
    if types.is_struct(value.type):
        names = [field.name for field in value.type]
        if "bytes" not in names or not value["bytes"].is_valid:
            raise DataError("it holds no image, only where one was: write the set with its images in it")
        value = value["bytes"]
    if not value.is_valid or not (types.is_binary(value.type) or types.is_large_binary(value.type)):
        raise DataError(f"it holds {value.type if value.is_valid else 'nothing'}, no bytes of an image")
    if value.as_buffer().size > _MAX_IMAGE_BYTES:
        raise DataError(f"an image of {value.as_buffer().size} bytes is over the limit of {_MAX_IMAGE_BYTES}")
    return bytes(value.as_py())


# --------------------------------------------------------------------------------------------------------------
# WinoGAViL: cues, each with some images of which a few belong to it (Bitton et al. 2022, arXiv 2207.12576).
#
# Every candidate of every cue stands as an image of its own, so one image stands there several times.
# ``items`` says which candidates belong together, ``captions`` has the cue, and ``metadata["association"]`` is
# 1 where an image belongs to it.

ASSOCIATION = "association"
_PICTURES = ("candidates_images", "candidate_images", "images")  # columns of lists of images
_FOLDERS = (
    "images",
    "winogavil_images",
    "winogavil_images_dir",
)  # of files NAME.jpg beside the parquet files


def open_winogavil(place: Path | str, name: str, *, split: str, files: ParquetFiles) -> EvalDataset:
    """The set in parquet files; its images in a column ``candidates_images``, or as files in a folder ``images``.

    Raises:
        DataError: a case has no association, or one that is not among its candidates; images are missing.
    """
    cells: list[tuple[int, int, int]] = []
    names: list[str] = []
    cues: list[tuple[str, ...]] = []
    right: list[int] = []
    for row, (cue, candidates, chosen) in enumerate(
        zip(*files.columns("cue", "candidates", "associations"), strict=True)
    ):
        own, belong = _texts(candidates), set(_texts(chosen))
        if not isinstance(cue, str) or not belong or not belong <= set(own) or len(set(own)) != len(own):
            raise DataError(
                f"dataset {name}: row {row} has no cue, a candidate twice, or associations that are none of its "
                "candidates"
            )
        cells += [(row, 0, number) for number in range(len(own))]
        names += own
        cues += [(cue,)] * len(own)
        right += [int(one in belong) for one in own]
    pictures = _pictures(place, name, files, np.array(cells, dtype=np.int64), names)
    return checked_set(
        EvalDataset(
            name=name,
            split=split,
            class_names=(),
            templates=DEFAULT_TEMPLATES,
            shards=pictures,
            labels=None,
            captions=tuple(cues),
            items=torch.tensor([row for row, _, _ in cells]),
            metadata={ASSOCIATION: torch.tensor(right)},
            revision=pictures.fingerprint(),
            tasks=("compositional",),
        )
    )


def _texts(value: Any) -> list[str]:
    """A list of names, which some copies of the set keep as JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return []
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


def _pictures(place: Path | str, name: str, files: ParquetFiles, cells: Any, names: Sequence[str]) -> Images:
    from pyarrow import types

    for column in _PICTURES:
        if column in files.schema.names:
            kind = files.schema.field(column).type
            if types.is_list(kind) and not types.is_string(kind.value_type):
                return ParquetImages(files, [column], cells)
    if isinstance(place, Path):
        for folder in (place / inside for inside in _FOLDERS):
            if folder.is_dir():
                return FileImages(folder, [_file(folder, name, one) for one in names])
    raise DataError(
        f"dataset {name}: it has no column candidates_images with images, and no folder images with NAME.jpg"
    )


def _file(folder: Path, name: str, candidate: str) -> Path:
    if "/" in candidate or candidate.startswith("."):
        raise DataError(f"dataset {name}: {candidate[:40]!r} is no name of an image")
    for extension in IMAGE_EXTENSIONS:
        if (file := folder / f"{candidate}.{extension}").is_file():
            return file
    raise DataError(f"dataset {name}: there is no image of {candidate[:40]!r} in {folder}")


# --------------------------------------------------------------------------------------------------------------

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

    def dataset(self, pictures: Images, tasks: tuple[str, ...], **parts: Any) -> EvalDataset:
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
        image: the column of the images, if it is not plain which it is.
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
        return one.dataset(ParquetImages(files, [image]), ("retrieval",), captions=captions)
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
        ParquetImages(one.files, [image]),
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
    """One right caption of each image, and wrong ones."""
    choices = []
    for row, own in enumerate(zip(*one.files.columns(*columns), strict=True)):
        if not all(isinstance(text, str) and text.strip() for text in own):
            raise one.fault(row, f"lacks one of {', '.join(columns)}")
        choices.append(tuple(text.strip() for text in own))
    return one.dataset(ParquetImages(one.files, [image]), ("compositional",), choices=tuple(choices))


def _winoground(one: _Set) -> EvalDataset:
    """Two images an item, each with its own caption and the other's."""
    choices = []
    for row, (first, second) in enumerate(zip(*one.files.columns("caption_0", "caption_1"), strict=True)):
        if not (isinstance(first, str) and isinstance(second, str)):
            raise one.fault(row, "lacks a caption")
        choices += [(first, second), (second, first)]
    items = torch.arange(len(one.files)).repeat_interleave(2)  # (N,)
    pictures = ParquetImages(one.files, ["image_0", "image_1"])
    return one.dataset(pictures, ("compositional",), choices=tuple(choices), items=items)
