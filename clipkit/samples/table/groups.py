"""Find the rows of a table that have the same image, and merge them.

Rows of one image need not be adjacent. Keys and rows are in a temporary file.
"""

import hashlib
import json
import pickle
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from threading import Lock
from typing import Any

from clipkit.errors import DataError
from clipkit.samples.table import Row
from clipkit.samples.table.values import json_value

MOST_ROWS = 100  # of one image; further ones are bad rows
TOO_MANY_ROWS = f"more than {MOST_ROWS} rows of one image (--no-group makes a sample of each)"
NESTED = "other columns are nested too deeply"
_CACHE_KIB = 65_536  # of SQLite; larger tables are on disk


def digest_key(content: bytes) -> bytes:
    """Return the 16 bytes that stand for a key."""
    return hashlib.blake2b(content, digest_size=16).digest()


class RowsByKey:
    """The rows of a table by key.

    Args:
        every_row: store all rows; by default, the first row of a group is not stored, so that the file stays small
            if the table is read again.

    Attributes:
        repeated: number of rows that are not the first of their group.
        other_images: number of these rows whose image is not that of the first.
    """

    def __init__(self, *, every_row: bool = False) -> None:
        self.repeated = self.other_images = 0
        self._every_row = every_row
        self._lock = Lock()
        self._data = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._data.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        self._data.execute(
            "CREATE TABLE groups (key BLOB PRIMARY KEY, first INTEGER, image BLOB, size INTEGER) WITHOUT ROWID"
        )
        self._data.execute(
            "CREATE TABLE rows (row INTEGER PRIMARY KEY, first INTEGER, position INTEGER, content BLOB)"
        )
        self._data.execute("CREATE INDEX by_first ON rows (first, row)")
        self._data.execute("BEGIN")  # never committed

    def __del__(self) -> None:
        self._data.close()

    def add(self, number: int, row: Row, key: bytes, *, image: bytes = b"") -> None:
        """Add a row.

        Args:
            number: greater than that of the row before.
            key: 16 bytes, equal for the rows of a group; empty for a row that belongs to no group.
            image: 16 bytes that identify the row's image, if rows of a group may have different ones.
        """
        try:
            content = pickle.dumps(row)
        except RecursionError:
            key = b""
            content = pickle.dumps(replace(row, caption=None, others={}, cause=NESTED))
        first = number
        size = 1
        first_image = image
        try:
            if key:
                first, size, first_image = self._data.execute(
                    "INSERT INTO groups VALUES (?, ?, ?, 1) ON CONFLICT (key) DO UPDATE SET size = size + 1 "
                    "RETURNING first, size, image",
                    (key, number, image),
                ).fetchone()
            if size > MOST_ROWS:
                first = number
                content = pickle.dumps(replace(row, caption=None, others={}, cause=TOO_MANY_ROWS))
            if size > 1 or self._every_row:
                self._data.execute("INSERT INTO rows VALUES (?, ?, ?, ?)", (number, first, size - 1, content))
        except sqlite3.OperationalError as error:
            raise DataError(
                f"cannot write a temporary file in {tempfile.gettempdir()}: {error}; set TMPDIR to another folder"
            ) from error
        self.repeated += size > 1
        self.other_images += size > 1 and image != first_image

    def position(self, number: int) -> int:
        """Return the index of a row in its group; 0 for the first row, and for rows that were not added."""
        rows = self._select("SELECT position FROM rows WHERE row = ?", number)
        return int(next(rows, (0,))[0])

    def stored_rows(self, first: int) -> list[Row]:
        """Return the rows of a group in order, at most ``MOST_ROWS``; see ``every_row`` for the first one."""
        rows = self._select("SELECT content FROM rows WHERE first = ? ORDER BY row", first)
        return [pickle.loads(content) for (content,) in rows]

    def number_groups(self) -> int:
        """Number the groups from 1 in the order of their first rows; return how many there are.

        A row that belongs to no group, and a row beyond ``MOST_ROWS``, is a group of its own.
        """
        self._data.execute("CREATE TABLE numbered (i INTEGER PRIMARY KEY, first INTEGER)")
        self._data.execute("INSERT INTO numbered (first) SELECT row FROM rows WHERE row = first ORDER BY row")
        return int(next(self._select("SELECT count(*) FROM numbered"))[0])

    def group(self, number: int) -> list[Row]:
        """Return the rows of a numbered group."""
        rows = self._select(
            "SELECT content FROM numbered JOIN rows USING (first) WHERE i = ? ORDER BY row", number
        )
        return [pickle.loads(content) for (content,) in rows]

    def _select(self, query: str, *values: int) -> Iterator[tuple[Any, ...]]:
        with self._lock:
            return iter(self._data.execute(query, values).fetchall())


def merge_rows(rows: Sequence[Row]) -> Row:
    """Return the first row with the captions of all.

    Another column keeps its value if it is the same in all rows; otherwise it becomes a list of the rows' values.
    """
    if len(rows) == 1:
        return rows[0]
    captions: list[object] = []
    columns: dict[str, None] = {}  # in order of occurrence
    for row in rows:
        captions += row.caption if isinstance(row.caption, list) else [row.caption]
        columns |= dict.fromkeys(row.others)
    others: dict[str, object] = {}
    for column in columns:
        values = [row.others.get(column) for row in rows]
        others[column] = values[0] if _are_equal(values) else values
    return replace(rows[0], caption=captions, others=others)


def _are_equal(values: Sequence[object]) -> bool:
    try:
        return len({json.dumps(json_value(value), sort_keys=True) for value in values}) == 1
    except RecursionError:  # nested too deeply, which the writer of the json reports
        return False
