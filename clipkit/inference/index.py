"""An approximate index of embeddings: a graph of neighbors (HNSW, Malkov and Yashunin 2016) by usearch.

    EMBEDDINGS/index/index.json              the file below, its SHA-256, and the embedding files that it covers
    EMBEDDINGS/index/rows-DIGITS.usearch     the graph and the rows in int8; never changed

The index only selects candidates. ``clipkit.inference.search`` compares these exactly, and also all rows of
embedding files that are new or have changed since. A wrong index can miss rows, but gives no wrong similarity.

Dimensions: N rows, O embedding dimension, C candidates.
"""

import hashlib
import json
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from clipkit.errors import ConfigError, DataError
from clipkit.files.writing import lock_output, replacing, write_atomic
from clipkit.inference.storage import STORAGE, unpacked

_FORMAT = 1
# neighbors of a row, and candidates for them while it is added
_CONNECTIVITY = 32
_EXPANSION = 256
_BLOCK = 10_000  # rows that are added at a time
_ROW_BITS = 32  # of a key; the others are the number of the embedding file

Stamp = tuple[int, int, int]  # rows, bytes and modification time in ns of an embedding file


class ApproximateIndex:
    """The index of a folder of embeddings, memory-mapped.

    Args:
        view: whether to map the file instead of reading it, so that rows cannot be added.

    Attributes:
        covers: the embedding files that are covered, by number.
        path: the mapped file.

    Raises:
        DataError: it is damaged.
        ConfigError: usearch is missing.
        FileNotFoundError: the folder has none.
    """

    def __init__(self, folder: Path, *, view: bool = True) -> None:
        self._lock = Lock()  # usearch's threads have one context each; two searches must not share one
        described = folder / "index" / "index.json"
        text = described.read_bytes()
        usearch = _usearch(folder)
        try:
            stored = json.loads(text)
            if stored["format"] != _FORMAT:
                raise ValueError(f"format {stored['format']} is unknown")
            self.covers: dict[int, Stamp] = {
                int(file_number): (int(rows), int(size), int(time))
                for file_number, (rows, size, time) in stored["covers"].items()
            }
            self.path = path = described.with_name(Path(str(stored["file"])).name)
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != stored["sha256"]:
                    raise ValueError(f"the content of {path.name} has changed")
            self.engine = usearch.Index.restore(path, view=view, expansion_add=_EXPANSION)
            if self.engine is None or len(self.engine) != stored["rows"]:
                raise ValueError(f"{path.name} is no index of {stored['rows']} rows")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            why = f"missing {path.name}" if isinstance(error, FileNotFoundError) else error
            raise DataError(
                f"the index in {described.parent} is damaged ({why}): run clipkit index {folder}, or pass --exact"
            ) from error

    def near(self, query: npt.NDArray[np.float32], count: int) -> dict[int, npt.NDArray[np.int64]]:
        """Return candidates for the rows nearest to a query, by the number of the embedding file.

        Args:
            query: (O,), unit norm.
            count: C; more candidates take longer, and include more of the nearest rows.
        """
        with self._lock:
            self.engine.expansion_search = count
            keys = self.engine.search(STORAGE["int8"].pack(query[None])[0], count, threads=1).keys
        numbers = keys >> _ROW_BITS
        rows = (keys & (2**_ROW_BITS - 1)).astype(np.int64)
        return {int(file_number): np.sort(rows[numbers == file_number]) for file_number in np.unique(numbers)}


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
    usearch = _usearch(folder)
    stamped_rows = {file_number: (stamp, rows) for file_number, stamp, rows in parts}
    index_folder = folder / "index"
    index_folder.mkdir(exist_ok=True)
    with lock_output(index_folder, "clipkit index", lock=index_folder / ".lock"):
        engine = None
        covers = dict[int, Stamp]()
        try:
            earlier = ApproximateIndex(folder, view=False)
            if all(
                file_number in stamped_rows and stamped_rows[file_number][0] == stamp
                for file_number, stamp in earlier.covers.items()
            ):
                engine = earlier.engine
                covers = earlier.covers
        except (DataError, FileNotFoundError):  # replaced by a new one
            pass
        if engine is None or engine.ndim != width:
            engine = usearch.Index(
                ndim=width,
                metric="cos",
                dtype="i8",
                connectivity=_CONNECTIVITY,
                expansion_add=_EXPANSION,
                enable_key_lookups=False,
            )
            covers = {}
        done = 0
        for file_number, (stamp, rows) in stamped_rows.items():
            if file_number in covers:
                continue
            for start in range(0, len(rows), _BLOCK):
                block = unpacked(rows[start : start + _BLOCK])
                valid = np.flatnonzero(np.isfinite(block).all(axis=1) & block.any(axis=1))
                keys = (file_number << _ROW_BITS) + start + valid
                engine.add(keys.astype(np.uint64), STORAGE["int8"].pack(block[valid]))
                done += len(valid)
                show(done)
            covers[file_number] = stamp
        path = index_folder / f"rows-{secrets.token_hex(8)}.usearch"
        with replacing(path, durable=True) as temporary:
            try:
                engine.save(temporary)
            except RuntimeError as error:
                raise DataError(f"cannot write {index_folder}: {error}; is the disk full?") from error
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        described: Mapping[str, Any] = {
            "format": _FORMAT, "file": path.name, "sha256": digest, "rows": len(engine), "covers": covers,
        }  # fmt: skip
        write_atomic(index_folder / "index.json", json.dumps(described) + "\n", durable=True)
        for other in [
            *index_folder.glob("rows-*.usearch"),
            *index_folder.glob(".*.partial"),
        ]:  # readers keep what they have mapped
            if other != path:
                other.unlink(missing_ok=True)
        return done, path.stat().st_size


def _usearch(folder: Path) -> Any:
    try:
        import usearch.index
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the index of {folder} requires {error.name}: pip install -e '.[index]', or pass --exact"
        ) from error
    return usearch.index
