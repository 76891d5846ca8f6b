"""An approximate index of embeddings: lists of similar rows (IVF), four bits per element, by faiss.

    EMBEDDINGS/index/index.json           the file below, its SHA-256, and the embedding files that it covers
    EMBEDDINGS/index/rows-DIGITS.faiss    a rotation, centers of lists, and codes of rows; read into memory

A row belongs to the list of the nearest center. Its code stands for the difference between both, after the
rotation: 4 bits choose one of 16 values for each element. faiss estimates inner products with a query by tables of
the products of these values, which stay in registers (André et al. 2015,
https://www.vldb.org/pvldb/vol9/p288-andre.pdf).

The index only selects candidates. ``clipkit.inference.search`` compares these exactly, and also all rows of
embedding files that are new or have changed since. A wrong index can miss rows, but gives no wrong similarity.

Dimensions: N rows, O embedding dimension, C candidates.
"""

import hashlib
import json
import math
import os
import secrets
import sys
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from clipkit.errors import ConfigError, DataError
from clipkit.files.writing import lock_output, replacing, write_atomic
from clipkit.inference.storage import unpacked

_FORMAT = 6
LARGEST_K = 1000
_LISTS_PER_ROOT = 3  # of the number of rows
_SAMPLES = 40  # rows for each list that its center is computed from
_ITERATIONS = 5
# by each query, at least; many short lists are searched faster than few long ones
_LISTS_SEARCHED = 96
_ROWS_SEARCHED = 32_000
_RESULTS_PER_LIST = 2  # for which one more list is searched
# that are compared exactly, at least and for each result
_LEAST_CANDIDATES = 32
_CANDIDATES = 2
_CODE_BITS = 4  # for each element
_LEAST_WIDTH = 256  # after the rotation, so that codes of narrow rows are exact enough
# of the squared norm of centers, when lists are ranked. Half of it would rank them by distance, but texts, which
# have low cosines with all images, find more of the nearest images if cosines count more.
_NORM_WEIGHT = 0.25
_BLOCK = 10_000  # rows that are added at a time
_ROW_BITS = 32  # of a key; the others are the number of the embedding file

_LARGEST = 1e30  # squared norm of a row; faiss ends the process for rows whose distances are not finite
_READING = Lock()  # faiss has one limit for all threads
# errors of damaged files
_DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError)

# rows, bytes and modification time in ns of an embedding file, and the CRC-32 of its first row
Stamp = tuple[int, int, int, int]


class ApproximateIndex:
    """The index of a folder of embeddings.

    Args:
        folder: the folder of the embeddings.

    Attributes:
        covers: the embedding files that are covered, by number.
        engine: of faiss, to which rows can be added.

    Raises:
        DataError: it is damaged or of another version.
        ConfigError: faiss is missing.
        FileNotFoundError: the folder has none.
    """

    def __init__(self, folder: Path) -> None:
        described = folder / "index" / "index.json"
        self._folder = folder
        try:
            text = described.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise
        except OSError as error:
            raise DataError(f"cannot read {described}: {error.strerror}") from error
        self._faiss = _import_faiss(folder)
        try:
            stored = json.loads(text)
            if stored["format"] != _FORMAT:
                raise ValueError("it is of another version of clipkit")
            self.covers: dict[int, Stamp] = {
                int(file_number): (int(rows), int(size), int(time), int(digest))
                for file_number, (rows, size, time, digest) in stored["covers"].items()
            }
            path = described.with_name(Path(str(stored["file"])).name)
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != stored["sha256"]:
                    raise ValueError(f"the content of {path.name} has changed")
            with _READING:
                # The file is larger than its parts. faiss computes a table of 64 bytes for 4 bytes of the centers.
                self._faiss.set_deserialization_vector_byte_limit(16 * path.stat().st_size)
                self.engine = self._faiss.read_index(str(path))
            rows = self.engine.ntotal
            if rows != stored["rows"]:
                raise ValueError(f"{path.name} is no index of {stored['rows']} rows")
            self._rotation = self._faiss.downcast_VectorTransform(self.engine.chain.at(0))
            self._lists = self._faiss.downcast_index(self.engine.index)
            self._lists.precomputed_table.resize(0)  # for distances
            self._centers = self._lists.quantizer.reconstruct_n(0, self._lists.nlist)
            self._norms = _NORM_WEIGHT * np.einsum("lo,lo->l", self._centers, self._centers)
            # of each search; the lists of one that needs fewer are filled up
            self._lists.nprobe = self._count_lists(LARGEST_K)
        except _DAMAGED as error:
            why = f"missing {path.name}" if isinstance(error, FileNotFoundError) else error
            raise self._describe_damage(why) from error

    @property
    def list_count(self) -> int:
        """Number of lists."""
        return int(self._lists.nlist)

    def near(self, query: npt.NDArray[np.float32], k: int, files: Container[int]) -> list[tuple[int, int]]:
        """Return candidates for the rows nearest to a query: numbers of embedding files, and of rows in these.

        Args:
            query: (O,), unit norm.
            k: rows that are wanted, at most ``LARGEST_K``. There are more candidates, or fewer if the lists
                searched have fewer rows.
            files: numbers of the embedding files that rows may be in.
        """
        self._faiss.omp_set_num_threads(1)  # of this thread
        rotated = self._rotation.apply(query[None])
        products = self._centers @ rotated[0]
        count = self._count_lists(k)
        best = np.argpartition(self._norms - products, count - 1)[:count]
        searched, list_products = np.full((1, self._lists.nprobe), -1), np.zeros((1, self._lists.nprobe))
        searched[0, :count], list_products[0, :count] = best, products[best]
        wanted = requested = max(_LEAST_CANDIDATES, _CANDIDATES * k)
        while True:
            _, [keys] = self._lists.search_preassigned(rotated, requested, searched, list_products)
            keys = keys[keys >= 0]
            numbers, rows = (keys >> _ROW_BITS).tolist(), (keys & (2**_ROW_BITS - 1)).tolist()
            candidates = [pair for pair in zip(numbers, rows, strict=True) if pair[0] in files]
            if len(keys) < requested or len(candidates) >= wanted:
                return candidates
            requested *= 4  # many were of other files

    def _count_lists(self, k: int) -> int:
        """Return the number of lists that are searched for k results."""
        by_rows = _ROWS_SEARCHED * self.list_count // max(1, int(self.engine.ntotal))
        return min(self.list_count, max(_LISTS_SEARCHED, by_rows) + k // _RESULTS_PER_LIST)

    def _describe_damage(self, why: object) -> DataError:
        return DataError(
            f"cannot use the index in {self._folder / 'index'} ({why}): run clipkit index {self._folder}, "
            "or pass --exact"
        )


def write_index(
    folder: Path,
    parts: Iterable[tuple[int, Stamp, npt.NDArray[Any]]],
    width: int,
    show: Callable[[int], None] = lambda _: None,
) -> tuple[int, int]:
    """Index all rows of a folder, or add those of new files to its index.

    Args:
        parts: number, stamp and stored rows of each embedding file.
        width: O.

    Returns:
        The number of rows added, without those that are zero or not finite, and the bytes of the index.
    """
    faiss = _import_faiss(folder)
    stamped_rows = {file_number: (stamp, rows) for file_number, stamp, rows in parts}
    if max(stamped_rows, default=0) >= 2 ** (63 - _ROW_BITS):
        raise DataError(f"cannot index {folder}: the number of a file, {max(stamped_rows)}, is too large")
    total = sum(len(rows) for _, rows in stamped_rows.values())
    lists = _LISTS_PER_ROOT * math.isqrt(total)
    index_folder = folder / "index"
    index_folder.mkdir(exist_ok=True)
    with lock_output(index_folder, "clipkit index", lock=index_folder / ".lock"):
        engine = None
        covers = dict[int, Stamp]()
        try:
            earlier = ApproximateIndex(folder)
            is_current = all(
                file_number in stamped_rows and stamped_rows[file_number][0] == stamp
                for file_number, stamp in earlier.covers.items()
            )
            # lists that became too long take longer to search
            if is_current and earlier.engine.d == width and lists <= 2 * earlier.list_count:
                engine = earlier.engine
                covers = earlier.covers
        except (DataError, FileNotFoundError):  # replaced by a new one
            pass
        # two OpenMP runtimes, of torch and of faiss, crash on macOS if both have threads
        faiss.omp_set_num_threads(1 if sys.platform == "darwin" else torch.get_num_threads())
        if engine is None:
            step = max(1, total // (_SAMPLES * lists))
            sample = np.concatenate([_select_valid(rows[::step])[1] for _, rows in stamped_rows.values()])
            if not len(sample):  # every step-th row is zero or not finite
                sample = np.concatenate([_select_valid(rows)[1] for _, rows in stamped_rows.values()])
            lists = min(lists, len(sample))
            if len(sample) < 2**_CODE_BITS:  # faiss needs as many
                sample = np.resize(sample, (2**_CODE_BITS, width))
            engine = _make_engine(faiss, width, lists)
            engine.train(sample)
        done = 0
        for file_number, (stamp, rows) in stamped_rows.items():
            if file_number in covers:
                continue
            for start in range(0, len(rows), _BLOCK):
                valid, block = _select_valid(rows[start : start + _BLOCK])
                if len(valid):
                    engine.add_with_ids(block, (file_number << _ROW_BITS) + start + valid)
                done += len(valid)
                show(done)
            covers[file_number] = stamp
        path = index_folder / f"rows-{secrets.token_hex(8)}.faiss"
        with replacing(path, durable=True) as temporary:
            try:
                faiss.write_index(engine, str(temporary))
            except RuntimeError as error:
                raise DataError(f"cannot write {index_folder}: is the disk full?") from error
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        described: Mapping[str, Any] = {
            "format": _FORMAT, "file": path.name, "sha256": digest, "rows": engine.ntotal, "covers": covers,
        }  # fmt: skip
        write_atomic(index_folder / "index.json", json.dumps(described) + "\n", durable=True)
        for other in [*index_folder.glob("rows-*"), *index_folder.glob(".*.partial")]:
            if other != path:
                other.unlink(missing_ok=True)
        return done, path.stat().st_size


def _make_engine(faiss: Any, width: int, lists: int) -> Any:
    """Return an index without rows; a random rotation gives all elements about the same variance."""
    elements = max(width, _LEAST_WIDTH)
    rotation = faiss.RandomRotationMatrix(width, elements)
    centers = faiss.IndexFlatL2(elements)
    engine = faiss.IndexIVFPQFastScan(
        centers, elements, lists, elements, _CODE_BITS, faiss.METRIC_INNER_PRODUCT
    )
    engine.by_residual = True
    engine.cp.niter = _ITERATIONS
    for clustering in (engine.cp, engine.pq.cp):
        clustering.min_points_per_centroid = 1  # else faiss prints a warning
    return faiss.IndexPreTransform(rotation, engine)


def _select_valid(rows: npt.NDArray[Any]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Return the numbers of the stored rows that are finite and not zero, and these rows in float32."""
    floats = unpacked(rows)
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.einsum("no,no->n", floats, floats)
    valid = np.flatnonzero((squares > 0) & (squares < _LARGEST))  # false for NaN
    return valid, floats[valid]


def _import_faiss(folder: Path) -> Any:
    if sys.platform == "darwin":
        # OpenMP aborts the process when a second library brings its own runtime, unless this is set
        os.environ.setdefault("KMP_DUPLICATE_LIB_OK", "TRUE")
    try:
        import faiss
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the index of {folder} requires {error.name}: pip install -e '.[index]', or pass --exact"
        ) from error
    return faiss
