"""A teacher's features that ``clipkit encode`` has stored, found for the samples of a training.

Distilling from stored features costs no pass of the teacher (data reinforcement; MobileCLIP, Vasu et al. 2024,
https://arxiv.org/abs/2311.17049). What is stored here are features of whole pictures, prepared as the teacher
prepares them, and they teach a student that sees random crops of these pictures. MobileCLIP stores features of
several augmentations of each picture together with their parameters; that is not done. No effect was measured here.

Rows are found by shard and key, as the folder's metadata name them. Folders may have been moved since: a shard is
the one whose path has the most last parts in common. Letters: N rows of a folder, B samples, T width of features.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clipkit.errors import ConfigError, DataError
from data.captions import TEXT, CaptionRule
from data.index import CAPTION, IMAGE, META, ShardIndex, index_shard, stored_index
from data.shard_file import ShardFile
from data.shards import Shards
from data.stored_rows import StoredRows

__all__ = ["FoundRow", "StoredFeatures", "TeacherFeatures"]


class TeacherFeatures(NamedTuple):
    """(B, T) float16, unit norm up to rounding: of a batch's pictures and, where they are stored, of its texts."""

    images: Tensor
    texts: Tensor | None = None


class FoundRow(NamedTuple):
    """Where the features of a sample lie: rows of the pictures' and of the texts' folder."""

    image: int
    text: int


class StoredFeatures:
    """Features of the pictures, and of the captions, of a training set.

    A sample that ``clipkit encode`` could not encode counts as bad in training, so that another one replaces it.

    Args:
        images: a folder that ``clipkit encode`` wrote of the training's shards.
        texts: one that ``clipkit encode --text`` wrote of the same, by the same model.

    Raises:
        DataError: a folder holds no such embeddings, or damaged ones.
        ConfigError: the two do not fit one another, or pyarrow is missing.

    Attributes:
        width: T.
        fingerprint: changes when they are encoded again by another model or in another way.
    """

    def __init__(self, images: Path, texts: Path | None = None) -> None:
        self._images = StoredRows(images, "image")
        self._texts = StoredRows(texts, "caption") if texts is not None else None
        self.width = self._images.width
        if self._texts is not None and self._images.weights != self._texts.weights:
            raise ConfigError(
                f"{images} and {texts} were encoded by different models, or with different --background or "
                "--upright: encode one of them again"
            )

        folders = filter(None, (self._images, self._texts))
        self.fingerprint = hashlib.sha256("\n".join(one.made_by for one in folders).encode()).hexdigest()[:32]

    def describe(self) -> str:
        """What is there, by which model and from where, as a line tells it."""
        texts = f", {len(self._texts)} of texts" if self._texts is not None else ""
        return f"{len(self._images)} stored features of pictures{texts}, {self._images.origin()}"

    def check(self, shards: Shards) -> None:
        """See before a training that every sample has its features; one shard is looked at after the other.

        Remote shards that were never indexed are left out; what they lack counts as bad samples later.

        Raises:
            DataError: features are missing, and the command that makes them; or they are of other shards.
            ConfigError: the captions are trained on in another form than they were encoded in.
        """
        if self._texts is not None:
            _check_rule(shards.selection.captions)
        for stored in filter(None, (self._images, self._texts)):
            _check_shards(stored, shards)

    def find(self, shard: str, key: str) -> FoundRow:
        """Where the features of a sample are, by its shard as messages show it and its key.

        Raises:
            DataError: they are not there.
        """
        text = self._texts.find(shard, key) if self._texts is not None else -1
        return FoundRow(image=self._images.find(shard, key), text=text)

    def read(self, found: Sequence[FoundRow]) -> TeacherFeatures:
        """The features of B samples; they share one storage, as each takes a file descriptor between processes."""
        features = np.empty((2 if self._texts is not None else 1, len(found), self.width), dtype=np.float16)
        self._images.read([one.image for one in found], features[0])
        if self._texts is not None:
            self._texts.read([one.text for one in found], features[1])
        return TeacherFeatures(*torch.from_numpy(features))

    def zeros(self, count: int) -> TeacherFeatures:
        """Features of the form that ``read`` returns, all zero."""
        parts = 2 if self._texts is not None else 1
        return TeacherFeatures(*torch.zeros(parts, count, self.width, dtype=torch.float16))


def _check_rule(rule: CaptionRule) -> None:
    """``clipkit encode --text`` takes the caption file as it is, or else the json's caption."""
    if rule.fields != (TEXT,) or rule.choice != "first" or rule.templates or rule.prefix:
        raise ConfigError(
            "stored features of texts are of the captions as they are: leave data.captions, data.caption_choice, "
            "data.caption_templates and data.caption_prefix out, or the features of texts"
        )


def _check_shards(stored: StoredRows, shards: Shards) -> None:
    total = missing = 0
    example, without = ("", ""), list[ShardFile]()
    for number in range(len(shards.manifest)):
        file = shards.manifest.shard(number)
        index = _index_of(file, shards.selection.truncated)
        if index is None:
            continue
        rows = _usable(index)
        lacking = stored.lacking(file.shown, index, rows)
        total, missing = total + len(rows), missing + len(lacking)
        if len(lacking):
            example = example if example[1] else (index.key(int(lacking[0])), file.shown)
            if not stored.is_of(file.shown):
                without.append(file)
    if missing:
        raise DataError(
            f"{missing:,} of {total:,} samples have no features in {stored.folder}, such as {example[0]} of "
            f"{example[1]}: {stored.command([one.url for one in without])}"
        )


def _index_of(file: ShardFile, truncated: str) -> ShardIndex | None:
    """A shard's index without fetching the shard."""
    index = stored_index if file.is_remote else index_shard
    return index(file, truncated=truncated)


def _usable(index: ShardIndex) -> npt.NDArray[np.int64]:
    """The rows of a shard that may be samples; what the selection leaves out of them was encoded too."""
    has = index.has()
    return np.flatnonzero(has[:, IMAGE] & (has[:, CAPTION] | has[:, META]))
