"""Parquet files, as tables and with random access to encoded images; pyarrow is in the extra ``pack``."""

import hashlib
import os
import re
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from clipkit.errors import DataError
from clipkit.samples.base import Samples
from clipkit.samples.remote import ShardCache, ShardFile
from clipkit.samples.table.base import (
    CAPTION_COLUMNS,
    IMAGE_COLUMNS,
    ColumnRequest,
    Format,
    Record,
    find_column,
    json_value,
    parse_captions,
)

if TYPE_CHECKING:
    import pyarrow as pa

# rows that are read at a time, and rows with images
_BATCH = 1024
_BATCH_WITH_BYTES = 16
_KEPT_BYTES = 256 << 20  # of row groups in memory; the last two are kept whatever their size
_MAX_GROUP_BYTES = 16 << 30
_MAX_IMAGE_BYTES = 256 << 20
_LISTED = re.compile(r"(.+)\[(\d+)\]")


class ParquetSamples(Samples):
    """The rows of Parquet files, see ``clipkit.samples.Samples``; reading is thread-safe, also after a fork.

    Members are the columns of bytes, of structs with ``bytes`` (the hub's image datasets), and of lists of one of
    these, whose elements are ``NAME[0]``, ``NAME[1]`` and so on. The first one is probably the image. The field of
    the captions is a list.

    Args:
        files: the files.
        cache: cache of remote files.
        image_column: column of the images; found by common names by default.
        caption_column: column of the captions, likewise.

    Attributes:
        image_column: column of the images: given, with a common name, or the only one with images; otherwise "".
        caption_column: column of the captions, given or with a common name; otherwise "".
        schema: pyarrow's schema of all files.
        marks: by file, a hash of its footer, which holds the sizes and positions of its content.
        group_reads: number of row groups that this process has read.
    """

    def __init__(
        self,
        files: Sequence[ShardFile],
        cache: ShardCache | None = None,
        *,
        image_column: str | None = None,
        caption_column: str | None = None,
    ) -> None:
        self.files = tuple(files)
        self.cache = cache
        schema: pa.Schema | None = None
        self._groups: list[tuple[int, int]] = []  # index of the file, and of the row group in the file
        self._sizes: list[int] = []  # rows of each group
        marks: list[str] = []
        for index, file in enumerate(self.files):
            with _open_parquet(file, self.local_path(index)) as opened:
                about = opened.metadata
                for group in range(about.num_row_groups):
                    self._groups.append((index, group))
                    self._sizes.append(about.row_group(group).num_rows)
                columns = opened.schema_arrow
            if schema is not None and columns.remove_metadata() != schema.remove_metadata():
                raise DataError(f"{file.shown} has other columns than {self.files[0].shown}")
            schema = schema or columns
            with self.local_path(index).open("rb") as content:
                size = content.seek(-8, 2)
                length = int.from_bytes(content.read(4), "little")
                content.seek(max(0, size - length))
                marks.append(hashlib.sha256(content.read(length)).hexdigest()[:16])
        assert schema is not None
        self.schema = schema
        self.marks = tuple(marks)
        self._starts = [0, *accumulate(self._sizes)]
        with_images = [field.name for field in schema if has_bytes(field.type)]
        self.image_column = image_column or find_column(IMAGE_COLUMNS, with_images)
        if not self.image_column and len(with_images) == 1:
            self.image_column = with_images[0]
        self._members = sorted(with_images, key=lambda name: name != self.image_column)
        self._others = [name for name in schema.names if name not in with_images]
        self.caption_column = caption_column or find_column(CAPTION_COLUMNS, self._others)
        self._forget()

    def _forget(self) -> None:
        self._kept: OrderedDict[tuple[int, str], Any] = OrderedDict()  # by group and column
        self._lock = Lock()
        self._reading = [Lock() for _ in self.files]
        self._process = os.getpid()
        self.group_reads = 0

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("_kept", "_lock", "_reading")
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def content_id(self) -> str:
        """16 hexadecimal digits that depend on the files' footers."""
        return hashlib.sha256(repr(self.marks).encode()).hexdigest()[:16]

    def local_path(self, index: int) -> Path:
        """Return the local path of a file, to be opened at once."""
        file = self.files[index]
        if self.cache is not None:
            return self.cache.fetch(file)
        return Path(file.url)

    def key(self, i: int) -> str:
        return f"row {i}"

    def locate(self, i: int) -> tuple[str, str]:
        return self.files[self._groups[self._group_of(i)][0]].shown, self.key(i)

    def members(self, i: int) -> Sequence[str]:
        return self._members

    def fields(self, i: int) -> dict[str, Any]:
        group = self._group_of(i)
        row = i - self._starts[group]
        fields = {}
        for name in self._others:
            fields[name] = json_value(python_value(self._read_column(group, name)[row]))
        if self.caption_column in fields:
            fields[self.caption_column] = parse_captions(fields[self.caption_column])
        return fields

    def read(self, i: int, member: str) -> bytes:
        """Return an encoded image, with "" the first member; raise DataError if it cannot be read."""
        if not member and not self._members:
            raise DataError("no column with images")
        member = member or self._members[0]
        index = 0
        if member not in self.schema.names and (match := _LISTED.fullmatch(member)):
            member = match[1]
            index = int(match[2])
        group = self._group_of(i)
        return _image_in(self._read_column(group, member)[i - self._starts[group]], index)

    def columns(self, *names: str) -> list[list[Any]]:
        """Return all values of some columns, which should be small."""
        values: list[list[Any]] = [[] for _ in names]
        for batch in self.batches(names):
            for column, name in zip(values, names, strict=True):
                # by position, because batch.column(name) fails for duplicate names
                column += batch.column(batch.schema.names.index(name)).to_pylist()
        if any(len(column) != len(self) for column in values):
            raise DataError(f"{self.files[0].shown}: the number of rows does not match its footer")
        return values

    def batches(self, names: Sequence[str], rows: int = _BATCH) -> "Iterator[pa.RecordBatch]":
        """Yield some of the columns of all rows, a few rows at a time."""
        for index, file in enumerate(self.files):
            with _open_parquet(file, self.local_path(index)) as opened:
                yield from opened.iter_batches(batch_size=rows, columns=list(names))

    def check_one_image_per_row(self, column: str) -> None:
        """Raise DataError if the column has lists with several images in one row."""
        for index, file in enumerate(self.files):
            with _open_parquet(file, self.local_path(index)) as opened:
                about = opened.metadata
            for group in range(about.num_row_groups):
                rows = about.row_group(group)
                for i in range(rows.num_columns):
                    values = rows.column(i)
                    # an empty list counts as one value
                    if values.path_in_schema.startswith(f"{column}.") and values.num_values > rows.num_rows:
                        raise DataError(
                            f"{file.shown} has several images in one row of column {column!r}: "
                            "write one row per image"
                        )

    def _group_of(self, i: int) -> int:
        return bisect_right(self._starts, i) - 1

    def _read_column(self, group: int, column: str) -> Any:
        """Return a column of a row group, which one thread reads while others wait for it."""
        if self._process != os.getpid():  # locks may have been held during the fork
            self._forget()
        key = (group, column)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        index = self._groups[group][0]
        with self._reading[index]:
            with self._lock:
                if key in self._kept:
                    return self._kept[key]
            file = self.files[index]
            within = self._groups[group][1]
            with _open_parquet(file, self.local_path(index)) as opened:
                size = opened.metadata.row_group(within).total_byte_size
                if size > _MAX_GROUP_BYTES:
                    raise DataError(f"{file.shown} has a row group of {size} bytes: write smaller row groups")
                rows = opened.read_row_group(within, columns=[column], use_threads=False)
            # by position, because rows.column(name) fails for duplicate names
            values = rows.column(rows.column_names.index(column))
            if len(values) != self._sizes[group]:
                raise DataError(f"{file.shown} has {len(values)} rows, which does not match its footer")
            with self._lock:
                self._kept[key] = values
                self.group_reads += 1
                while (
                    len(self._kept) > 2 and sum(values.nbytes for values in self._kept.values()) > _KEPT_BYTES
                ):
                    self._kept.popitem(last=False)
        return values


class Parquet(Format):
    """A Parquet table; ``samples`` gives random access to its rows."""

    def __init__(self, path: Path, requests: Sequence[ColumnRequest]) -> None:
        super().__init__(path)
        self.samples = ParquetSamples([ShardFile.at(path)])
        schema = self.samples.schema
        self.names = list(schema.names)
        self.types = {name: schema.field(self.names.index(name)).type for name in self.names}

    @property
    def content_id(self) -> str:
        return self.samples.content_id

    def read_image(self, row: int, column: str) -> bytes:
        return self.samples.read(row, column)

    def records(self, required: Sequence[str], others: Sequence[str]) -> Iterator[Record]:
        total = max(1, len(self.samples))
        has_bytes = any("binary" in str(self.types[name]) for name in required)
        batch_size = _BATCH_WITH_BYTES if has_bytes else _BATCH
        row = 0
        try:
            for batch in self.samples.batches([*required, *others], batch_size):
                # by position, because batch.column(name) fails for duplicate names
                columns = {name: batch.column(i) for i, name in reversed([*enumerate(batch.schema.names)])}
                values = {name: columns[name].to_pylist() for name in required}
                for i in range(batch.num_rows):
                    row += 1
                    cells = {name: values[name][i] for name in required}
                    for name in others:
                        cells[name] = python_value(columns[name][i])
                    yield Record(cells=cells, progress=row / total)
        except DataError as error:
            raise DataError(f"{self.samples.files[0].shown} is damaged after row {row}: {error}") from error


@contextmanager
def _open_parquet(file: ShardFile, path: Path) -> Iterator[Any]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise DataError("Parquet tables need pyarrow: pip install 'pyarrow>=18'") from error
    try:
        with ParquetFile(path) as opened:
            yield opened
    except (ArrowException, OSError, ValueError, LookupError, MemoryError, OverflowError) as error:
        message = " ".join(str(error).split())[:200]
        raise DataError(f"{file.shown} cannot be read as Parquet: {message}") from error


def has_bytes(kind: "pa.DataType") -> bool:
    """Whether values of a type may be encoded images, or lists of such; see ``ParquetSamples``."""
    from pyarrow import types

    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        kind = kind.value_type
    if types.is_struct(kind):
        return int(kind.get_field_index("bytes")) >= 0
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def _image_in(value: Any, index: int) -> bytes:
    from pyarrow import types

    if not value.is_valid:
        raise DataError("there is no image")
    if types.is_list(value.type) or types.is_large_list(value.type) or types.is_fixed_size_list(value.type):
        if not 0 <= index < len(value.values):
            raise DataError(f"there are {len(value.values)} images, no number {index}")
        value = value.values[index]
    if types.is_struct(value.type):
        names = [field.name for field in value.type]
        if "bytes" not in names or not value["bytes"].is_valid:
            raise DataError("it contains only the path of an image: write the dataset with embedded images")
        value = value["bytes"]
    if not value.is_valid or not (types.is_binary(value.type) or types.is_large_binary(value.type)):
        raise DataError(f"it holds {value.type if value.is_valid else 'nothing'}, not the bytes of an image")
    if value.as_buffer().size > _MAX_IMAGE_BYTES:
        raise DataError(f"an image of {value.as_buffer().size} bytes is over the limit of {_MAX_IMAGE_BYTES}")
    return bytes(value.as_py())


def python_value(scalar: Any) -> Any:
    """Convert a pyarrow value: times in microseconds (None if out of Python's range), maps as a dict.

    Maps with keys other than strings become lists of pairs.
    """
    from pyarrow import duration, time64, timestamp, types

    kind = scalar.type
    if not scalar.is_valid:
        return None
    if types.is_map(kind):
        pairs = [(python_value(entry["key"]), python_value(entry["value"])) for entry in scalar.values]
        if str(kind.key_type) in ("string", "large_string", "string_view"):
            return dict(pairs)
        return pairs
    if "map<" not in str(kind) and "[ns" not in str(kind):  # with pandas, nanoseconds would be its types
        with suppress(ValueError, OverflowError):  # years beyond 9999
            return scalar.as_py()
    if types.is_struct(kind):
        return {name: python_value(value) for name, value in scalar.items()}
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return list(map(python_value, scalar.values))
    coarser = kind
    if types.is_timestamp(kind):
        coarser = timestamp("us", kind.tz)
    elif types.is_time(kind):
        coarser = time64("us")
    elif types.is_duration(kind):
        coarser = duration("us")
    try:
        return scalar.cast(coarser, safe=False).as_py()
    except (ValueError, OverflowError):
        return None
