"""Find the rows of a table that have the same image, and merge them.

Rows of one image need not be adjacent, so a table is read twice: once to find the groups, and once to use each
group where its first row is. Keys and all rows but the first of each group are in a temporary file.
"""

import hashlib
import json
import pickle
import sqlite3
import tempfile
from collections.abc import Sequence
from dataclasses import replace

from clipkit.errors import DataError
from clipkit.samples import Row
from data.captions import json_value

__all__ = ["MOST_ROWS", "TOO_MANY_ROWS", "RowsByKey", "digest_key", "merge_rows"]

MOST_ROWS = 100  # of one image; further ones are bad rows
TOO_MANY_ROWS = f"more than {MOST_ROWS} rows of one image (--no-group makes a sample of each)"
_CACHE_KIB = 65_536  # of SQLite; larger tables are on disk


def digest_key(content: bytes) -> bytes:
    """Return the 16 bytes that stand for a key."""
    return hashlib.blake2b(content, digest_size=16).digest()


class RowsByKey:
    """The rows of a table by key.

    Call ``add`` for each row that can be used, then ``position`` and ``later_rows`` while the table is read again.
    Rows are numbered by the caller. Use as a context manager, which deletes the temporary file.

    Attributes:
        repeated: number of rows that are not the first of their group.
        other_images: number of these rows whose image is not that of the first.
    """

    def __init__(self) -> None:
        self.repeated = self.other_images = 0
        self._data = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._data.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        self._data.execute(
            "CREATE TABLE first (key BLOB PRIMARY KEY, row INTEGER, image BLOB, size INTEGER) WITHOUT ROWID"
        )
        self._data.execute(
            "CREATE TABLE later (row INTEGER PRIMARY KEY, first INTEGER, position INTEGER, content BLOB)"
        )
        self._data.execute("CREATE INDEX by_first ON later (first, row)")
        self._data.execute("BEGIN")  # never committed

    def __enter__(self) -> "RowsByKey":
        return self

    def __exit__(self, *_: object) -> None:
        self._data.close()

    def add(self, number: int, row: Row, key: bytes, *, image: bytes = b"") -> None:
        """Add a row.

        Args:
            number: greater than that of the row before.
            row: the row; its path is stored only if it is text.
            key: 16 bytes, equal for the rows of a group.
            image: 16 bytes that identify the row's image, if rows of a group may have different ones.

        Raises:
            DataError: the temporary file cannot be written.
        """
        try:
            first, size, first_image = self._data.execute(
                "INSERT INTO first VALUES (?, ?, ?, 1) ON CONFLICT (key) DO UPDATE SET size = size + 1 "
                "RETURNING row, size, image",
                (key, number, image),
            ).fetchone()
            if size == 1:
                return
            content = None
            if size <= MOST_ROWS:
                try:
                    content = pickle.dumps(row if isinstance(row.path, str) else replace(row, path=None))
                except RecursionError:  # a value nested too deeply: the row is used by itself
                    self._data.execute("UPDATE first SET size = size - 1 WHERE key = ?", (key,))
                    return
            self.repeated += 1
            self.other_images += image != first_image
            self._data.execute("INSERT INTO later VALUES (?, ?, ?, ?)", (number, first, size - 1, content))
        except sqlite3.OperationalError as error:
            raise DataError(
                f"cannot write a temporary file in {tempfile.gettempdir()}: {error}; set TMPDIR to another folder"
            ) from error

    def position(self, number: int) -> int:
        """Return the index of a row in its group; 0 for the first row, and for rows that were not added."""
        if not self.repeated:
            return 0
        found = self._data.execute("SELECT position FROM later WHERE row = ?", (number,)).fetchone()
        return found[0] if found else 0

    def later_rows(self, number: int) -> list[Row]:
        """Return the rows that follow the first row of a group, at most ``MOST_ROWS`` - 1."""
        if not self.repeated:
            return []
        found = self._data.execute(
            "SELECT content FROM later WHERE first = ? AND content IS NOT NULL ORDER BY row", (number,)
        )
        return [pickle.loads(content) for (content,) in found]


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
