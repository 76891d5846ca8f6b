"""What lies beside each picture of shards: label, captions, and the numbers of its ``.npy``; no picture is read.

Letters in shape comments: N samples, C classes, K columns.
"""

import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from clipkit.count_progress import counted
from clipkit.errors import DataError
from clipkit.tar import Content, FileContent, sample_name, tar_files_of
from data.captions import is_utf8
from data.index import CAPTION, IMAGE, IMAGE_EXTENSIONS, LABEL, META
from data.open_shard import OpenShard, label_of, meta_of, text_of
from data.shard_file import ShardFile
from data.shards import Shards
from eval.readers.npy import MAX_NPY_BYTES, Array, array_of

__all__ = ["Annotations", "annotations_of", "columns_of", "multi_hot"]

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
    """Read what lies beside the pictures of dataset ``name``.

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
    """Of two pictures or labels that share a name, one would not count."""
    index = opened.index
    for what, column, extensions in (("pictures", IMAGE, IMAGE_EXTENSIONS), ("labels", LABEL, ("cls",))):
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
    """(N, C) bool: which classes each picture shows.

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
