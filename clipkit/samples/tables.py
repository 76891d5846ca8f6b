"""Tables as samples: the rows of one image are one sample, and a row that cannot be used is a bad sample.

Rows of one image need not be adjacent. Keys and rows are in a temporary file.
"""

import hashlib
import json
import os
import pickle
import sqlite3
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

from clipkit.errors import DataError, nearest
from clipkit.samples.base import Samples
from clipkit.samples.folders import read_file
from clipkit.samples.table import Row, Table, listed_path
from clipkit.samples.table.base import MOST_CAPTIONS, check_captions, json_value, usable_texts

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
        most_rows: of a group; further ones are bad rows.

    Attributes:
        repeated: number of rows that are not the first of their group.
        other_images: number of these rows whose image is not that of the first.
    """

    def __init__(self, *, every_row: bool = False, most_rows: int = MOST_ROWS) -> None:
        self.repeated = self.other_images = 0
        self._every_row = every_row
        self._most_rows = most_rows
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

    def add(self, row_number: int, row: Row, key: bytes, *, image: bytes = b"") -> None:
        """Add a row.

        Args:
            row_number: greater than that of the row before.
            key: 16 bytes, equal for the rows of a group; empty for a row that belongs to no group.
            image: 16 bytes that identify the row's image, if rows of a group may have different ones.
        """
        try:
            content = pickle.dumps(row)
        except RecursionError:
            key = b""
            content = pickle.dumps(replace(row, caption=None, others={}, cause=NESTED))
        first = row_number
        size = 1
        first_image = image
        try:
            if key:
                first, size, first_image = self._data.execute(
                    "INSERT INTO groups VALUES (?, ?, ?, 1) ON CONFLICT (key) DO UPDATE SET size = size + 1 "
                    "RETURNING first, size, image",
                    (key, row_number, image),
                ).fetchone()
            if size > self._most_rows:
                first = row_number
                content = pickle.dumps(replace(row, caption=None, others={}, cause=TOO_MANY_ROWS))
            if size > 1 or self._every_row:
                self._data.execute(
                    "INSERT INTO rows VALUES (?, ?, ?, ?)", (row_number, first, size - 1, content)
                )
        except sqlite3.OperationalError as error:
            raise DataError(
                f"cannot write a temporary file in {tempfile.gettempdir()}: {error}; set TMPDIR to another folder"
            ) from error
        self.repeated += size > 1
        self.other_images += size > 1 and image != first_image

    def position(self, row_number: int) -> int:
        """Return the index of a row in its group; 0 for the first row, and for rows that were not added."""
        rows = self._select("SELECT position FROM rows WHERE row = ?", row_number)
        return int(next(rows, (0,))[0])

    def stored_rows(self, first: int) -> list[Row]:
        """Return the rows of a group in order, at most ``most_rows``; see ``every_row`` for the first one."""
        rows = self._select("SELECT content FROM rows WHERE first = ? ORDER BY row", first)
        return [pickle.loads(content) for (content,) in rows]

    def number_groups(self) -> int:
        """Number the groups from 1 in the order of their first rows; return how many there are.

        A row that belongs to no group, and a row beyond ``most_rows``, is a group of its own.
        """
        self._data.execute("CREATE TABLE numbered (i INTEGER PRIMARY KEY, first INTEGER)")
        self._data.execute("INSERT INTO numbered (first) SELECT row FROM rows WHERE row = first ORDER BY row")
        return int(next(self._select("SELECT count(*) FROM numbered"))[0])

    def group(self, group_number: int) -> list[Row]:
        """Return the rows of a numbered group."""
        rows = self._select(
            "SELECT content FROM numbered JOIN rows USING (first) WHERE i = ? ORDER BY row", group_number
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


_EVERY = 1000  # rows between two calls of ``progress``
_CONTENT = b""  # path of a row whose image is in the table


class TableSamples(Samples):
    """The images and captions of tables, see ``clipkit.samples.Samples``; they are read once, when it is made.

    Rows have the same image if their paths are equal after normalization (``./``, ``//``, ``\\``, ``file://``), or
    if their encoded images have the same bytes. They are one sample, at the position of the first of them, with the
    captions of all. Another column keeps its value if that is the same in all rows; otherwise it is a list of the
    rows' values. A row without a usable caption, if captions are needed, is a bad sample, and so is a row after
    ``most_rows`` of an image. The only member of a sample is the column of images.

    Args:
        tables: tables with the same columns, opened with ``encoded`` if their images may be in them.
        group: make one sample of the rows of an image; False makes a sample of each row.
        group_by: column whose value is the same in the rows of an image; rows without a value are not grouped.
        progress: called now and then while the tables are read, with the fraction and the number of rows read.
        most_rows: of an image.

    Attributes:
        image_column: column of the images; "" if there is none.
        caption_column, captions_from: column of the captions; "" if there is none.
        left_out: columns of the first table that are not read, with the reason.
        others: names of the other columns of the first table; rows of JSON may have more.
        damage: why a table cannot be read to the end, otherwise "". The last sample has it as its cause.
        repeated: number of rows that are not the first of their image.
        other_images: number of these rows whose image is not that of the first, with ``group_by``.
    """

    # as of ``FolderSamples``
    classes: tuple[list[str], dict[str, int]] = ([], {})
    class_names: Mapping[str, str] = {}

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        group: bool = True,
        group_by: str | None = None,
        progress: Callable[[float, int], object] | None = None,
        most_rows: int = MOST_ROWS,
    ) -> None:
        self.tables = tuple(tables)
        self.image_column = tables[0].image_column
        self.caption_column = tables[0].caption_column
        self.captions_from = self.caption_column
        self.left_out = tables[0].left_out
        self.others = list(tables[0].others)
        self.damage = ""
        self._options = {"group": group, "group_by": group_by}
        self._most_rows = most_rows
        if group_by is not None:
            for table in tables:
                if group_by == table.caption_column:
                    raise DataError(
                        f"--group-by: {group_by!r} is the column of captions: name another column"
                    )
                if group_by not in table.others:
                    names = [table.image_column, *table.others][:30]
                    raise DataError(
                        f"--group-by: {table.path} has no such column {group_by!r} ({nearest(group_by, names)})"
                    )
        # consecutive calls are about the same sample
        self._find_path = lru_cache(maxsize=4)(Table.find_image)
        self._rows = RowsByKey(every_row=True, most_rows=most_rows)
        self._starts: list[int] = []  # by table, the number of rows before it
        row_number = 0
        for part, table in enumerate(self.tables):
            self._starts.append(row_number)
            try:
                for row in table:
                    row_number += 1
                    if progress is not None and row_number % _EVERY == 0:
                        progress((part + row.progress) / len(tables), row_number)
                    self._add_row(row, row_number, table, group, group_by)
            except DataError as error:
                self.damage = str(error)
                self._rows.add(
                    row_number + 1, Row(number=row_number + 1, cause=self.damage, progress=1.0), b""
                )
                break
        self._count = self._rows.number_groups()
        self._last: tuple[int, list[Row], Row] | None = None  # the sample that was looked at last
        self.repeated = self._rows.repeated
        self.other_images = self._rows.other_images

    def _add_row(self, row: Row, row_number: int, table: Table, group: bool, group_by: str | None) -> None:
        """Store a row with its key, which is empty if it belongs to no group."""
        content = row.content
        image = b""
        if isinstance(content, bytes):
            image = digest_key(b"bytes" + content) if group else b""
            content = _CONTENT
        elif group and isinstance(content, str) and content:
            try:
                # not the file, for which a network file system would be asked about every row
                path = os.path.normpath(listed_path(table.path.parent.absolute(), content))
                image = digest_key(b"path" + path.encode("utf-8", "surrogatepass"))
            except (DataError, ValueError):  # not a file, which is the cause of a bad sample
                image = b""
        if (row.number, row.path) != (row_number, content):
            row = replace(row, number=row_number, path=content)
        if not row.cause and table.needs_caption:
            try:
                check_captions(row.caption)
            except DataError as error:
                row = replace(row, caption=None, others={}, cause=str(error))
        key = image
        if group_by is not None:
            value = json_value(row.others.get(group_by))
            key = b""
            if value not in (None, ""):
                key = digest_key(json.dumps(value, sort_keys=True).encode())
        self._rows.add(row_number, row, b"" if row.cause else key, image=image)

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_again, (self.tables, self._options)

    def __len__(self) -> int:
        return self._count

    def label(self, i: int) -> int | None:
        return None

    def rows(self, i: int) -> list[Row]:
        """Return the rows of a sample, numbered from 1 in all tables; paths of images in a table are bytes."""
        return self._look_up(i)[0]

    def row(self, i: int) -> Row:
        """Return the rows of a sample as one row, whose cause is why the sample cannot be used."""
        return self._look_up(i)[1]

    def _look_up(self, i: int) -> tuple[list[Row], Row]:
        last = self._last
        if last is not None and last[0] == i:
            return last[1:]
        rows = self._rows.group(i + 1)
        row = merge_rows(rows)
        cause = row.cause
        if not cause and len(rows) > 1 and self._table_of(row).needs_caption:
            try:
                check_captions(row.caption, most=max(MOST_CAPTIONS, self._most_rows))
            except DataError as error:
                cause = str(error)
        if not cause and self.image_column and row.path in (None, ""):
            cause = "no path"
        elif not cause and self.image_column and not isinstance(row.path, str | bytes):
            cause = "path is not text"
        if cause != row.cause:
            row = replace(row, cause=cause)
        self._last = (i, rows, row)
        return rows, row

    def cause(self, i: int) -> str:
        return self.row(i).cause

    def path(self, i: int) -> Path | None:
        row = self.row(i)
        if row.cause:
            raise DataError(row.cause)
        if not isinstance(row.path, str):
            return None
        return self._find_path(self._table_of(row), row.path)

    def key(self, i: int) -> str:
        row = self.row(i)
        if not isinstance(row.path, str) or not row.path:
            return str(row.number)
        try:
            return str(self._find_path(self._table_of(row), row.path))
        except DataError:
            return row.path

    def locate(self, i: int) -> tuple[str, str]:
        return str(self._table_of(self.row(i)).path), self.key(i)

    def members(self, i: int) -> Sequence[str]:
        return [self.image_column] if self.image_column else []

    def fields(self, i: int) -> dict[str, Any]:
        row = self.row(i)
        if row.cause:
            raise DataError(row.cause)
        fields: dict[str, Any] = {}
        if self.caption_column:
            fields[self.caption_column] = usable_texts(row.caption)
        try:
            fields |= {name: json_value(value) for name, value in row.others.items()}
        except RecursionError:
            raise DataError(NESTED) from None
        return fields

    def read(self, i: int, member: str) -> bytes:
        row = self.row(i)
        if isinstance(row.path, bytes) and not row.cause:
            part = self._part_of(row)
            return self.tables[part].read_image(row.number - 1 - self._starts[part])
        path = self.path(i)
        assert path is not None
        return read_file(path)

    @property
    def content_id(self) -> str:
        marks = [table.content_id for table in self.tables]
        return hashlib.sha256(repr((marks, self._options)).encode()).hexdigest()[:16]

    def _part_of(self, row: Row) -> int:
        return bisect_right(self._starts, row.number - 1) - 1

    def _table_of(self, row: Row) -> Table:
        return self.tables[self._part_of(row)]


def _open_again(tables: Sequence[Table], options: dict[str, Any]) -> TableSamples:
    return TableSamples(tables, **options)
