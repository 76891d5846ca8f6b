"""An approximate index of embeddings: lists of similar rows (IVF), one byte per element, by faiss.

    EMBEDDINGS/index/index.json           describes the file below, and lists the embedding files that it covers
    EMBEDDINGS/index/rows-DIGITS.faiss    centers, and rows, which stay memory-mapped

The index only selects candidates. ``clipkit.inference.search`` compares these exactly, and also all rows of
embedding files that are new or have changed since. A wrong index can miss rows, but gives no wrong similarity.

Dimensions: N rows, O embedding dimension.
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

LARGEST_K = 1000
_FORMAT = 5
_LISTS_PER_ROOT = 3  # lists for each unit of the square root of the number of rows
_SAMPLES = 40  # rows for each list that its center is computed from
_ITERATIONS = 5
# searched by a query, at least; many short lists are searched faster than few long ones
_LISTS_SEARCHED = 80
_ROWS_SEARCHED = 26_000
_RESULTS_PER_LIST = 2  # for which one more list is searched
# candidates of a query, at least and for each result
_LEAST_CANDIDATES = 64
_CANDIDATES_PER_RESULT = 2
_WIDTH_MULTIPLE = 16  # faiss is fast for widths that are multiples of it
# A longer query ranks unit rows in the same order, but lists more by the cosine and less by the norm of their
# centers: texts, which have low cosines with all images, then find more of the nearest images.
_QUERY_NORM = 2.0
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
        mapped: keep the rows in the file, memory-mapped; no rows can be added then.

    Attributes:
        covers: the embedding files that are covered, by number.

    Raises:
        DataError: it is damaged or of another version.
        ConfigError: faiss is missing.
        FileNotFoundError: the folder has none.
    """

    def __init__(self, folder: Path, *, mapped: bool = True) -> None:
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
            status = path.stat()
            if (status.st_size, status.st_mtime_ns) != (stored["bytes"], stored["time"]):
                raise ValueError(f"{path.name} has changed")
            with _READING:
                # no part of the file is larger than the file
                self._faiss.set_deserialization_vector_byte_limit(status.st_size + 1)
                flags = self._faiss.IO_FLAG_MMAP_IFC if mapped else 0
                self.engine = self._faiss.read_index(str(path), flags)
            self._rotation = self._faiss.downcast_VectorTransform(self.engine.chain.at(0))
            self._lists = self._faiss.downcast_index(self.engine.index)
            rows = self.engine.ntotal
            if rows != stored["rows"] or _hash_centers(self._faiss, self.engine) != stored["centers"]:
                raise ValueError(f"{path.name} is damaged")
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

        Raises:
            DataError: the index is damaged.
        """
        self._faiss.omp_set_num_threads(1)  # of this thread
        rotated = self._rotation.apply(_QUERY_NORM * query[None])
        by_rows = _ROWS_SEARCHED * self.list_count // max(1, self.engine.ntotal)
        lists = min(self.list_count, max(_LISTS_SEARCHED, by_rows) + k // _RESULTS_PER_LIST)
        parameters = self._faiss.IVFSearchParameters(nprobe=lists)
        least_candidates = max(_LEAST_CANDIDATES, _CANDIDATES_PER_RESULT * k)
        requested = least_candidates
        while True:
            _, [keys] = self._lists.search(rotated, requested, params=parameters)
            keys = keys[keys >= 0]
            candidates = []
            for key in keys.tolist():
                file_number, row = key >> _ROW_BITS, key & (2**_ROW_BITS - 1)
                if file_number not in self.covers or row >= self.covers[file_number][0]:
                    raise self._describe_damage(f"no row {row} in file {file_number}")
                if file_number in files:
                    candidates.append((file_number, row))
            if len(keys) < requested or len(candidates) >= least_candidates:
                return candidates
            requested *= 4  # many were of other files

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
                engine = ApproximateIndex(folder, mapped=False).engine
                covers = earlier.covers
        except (DataError, FileNotFoundError):  # replaced by a new one
            pass
        # two OpenMP runtimes, of torch and of faiss, crash on macOS if both have threads
        faiss.omp_set_num_threads(1 if sys.platform == "darwin" else torch.get_num_threads())
        if engine is None:
            step = max(1, total // (_SAMPLES * lists))
            sample = np.concatenate([_select_valid(rows[::step])[1] for _, rows in stamped_rows.values()])
            if len(sample) < lists:  # most of these rows are zero or not finite
                sample = np.concatenate([_select_valid(rows)[1] for _, rows in stamped_rows.values()])
            lists = min(lists, len(sample))
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
        status = path.stat()
        described: Mapping[str, Any] = {
            "format": _FORMAT,
            "file": path.name,
            "bytes": status.st_size,
            "time": status.st_mtime_ns,
            "rows": engine.ntotal,
            "centers": _hash_centers(faiss, engine),
            "covers": covers,
        }
        write_atomic(index_folder / "index.json", json.dumps(described) + "\n", durable=True)
        for other in [*index_folder.glob("rows-*"), *index_folder.glob(".*.partial")]:
            if other != path:
                other.unlink(missing_ok=True)
        return done, status.st_size


def _make_engine(faiss: Any, width: int, lists: int) -> Any:
    """Return an index without rows, which will store the difference of each row to the center of its list in bytes.

    One range of values for all elements makes faiss faster. A random rotation gives them about the same variance.
    """
    rotation = faiss.RandomRotationMatrix(width, math.ceil(width / _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE)
    centers = faiss.IndexFlatL2(rotation.d_out)
    engine = faiss.IndexIVFScalarQuantizer(
        centers, rotation.d_out, lists, faiss.ScalarQuantizer.QT_8bit_uniform, faiss.METRIC_L2
    )
    engine.cp.niter = _ITERATIONS
    engine.cp.min_points_per_centroid = 1  # else faiss prints a warning
    return faiss.IndexPreTransform(rotation, engine)


def _hash_centers(faiss: Any, engine: Any) -> str:
    """Hash what all searches depend on: the rotation, the centers, and the range of values that bytes stand for."""
    lists = faiss.downcast_index(faiss.extract_index_ivf(engine))
    rotation = faiss.downcast_VectorTransform(engine.chain.at(0))
    digest = hashlib.sha256(faiss.vector_to_array(rotation.A))
    digest.update(lists.quantizer.reconstruct_n(0, lists.nlist))
    digest.update(faiss.vector_to_array(lists.sq.trained))
    return digest.hexdigest()


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
