"""Tables as samples: the rows of one image are one sample, and a row that cannot be used is a bad sample."""

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from clipkit.errors import DataError, nearest
from clipkit.samples.base import Samples
from clipkit.samples.folders import read_file
from clipkit.samples.table import Row, Table, listed_path
from clipkit.samples.table.captions import check_captions, usable_texts
from clipkit.samples.table.groups import NESTED, RowsByKey, digest_key, merge_rows
from clipkit.samples.table.values import json_value

_EVERY = 1000  # rows between two calls of ``progress``
_CONTENT = b""  # path of a row whose image is in the table


class TableSamples(Samples):
    """The images and captions of tables, see ``clipkit.samples.Samples``; they are read once, when it is made.

    Rows have the same image if their paths are equal after normalization (``./``, ``//``, ``\\``, ``file://``), or
    if their encoded images have the same bytes. They are one sample, at the position of the first of them, with the
    captions of all. Another column keeps its value if that is the same in all rows; otherwise it is a list of the
    rows' values. A row without a usable caption, if captions are needed, is a bad sample, and so is a row after
    ``MOST_ROWS`` of an image. The only member of a sample is the column of images.

    Args:
        tables: tables with the same columns, opened with ``encoded`` if their images may be in them.
        group: make one sample of the rows of an image; False makes a sample of each row.
        group_by: column whose value is the same in the rows of an image; rows without a value are not grouped.
        progress: called now and then while the tables are read, with the fraction and the number of rows read.

    Attributes:
        image_column: column of the images; "" if there is none.
        caption_column, captions_from: column of the captions; "" if there is none.
        left_out: columns of the first table that are not read, with the reason.
        others: names of the other columns of the first table; rows of JSON may have more.
        damage: why a table cannot be read to the end, otherwise "". The last sample has it as its cause.
        repeated: number of rows that are not the first of their image.
        other_images: number of these rows whose image is not that of the first, with ``group_by``.
    """

    class_names: Mapping[str, str] = {}  # as of ``FolderSamples``

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        group: bool = True,
        group_by: str | None = None,
        progress: Callable[[float, int], object] | None = None,
    ) -> None:
        self.tables = tuple(tables)
        self.image_column = tables[0].image_column
        self.caption_column = tables[0].caption_column
        self.captions_from = self.caption_column
        self.left_out = tables[0].left_out
        self.others = list(tables[0].others)
        self.damage = ""
        self._options = {"group": group, "group_by": group_by}
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
        self._rows = RowsByKey(every_row=True)
        self._starts: list[int] = []  # by table, the number of rows before it
        number = 0
        for part, table in enumerate(self.tables):
            self._starts.append(number)
            try:
                for row in table:
                    number += 1
                    if progress is not None and number % _EVERY == 0:
                        progress((part + row.progress) / len(tables), number)
                    self._add_row(row, number, table, group, group_by)
            except DataError as error:
                self.damage = str(error)
                self._rows.add(number + 1, Row(number=number + 1, cause=self.damage, progress=1.0), b"")
                break
        self._count = self._rows.number_groups()
        self._last: tuple[int, list[Row], Row] | None = None  # the sample that was looked at last
        self.repeated = self._rows.repeated
        self.other_images = self._rows.other_images

    def _add_row(self, row: Row, number: int, table: Table, group: bool, group_by: str | None) -> None:
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
        if (row.number, row.path) != (number, content):
            row = replace(row, number=number, path=content)
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
        self._rows.add(number, row, b"" if row.cause else key, image=image)

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_again, (self.tables, self._options)

    def __len__(self) -> int:
        return self._count

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
                check_captions(row.caption)
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
