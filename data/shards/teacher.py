"""A teacher's features, stored by ``clipkit encode``, for the samples of a training run.

Distilling from stored features needs no forward pass of the teacher (data reinforcement; MobileCLIP, Vasu et
al. 2024, https://arxiv.org/abs/2311.17049). The features are of whole images, preprocessed for the teacher,
while the student sees random crops.

Rows are found by shard and key, as in the folder's metadata. Folders may have been moved: a shard is matched
to the path with the most trailing parts in common. Letters: N rows of a folder, K keys, B samples, T width
of features.
"""

import hashlib
import json
import re
import shlex
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clipkit.errors import ConfigError, DataError
from clipkit.inference import readable, storage_of, unpacked
from data.captions import TEXT
from data.order import hashed
from data.remote.store import ShardFile
from data.shards.index import CAPTION, IMAGE, META, ShardIndex, index_shard, stored_index
from data.shards.samples import Shards

__all__ = ["FoundRow", "StoredFeatures", "StoredRows", "TeacherFeatures", "hashes_of"]

_NUMBER = re.compile(r"([0-9]+)\.(?:npy|parquet|jsonl)$")
_MAX_BYTES = 64 << 20  # of manifest.json, which lists the sources
_MAX_LINE = 1 << 20  # of failures.jsonl
_CHUNK = 2**16  # keys hashed at a time
_SHOWN = 3  # sources in a message
_FAILED, _ABSENT = -1, -2  # instead of a row
_NO_KEY = 0  # hash of the empty key, which stands for the rest of a truncated shard
_COLUMN = {"image": ("img_emb", "image_path"), "caption": ("text_emb", "key")}
# entries of the manifest that the values depend on; devices round differently
_MADE_BY = ("kind", "weights", "batch_size", "precision", "device")
_RECREATE = "recreate it with clipkit encode"

Keys = npt.NDArray[np.uint64]
Int64s = npt.NDArray[np.int64]


# --------------------------------------------------------------------------------------------------------------
# Hashes of keys: sums of products with random numbers, one per position, modulo 2^64 (Carter and Wegman 1979).


def hashes_of(content: npt.NDArray[np.uint8], ends: npt.NDArray[Any]) -> Keys:
    """Return 64-bit hashes of K texts, (K,).

    Args:
        content: the concatenated texts in UTF-8.
        ends: (K,) where each text ends.
    """
    ends = ends.astype(np.int64)
    hashes = np.empty(len(ends), dtype=np.uint64)
    for first in range(0, len(ends), _CHUNK):
        some = ends[first : first + _CHUNK]
        begin = int(ends[first - 1]) if first else 0
        lengths = np.diff(some, prepend=begin)
        some = some - begin
        starts = some - lengths
        factors = _factors(int(lengths.max()))
        positions = np.arange(int(some[-1])) - np.repeat(starts, lengths)
        text = content[begin : begin + len(positions)].astype(np.uint64)
        products = (text + np.uint64(1)) * factors[positions]
        sums = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(products, dtype=np.uint64)])
        hashes[first : first + _CHUNK] = sums[some] - sums[starts]
    return hashes


def _hash_of(text: bytes) -> int:
    """Return the hash of one text, ten times faster than with arrays."""
    factors: list[int] = _FACTORS if len(text) <= len(_FACTORS) else _factors(len(text)).tolist()
    return sum((byte + 1) * factor for byte, factor in zip(text, factors, strict=False)) % 2**64


def _factors(count: int) -> Keys:
    return hashed(1, np.arange(count))


_FACTORS: list[int] = _factors(256).tolist()


# --------------------------------------------------------------------------------------------------------------
# One folder of embeddings. They stay on the disk and are memory-mapped; 16 bytes per row are kept in memory: a
# hash of the key, looked up only among those of its shard, and the row.


class StoredRows:
    """The rows of a folder that ``clipkit encode`` wrote.

    Args:
        folder: the folder.
        kind: "image" or "caption".

    Raises:
        DataError: the folder has no such embeddings, or damaged ones, or two rows of the same shard and key.
        ConfigError: pyarrow is missing.

    Attributes:
        width: T.
        weights: identifies the model.
        made_by: identifies everything that the values depend on.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind = folder, kind
        self._manifest = _manifest(folder, kind)
        self.weights = str(self._manifest.get("weights"))
        self.made_by = " ".join(str(self._manifest.get(name)) for name in _MADE_BY)
        if _is_compact(self._manifest):
            self.made_by += f" {self._manifest['dtype']}"
        embeddings, metadata = _numbered(folder / _COLUMN[kind][0]), _numbered(folder / "metadata")
        both = sorted(embeddings.keys() & metadata.keys())
        if (folder / ".parts").is_dir():  # lists the complete parts
            both = sorted(set(both) & _numbered(folder / ".parts").keys())
        if not both:
            raise DataError(
                f"{folder} has no complete embeddings: run its clipkit encode command to completion"
            )
        self._files = [(embeddings[number], metadata[number]) for number in both]
        self._arrays: list[npt.NDArray[Any]] = []
        shapes = [array.shape for array in self._mapped()]
        widths = {array.shape[1] * storage_of(array).packed for array in self._mapped()}
        if len(widths) != 1:
            raise DataError(f"{folder} has embeddings of different widths: {_RECREATE}")
        (self.width,) = widths
        self._ends: list[int] = np.cumsum([shape[0] for shape in shapes]).tolist()
        self._number: dict[str, int] = {}  # of each source in the metadata
        # hashes of the keys and their rows, sorted by source and hash, and where each source starts
        parts = [*self._metadata(), self._failures()]
        sources, keys, rows = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.lexsort((rows == _FAILED, keys, sources))  # failures last
        sources, keys, rows = sources[order], keys[order], rows[order]
        twice = (sources[1:] == sources[:-1]) & (keys[1:] == keys[:-1]) & (rows[1:] != _FAILED)
        if twice.any():
            source = list(self._number)[int(sources[1:][twice][0])]
            raise DataError(
                f"{folder} has two rows of one key of {source}: give clipkit encode each shard once, and each "
                "sample its own key"
            )
        self._keys: Keys = keys
        self._rows: Int64s = rows
        self._starts = np.searchsorted(sources, np.arange(len(self._number) + 1)).tolist()
        self._sources = list(map(_parts, self._number))
        self._named: dict[str, list[int]] = {}  # sources by the last part of their path
        for number, path in enumerate(self._sources):
            self._named.setdefault(path[-1], []).append(number)
        self._known: dict[str, int] = {}  # source of each shard; -1 for none

    def __len__(self) -> int:
        return self._ends[-1]

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_arrays": []}  # another process maps the files itself

    def origin(self) -> str:
        """Return model and sources in one line."""
        sources = self._manifest["sources"]
        more = f" and {len(sources) - _SHOWN} more" if len(sources) > _SHOWN else ""
        return f"by {self._manifest.get('model')} from {', '.join(sources[:_SHOWN])}{more}"

    def command(self, added: Sequence[str]) -> str:
        """Return the command that completes the folder.

        Args:
            added: further shards to encode.
        """
        manifest, words = self._manifest, ["clipkit", "encode"]
        for sources in (manifest["sources"], added):
            words += [*sources[:_SHOWN], "…"] if len(sources) > 2 * _SHOWN else sources
        words += ["--text"] if self.kind == "caption" else []
        words += ["--model", str(manifest.get("model")), "--out", str(self.folder)]
        for option in ("rows_per_file", "batch_size", "precision", "device"):
            words += [f"--{option.replace('_', '-')}", str(manifest.get(option))]
        words += ["--dtype", str(manifest["dtype"])] if _is_compact(manifest) else []
        return shlex.join(words)

    def is_of(self, shard: str) -> bool:
        """Return whether a shard was encoded from its current path, rather than another shard of the same name."""
        source = self._source(shard)
        return source >= 0 and _common(_parts(readable(shard)), self._sources[source]) == len(
            self._sources[source]
        )

    def find(self, shard: str, key: str) -> int:
        """Return the row of a sample.

        Raises:
            DataError: there is none.
        """
        source, found = self._source(shard), _ABSENT
        if source >= 0:
            wanted = np.uint64(_hash_of(key.encode("utf-8", "replace")))
            first, end = self._starts[source : source + 2]
            place = first + int(self._keys[first:end].searchsorted(wanted))
            if place < end and self._keys[place] == wanted:
                found = int(self._rows[place])
        if found < 0:
            why = "could not be encoded" if found == _FAILED else "is missing"
            raise DataError(f"no stored feature: its {self.kind} {why} in {self.folder}")
        return found

    def lacking(self, shard: str, index: ShardIndex, rows: Int64s) -> Int64s:
        """Return the rows of a shard's index that were not encoded, except failed ones.

        Raises:
            DataError: another shard of the same name was encoded.
        """
        source = self._source(shard)
        if source < 0:
            return rows
        keys = hashes_of(index.key_bytes, index.key_ends)
        first, end = self._starts[source : source + 2]
        encoded = self._keys[first:end]
        others = int((~np.isin(encoded, keys) & (encoded != _NO_KEY)).sum())
        if others:
            raise DataError(
                f"{self.folder} was encoded from another shard than {shard}, which lacks {others:,} of the encoded "
                f"keys: {_RECREATE} from data.train"
            )
        return rows[~np.isin(keys[rows], encoded)]

    def read(self, rows: Sequence[int], out: npt.NDArray[np.float16]) -> None:
        """Copy rows into ``out``, (B, T)."""
        arrays, ends = self._mapped(), self._ends
        for place, row in enumerate(rows):
            file = bisect_right(ends, row)
            row -= ends[file]  # relative to the end of the file
            out[place] = unpacked(arrays[file][row : row + 1 or None])[0]

    def _mapped(self) -> list[npt.NDArray[Any]]:
        for path, _ in self._files if not self._arrays else ():
            try:
                array: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
            except (OSError, ValueError) as error:
                raise DataError(f"{path} is damaged: {' '.join(str(error).split())}; {_RECREATE}") from error
            try:
                storage_of(array)
            except DataError as error:
                raise DataError(f"{path} has no rows of embeddings: {_RECREATE}") from error
            self._arrays.append(array)
        return self._arrays

    def _source(self, shard: str) -> int:
        """Return the source whose path has the most trailing parts in common with a shard's."""
        if (known := self._known.get(shard)) is not None:
            return known
        parts = _parts(readable(shard))
        common = {number: _common(parts, self._sources[number]) for number in self._named.get(parts[-1], ())}
        longest = max(common.values(), default=0)
        best = [number for number, length in common.items() if length == longest]
        if len(best) > 1:
            one, other = ("/".join(self._sources[number]) for number in best[:2])
            raise DataError(
                f"{self.folder} has embeddings of {one} and of {other}, and either may be {shard}: encode them by "
                "their full paths"
            )
        self._known[shard] = best[0] if best else -1
        return self._known[shard]

    def _metadata(self) -> Iterator[tuple[Int64s, Keys, Int64s]]:
        """Yield number of the source, hash of the key and row, (N,) each, for every file."""
        start = 0
        for (_, path), end in zip(self._files, self._ends, strict=True):
            keys, names, sources = _columns(path, _COLUMN[self.kind][1])
            if len(keys) != end - start:
                raise DataError(f"{path} has {len(keys)} rows for {end - start} embeddings: {_RECREATE}")
            numbers = [self._number.setdefault(name, len(self._number)) for name in names]
            yield np.array(numbers, dtype=np.int64)[sources], keys, np.arange(start, end)
            start = end

    def _failures(self) -> tuple[Int64s, Keys, Int64s]:
        """Return the same for the samples that could not be encoded."""
        numbers, ends, content = list[int](), list[int](), bytearray()
        path = self.folder / "failures.jsonl"
        if path.is_file():
            try:
                with path.open("rb") as file:
                    while line := file.readline(_MAX_LINE):
                        one = json.loads(line)
                        numbers.append(self._number.setdefault(str(one["source"]), len(self._number)))
                        content += str(one["key"]).encode("utf-8", "replace")
                        ends.append(len(content))
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise DataError(f"{path} cannot be read: {error}; {_RECREATE}") from error
        keys = hashes_of(np.frombuffer(content, dtype=np.uint8), np.array(ends, dtype=np.int64))
        return np.array(numbers, dtype=np.int64), keys, np.full(len(numbers), _FAILED)


def _parts(path: str) -> list[str]:
    """Split a path or URL; the command of a ``pipe:`` ends with the tar's name."""
    parts = path.replace(" ", "/").split("/") if path.startswith("pipe:") else path.split("/")
    return [part for part in parts if part not in ("", ".")] or [path]


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    """Return how many trailing parts two paths have in common."""
    pairs = zip(reversed(one), reversed(other), strict=False)
    return next((count for count, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _is_compact(manifest: Mapping[str, Any]) -> bool:
    """Return whether embeddings are stored in another dtype than float16."""
    return bool(manifest.get("dtype", "float16") != "float16")


def _numbered(folder: Path) -> dict[int, Path]:
    found = ((_NUMBER.search(path.name), path) for path in folder.glob("[!.]*"))
    return {int(match[1]): path for match, path in found if match}


def _manifest(folder: Path, kind: str) -> dict[str, Any]:
    path = folder / "manifest.json"
    flag = " --text" if kind == "caption" else ""
    make = f"clipkit encode DATA{flag} --model TEACHER --out {folder}"
    if not path.is_file():
        raise DataError(f"{folder} has no embeddings written by clipkit encode: {make}")
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError("it is too large")
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(manifest, dict) or not isinstance(manifest.get("sources"), list):
            raise ValueError("it is not a manifest")
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}; {make}") from error
    if manifest.get("kind") != kind:
        names = {"image": "images", "caption": "texts"}
        other = names.get(str(manifest.get("kind")), "something else")
        raise DataError(f"{folder} has embeddings of {other}, not of {names[kind]}: {make}")
    return {**manifest, "sources": list(map(str, manifest["sources"]))}


def _columns(path: Path, column: str) -> tuple[Keys, list[str], Int64s]:
    """Read hashes of the keys, names of the sources, and each row's index into the names from metadata."""
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
        raise DataError(f"{path} cannot be read: {' '.join(str(error).split())}; {_RECREATE}") from error
    if keys.null_count or sources.null_count:
        raise DataError(f"{path} has rows without a key: {_RECREATE}")
    if not len(keys):
        return np.empty(0, dtype=np.uint64), [], np.empty(0, dtype=np.int64)
    _, ends, content = keys.buffers()
    bounds = np.frombuffer(ends, dtype=np.int64)[keys.offset : keys.offset + len(keys) + 1]
    text = np.frombuffer(content, dtype=np.uint8)[bounds[0] : bounds[-1]]
    numbers = sources.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    return hashes_of(text, bounds[1:] - bounds[0]), sources.dictionary.to_pylist(), numbers


# --------------------------------------------------------------------------------------------------------------


class TeacherFeatures(NamedTuple):
    """(B, T) float16, unit norm up to rounding, of a batch's images and, if stored, of its texts."""

    images: Tensor
    texts: Tensor | None = None


class FoundRow(NamedTuple):
    """Rows of a sample's features in the folders of images and of texts."""

    image: int
    text: int


class StoredFeatures:
    """Features of the images, and optionally the captions, of a training set.

    A sample that ``clipkit encode`` could not encode is a bad sample in training and is replaced.

    Args:
        images: folder that ``clipkit encode`` wrote for the training's shards.
        texts: folder that ``clipkit encode --text`` wrote for the same shards with the same model.

    Raises:
        DataError: a folder has no such embeddings, or damaged ones.
        ConfigError: the folders do not match, or pyarrow is missing.

    Attributes:
        width: T.
        fingerprint: changes with the model and settings that computed the features.
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
        made_by = "\n".join(one.made_by for one in (self._images, self._texts) if one is not None)
        self.fingerprint = hashlib.sha256(made_by.encode()).hexdigest()[:32]

    def describe(self) -> str:
        """Return number, model and sources of the features in one line."""
        texts = f", {len(self._texts)} of texts" if self._texts is not None else ""
        return f"{len(self._images)} stored features of images{texts}, {self._images.origin()}"

    def check(self, shards: Shards) -> None:
        """Check before training that every sample has features, one shard after the other.

        Remote shards that were never indexed are skipped; samples without features are bad samples later.

        Raises:
            DataError: features are missing (the message has the command that creates them) or of other shards.
            ConfigError: captions are changed in training, but were encoded unchanged.
        """
        rule = shards.selection.captions
        changed = rule.fields != (TEXT,) or rule.choice != "first" or rule.templates or rule.prefix
        if self._texts is not None and changed:
            raise ConfigError(
                "stored text features require unchanged captions: remove data.captions, data.caption_choice, "
                "data.caption_templates and data.caption_prefix, or distill.text_features"
            )
        for stored in filter(None, (self._images, self._texts)):
            total = missing = 0
            example, without = ("", ""), list[ShardFile]()
            for number in range(len(shards.manifest)):
                file = shards.manifest.shard(number)
                find_index = stored_index if file.is_remote else index_shard
                index = find_index(file, truncated=shards.selection.truncated)
                if index is None:
                    continue
                has = index.has()  # samples that filters drop were encoded, too
                rows = np.flatnonzero(has[:, IMAGE] & (has[:, CAPTION] | has[:, META]))
                lacking = stored.lacking(file.shown, index, rows)
                total, missing = total + len(rows), missing + len(lacking)
                if len(lacking):
                    example = example if example[1] else (index.key(int(lacking[0])), file.shown)
                    if not stored.is_of(file.shown):
                        without.append(file)
            if missing:
                raise DataError(
                    f"{missing:,} of {total:,} samples have no features in {stored.folder}, such as {example[0]} "
                    f"of {example[1]}: {stored.command([one.url for one in without])}"
                )

    def find(self, shard: str, key: str) -> FoundRow:
        """Find the features of a sample, given its key and the displayed name of its shard.

        Raises:
            DataError: they are missing.
        """
        text = self._texts.find(shard, key) if self._texts is not None else -1
        return FoundRow(image=self._images.find(shard, key), text=text)

    def read(self, found: Sequence[FoundRow]) -> TeacherFeatures:
        """Return the features of B samples in one storage; each storage sent to a process takes a descriptor."""
        features = np.empty((1 if self._texts is None else 2, len(found), self.width), dtype=np.float16)
        self._images.read([one.image for one in found], features[0])
        if self._texts is not None:
            self._texts.read([one.text for one in found], features[1])
        return TeacherFeatures(*torch.from_numpy(features))

    def zeros(self, count: int) -> TeacherFeatures:
        """Return zeros in the form of ``read``."""
        parts = 1 if self._texts is None else 2
        return TeacherFeatures(*torch.zeros(parts, count, self.width, dtype=torch.float16))
