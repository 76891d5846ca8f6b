"""A teacher's features that ``clipkit encode`` has stored, found for the samples of a training.

Distilling from stored features costs no pass of the teacher (data reinforcement; MobileCLIP, Vasu et al. 2024,
https://arxiv.org/abs/2311.17049). What is stored here are features of whole pictures, prepared as the teacher
prepares them, and they teach a student that sees random crops of these pictures. MobileCLIP stores features of
several augmentations of each picture together with their parameters; that is not done. No effect was measured
here.

Rows are found by shard and key, as the folder's metadata name them. Folders may have been moved since: a shard is
the one whose path has the most last parts in common. Letters: N rows of a folder, B samples, T width of features.
"""

import hashlib
import json
import re
import shlex
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clipkit.errors import ConfigError, DataError
from clipkit.inference.inputs import readable
from data.captions import TEXT, CaptionRule
from data.order import hashed
from data.remote.store import ShardFile
from data.shards.index import CAPTION, IMAGE, META, ShardIndex, index_shard, stored_index
from data.shards.samples import Shards

__all__ = ["FoundRow", "StoredFeatures", "StoredRows", "TeacherFeatures", "hashes_of"]


# --------------------------------------------------------------------------------------------------------------
# One folder of embeddings as ``clipkit encode`` writes it, searched by shard and key.
#
# The embeddings stay on the disk and are mapped. Held in memory are 16 bytes a row: a hash of the key, looked
# up among those of its shard only, and the row. Letters: N rows, K keys, T width.

_NUMBER = re.compile(r"([0-9]+)\.(?:npy|parquet|jsonl)$")
_MOST_BYTES = 64 << 20  # of manifest.json, which names the sources
_LONGEST_LINE = 1 << 20  # of failures.jsonl
_AT_ONCE = 2**16  # keys that are hashed at a time
_SHOWN = 3  # sources that are named one by one
_FAILED = -1  # in the place of a row
_NO_KEY = 0  # hash of the empty key, by which the rest of a shard that breaks off is listed
_COLUMN = {"image": ("img_emb", "image_path"), "caption": ("text_emb", "key")}
_MAKING = (
    "kind",
    "weights",
    "batch_size",
    "precision",
    "device",
)  # of the manifest; devices round differently
_REMADE = "make it again with clipkit encode"

Keys = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]


class StoredRows:
    """The rows of a folder.

    Args:
        folder: what ``--out`` was.
        kind: "image" or "caption", what it holds.

    Raises:
        DataError: it holds no such embeddings, damaged ones, or two of one shard and key.
        ConfigError: pyarrow is missing.

    Attributes:
        width: T.
        weights: what identifies the model.
        made_by: that, and all else that their values depend on.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind = folder, kind
        self._manifest = _manifest(folder, kind)
        self.weights = str(self._manifest.get("weights"))
        self.made_by = " ".join(str(self._manifest.get(name)) for name in _MAKING)
        self._files = _files(folder, kind)
        self._arrays: list[npt.NDArray[Any]] = []
        shapes = [array.shape for array in self._mapped()]
        if len({shape[1:] for shape in shapes}) != 1:
            raise DataError(f"{folder} holds embeddings of different widths: {_REMADE}")
        self.width = int(shapes[0][1])
        self._ends: list[int] = np.cumsum([shape[0] for shape in shapes]).tolist()
        self._number: dict[str, int] = {}  # of a source, by its name in the metadata
        self._keys, self._rows, self._starts = self._table()
        self._named: dict[str, list[int]] = {}  # sources by the last part of their names
        for source, number in self._number.items():
            self._named.setdefault(_parts(source)[-1], []).append(number)
        self._sources = list(map(_parts, self._number))
        self._known: dict[str, int] = {}  # the source of a shard; -1 for none

    def __len__(self) -> int:
        return self._ends[-1]

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_arrays": []}  # a copy in another process maps the files by itself

    def origin(self) -> str:
        """By which model and from where, as a line tells it."""
        sources = self._manifest["sources"]
        more = f" and {len(sources) - _SHOWN} more" if len(sources) > _SHOWN else ""
        return f"by {self._manifest.get('model')} from {', '.join(sources[:_SHOWN])}{more}"

    def command(self, added: Sequence[str]) -> str:
        """What makes the folder complete.

        Args:
            added: shards that are to be encoded as well.
        """
        manifest = self._manifest
        sources = [*_some(manifest["sources"]), *_some(added)]
        words = ["clipkit", "encode", *sources, *(["--text"] if self.kind == "caption" else [])]
        words += ["--model", str(manifest.get("model")), "--out", str(self.folder)]
        for option in ("rows_per_file", "batch_size", "precision", "device"):
            words += [f"--{option.replace('_', '-')}", str(manifest.get(option))]
        return shlex.join(words)

    def is_of(self, shard: str) -> bool:
        """Whether a shard was encoded from the place where it is now, and not one of its name elsewhere."""
        source = self._source(shard)
        return source >= 0 and _shared(_parts(readable(shard)), self._sources[source]) == len(
            self._sources[source]
        )

    def find(self, shard: str, key: str) -> int:
        """The row of a sample.

        Raises:
            DataError: there is none.
        """
        source, found = self._source(shard), _FAILED - 1
        if source >= 0:
            wanted = np.uint64(_hash_of(key.encode("utf-8", "replace")))
            first, end = self._starts[source : source + 2]
            place = first + int(self._keys[first:end].searchsorted(wanted))
            if place < end and self._keys[place] == wanted:
                found = int(self._rows[place])
        if found < 0:
            why = "could not be encoded" if found == _FAILED else "is not there"
            raise DataError(f"no stored feature: its {self.kind} {why} in {self.folder}")
        return found

    def lacking(self, shard: str, index: ShardIndex, rows: Numbers) -> Numbers:
        """Those rows of a shard's index that were not encoded, and not tried either.

        Raises:
            DataError: what was encoded is another shard of that name.
        """
        source, keys = self._source(shard), hashes_of(index.key_bytes, index.key_ends)
        if source >= 0:
            first, end = self._starts[source : source + 2]
            encoded = self._keys[first:end]
            others = int((~np.isin(encoded, keys) & (encoded != _NO_KEY)).sum())
            if others:
                raise DataError(
                    f"{self.folder} is of another shard than {shard}, which lacks {others:,} of the keys that were "
                    f"encoded: {_REMADE}, of data.train"
                )
        return rows[self._find(source, keys[rows]) < _FAILED]

    def read(self, rows: Sequence[int], out: npt.NDArray[np.float16]) -> None:
        """Copy rows into ``out``, (B, T)."""
        arrays, ends = self._mapped(), self._ends
        for place, row in enumerate(rows):
            file = bisect_right(ends, row)
            out[place] = arrays[file][row - ends[file]]  # counted from the file's end

    def _mapped(self) -> list[npt.NDArray[Any]]:
        if not self._arrays:
            self._arrays = [_array(path) for path, _ in self._files]
        return self._arrays

    def _find(self, source: int, keys: Keys) -> Numbers:
        """(K,) rows; ``_FAILED`` for what could not be encoded, less for what is not there."""
        if source < 0:
            return np.full(len(keys), _FAILED - 1)
        first, end = self._starts[source : source + 2]
        known = self._keys[first:end]
        places = np.searchsorted(known, keys)
        there = places < len(known)
        there[there] = known[places[there]] == keys[there]
        rows = np.full(len(keys), _FAILED - 1)
        rows[there] = self._rows[first + places[there]]
        return rows

    def _source(self, shard: str) -> int:
        """The source with which a shard's path has the most last parts in common."""
        if (known := self._known.get(shard)) is not None:
            return known
        parts = _parts(readable(shard))
        shared = {number: _shared(parts, self._sources[number]) for number in self._named.get(parts[-1], ())}
        longest = max(shared.values(), default=0)
        best = [number for number, length in shared.items() if length == longest]
        if len(best) > 1:
            one, other = ("/".join(self._sources[number]) for number in best[:2])
            raise DataError(
                f"{self.folder} has embeddings of {one} and of {other}, and either may be {shard}: encode them by "
                "their full paths"
            )
        self._known[shard] = best[0] if best else -1
        return self._known[shard]

    def _table(self) -> tuple[Keys, Numbers, list[int]]:
        """Hashes of the keys and their rows, ordered by source and hash, and where each source begins."""
        parts = [*self._metadata(), *self._failures()]
        sources = np.concatenate([source for source, _, _ in parts])
        keys = np.concatenate([key for _, key, _ in parts])
        rows = np.concatenate([row for _, _, row in parts])
        order = np.lexsort((rows == _FAILED, keys, sources))  # what failed comes last
        sources, keys, rows = sources[order], keys[order], rows[order]
        twice = (sources[1:] == sources[:-1]) & (keys[1:] == keys[:-1]) & (rows[1:] != _FAILED)
        if twice.any():
            source = list(self._number)[int(sources[1:][twice][0])]
            raise DataError(
                f"{self.folder} has two rows of one key of {source}: give clipkit encode each shard once, and each "
                "sample a key of its own"
            )
        return keys, rows, np.searchsorted(sources, np.arange(len(self._number) + 1)).tolist()

    def _metadata(self) -> Iterator[tuple[npt.NDArray[np.int32], Keys, Numbers]]:
        """Of each file the number of the source, the hash of the key and the row of each of its rows."""
        start = 0
        for (_, path), end in zip(self._files, self._ends, strict=True):
            keys, names, sources = _columns(path, _COLUMN[self.kind][1])
            if len(keys) != end - start:
                raise DataError(f"{path} has {len(keys)} rows for {end - start} embeddings: {_REMADE}")
            numbers = [self._number.setdefault(name, len(self._number)) for name in names]
            yield np.array(numbers, dtype=np.int32)[sources], keys, np.arange(start, end)
            start = end

    def _failures(self) -> Iterator[tuple[npt.NDArray[np.int32], Keys, Numbers]]:
        """The same of what could not be encoded."""
        numbers, ends, content = list[int](), list[int](), bytearray()
        path = self.folder / "failures.jsonl"
        if path.is_file():
            for source, key in _failed(path):
                numbers.append(self._number.setdefault(source, len(self._number)))
                content += key.encode("utf-8", "replace")
                ends.append(len(content))
        keys = hashes_of(np.frombuffer(content, dtype=np.uint8), np.array(ends, dtype=np.int64))
        yield np.array(numbers, dtype=np.int32), keys, np.full(len(numbers), _FAILED)


def hashes_of(content: npt.NDArray[np.uint8], ends: npt.NDArray[Any]) -> Keys:
    """(K,) 64 bits of each of K texts: sums of products with random numbers, one for each place.

    Such sums are as good as random ones for texts that nobody made to collide (Carter and Wegman 1979).

    Args:
        content: the texts in UTF-8, one after the other.
        ends: (K,) where each ends.
    """
    ends = ends.astype(np.int64)
    hashes = np.empty(len(ends), dtype=np.uint64)
    for first in range(0, len(ends), _AT_ONCE):
        some = ends[first : first + _AT_ONCE]
        begin = int(ends[first - 1]) if first else 0
        lengths = np.diff(some, prepend=begin)
        some = some - begin
        starts = some - lengths
        factors = _factors(int(lengths.max()))
        places = np.arange(int(some[-1])) - np.repeat(starts, lengths)
        products = (content[begin : begin + len(places)].astype(np.uint64) + np.uint64(1)) * factors[places]
        sums = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(products, dtype=np.uint64)])
        hashes[first : first + _AT_ONCE] = sums[some] - sums[starts]
    return hashes


def _hash_of(text: bytes) -> int:
    """The same of one text, at a tenth of the cost of arrays."""
    factors: list[int] = _FACTORS if len(text) <= len(_FACTORS) else _factors(len(text)).tolist()
    return sum((byte + 1) * factor for byte, factor in zip(text, factors, strict=False)) % 2**64


def _factors(count: int) -> Keys:
    return hashed(1, np.arange(count))


_FACTORS: list[int] = _factors(256).tolist()


def _parts(path: str) -> list[str]:
    """The parts of a path or URL; a command of a ``pipe:`` ends with the tar's name."""
    parts = path.replace(" ", "/").split("/") if path.startswith("pipe:") else path.split("/")
    return [part for part in parts if part not in ("", ".")] or [path]


def _some(sources: Sequence[str]) -> list[str]:
    return [*sources[:_SHOWN], "…"] if len(sources) > 2 * _SHOWN else list(sources)


def _shared(one: Sequence[str], other: Sequence[str]) -> int:
    """How many last parts two paths have in common."""
    pairs = zip(reversed(one), reversed(other), strict=False)
    return next((count for count, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _manifest(folder: Path, kind: str) -> dict[str, Any]:
    path = folder / "manifest.json"
    flag = " --text" if kind == "caption" else ""
    make = f"clipkit encode DATA{flag} --model TEACHER --out {folder}"
    if not path.is_file():
        raise DataError(f"{folder} holds no embeddings that clipkit encode wrote: {make}")
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError("it is too large")
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(manifest, dict) or not isinstance(manifest.get("sources"), list):
            raise ValueError("it is no manifest")
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}; {make}") from error
    if manifest.get("kind") != kind:
        what = {"image": "pictures", "caption": "texts"}
        held = what.get(str(manifest.get("kind")), "something else")
        raise DataError(f"{folder} holds embeddings of {held}, not of {what[kind]}: {make}")
    return {**manifest, "sources": list(map(str, manifest["sources"]))}


def _files(folder: Path, kind: str) -> list[tuple[Path, Path]]:
    """The embeddings and the metadata of each part that is complete, in order."""
    embeddings = _numbered(folder / _COLUMN[kind][0])
    metadata = _numbered(folder / "metadata")
    both = sorted(embeddings.keys() & metadata.keys())
    if (folder / ".parts").is_dir():  # lists what is complete
        both = sorted(set(both) & _numbered(folder / ".parts").keys())
    if not both:
        raise DataError(f"{folder} holds no embeddings yet: run its clipkit encode to the end")
    return [(embeddings[number], metadata[number]) for number in both]


def _numbered(folder: Path) -> dict[int, Path]:
    found = ((_NUMBER.search(path.name), path) for path in folder.glob("[!.]*"))
    return {int(match[1]): path for match, path in found if match}


def _array(path: Path) -> npt.NDArray[Any]:
    """A file of embeddings, mapped."""
    try:
        array: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is damaged: {' '.join(str(error).split())}; {_REMADE}") from error
    if array.ndim != 2 or array.dtype.kind != "f":
        raise DataError(f"{path} holds no rows of embeddings: {_REMADE}")
    return array


def _columns(path: Path, column: str) -> tuple[Keys, list[str], Numbers]:
    """Of a file of metadata the hashes of its keys, the names of its sources, and each row's number among
    these."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            "stored features need pyarrow, for their metadata: pip install 'pyarrow>=18'"
        ) from error
    try:
        table = pyarrow.parquet.read_table(path, columns=[column, "source"])
        keys = table.column(column).cast(pyarrow.large_string()).combine_chunks()
        sources = table.column("source").combine_chunks().dictionary_encode()
    except (OSError, KeyError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {' '.join(str(error).split())}; {_REMADE}") from error
    if keys.null_count or sources.null_count:
        raise DataError(f"{path} has rows without a key: {_REMADE}")
    if not len(keys):
        return np.empty(0, dtype=np.uint64), [], np.empty(0, dtype=np.int64)
    _, ends, content = keys.buffers()
    bounds = np.frombuffer(ends, dtype=np.int64)[keys.offset : keys.offset + len(keys) + 1]
    text = np.frombuffer(content, dtype=np.uint8)[bounds[0] : bounds[-1]]
    numbers = sources.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    return hashes_of(text, bounds[1:] - bounds[0]), sources.dictionary.to_pylist(), numbers


def _failed(path: Path) -> Iterator[tuple[str, str]]:
    """Source and key of each line of ``failures.jsonl``."""
    try:
        with path.open("rb") as file:
            while line := file.readline(_LONGEST_LINE):
                one = json.loads(line)
                yield str(one["source"]), str(one["key"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} cannot be read: {error}; {_REMADE}") from error


# --------------------------------------------------------------------------------------------------------------


class TeacherFeatures(NamedTuple):
    """(B, T) float16, unit norm up to rounding: of a batch's pictures and, where they are stored, of its
    texts."""

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
        """The features of B samples; they share one storage, as each takes a file descriptor between
        processes."""
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
