"""``clipkit search`` and ``clipkit index``: find the nearest rows of embeddings for texts and images.

Embeddings stay memory-mapped. A query, which is never quantized, is compared with all rows in float32, to which
blocks of rows are converted that stay in the cache. Of the rows that an index covers (see
``clipkit.inference.index``), it is compared only with the candidates that the index selects, which can miss some of
the nearest.

Dimensions: N rows, O embedding dimension, K results, Q queries.
"""

import base64
import hashlib
import io
import json
import math
import mmap
import os
import re
import sys
import time
import zlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from threading import Lock
from tokenize import TokenError
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.compute
import pyarrow.parquet
import torch
import torch.nn.functional as F
from markupsafe import Markup
from PIL import Image
from torch import Tensor

from clipkit.api import encode_image, encode_text, load
from clipkit.distributed import allow_open_files
from clipkit.errors import ConfigError, DataError
from clipkit.files.pages import check_page, templates, write_page
from clipkit.files.terminal import CountProgress, counted, format_bytes, printable
from clipkit.formats.checkpoint import model_hash
from clipkit.inference.index import LARGEST_K, ApproximateIndex, Stamp, write_index
from clipkit.inference.inputs import Item, Sample, Stream, read_image
from clipkit.inference.storage import Storage, content_digest, storage_of, unpacked
from clipkit.inference.stream import pick_device
from clipkit.model.clip import CLIP
from clipkit.model.preprocess import ImageLike
from clipkit.options import IndexOptions, SearchOptions, ServeOptions
from clipkit.samples.decode import decode_pixels
from clipkit.samples.depth import STRETCH
from clipkit.samples.sources import PARQUET_SUFFIXES
from clipkit.samples.traits import Decoding

TEMPLATES = templates(Path(__file__).with_name("templates"))
NOT_WEIGHT = 0.5  # of negative embeddings
# errors of damaged files; numpy parses headers as Python
_DAMAGED = (
    OSError, ValueError, TypeError, ArithmeticError, SyntaxError, TokenError, pyarrow.ArrowException, DataError,
)  # fmt: skip
_NAMED = re.compile(r"(?:img|text)_emb_?([0-9]+)\.npy")
_SHARDS = 16  # whose list of members is kept
_TABLES = 100 << 20  # bytes of metadata that are kept
_AS_SHOWN = Decoding(background=(255, 255, 255), upright=True, pixel_range=STRETCH)
_BLOCK = 1 << 16  # rows that are compared with several queries at a time
_QUERIES = 50  # that the recall of an index is measured with
_NUMBERS = 1 << 18  # that are converted to float32 at a time, so that they stay in the cache


@dataclass(frozen=True, kw_only=True)
class Hit:
    """A row that was found.

    Attributes:
        id: names the row until its file changes, as "part-row-digits".
        path: the image's path, the key in its shard, or the text.
        source: the folder, file, shard or table that contains it.
        directory: the folder that relative paths were given in; "" for the current one.
    """

    id: str
    similarity: float
    path: str
    source: str
    metadata: Mapping[str, Any]
    directory: str = ""

    @property
    def digest(self) -> str:
        """Digest of the content, see ``content_digest``; "" for folders of earlier versions and clip-retrieval."""
        return str(self.metadata.get("digest") or "")


class EmbeddingsChanged(DataError):
    """An embedding file or its metadata changed while it was open."""


FileStamp = tuple[int, int, int, int]  # modification time in ns, bytes, inode and time of change in ns


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One embedding file, memory-mapped, with its metadata."""

    number: int
    digits: str  # change with the files
    path: Path
    rows: npt.NDArray[Any]  # (N, O), as they are stored
    memory: mmap.mmap  # of the rows
    storage: Storage
    table: Path
    columns: Sequence[str]  # of the table
    row_group_ends: Sequence[int]  # of the table: the number of the first row after each row group
    stamps: tuple[FileStamp, FileStamp]  # of both files

    def check(self) -> None:
        """Check that the embedding file and its metadata are unchanged.

        The rows of a new table are of other images, and reading beyond the new end of a mapped file would end the
        process.

        Raises:
            EmbeddingsChanged: one of them was changed, replaced or removed.
            DataError: one of them cannot be read.
        """
        for path, stamp in zip((self.path, self.table), self.stamps, strict=True):
            try:
                is_same = _stamp_of(path) == stamp
            except FileNotFoundError:
                is_same = False
            except OSError as error:
                raise DataError(f"cannot read {path}: {error.strerror}") from error
            if not is_same:
                raise EmbeddingsChanged(f"{path} changed while it was read: search again")

    @cached_property
    def stamp(self) -> Stamp:
        """Identifies the embedding file in an index, also after both were copied with their times."""
        time, size, *_ = self.stamps[0]
        return len(self.rows), size, time, zlib.crc32(self.rows[:1].tobytes())

    @property
    def width(self) -> int:
        """O."""
        return int(self.rows.shape[1]) * self.storage.packed

    @cached_property
    def norms(self) -> Tensor:
        """Norms of the stored numbers, (N,) float32."""
        return torch.cat([numbers.norm(dim=1) for _, numbers in self._blocks()])

    def similarities(self, query: Tensor) -> Tensor:
        """Return the similarities of a query, (O,), with all rows, (N,) float32."""
        self.expect_reads(in_order=True)
        scores = torch.empty(len(self.rows))
        for block, numbers in self._blocks():
            torch.mv(numbers, query, out=scores[block])
        self.expect_reads(in_order=False)
        return scores if self.storage.unit else scores.div_(self.norms)

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield blocks of rows and their numbers, which are valid until the next block."""
        length = max(1, _NUMBERS // self.width)
        memory = torch.empty(length, self.width)  # kept, as the system clears new memory
        for start in range(0, len(self.rows), length):
            block = slice(start, start + length)
            rows = self.rows[block]
            yield block, _numbers(rows, out=memory[: len(rows)])

    def expect_reads(self, *, in_order: bool) -> None:
        """Tell the system whether to read ahead when rows are not in memory."""
        if hasattr(self.memory, "madvise"):  # not on Windows
            self.memory.madvise(mmap.MADV_NORMAL if in_order else mmap.MADV_RANDOM)


class _Snapshot:
    """The files of a folder and its index as they were opened.

    Attributes:
        parts: the files with at least one row.
        covered: indices of the parts that the index covers, by the numbers of their files.
        covered_rows: number of their rows.
        rest: the other parts by their indices.
    """

    def __init__(self, parts: Sequence[_Part] = (), index: ApproximateIndex | None = None) -> None:
        self.parts = parts
        self.index = index
        self.covered: dict[int, int] = {}
        self.rest: dict[int, _Part] = {}
        for part_index, part in enumerate(parts):
            if index is not None and index.covers.get(part.number) == part.stamp:
                self.covered[part.number] = part_index
                part.expect_reads(in_order=False)
            else:
                self.rest[part_index] = part
        self.covered_rows = sum(len(parts[part_index].rows) for part_index in self.covered.values())


class Embeddings:
    """A folder written by ``clipkit encode`` or clip-retrieval, which may grow while it is searched.

    Attributes:
        manifest: what ``clipkit encode`` recorded; empty for other folders.
        left_out: embedding files without as many rows of metadata.
    """

    def __init__(self, folder: Path, *, exact: bool = False) -> None:
        self.folder = folder
        self.manifest: dict[str, Any] = {}
        self._snapshot = _Snapshot()
        self._complete: set[int] | None = None  # numbers of the files that were opened
        self.left_out: list[Path] = []
        self._tables: OrderedDict[tuple[str, int | None], pyarrow.Table] = OrderedDict()
        self._table_bytes = 0
        self._lock = Lock()
        self._exact = exact
        # with the stamp of its description
        self._index: tuple[FileStamp, ApproximateIndex] | None = None
        allow_open_files()  # each embedding file stays open
        self.refresh()

    @property
    def _parts(self) -> Sequence[_Part]:
        return self._snapshot.parts

    def __len__(self) -> int:
        return sum(len(part.rows) for part in self._parts)

    @property
    def width(self) -> int:
        """O."""
        return self._parts[0].width

    @property
    def has_images(self) -> bool:
        """Whether the rows are of images rather than texts."""
        return self.manifest.get("kind") != "caption"

    @property
    def columns(self) -> list[str]:
        """Names of the metadata columns."""
        return list(self._parts[0].columns)

    @property
    def unindexed(self) -> int:
        """Number of rows that the index lacks; 0 without an index."""
        snapshot = self._snapshot
        return 0 if snapshot.index is None else sum(len(part.rows) for part in snapshot.rest.values())

    @property
    def missing(self) -> int:
        """Number of embedding files that ``clipkit encode`` has not completed yet; 0 if it is unknown."""
        complete = len(_files(self.folder)) - len(self.left_out)
        return max(0, self._file_count - complete)

    @property
    def _file_count(self) -> int:
        """Number of embedding files when ``clipkit encode`` is complete; 0 if it is unknown."""
        items = self.manifest.get("items")
        length = self.manifest.get("rows_per_file")
        if not (isinstance(items, int) and isinstance(length, int) and length > 0):
            return 0
        return math.ceil(items / length)

    def refresh(self) -> None:
        """Open files that are new or have changed since; incomplete ones are left out until they are complete."""
        with self._lock:
            if not self._exact:
                self._refresh_index()
            opened_parts = {(str(part.path), *part.stamps): part for part in self._parts}
            parts = []
            self.left_out = []
            complete = set[int]()
            for file_number, rows, table in _files(self.folder):
                part = None
                try:
                    stamps = _stamp_of(rows), _stamp_of(table)
                    part = opened_parts.get((rows, *stamps))
                    part = part or _open_part(file_number, Path(rows), Path(table), stamps)
                except (FileNotFoundError, EmbeddingsChanged):  # being replaced
                    pass
                if part is None:
                    self.left_out.append(Path(rows))
                    continue
                complete.add(file_number)
                if len(part.rows):
                    parts.append(part)
            # after the files, which are written later
            self._refresh_manifest(has_rows=bool(parts))
            if complete != self._complete:
                self._check_complete(complete)
                self._complete = complete
            if not parts and len(complete) < self._file_count:
                raise DataError(
                    f"{self.folder} has no complete embedding file: if clipkit encode is running, wait for it; "
                    "if it was interrupted, run its command again"
                )
            if self.left_out and not parts:
                raise DataError(
                    f"{self.left_out[0]} lacks its metadata: expected as many rows in {self.folder / 'metadata'}"
                )
            if not parts:
                raise DataError(
                    f"{self.folder} contains no embeddings: expected a folder written by clipkit encode, with "
                    "img_emb and metadata"
                )
            if len({(part.width, part.rows.dtype) for part in parts}) > 1:
                raise DataError(
                    f"the files in {self.folder} have embeddings of different dimensions or dtypes"
                )
            self._snapshot = _Snapshot(parts, self._index[1] if self._index else None)

    def sample(self, count: int) -> Tensor:
        """Return at most ``count`` rows that are finite and not zero, evenly spaced, (count, O) float32."""
        ends = np.cumsum([len(part.rows) for part in self._parts])
        rows = np.unique(np.linspace(0, ends[-1] - 1, count).astype(np.int64))
        file_indices = np.searchsorted(ends, rows, side="right")
        both = zip(file_indices.tolist(), rows, strict=True)
        vectors = torch.cat([_unit_rows(self._parts[index].rows[[row - ends[index]]]) for index, row in both])
        return vectors[vectors.isfinite().all(dim=1) & vectors.any(dim=1)]

    def nearest_similarities(self, queries: Tensor, k: int) -> Tensor:
        """Return the similarities of the k rows nearest to each query, (Q, K) float32, reading all rows once.

        Args:
            queries: (Q, O) float32, unit norm.
            k: K, if there are as many rows.
        """
        best = torch.empty(len(queries), 0)
        for part in self._parts:
            for rows in torch.arange(len(part.rows)).split(_BLOCK):
                scores = _drop_nonfinite(queries @ _unit_rows(part.rows[rows.numpy()]).T)
                best = torch.cat([best, scores], dim=1)
                best = best.topk(min(k, best.shape[1])).values
        return best

    def write_index(self, show: Callable[[int], None]) -> tuple[int, int]:
        """Write or extend the index of the folder; see ``clipkit.inference.index.write_index``."""
        stamped_rows = ((part.number, part.stamp, part.rows) for part in self._parts)
        return write_index(self.folder, stamped_rows, self.width, show)

    def _refresh_manifest(self, *, has_rows: bool) -> None:
        path = self.folder / "manifest.json"
        manifest: dict[str, Any] = {}
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            if not has_rows:  # the folder was removed
                return
        except (OSError, ValueError) as error:
            raise DataError(f"cannot read {path}: {error}") from error
        if not isinstance(manifest, dict):
            raise DataError(f"cannot read {path}: it is not a manifest")
        # the weights are a digest of the preprocessing and the dimension, too
        is_same = all(manifest.get(name) == self.manifest.get(name) for name in ("weights", "kind"))
        if self._parts and not is_same:
            raise DataError(
                f"{self.folder} was encoded with another model or of another kind since it was opened: restart "
                "clipkit serve, or search again"
            )
        self.manifest = manifest

    def _refresh_index(self) -> None:
        path = self.folder / "index" / "index.json"
        try:
            stamp = _stamp_of(path)
            if self._index is None or self._index[0] != stamp:
                self._index = None
                self._index = stamp, ApproximateIndex(self.folder)
        except (FileNotFoundError, NotADirectoryError):
            self._index = None
        except OSError as error:
            raise DataError(
                f"cannot read {path}: {error.strerror}; pass --exact to search without the index"
            ) from error

    def _check_complete(self, complete: set[int]) -> None:
        for record in sorted((self.folder / ".parts").glob("*.jsonl")):
            if not record.stem.isdecimal() or int(record.stem) in complete:
                continue
            digits = record.stem.zfill(len(str(self._file_count)))
            kind = "img_emb" if self.has_images else "text_emb"
            embeddings, metadata = f"{kind}/{kind}_{digits}.npy", f"metadata/metadata_{digits}.parquet"
            fault = f"lacks {embeddings}, which was complete"
            for file_number, rows, table in _files(self.folder):
                if file_number != int(digits):
                    continue
                fault = ""
                try:
                    stamps = _stamp_of(rows), _stamp_of(table)
                    if _open_part(file_number, Path(rows), Path(table), stamps) is None:
                        fault = f"has different numbers of rows in {embeddings} and {metadata}"
                except FileNotFoundError:
                    fault = f"lacks {metadata}, which was complete"
                except EmbeddingsChanged:  # being replaced
                    pass
            # the record is written after the files and removed before them
            if fault and record.is_file():
                raise DataError(
                    f"{self.folder} {fault}: run its clipkit encode command again, which writes it"
                )

    def search(self, query: Tensor, k: int, *, filters: Sequence[tuple[str, str]] = ()) -> list[Hit]:
        """Return the k most similar rows, the best first; those that differ only by rounding in any order.

        With an index, unless there are filters or k is above 1,000, some may be missing.

        Args:
            query: (O,) float32, unit norm.
            filters: pairs of a column and a text that its value must contain, ignoring case; all must match.

        Raises:
            EmbeddingsChanged: a file of the results, or one that is compared row by row, has changed since
                ``refresh``. A file that was truncated in place since then ends the process; ``clipkit encode`` only
                replaces files.
            DataError: the query has another dimension, or there is no such column.
        """
        snapshot = self._snapshot
        parts = snapshot.parts
        if query.shape != (self.width,):
            raise DataError(f"the query has dimension {query.numel()}, the embeddings have {self.width}")
        ranked = None
        if snapshot.index is not None and not filters and k <= LARGEST_K:
            ranked = self._from_index(snapshot, snapshot.index, query, k)
        if ranked is None:
            masks = [self._mask(part, filters) for part in parts]
            ranked = self._compare_rows(dict(enumerate(parts)), masks, query, k)
        ranked = sorted(ranked)[:k]
        for part_index in {part_index for _, part_index, _ in ranked}:
            parts[part_index].check()  # also if its metadata is in memory
        return [self._hit(parts[part_index], row, -score) for score, part_index, row in ranked]

    def _from_index(
        self, snapshot: _Snapshot, index: ApproximateIndex, query: Tensor, k: int
    ) -> list[tuple[float, int, int]] | None:
        """Rank the candidates of the index, and the rows that it lacks; None if it has too few candidates.

        Returns:
            Negative similarity, index of the part, and row.
        """
        parts, covered = snapshot.parts, snapshot.covered
        near = index.near(query.numpy(), k, covered) if covered else []
        candidates = [(covered[file_number], row) for file_number, row in near]
        if len(candidates) < min(k, snapshot.covered_rows):
            return None
        ranked: list[tuple[float, int, int]] = []
        if candidates:
            stored = np.empty((len(candidates), parts[0].rows.shape[1]), parts[0].rows.dtype)
            for i, (part_index, row) in enumerate(candidates):
                stored[i] = parts[part_index].rows[row]
            scores = _unit_rows(stored) @ query
            best = scores.topk(min(k, len(scores)))
            ranked = [(-score, *candidates[i]) for score, i in zip(*map(Tensor.tolist, best), strict=True)]
        if snapshot.rest:
            ranked += self._compare_rows(snapshot.rest, [None] * len(parts), query, k)
        return ranked

    @staticmethod
    def _compare_rows(
        parts: Mapping[int, _Part], masks: Sequence[Tensor | None], query: Tensor, k: int
    ) -> list[tuple[float, int, int]]:
        """Compare all rows of parts, given by their indices, that pass the masks; see ``_from_index``."""
        scores = []
        for part_index, part in parts.items():
            part.check()
            mask = masks[part_index]
            similarities = _drop_nonfinite(part.similarities(query))
            scores.append(similarities if mask is None else similarities.masked_fill(~mask, -torch.inf))
        every = torch.cat(scores)
        k = min(k, int((every > -torch.inf).sum()))
        if k == 0:
            return []
        least = every.topk(k).values[-1]
        ranked: list[tuple[float, int, int]] = []
        for part_index, similarities in zip(parts, scores, strict=True):
            best = (similarities >= least).nonzero()[:, 0]
            ranked += [(-float(similarities[row]), part_index, row) for row in best.tolist()]
        return ranked

    def row(self, name: str) -> tuple[Hit, Tensor]:
        """Return a row by the id of a hit, with similarity 1, and its embedding, (O,) float32."""
        match = re.fullmatch(r"(\d{1,18})-(\d{1,12})-([0-9a-f]{8})", name)
        part = next((candidate for candidate in self._parts if match and candidate.digits == match[3]), None)
        if match is None or part is None or part.number != int(match[1]) or int(match[2]) >= len(part.rows):
            raise DataError(f"no row {printable(name, 40)}: the embeddings may have changed, search again")
        row = int(match[2])
        part.check()
        return self._hit(part, row, 1.0), F.normalize(_numbers(part.rows[[row]])[0], dim=0)

    def find_embedding(self, hit: Hit) -> Tensor:
        """Return this folder's embedding, (O,) of unit norm, of the image or text of a hit in another folder."""
        has_digests = False
        for part in self._parts:
            table = self._table(part)
            if not hit.digest or "digest" not in table.column_names:
                continue
            has_digests = True
            equal = pyarrow.compute.equal(table["digest"].cast(pyarrow.string()), hit.digest)
            rows = pyarrow.compute.indices_nonzero(equal.fill_null(False)).to_numpy()
            if len(rows):
                part.check()
                return F.normalize(_numbers(part.rows[rows[:1]])[0], dim=0)
        if not has_digests:
            raise DataError(
                f"{self.folder} or the folder of {printable(hit.path, 200)} does not record the content of "
                "images: write it with clipkit encode"
            )
        raise DataError(f"{self.folder} has no embedding of {printable(hit.path, 200)}")

    def _hit(self, part: _Part, row: int, similarity: float) -> Hit:
        group = bisect_right(part.row_group_ends, row)
        table = self._table(part, group)
        table_row = row - (part.row_group_ends[group] - len(table))
        try:
            values = {name: _plain(table[i], table_row) for i, name in enumerate(table.column_names)}
        except UnicodeDecodeError as error:
            raise DataError(f"cannot read {part.table}: row {row} has text that is not UTF-8") from error
        column = "image_path" if self.has_images and "image_path" in values else "caption"
        path, source = values.pop(column, None), values.pop("source", None)
        return Hit(
            id=f"{part.number}-{row}-{part.digits}",
            similarity=similarity,
            path="" if path is None else str(path),
            source="" if source is None else str(source),
            metadata={
                name: value if value is None or isinstance(value, str | int | float) else str(value)
                for name, value in values.items()
            },
            directory=str(self.manifest.get("directory", "")),
        )

    def _table(self, part: _Part, group: int | None = None) -> pyarrow.Table:
        """Return the metadata of all rows, or of a row group."""
        key = part.digits, group
        with self._lock:
            if key in self._tables:
                self._tables.move_to_end(key)
                return self._tables[key]
        try:
            with pyarrow.parquet.ParquetFile(part.table) as file:
                # starting threads takes longer
                table = file.read_row_groups(
                    range(file.num_row_groups) if group is None else [group], use_threads=False
                )
        except (OSError, pyarrow.ArrowException) as error:
            part.check()
            raise DataError(f"cannot read {part.table}: {error}") from error
        part.check()
        with self._lock:
            if key not in self._tables:
                self._tables[key] = table
                self._table_bytes += table.nbytes
            while len(self._tables) > 1 and self._table_bytes > _TABLES:
                self._table_bytes -= self._tables.popitem(last=False)[1].nbytes
        return table

    def _mask(self, part: _Part, filters: Sequence[tuple[str, str]]) -> Tensor | None:
        mask = None
        for column, text in filters:
            table = self._table(part)
            if table.column_names.count(column) != 1:
                kind = "several columns" if column in table.column_names else "no column"
                raise DataError(f"{kind} {printable(column, 40)}: {', '.join(table.column_names)}")
            try:
                values = table[column].cast(pyarrow.string())
            except pyarrow.ArrowException as error:
                raise DataError(f"column {column} has no text: {error}") from error
            matches = pyarrow.compute.match_substring(values, text, ignore_case=True).fill_null(False)
            column_mask = torch.from_numpy(matches.to_numpy(zero_copy_only=False).copy())
            mask = column_mask if mask is None else mask & column_mask
        return mask


def _plain(values: pyarrow.ChunkedArray, row: int) -> Any:
    """Return a value of a column; as text if Python cannot represent it, such as a time in nanoseconds."""
    try:
        return values[row].as_py()
    except UnicodeDecodeError:
        raise
    except (ValueError, OverflowError):
        try:
            return str(values[row].cast(pyarrow.string()))
        except pyarrow.ArrowNotImplementedError:  # lists
            return " ".join(values.slice(row, 1).to_string().split())


def _numbers(rows: npt.NDArray[Any], out: Tensor | None = None) -> Tensor:
    """Return stored rows in float32, (N, O), up to a positive factor for each row; maybe in the memory of out."""
    if rows.dtype == np.float16:  # numpy takes 15 times as long
        halves = torch.from_numpy(rows)
        return halves.float() if out is None else out.copy_(halves)
    return torch.from_numpy(storage_of(rows).numbers(rows))


def _unit_rows(rows: npt.NDArray[Any]) -> Tensor:
    """Return stored rows in float32, (N, O), unit norm up to rounding; NaN for zero rows in int8."""
    return _numbers(rows) if storage_of(rows).unit else torch.from_numpy(unpacked(rows))


def _drop_nonfinite(scores: Tensor) -> Tensor:
    """Give rows that are not finite the lowest similarity, in place."""
    return scores.nan_to_num_(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)


def _files(folder: Path) -> list[tuple[int, str, str]]:
    """List number, embedding file and metadata; as strings, since thousands of paths take tens of milliseconds."""
    kind = next((kind for kind in ("img_emb", "text_emb") if (folder / kind).is_dir()), None)
    if kind is None:
        return []
    tables = str(folder / "metadata" / "metadata_")
    with os.scandir(folder / kind) as entries:
        named = [
            (entry.path, match[1])
            for entry in entries
            if entry.name.startswith(kind) and (match := _NAMED.fullmatch(entry.name))
        ]
    return sorted((int(digits), path, f"{tables}{digits}.parquet") for path, digits in named)


def _stamp_of(path: str | Path) -> FileStamp:
    status = os.stat(path)  # noqa: PTH116, for strings
    return status.st_mtime_ns, status.st_size, status.st_ino, status.st_ctime_ns


def _open_part(
    file_number: int, rows: Path, table: Path, stamps: tuple[FileStamp, FileStamp]
) -> _Part | None:
    """Open a part; None if the numbers of rows differ because it is being replaced.

    Raises:
        FileNotFoundError: a file is missing.
        EmbeddingsChanged: a file was replaced since the stamps were taken.
        DataError: a file is damaged.
    """
    try:
        # never written; a plain array, since selecting rows of a memmap takes longer
        mapped: Any = np.lib.format.open_memmap(rows, mode="c")
        array = mapped.view(np.ndarray)
        metadata = pyarrow.parquet.read_metadata(table)
        columns = metadata.schema.to_arrow_schema().names
        groups = (metadata.row_group(i) for i in range(metadata.num_row_groups))
        row_group_ends = [*accumulate(group.num_rows for group in groups)]
        storage = storage_of(array)
    except FileNotFoundError:
        raise
    except _DAMAGED as error:
        raise DataError(f"cannot read {rows} and {table}: {error}") from error
    if len(array) != (row_group_ends[-1] if row_group_ends else 0):
        return None
    part = _Part(
        number=file_number,
        digits=hashlib.sha256(repr((file_number, stamps)).encode()).hexdigest()[:8],
        path=rows,
        rows=array,
        memory=mapped._mmap,
        storage=storage,
        table=table,
        columns=columns,
        row_group_ends=row_group_ends,
        stamps=stamps,
    )
    part.check()
    return part


def encode_query(model: CLIP, *, texts: Sequence[str] = (), images: Sequence[ImageLike] = ()) -> list[Tensor]:
    """Encode texts and images of a query, (O,) float32 each."""
    vectors = [*encode_text(list(texts), model)] if texts else []
    return [*vectors, *encode_image(list(images), model)] if images else vectors


def combine_query(positive: Sequence[Tensor], negative: Sequence[Tensor] = ()) -> Tensor:
    """Return the mean of the positive minus half the mean of the negative embeddings, (O,) float32, unit norm."""
    total = torch.stack([*positive]).mean(dim=0)
    if negative:
        total = total - NOT_WEIGHT * torch.stack([*negative]).mean(dim=0)
    if not total.isfinite().all():
        raise DataError("an embedding of the query contains NaN or infinity")
    if not total.norm() > 1e-6:
        raise DataError("the embeddings of the query add up to zero: there is nothing to search for")
    return F.normalize(total, dim=0)


def load_model(embeddings: Embeddings, options: SearchOptions | ServeOptions, name: str = "") -> CLIP:
    """Load the model of embeddings, by default the one that ``clipkit encode`` recorded."""
    recorded = embeddings.manifest
    source = name or str(recorded.get("model") or "")
    if not source:
        raise ConfigError(f"{embeddings.folder} does not record its model: pass --model")
    there = Path(str(recorded.get("directory", ""))) / source
    model = load(
        source if name or not there.exists() else there,
        name=options.name,
        device=pick_device(options.device),
        background=recorded.get("background"),
        upright=recorded.get("upright"),
        pixel_range=recorded.get("pixel_range"),
    )
    if recorded and model_hash(model) != recorded.get("weights"):
        model.dim = min(model.dim, embeddings.width)  # as with encode --dim
        if model_hash(model) != recorded.get("weights"):
            raise ConfigError(
                f"{embeddings.folder} has embeddings of {recorded.get('model')} with other weights than {source}: "
                "leave out --model"
                if name
                else f"{source} has changed since {embeddings.folder} was encoded: encode into a new folder, or "
                "pass the earlier weights as --model"
            )
    if model.dim != embeddings.width:
        raise ConfigError(
            f"{source} gives embeddings of dimension {model.dim}, {embeddings.folder} has {embeddings.width}"
        )
    return model


@lru_cache(_SHARDS)
def _images_of(source: Path, _changed: tuple[int, int]) -> dict[str, list[Sample]]:
    images: dict[str, list[Sample]] = {}
    for item in Stream([str(source)]):
        if isinstance(item.image, Sample):
            images.setdefault(item.key, []).append(item.image)
    return images


def _contains_images(source: str) -> bool:
    return source.lower().endswith((".tar", *PARQUET_SUFFIXES))


def _locate_path(path: str, directory: str) -> Path:
    there = Path(directory) / path
    return there if there.exists() else Path(path)


def thumbnail(hit: Hit, side: int) -> bytes:
    """Return the image of a hit as a JPEG of at most ``side`` pixels along each side."""
    source, image = (_locate_path(location, hit.directory) for location in (hit.source, hit.path))
    images: Sequence[Path | Sample] = [image]
    try:
        if _contains_images(hit.source) and source.is_file():
            state = source.stat()
            images = _images_of(source, (state.st_mtime_ns, state.st_size)).get(hit.path, [])
            if not images and image.is_file():
                images = [image]  # a table of paths
            if not images or (len(images) > 1 and not hit.digest):
                raise DataError(f"{hit.source} has {'several images' if images else 'no image'} {hit.path}")
    except OSError as error:
        raise DataError(f"cannot read {source}: {error.strerror}") from error
    candidates = [*images]
    if hit.digest:  # the image may be a member that ``clipkit encode --image`` named
        for sample in images:
            if isinstance(sample, Sample):
                candidates += [replace(sample, image=name) for name in sample.samples.members(sample.i)]
    for content in candidates:
        try:
            data = read_image(Item(source=hit.source, key=hit.path, image=content))
        except DataError:
            if len(candidates) == 1:
                raise
            continue
        if not hit.digest or content_digest(data) == hit.digest:
            break
    else:
        raise DataError(f"{hit.path} has changed since it was encoded")
    decoded = Image.fromarray(decode_pixels(data, _AS_SHOWN).pixels.transpose(1, 2, 0))
    decoded.thumbnail((side, side), Image.Resampling.BICUBIC, reducing_gap=2.0)
    file = io.BytesIO()
    decoded.save(file, "JPEG", quality=85)
    return file.getvalue()


def run_search(options: SearchOptions) -> int:
    """Run the command and return its exit status: 0 if something was found."""
    check_page("--html", options.html)
    texts = [options.text] if options.text else []
    if not texts and not options.image:
        raise ConfigError("nothing to search for: give a text or --image FILE")
    embeddings = Embeddings(options.embeddings, exact=options.exact)
    model = load_model(embeddings, options, options.model)
    positive = encode_query(model, texts=texts, images=options.image)
    query = combine_query(positive, encode_query(model, texts=options.unwanted))
    embeddings.refresh()  # loading the model took time, in which files may have been replaced
    if note := stale_note(embeddings):
        print(note, file=sys.stderr)
    hits = embeddings.search(query, options.k)
    if options.html is not None:
        title = printable(options.text or ", ".join(path.name for path in options.image), 80)
        unwanted = ", but not " + " or ".join(map(repr, options.unwanted)) if options.unwanted else ""
        lead = (
            f"The {len(hits)} nearest of {counted(len(embeddings), 'row')} in {embeddings.folder}{unwanted}."
        )
        results = [(hit, embed_thumbnail(hit)) for hit in hits]
        page = TEMPLATES.get_template("found.html").render(title=title, lead=lead, notes=[], hits=results)
        print(f"wrote {write_page(options.html, page)}")
        return 0 if hits else 1
    captions = "  caption" if any(hit.metadata.get("caption") for hit in hits) else ""
    print(f"rank  similarity  path{captions}")
    for rank, hit in enumerate(hits, start=1):
        caption = hit.metadata.get("caption")
        about = f"  {printable(str(caption), 60)}" if caption else ""
        print(f"{rank:>4}  {hit.similarity:>10.4f}  {printable(hit.path)}{about}")
    return 0 if hits else 1


def stale_note(embeddings: Embeddings) -> str:
    """Return lines about files that are not encoded yet and rows that the index lacks; "" if there are none."""
    notes = []
    folder = embeddings.folder
    if embeddings.missing:
        files = counted(embeddings.missing, "complete embedding file")
        notes.append(f"note: {folder} lacks {files}: clipkit encode is running or was interrupted")
    elif embeddings.left_out:
        files = counted(len(embeddings.left_out), "embedding file")
        first = embeddings.left_out[0]
        notes.append(f"note: {files} without as many rows of metadata are left out, such as {first}")
    if embeddings.unindexed:
        rows = counted(embeddings.unindexed, "row")
        notes.append(
            f"note: the index lacks {rows}, which are compared one by one; run clipkit index {folder}"
        )
    return "\n".join(notes)


def run_index(options: IndexOptions) -> int:
    """Run ``clipkit index`` and return its exit status."""
    embeddings = Embeddings(options.embeddings, exact=True)
    queries = embeddings.sample(_QUERIES)
    if not len(queries):
        raise DataError(f"{embeddings.folder} has no row to search: those sampled are zero, NaN or infinite")
    began = time.monotonic()
    try:
        with CountProgress("indexing", total=None, shown=not options.quiet) as bar:
            added, size = embeddings.write_index(bar.show)
    except OSError as error:
        raise DataError(
            f"cannot write the index of {embeddings.folder}: {error.strerror or error}"
        ) from error
    print(
        f"added {counted(added, 'row')} of {len(embeddings):,} in {time.monotonic() - began:,.1f} s; the index has "
        f"{format_bytes(size)}"
    )
    indexed = Embeddings(embeddings.folder)
    recalled = []
    for query, similarities in zip(queries, embeddings.nearest_similarities(queries, 10), strict=True):
        hits = indexed.search(query, len(similarities))
        recalled += [hit.similarity >= float(similarities[-1]) - 1e-6 for hit in hits]
    print(
        f"recall@10 {np.mean(recalled):.3f} against exact search, with {counted(len(queries), 'row')} as queries"
    )
    if note := stale_note(indexed):
        print(note, file=sys.stderr)
    return 0


def embed_thumbnail(hit: Hit) -> Markup | None:
    """Return a thumbnail as a data URI; None if there is none."""
    try:
        return Markup("data:image/jpeg;base64,") + base64.b64encode(thumbnail(hit, 240)).decode()
    except DataError:
        return None
