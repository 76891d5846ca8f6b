"""The layout in which the field publishes its sets, WebDataset shards with text files beside them.

CLIP_benchmark and DataComp publish so, and data/shards/writer.py writes it: a sample has its image and a
``cls`` (the number of its class), an ``npy`` (multi-hot, where ``dataset_type.txt`` says ``multilabel``; else
facts about the image, in columns that the caller names) or captions, one a line. Additions of our own:
``card.json`` may list ``"tasks"`` and states how many samples there are; a sample's json may list its captions
as ``"captions"``, of which the caption file then holds the first; and ``dataset_type.txt`` may say
``image_caption_selection``: of an image's captions the first is right and the others are wrong.

Plain shards, as crawls leave them, say nothing of themselves: without ``card.json``, ``dataset_type.txt`` and (in a
split's own folder) ``nshards.txt``, pairs are scored without the samples that have no caption, and how many those
are is logged. Everywhere else a sample that lacks what others have is an error.
"""

import hashlib
import logging
import math
import os
import re
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clipkit.errors import DataError
from clipkit.files.patterns import IMAGE_EXTENSIONS
from clipkit.files.tar import Content, FileContent, sample_name, tar_files_of
from clipkit.files.terminal import counted
from data.captions import CaptionRule, Selection, is_utf8
from data.remote.cache import shard_cache
from data.remote.store import ShardFile, Unreachable, is_remote
from data.shards.index import CAPTION, IMAGE, LABEL, META
from data.shards.manifest import make_manifest
from data.shards.samples import Sample, Shards
from data.shards.shard import OpenShard, label_of, meta_of, text_of
from data.shards.sources import find_shards
from eval.datasets.dataset import DEFAULT_TEMPLATES, TEST, EvalDataset, Images, NoSplit, some
from eval.readers.files import beside, checked_set, folder_of_split, lines_of, read_text_file, written
from eval.readers.folders import visible_folders
from eval.results.records import parse_json
from eval.tasks import TASKS

__all__ = [
    "CACHE_GB",
    "MAX_NPY_BYTES",
    "Annotations",
    "EveryImage",
    "SomeImages",
    "address_of",
    "annotations_of",
    "array_of",
    "columns_of",
    "files_in",
    "find_published",
    "multi_hot",
    "open_published",
    "shards_of_split",
    "versions_of",
]


# --------------------------------------------------------------------------------------------------------------
# The ``.npy`` members of a sample: a multi-hot label, or facts about its image as columns.
#
# Only plain arrays of whole numbers, floats and booleans are read, and no header is believed before the bytes
# are there; nothing in them is ever unpickled.

MAX_NPY_BYTES = 4 << 20  # of one sample: half a million classes of 8 bytes
_MAX_HEADER = 10_000  # bytes
_MAX_SIDES = 8
# a Python dictionary, as numpy writes it; one of records or with other spaces is none of ours
_FORM = re.compile(
    rb"\{'descr': '([<>|=][a-zA-Z])([0-9]{0,9})', 'fortran_order': (True|False), "
    rb"'shape': \(([0-9, ]{0,99})\), \} *\n"
)
_MAGIC = b"\x93NUMPY"
_KINDS = "biuf"  # booleans, whole numbers, floats

Array = npt.NDArray[Any]


def array_of(data: bytes) -> Array:
    """The array of an ``.npy`` file of numbers, read-only.

    Raises:
        DataError: it is no such file, is of another dtype (objects, text, records), or not whole.
    """
    if data[:6] != _MAGIC or len(data) < 12 or data[6] not in (1, 2):
        raise DataError("its npy is no array of numpy")
    wide = data[6] == 2
    start = 12 if wide else 10
    length = int.from_bytes(data[8:start], "little")
    if length > _MAX_HEADER or start + length > len(data):
        raise DataError("its npy has a header of a wrong length")
    dtype, shape, in_columns = _header(data[start : start + length])
    count = math.prod(shape)
    if count * dtype.itemsize != len(data) - start - length:
        raise DataError(f"its npy states {count} values of {dtype}, its bytes are others")
    flat = np.frombuffer(data, dtype, count, start + length)
    return flat.reshape(shape, order="F" if in_columns else "C")


@lru_cache(maxsize=64)  # the samples of a dataset have the same header
def _header(header: bytes) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    match = _FORM.fullmatch(header)
    if match is None:
        raise DataError("its npy has no sound header of an array of numbers")
    kind, size, in_columns, sides = (one.decode() for one in match.groups())
    if kind[1] == "O":
        raise DataError("its npy holds objects, which could run a program; numbers are read alone")
    try:
        dtype = np.dtype(kind + size)
        shape = tuple(int(side) for side in sides.replace(" ", "").split(",") if side)
    except (TypeError, ValueError) as error:
        raise DataError("its npy has no sound header of an array of numbers") from error
    if dtype.kind not in _KINDS:
        raise DataError(f"its npy holds {dtype} values; numbers are read alone")
    if len(shape) > _MAX_SIDES:
        raise DataError(f"its npy has {len(shape)} dimensions")
    return dtype, shape, in_columns == "True"


# --------------------------------------------------------------------------------------------------------------
# What lies beside each image of shards: label, captions, and the numbers of its ``.npy``; no image is read.
#
# Letters in shape comments: N samples, C classes, K columns.

Captions = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Annotations:
    """By sample, in the order of the shards.

    Attributes:
        labels: of its ``cls``.
        captions: those that its json lists, else the lines of its caption.
        arrays: of its ``npy``; none of any where they were not asked for.
        not_utf8: the samples with a caption that is not UTF-8, as messages name them.
    """

    labels: list[int | None]
    captions: list[tuple[str, ...]]
    arrays: list[Array | None]
    not_utf8: list[str]


def annotations_of(name: str, shards: Shards, *, arrays: bool) -> Annotations:
    """Read what lies beside the images of dataset ``name``.

    Raises:
        DataError: a shard or a member cannot be read; a label is no number.
    """
    found = Annotations(labels=[], captions=[], arrays=[], not_utf8=[])
    for number in range(len(shards.counts)):
        file = shards.manifest.shard(number)
        opened = OpenShard(file, shards.selection, shards.cache)
        _check_single(name, opened)
        for within in range(len(opened)):
            row = opened.row(within)
            try:
                caption, label, meta = opened.read(row, (CAPTION, LABEL, META))
                found.labels.append(label_of(label))
                found.captions.append(_captions(text_of(caption), meta))
                if not all(map(is_utf8, found.captions[-1])):
                    found.not_utf8.append(f"{opened.index.key(row)} of {opened.shown}")
            except DataError as error:
                key = opened.index.key(row)
                raise DataError(f"dataset {name}: sample {key} of {opened.shown}: {error}") from error
        found.arrays.extend(_arrays(name, opened, file, shards) if arrays else [None] * len(opened))
    return found


def _check_single(name: str, opened: OpenShard) -> None:
    """Of two images or labels that share a name, one would not count."""
    index = opened.index
    for what, column, extensions in (("images", IMAGE, IMAGE_EXTENSIONS), ("labels", LABEL, ("cls",))):
        there, samples = (
            sum(index.extensions.get(one, 0) for one in extensions),
            int(index.has()[:, column].sum()),
        )
        if there > samples:
            raise DataError(
                f"dataset {name}: {opened.shown} has {there:,} {what} in {counted(samples, 'sample')}: what is "
                "called alike up to the first dot, and stands together, is one sample"
            )


def _captions(caption: str | None, json: bytes | None) -> tuple[str, ...]:
    """Those listed in the sample's json, if its caption is the first of them, else the lines of its caption."""
    meta = meta_of(json)
    if caption is None and isinstance(meta.get("caption"), str):
        caption = meta["caption"]
    listed = meta.get("captions")
    if not isinstance(listed, list) or listed[:1] != [caption]:
        listed = (caption or "").split("\n")
    return tuple(one.strip() for one in listed if isinstance(one, str) and one.strip())


def _arrays(name: str, opened: OpenShard, file: ShardFile, shards: Shards) -> list[Array | None]:
    """The ``npy`` of each sample that counts; the index of a shard knows nothing of them."""
    if not opened.index.extensions.get("npy"):
        return [None] * len(opened)
    found: list[Array | None] = []
    with closing(_Bytes(file, shards)) as content:
        spans = _spans(name, opened.shown, content)
        for within in range(len(opened)):
            row = opened.row(within)
            if row not in spans:
                found.append(None)
                continue
            start, size = spans[row]
            try:
                if size > MAX_NPY_BYTES:
                    raise DataError(f"its npy of {size} bytes is over the limit of {MAX_NPY_BYTES}")
                found.append(array_of(content.content[start : start + size]))
            except DataError as error:
                key = opened.index.key(row)
                raise DataError(f"dataset {name}: sample {key} of {opened.shown}: {error}") from error
    return found


def _spans(name: str, shown: str, shard: "_Bytes") -> dict[int, tuple[int, int]]:
    """Where the ``npy`` of each row of a shard's index lies; a row begins where the key changes."""
    spans: dict[int, tuple[int, int]] = {}
    row, last = -1, None
    for member, offset, size in tar_files_of(shown, shard.content, at_hand=shard.at_hand):
        if (parts := sample_name(member)) is None:
            continue
        key, extension = parts
        if key != last:
            row, last = row + 1, key
        if extension == "npy":
            if row in spans:
                raise DataError(f"dataset {name}: sample {key} of {shown} has two files npy")
            spans[row] = (offset, size)
    return spans


class _Bytes:
    """The bytes of a shard, wherever it lies."""

    def __init__(self, file: ShardFile, shards: Shards) -> None:
        self._descriptor = -1
        self.at_hand = not file.is_remote or shards.cache is not None
        if not self.at_hand:
            from data.remote.store import RangedBytes

            self.content: Content = RangedBytes(file)
            return
        path = shards.cache.fetch(file) if file.is_remote and shards.cache is not None else Path(file.url)
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise DataError(f"shard {file.shown}: {error.strerror}") from error
        self.content = FileContent(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


def multi_hot(name: str, arrays: Sequence[Array | None], shards: Shards, *, classes: int) -> Tensor:
    """(N, C) bool: which classes each image shows.

    Args:
        name: of the dataset.
        arrays: of each sample, its (C,) zeros and ones.
        shards: the samples, for messages.
        classes: how many classes have a name; 0 where none has.

    Raises:
        DataError: a sample has none, or one of another width or with other values.
    """
    rows = np.zeros((len(arrays), classes or _width(arrays)), dtype=np.bool_)
    for number, array in enumerate(arrays):
        said = _wrong_multi_hot(array, rows.shape[1], named=classes > 0)
        if said or array is None:
            raise _at(name, shards, number, said)
        rows[number] = array.reshape(-1) == 1
    return torch.from_numpy(rows)  # (N, C)


def _wrong_multi_hot(array: Array | None, width: int, *, named: bool) -> str:
    """What is wrong with a multi-hot label, nothing where it is sound."""
    if array is None:
        return "has no npy, in which a multilabel set keeps its labels"
    if array.size != width or array.ndim > 2 or (array.ndim == 2 and 1 not in array.shape):
        other = (
            f"classnames.txt has {counted(width, 'line')}; blank lines in it count"
            if named
            else "others have"
        )
        return f"has a multi-hot label of shape {array.shape}, {other}" + ("" if named else f" {width}")
    if not ((array == 0) | (array == 1)).all():
        return "has a multi-hot label with values other than 0 and 1"
    return ""


def columns_of(
    name: str, arrays: Sequence[Array | None], shards: Shards, names: Sequence[str]
) -> dict[str, Tensor]:
    """The columns of each sample's ``npy`` by name: (N,) int64, or float64 where some value is no whole number.

    Raises:
        DataError: a sample has none, or not as many values as there are names, or a value that is no number.
    """
    rows = np.zeros((len(arrays), len(names)))  # whole numbers of float64 are exact up to 2^53
    for number, array in enumerate(arrays):
        if array is None:
            raise _at(name, shards, number, f"has no npy, where {', '.join(names)} should stand")
        if array.size != len(names):
            stated = f"{len(names)} ({', '.join(names)})"
            raise _at(
                name,
                shards,
                number,
                f"has {counted(array.size, 'value')} in its npy, {stated} to be expected",
            )
        rows[number] = array.reshape(-1)
        if not np.isfinite(rows[number]).all():
            raise _at(name, shards, number, "has a value in its npy that is not finite")
    found = {}
    for column, key in enumerate(names):
        values = torch.from_numpy(rows[:, column].copy())  # (N,)
        whole = bool((values == values.round()).all()) and bool((values.abs() < 2**53).all())
        found[key] = values.to(torch.int64) if whole else values
    return found


def _width(arrays: Sequence[Array | None]) -> int:
    return next((array.size for array in arrays if array is not None), 0)


def _at(name: str, shards: Shards, number: int, what: str) -> DataError:
    shard, key = shards.locate(number)
    return DataError(f"dataset {name}: sample {key} of {shard} {what}")


# --------------------------------------------------------------------------------------------------------------
# Where published sets lie: their addresses at Hugging Face, the set of a name under a root, and their shards.

_HUB_HOSTS = ("huggingface.co", "hf.co")
# …/datasets/OWNER/NAME, perhaps /tree/BRANCH and a folder, as a browser shows it
_HUB_PAGE = re.compile(
    r"(/datasets/[\w.-]+/[\w.-]+)(?:/(?:tree|raw|resolve|blob)/([^/]+)(/.*)?)?/?", flags=re.ASCII
)
_PROBES = (f"{TEST}/nshards.txt", "classnames.txt", "dataset_type.txt")
_REMEMBERED = 60.0  # seconds; a program that runs on may find the store mended
_unreachable: dict[str, tuple[float, str]] = {}  # by root, when nobody answered and what was said then
_MAX_COUNT = 100  # bytes of nshards.txt
_MAX_SHARDS = 1_000_000


def address_of(source: str) -> str:
    """Where the files of a source lie: a page of Hugging Face names a data set, whose files lie elsewhere.

    ``https://huggingface.co/datasets/OWNER/NAME/tree/BRANCH``, the form that CLIP_benchmark takes, is read at
    ``…/resolve/BRANCH``, which gives texts and large files alike; without a branch it is ``main``.
    """
    if not source.startswith(("https://", "http://")):
        return source
    url = urlsplit(source)
    hosts = {*_HUB_HOSTS, urlsplit(os.environ.get("HF_ENDPOINT", "")).netloc}
    page = _HUB_PAGE.fullmatch(url.path)
    if page is None or url.netloc not in hosts:
        return source.rstrip("/")
    folder = (page[3] or "").rstrip("/")
    return f"{url.scheme}://{url.netloc}{page[1]}/resolve/{page[2] or 'main'}{folder}"


def find_published(root: str | Path, names: Sequence[str]) -> str | None:
    """The first of a dataset's names under which a set lies in a folder of sets, as a source to open.

    For the name ``vtab/dtd`` these are looked for, in this order: ``wds_vtab-dtd``, ``wds_vtab-dtd_test`` (as
    CLIP_benchmark and DataComp name their folders), ``vtab-dtd`` and ``vtab/dtd``. On this machine, and in stores
    that list their folders, other sets than published ones are found so too; and of ``sugar_crepe-swap_obj`` and
    ``aro-relation`` the files ``sugar_crepe/swap_obj.json`` (or in its ``data``) and
    ``aro/visual_genome_relation.json``.

    Args:
        root: a folder of this machine or a store, or an owner at Hugging Face (``hf://datasets/clip-benchmark``).
        names: what the set may be called, the likeliest first.

    Raises:
        DataError: the store cannot be reached; for a minute from then on that is told without asking it again, so
            that a suite of many sets does not wait for each.
    """
    when, said = _unreachable.get(str(root), (-math.inf, ""))
    if time.monotonic() - when < _REMEMBERED:
        raise Unreachable(said)
    try:
        return _found(root, names)
    except Unreachable as error:
        _unreachable[str(root)] = (time.monotonic(), str(error))
        raise


def _found(root: str | Path, names: Sequence[str]) -> str | None:
    for name in names:
        flat = name.replace("/", "-")
        published = flat if flat.startswith("wds_") else f"wds_{flat}"
        for candidate in dict.fromkeys((published, f"{published}_test", flat, name)):
            place = beside(root, candidate)
            if isinstance(place, Path):
                if place.expanduser().is_dir():
                    return str(place.expanduser())
            elif _is_set(address_of(place)):
                return place
        if (file := _json_file(root, flat)) is not None:
            return str(file)
    return None


def _json_file(root: str | Path, name: str) -> Path | None:
    """The file of a set that is one of several in a folder of their common name."""
    family, _, own = name.partition("-")
    for inside in (f"{own}.json", f"data/{own}.json", f"visual_genome_{own}.json"):
        place = beside(root, family, inside)
        if own and isinstance(place, Path) and place.expanduser().is_file():
            return place.expanduser()
    return None


def _is_set(address: str) -> bool:
    """Whether there is something; a web server, which may list nothing, is asked for a published set's files."""
    try:
        if address.startswith(("http://", "https://")):
            return any(_is_there(f"{address}/{name}") for name in _PROBES)
        return any(files_in(f"{address}{inside}") for inside in ("", f"/{TEST}", "/data"))
    except Unreachable:
        raise
    except DataError:  # there is no such bucket, data set or revision, or it is not ours to read
        return False


def _is_there(address: str) -> bool:
    """Whether a web server has a file.

    Raises:
        Unreachable: it fails, which says of no set that it is not there, and would be waited out for each anew.
    """
    try:
        return read_text_file(address) is not None
    except Unreachable:
        raise
    except DataError as error:  # what is not there or not ours to read is none
        raise Unreachable(str(error)) from error


def shards_of_split(name: str, root: str | Path, split: str) -> list[ShardFile]:
    """The shards of one split of a published set, all that it says there are.

    Raises:
        DataError: there is no such split, or a shard is missing.
    """
    if isinstance(root, Path):
        called = _check_has_split(root, name, split)
        found = find_shards(str(root), split=called)
    else:
        found = _remote_shards(name, root, split)
    _check_consecutive(found)
    return found


def _check_has_split(folder: Path, name: str, split: str) -> str:
    """What the split's folder is called; shards in the folder itself count as any split, asked for to test on.

    Raises:
        NoSplit: there is no such split.
        DataError: there are two.
    """
    folders = [inside for inside in visible_folders(folder) if any(inside.glob("*.tar"))]
    own, splits = folder_of_split(folders, split), [inside.name for inside in folders]
    if own is not None or (split == TEST and (not splits or any(folder.glob("*.tar")))):
        return own.name if own is not None else split
    if split != TEST or not splits:
        there = f"only {some(splits)}" if splits else "and no other"
        raise NoSplit(f"dataset {name} has no split {split!r}, {there}")
    advised = next((own for own in splits if own != "train"), splits[0])
    raise NoSplit(
        f"dataset {name} has no split {split!r} to score on, only {some(splits)}: pack it with pairs held out "
        f"(python -m data pack TABLE OUT --test 0.1), or name a split's own folder, {folder / advised}"
    )


def _remote_shards(name: str, root: str, split: str) -> list[ShardFile]:
    """As ``nshards.txt`` says: 0.tar … N-1.tar; where a store lists its folders and there is none, all tars."""
    from data.remote import store

    folders = [f"{root}/{split}"] + ([root] if split == TEST else [])
    for folder in folders:
        stated = read_text_file(f"{folder}/nshards.txt", limit=_MAX_COUNT)
        if stated is None:
            continue
        count = stated.strip()
        if not count.isdecimal() or not 0 < int(count) <= _MAX_SHARDS:
            raise DataError(
                f"dataset {name}: {store.shown(folder)}/nshards.txt says {count[:20]!r}, no count"
            )
        return store.describe([f"{folder}/{number}.tar" for number in range(int(count))])
    if root.startswith(("http://", "https://")):
        raise NoSplit(
            f"dataset {name}: there is no {store.shown(folders[0])}/nshards.txt, which says how many shards there "
            "are: no such split, or no published set"
        )
    for folder in folders:
        tars = [file for file in files_in(folder) if file.name.endswith(".tar")]
        if tars:
            return sorted(tars, key=lambda file: (len(file.name), file.name))
    raise NoSplit(f"dataset {name} has no split {split!r}: no tar in {store.shown(folders[0])}")


def files_in(folder: str) -> list[ShardFile]:
    """The files directly in a folder of a store that lists its folders; none where there is no such folder.

    Raises:
        DataError: there is no such bucket or data set.
        Unreachable: the store does not answer, or fails.
    """
    from data.remote.transfer import Attempts, TransferError, listing

    attempts = Attempts(folder)
    while True:
        try:
            return [ShardFile(url=url, size=size, version=version) for url, size, version in listing(folder)]
        except TransferError as error:
            if error.is_missing:
                return []
            try:
                attempts.failed(error)
            except DataError as fault:
                if error.temporary:  # it was waited out in vain, and would be for each set anew
                    raise Unreachable(str(fault)) from None
                raise


def _check_consecutive(shards: Sequence[ShardFile]) -> None:
    """Published shards are 0.tar … N-1.tar; a gap is a lost shard."""
    stems = [shard.name.removesuffix(".tar") for shard in shards]
    if all(stem.isdecimal() for stem in stems):
        missing = sorted(set(range(len(shards))) - {int(stem) for stem in stems})
        if missing:
            folder = shards[0].shown.rpartition("/")[0]
            raise DataError(f"shard {missing[0]}.tar is missing in {folder}; fetch the dataset again")


# --------------------------------------------------------------------------------------------------------------
# The images of shards, and some of them, in their order, as a set of their own.


class EveryImage(Shards):
    """All samples of shards."""

    def stamp(self) -> str:
        """16 hexadecimal digits that change with the samples, and when any shard was written anew."""
        states = versions_of([self.manifest.shard(number) for number in range(len(self.counts))])
        return hashlib.sha256(repr((self.fingerprint(), states)).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True, eq=False)
class SomeImages:
    """Random access to those samples of shards that are scored.

    Attributes:
        every: the shards' samples.
        numbers: of these, of the ones that are scored.
    """

    every: EveryImage
    numbers: Sequence[int]

    def __len__(self) -> int:
        return len(self.numbers)

    def read(self, number: int) -> Sample:
        """One of them, with the number that it has here.

        Raises:
            DataError: as for ``Shards.read``.
        """
        return self.every.read(self.numbers[number])._replace(id=number)

    def locate(self, number: int) -> tuple[str, str]:
        """Its shard and key."""
        return self.every.locate(self.numbers[number])

    def fingerprint(self) -> str:
        """16 hexadecimal digits that change with the shards, and with which of their samples are scored."""
        digest = hashlib.sha256(self.every.fingerprint().encode())
        digest.update(",".join(map(str, self.numbers)).encode())
        return digest.hexdigest()[:16]

    def stamp(self) -> str:
        """The same, which also changes with the shards' own stamp."""
        return hashlib.sha256(f"{self.fingerprint()} {self.every.stamp()}".encode()).hexdigest()[:16]


def versions_of(files: Sequence[ShardFile]) -> list[tuple[int | str, ...]]:
    """What tells that files were written anew: their etags, and of this machine's files what ``written`` says.

    Raises:
        DataError: one of this machine is gone.
    """
    return [(one.size, one.version, *(() if one.is_remote else _written(one))) for one in files]


def _written(file: ShardFile) -> tuple[int, int, int]:
    try:
        return written(Path(file.url).stat())
    except OSError as error:
        raise DataError(f"shard {file.shown}: {error.strerror}") from error


# --------------------------------------------------------------------------------------------------------------

CACHE_GB = 100.0  # of remote shards on this machine, as for a training
_FETCHING = 4  # shards at a time
_MARKS_OF_WHOLE = ("card.json", "dataset_type.txt", "nshards.txt")  # files of a set that was written as one
_MARKS_OF_SET = ("card.json", "dataset_type.txt", "classnames.txt")
_TYPES = ("classification", "multilabel", "retrieval", "image_caption_selection")
_SHOWN = 200  # characters of a source in a message
_log = logging.getLogger("eval")


def open_published(
    folder: Path | str,
    name: str,
    *,
    split: str = TEST,
    metadata_names: Sequence[str] = (),
    cache_gb: float = CACHE_GB,
) -> EvalDataset:
    """One split of a published set, on this machine or in a store; remote shards are fetched now, and kept.

    Args:
        folder: of this machine, or its URL (``https://``, ``hf://``, ``s3://``, ``gs://``; also a page of Hugging
            Face, ``https://huggingface.co/datasets/OWNER/NAME/tree/BRANCH``). Of this machine it may be one split's
            own; what that does not say of itself is read in the folder above.
        name: of the dataset.
        split: which of its folders.
        metadata_names: of the columns that the ``npy`` of each sample has beside its label, all of them in order.
        cache_gb: how much of remote shards this machine keeps; 0 reads samples over the network.

    Raises:
        DataError: there is no such split, it is incomplete or contradicts itself.
    """
    place = address_of(folder) if isinstance(folder, str) and is_remote(folder) else Path(folder)
    root, own_split = _described(place, split)
    card, kind = _card(root), _type(name, root)
    shards = _shards(shards_of_split(name, place, split), cache_gb)
    _check_count(name, shards, own_split, card)
    class_names = tuple(lines_of(beside(root, "classnames.txt")))
    several = kind == "multilabel"
    if several and metadata_names:
        raise DataError(f"dataset {name} is multilabel, so its npy is its label and holds no metadata")
    annotations = annotations_of(name, shards, arrays=several or bool(metadata_names))
    if shards.cache is not None:
        shards.cache.close()  # all that is fetched ahead is here; a suite would gather the threads of its datasets
    pictures: Images = shards
    labels, captions = None, None
    if several:
        labels = multi_hot(name, annotations.arrays, shards, classes=len(class_names))
    else:
        marks = [beside(one, mark) for one in dict.fromkeys((place, root)) for mark in _MARKS_OF_WHOLE]
        plain = not any(read_text_file(mark) is not None for mark in marks)
        pictures, labels, captions = _annotated(name, shards, annotations, may_lack_captions=plain)
    tasks = _tasks(name, card, kind, pairs_only=labels is None and bool(captions))
    if annotations.not_utf8:
        broken = f"{counted(len(annotations.not_utf8), 'sample')} with a caption that is not UTF-8"
        if not several and ({"retrieval", "compositional"} & set(tasks)):
            raise DataError(
                f"dataset {name}: {broken}, the first is {annotations.not_utf8[0]}: write them in UTF-8"
            )
        _log.warning("dataset %s: %s: captions are left out", name, broken)
        captions = None
    choices = captions if kind == "image_caption_selection" else None
    templates = tuple(
        line for line in lines_of(beside(root, "zeroshot_classification_templates.txt")) if line
    )
    metadata = columns_of(name, annotations.arrays, shards, metadata_names) if metadata_names else {}
    return checked_set(
        EvalDataset(
            name=name,
            split=split,
            class_names=class_names,
            templates=templates or DEFAULT_TEMPLATES,
            shards=pictures,
            labels=labels,
            captions=None if choices else captions,
            choices=choices,
            metadata=metadata,
            revision=pictures.fingerprint(),
            tasks=tasks,
        )
    )


def _described(place: Path | str, split: str) -> tuple[Path | str, str]:
    """Where the files are that say what a set is, and the split's name there: of a split's own folder, above it."""
    if split != TEST or not isinstance(place, Path) or not any(place.glob("*.tar")):
        return place, split
    own = place.absolute()
    known = [any((folder / mark).is_file() for mark in _MARKS_OF_SET) for folder in (own, own.parent)]
    return (own.parent, own.name) if known == [False, True] else (place, split)


def _shards(found: Sequence[ShardFile], cache_gb: float) -> EveryImage:
    """Their samples; counted anew, since statistics beside them may be of other shards."""
    cache = shard_cache([shard.url for shard in found], cache_gb)
    if cache is not None:
        cache.prefetch([shard for shard in found if shard.is_remote], threads=_FETCHING)
    selection = Selection(need=("image",), captions=CaptionRule())
    return EveryImage(make_manifest([found], selection, cache=cache, stats=False), selection, cache=cache)


def _check_count(name: str, shards: EveryImage, split: str, card: dict[str, Any]) -> None:
    stated = card.get("samples", {}).get(split) if isinstance(card.get("samples"), dict) else None
    if shards.skipped or stated not in (None, len(shards)):
        expected = f", its card says {str(stated)[:_SHOWN]}" if stated is not None else ""
        raise DataError(
            f"dataset {name}: split {split!r} has {counted(len(shards), 'sample')} with an image, "
            f"{shards.skipped} without"
            f"{expected}; fetch or write it again"
        )


def _annotated(
    name: str, shards: EveryImage, found: Annotations, *, may_lack_captions: bool
) -> tuple[Images, Tensor | None, tuple[tuple[str, ...], ...] | None]:
    """The images with labels and captions: each either of every sample or of none.

    Args:
        name: of the dataset.
        shards: its samples.
        found: what lies beside their images.
        may_lack_captions: whether samples without a caption are left out where others have one and none a label.
    """
    labels, captions = found.labels, found.captions
    known = [label for label in labels if label is not None]
    if may_lack_captions and not known and any(captions) and not all(captions):
        numbers = [number for number, own in enumerate(captions) if own]
        _log.warning(
            "dataset %s: %d of %d samples have no caption and are left out",
            name,
            len(shards) - len(numbers),
            len(shards),
        )
        return SomeImages(every=shards, numbers=numbers), None, tuple(filter(None, captions))
    for what, present in (
        ("label", [one is not None for one in labels]),
        ("caption", list(map(bool, captions))),
    ):
        if any(present) and not all(present):
            shard, key = shards.locate(present.index(False))
            raise DataError(f"dataset {name}: sample {key} of {shard} has no {what}, others have one")
    return shards, (torch.tensor(known) if known else None), (tuple(captions) if any(captions) else None)


def _type(name: str, root: Path | str) -> str:
    kind = (*lines_of(beside(root, "dataset_type.txt")), "")[0].lower()
    if kind not in ("", *_TYPES):
        raise DataError(f"dataset {name} is of type {kind[:40]!r}; known: {', '.join(_TYPES)}")
    return kind


def _tasks(name: str, card: dict[str, Any], kind: str, *, pairs_only: bool) -> tuple[str, ...]:
    if "tasks" in card:
        tasks = card["tasks"]
        if not isinstance(tasks, list) or not tasks or any(task not in [*TASKS] for task in tasks):
            shown = repr(tasks)[:_SHOWN]
            raise DataError(f"dataset {name}: card.json has tasks {shown}; known: {', '.join(TASKS)}")
        return tuple(task for task in TASKS if task in tasks)
    if kind == "image_caption_selection":
        return ("compositional",)
    return ("retrieval",) if kind == "retrieval" or pairs_only else ("zero-shot",)


def _card(root: Path | str) -> dict[str, Any]:
    place = beside(root, "card.json")
    try:
        card = parse_json(read_text_file(place) or "{}")
    except ValueError as error:
        raise DataError(f"{place} does not parse: {error}") from error
    if not isinstance(card, dict):
        raise DataError(f"{place} is not a JSON object")
    return card
