"""A teacher's features, stored by ``clipkit encode``, for the samples of a training run.

Distilling from stored features needs no forward pass of the teacher (data reinforcement; MobileCLIP, Vasu et
al. 2024, https://arxiv.org/abs/2311.17049). The features are of whole images, preprocessed for the teacher,
while the student sees random crops.

The features of an image or caption are found by the digest of its bytes, not by shard and key: every packed dataset
has a shard train/0.tar with a key 000000001. So data may be moved, renamed, reordered and packed into other shards,
and changed or other data never get features of another image. Letters: N rows of a folder, B samples, T width of
features.
"""

import hashlib
import json
import re
import shlex
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from clipkit.batch import TeacherFeatures
from clipkit.errors import ConfigError, DataError
from clipkit.inference import content_digest, storage_of, unpacked
from clipkit.samples.remote import ShardFile
from data.captions import is_utf8
from data.shards.samples import Shards

_NUMBER = re.compile(r"([0-9]+)\.(?:npy|parquet|jsonl)$")
_MAX_BYTES = 64 << 20  # of manifest.json, which lists the sources
_MAX_LINE = 1 << 20  # of failures.jsonl
_SHOWN = 3  # sources in a message
_EXAMINED = 1000  # samples that are compared before training
# instead of a row
_FAILED = -1
_ABSENT = -2
_FOLDER = {"image": "img_emb", "caption": "text_emb"}
_PLURAL = {"image": "images", "caption": "texts"}
# entries of the manifest that the values depend on; devices round differently
_MADE_BY = ("kind", "weights", "batch_size", "precision", "device")
_RECREATE = "recreate it with clipkit encode"

Digests = npt.NDArray[np.uint64]


# --------------------------------------------------------------------------------------------------------------
# One folder of embeddings. They stay on the disk and are memory-mapped; 16 bytes per row are kept in memory: the
# digest of the image or text, and the row.


class StoredRows:
    """The rows of a folder that ``clipkit encode`` wrote.

    Attributes:
        width: T.
        weights: identifies the model.
        scale: exp(t) of the model; 0 if it is not stored.
        made_by: identifies everything that the values depend on.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder = folder
        self.kind = kind
        self._manifest = _manifest(folder, kind)
        self.weights = str(self._manifest.get("weights"))
        scale = self._manifest.get("scale")
        self.scale = float(scale) if isinstance(scale, int | float) else 0.0
        self.made_by = " ".join(str(self._manifest.get(name)) for name in _MADE_BY)
        if _is_compact(self._manifest):
            self.made_by += f" {self._manifest['dtype']}"
        embeddings = _list_numbered(folder / _FOLDER[kind])
        metadata = _list_numbered(folder / "metadata")
        both = sorted(embeddings.keys() & metadata.keys())
        if (folder / ".parts").is_dir():  # lists the complete parts
            both = sorted(set(both) & _list_numbered(folder / ".parts").keys())
        if not both:
            raise DataError(
                f"{folder} has no complete embeddings: run its clipkit encode command to completion"
            )
        self._files = [(embeddings[index], metadata[index]) for index in both]
        self._arrays: list[npt.NDArray[Any]] = []
        shapes = [array.shape for array in self._mapped()]
        widths = {array.shape[1] * storage_of(array).packed for array in self._mapped()}
        if len(widths) != 1:
            raise DataError(f"{folder} has embeddings of different widths: {_RECREATE}")
        (self.width,) = widths
        self._ends: list[int] = np.cumsum([shape[0] for shape in shapes]).tolist()
        self._sources: set[str] = set()  # that the rows are of
        encoded = self._read_digests()
        failed = self._read_failures()
        digests = np.concatenate([encoded, failed])
        rows = np.concatenate([np.arange(len(encoded)), np.full(len(failed), _FAILED)])
        order = np.lexsort((rows == _FAILED, digests))  # of equal ones the first row, failures last
        self._digests: Digests = digests[order]
        self._rows: npt.NDArray[np.int64] = rows[order]

    def __len__(self) -> int:
        return self._ends[-1]

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_arrays": []}  # another process maps the files itself

    def origin(self) -> str:
        """Return model and sources in one line."""
        sources = self._manifest["sources"]
        more = ""
        if len(sources) > _SHOWN:
            more = f" and {len(sources) - _SHOWN} more"
        return f"by {self._manifest.get('model')} from {', '.join(sources[:_SHOWN])}{more}"

    def command(self, shards: Sequence[str]) -> str:
        """Return the command that completes the folder."""
        added = [shard for shard in shards if shard not in self._sources]
        return self._command((self._manifest["sources"], added), str(self.folder))

    def command_elsewhere(self, shards: Sequence[str]) -> str:
        """Return the command that encodes these shards, by default the sources of this folder, into another one."""
        return self._command([shards or self._manifest["sources"]], f"{self.folder}-2")

    def _command(self, lists: Sequence[Sequence[str]], out: str) -> str:
        manifest = self._manifest
        words = ["clipkit", "encode"]
        for sources in lists:
            words += [*sources[:_SHOWN], "…"] if len(sources) > 2 * _SHOWN else sources
        words += ["--text"] if self.kind == "caption" else []
        words += ["--model", str(manifest.get("model")), "--out", out]
        for option in ("rows_per_file", "batch_size", "precision", "device"):
            words += [f"--{option.replace('_', '-')}", str(manifest.get(option))]
        words += ["--dtype", str(manifest["dtype"])] if _is_compact(manifest) else []
        return shlex.join(words)

    def has(self, content: bytes) -> bool:
        """Return whether an image or text was encoded, or failed to be."""
        return self._find(content) != _ABSENT

    def find(self, content: bytes) -> int:
        """Return the row of an image file or of a text in UTF-8."""
        row = self._find(content)
        if row == _FAILED:
            raise DataError(f"no stored feature: its {self.kind} could not be encoded in {self.folder}")
        if row == _ABSENT:
            raise DataError(f"no stored feature: its {self.kind} is not among those encoded in {self.folder}")
        return row

    def _find(self, content: bytes) -> int:
        digest = np.uint64(int(content_digest(content), 16))
        i = int(self._digests.searchsorted(digest))
        if i < len(self._digests) and self._digests[i] == digest:
            return int(self._rows[i])
        return _ABSENT

    def read(self, rows: Sequence[int], out: npt.NDArray[np.float16]) -> None:
        """Copy rows into ``out``, (B, T)."""
        arrays = self._mapped()
        ends = self._ends
        for i, row in enumerate(rows):
            file = bisect_right(ends, row)
            row -= ends[file]  # relative to the end of the file
            out[i] = unpacked(arrays[file][row : row + 1 or None])[0]

    def _mapped(self) -> list[npt.NDArray[Any]]:
        if self._arrays:
            return self._arrays
        for path, _ in self._files:
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

    def _read_digests(self) -> Digests:
        parts = []
        start = 0
        for (_, path), end in zip(self._files, self._ends, strict=True):
            digests, sources = self._read_columns(path)
            if len(digests) != end - start:
                raise DataError(f"{path} has {len(digests)} rows for {end - start} embeddings: {_RECREATE}")
            parts.append(digests)
            self._sources.update(map(self._absolute, sources))
            start = end
        return np.concatenate(parts)

    def _read_columns(self, path: Path) -> tuple[Digests, list[str]]:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise ConfigError(
                "stored features need pyarrow, for their metadata: pip install 'pyarrow>=18'"
            ) from error
        try:
            if "digest" not in pyarrow.parquet.read_schema(path).names:
                raise DataError(
                    f"{self.folder} was written by an earlier version, which did not record what it encoded: "
                    f"encode again into another folder: {self.command_elsewhere([])}"
                )
            table = pyarrow.parquet.read_table(path, columns=["digest", "source"])
            digits = "".join(table.column("digest").to_pylist())
            digests = np.frombuffer(bytes.fromhex(digits), dtype=">u8").astype(np.uint64)
            sources = table.column("source").unique().to_pylist()
        except (OSError, KeyError, ValueError, TypeError) as error:
            raise DataError(f"{path} cannot be read: {' '.join(str(error).split())}; {_RECREATE}") from error
        return digests, sources

    def _absolute(self, source: str) -> str:
        return str(Path(str(self._manifest.get("directory", "")), source))

    def _read_failures(self) -> Digests:
        digests = list[int]()
        path = self.folder / "failures.jsonl"
        if path.is_file():
            try:
                with path.open("rb") as file:
                    while line := file.readline(_MAX_LINE):
                        failure = json.loads(line)
                        digests.append(int(failure["digest"], 16))
                        self._sources.add(self._absolute(str(failure["source"])))
                return np.array(digests, dtype=np.uint64)
            except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
                raise DataError(f"{path} cannot be read: {error}; {_RECREATE}") from error
        return np.array(digests, dtype=np.uint64)


def _is_compact(manifest: Mapping[str, Any]) -> bool:
    return bool(manifest.get("dtype", "float16") != "float16")


def _list_numbered(folder: Path) -> dict[int, Path]:
    matches = ((_NUMBER.search(path.name), path) for path in folder.glob("[!.]*"))
    return {int(match[1]): path for match, path in matches if match}


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
        other = _PLURAL.get(str(manifest.get("kind")), "something else")
        raise DataError(f"{folder} has embeddings of {other}, not of {_PLURAL[kind]}: {make}")
    return {**manifest, "sources": list(map(str, manifest["sources"]))}


# --------------------------------------------------------------------------------------------------------------


class FoundRow(NamedTuple):
    """Rows of a sample's features in the folders of images and of texts."""

    image: int
    text: int


class StoredFeatures:
    """Features of the images, and optionally the captions, of a training set.

    A sample that ``clipkit encode`` could not encode is a bad sample in training and is replaced.

    Args:
        images: folder that ``clipkit encode`` wrote for the training's images.
        texts: folder that ``clipkit encode --text`` wrote for their captions with the same model.

    Attributes:
        width: T.
        fingerprint: changes with the model and settings that computed the features.
    """

    def __init__(self, images: Path, texts: Path | None = None) -> None:
        self._images = StoredRows(images, "image")
        self._texts = StoredRows(texts, "caption") if texts is not None else None
        self.width = self._images.width
        self.scale = self._images.scale
        if self._texts is not None and self._images.weights != self._texts.weights:
            raise ConfigError(
                f"{images} and {texts} were encoded by different models, or with different --background or "
                "--upright: encode one of them again"
            )
        made_by = "\n".join(
            features.made_by for features in (self._images, self._texts) if features is not None
        )
        self.fingerprint = hashlib.sha256(made_by.encode()).hexdigest()[:32]

    def describe(self) -> str:
        """Return number, model and sources of the features in one line."""
        texts = ""
        if self._texts is not None:
            texts = f", {len(self._texts)} of texts"
        return f"{len(self._images)} stored features of images{texts}, {self._images.origin()}"

    def check(self, shards: Shards) -> None:
        """Check before training that samples have features: all of a small set, otherwise evenly spaced ones.

        Samples of remote shards are not read. In training, any sample without features is a bad sample.
        """
        rule = shards.selection.captions
        if self._texts is not None and (rule.templates or rule.prefix or rule.split):
            raise ConfigError(
                "stored text features are those of whole captions: remove data.caption_templates, "
                "data.caption_prefix and data.caption_split, or distill.text_features"
            )
        examined = 0
        without_image = list[tuple[ShardFile, str]]()
        without_text = list[tuple[ShardFile, str]]()
        ends = np.cumsum(shards.counts)
        for index in np.unique(np.linspace(0, len(shards) - 1, _EXAMINED).astype(np.int64)).tolist():
            file = shards.manifest.shard(int(np.searchsorted(ends, index, side="right")))
            if file.is_remote:
                continue
            try:
                sample = shards.read(index)
                captions = list(filter(is_utf8, chain.from_iterable(rule.captions_by_field(sample.fields))))
            except DataError:  # in training a bad sample
                continue
            examined += 1
            if not self._images.has(sample.image):
                without_image.append((file, sample.key))
            if self._texts is not None and not all(self._texts.has(text.encode()) for text in captions):
                without_text.append((file, sample.key))
        _reject_lacking(self._images, without_image, examined)
        if self._texts is not None:
            _reject_lacking(self._texts, without_text, examined)

    def find(self, image: bytes, caption: str) -> FoundRow:
        """Find the features of a sample."""
        text = -1
        if self._texts is not None:
            text = self._texts.find(caption.encode())
        return FoundRow(image=self._images.find(image), text=text)

    def read(self, matches: Sequence[FoundRow]) -> TeacherFeatures:
        """Return the features of B samples in one storage; each storage sent to a process takes a descriptor."""
        features = np.empty((1 if self._texts is None else 2, len(matches), self.width), dtype=np.float16)
        self._images.read([match.image for match in matches], features[0])
        if self._texts is not None:
            self._texts.read([match.text for match in matches], features[1])
        images, *texts = torch.from_numpy(features)
        return TeacherFeatures(images, texts[0] if texts else None, self.scale)

    def zeros(self, count: int) -> TeacherFeatures:
        """Return zeros in the form of ``read``."""
        zeros = torch.zeros(count, self.width, dtype=torch.float16)
        return TeacherFeatures(zeros, None if self._texts is None else zeros, self.scale)


def _reject_lacking(stored: StoredRows, lacking: Sequence[tuple[ShardFile, str]], examined: int) -> None:
    if not lacking:
        return
    shard, key = lacking[0]
    example = f"such as {key} of {shard.shown}"
    shards = list(dict.fromkeys(shard.url for shard, _ in lacking))
    if len(lacking) == examined:
        raise DataError(
            f"{stored.folder} has features of other {_PLURAL[stored.kind]}: none of {examined:,} samples examined "
            f"is among them, {example}; encode data.train into another folder: {stored.command_elsewhere(shards)}"
        )
    further = ", or have captions that were not encoded (--captions)" if stored.kind == "caption" else ""
    raise DataError(
        f"{len(lacking):,} of {examined:,} samples examined have no features in {stored.folder}, {example}: they "
        f"were added or changed since, or encoding was interrupted{further}; continue it: {stored.command(shards)}"
    )
