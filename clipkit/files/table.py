"""Read tables of images, captions or both row by row: CSV, TSV, JSONL or Parquet.

Text is UTF-8, with or without a byte order mark, or UTF-16 with one. The delimiter of a .csv file (comma, tab,
semicolon or bar) is detected from its header. A line that cannot be read becomes a row with a cause, not an error.

Other columns are read on request. Values from JSONL and Parquet keep their types; cells of CSV and TSV are strings,
unchanged (``007`` is not converted), or None if empty.
"""

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from clipkit.errors import DataError, nearest

__all__ = ["CAPTION_COLUMNS", "IMAGE_COLUMNS", "SUFFIXES", "Row", "Table", "safe_cell"]

# common names, most specific first; compared in lower case with "_" for spaces and hyphens
IMAGE_COLUMNS = (
    "filepath", "file_path", "image_path", "img_path", "path", "filename", "file_name", "image_file",
    "image_filename", "image_name", "image", "img", "picture", "photo", "file",
)  # fmt: skip
CAPTION_COLUMNS = (
    "caption", "text", "title", "description", "sentence", "alt_text", "alt", "prompt", "comment", "label",
)  # fmt: skip
_DELIMITED, _JSON_LINES, _PARQUET = (".csv", ".tsv", ".tab"), (".jsonl", ".ndjson"), (".parquet", ".pq")
SUFFIXES = (*_DELIMITED, *_JSON_LINES, *_PARQUET)
_BATCH, _ENCODED_BATCH = 1024, 16  # rows of a Parquet table that are read at a time, and rows with images
LONGEST_LINE = 2**20  # maximum length of a JSONL line, in bytes
HEADER = 2**16  # maximum length of a header, in bytes
# first columns of the output of ``clipkit classify``, and of that of earlier versions
_CLASSIFIED = (["image", "source", "label_1"], ["picture", "source", "label_1"])
_FORMULA = re.compile(r"'*[=+\-@\t\r\n＝＋－＠]")


def safe_cell(text: str) -> str:
    """Prefix text that a spreadsheet would evaluate as a formula with an apostrophe, as OWASP recommends.

    Text that already has such a prefix gets another apostrophe, so that removing one restores the original.
    """
    return f"'{text}" if _FORMULA.match(text) else text


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row: its path and caption (None without such a column), or why it cannot be read."""

    number: int  # from 1, not counting the header
    path: object = None
    caption: object = None
    cause: str = ""
    progress: float  # fraction of the table read so far, in [0, 1]
    others: Mapping[str, object] = field(default_factory=dict)  # other columns that were requested


class Table:
    """The rows of a table; iteration reads them from the file in order, with bounded memory.

    Args:
        path: a .csv, .tsv, .tab, .jsonl, .ndjson, .parquet or .pq file.
        image_column: column with the paths; found by common names if not given.
        caption_column: column with the captions; found by common names if not given.
        image_columns: common names of the column with the paths.
        image_name: content of that column, "image" or "url".
        need: columns that the table must have: "image", "caption" or both.
        encoded: whether a Parquet table's image column may hold encoded images, as bytes or as a struct with
            ``bytes`` (the hub's image datasets); paths of such rows are bytes or dicts.
        others: names of other columns to read; None for all of them.

    Raises:
        DataError: the file is missing or not a table of a known kind, or a column is missing or cannot be found.

    Attributes:
        image_column: name of the column with the paths; "" if there is none.
        caption_column: name of the column with the captions; "" if there is none.
        others: positions of the other columns to read, by name; later lines of JSONL may have more columns.
        left_out: columns that are not read, by name, with the reason. If several columns have the same name, only
            the first is read.
    """

    def __init__(
        self,
        path: Path,
        *,
        image_column: str | None,
        caption_column: str | None,
        image_columns: Sequence[str] = IMAGE_COLUMNS,
        image_name: str = "image",
        need: Sequence[str] = ("image", "caption"),
        encoded: bool = False,
        others: Sequence[str] | None = (),
    ) -> None:
        if not path.is_file():
            raise DataError(f"{path} is not a file: expected a .csv, .tsv, .jsonl or .parquet table")
        self.path, self._batch = path, _BATCH
        asked = {image_name: image_column, "caption": caption_column}
        self._usual = {image_name: image_columns, "caption": CAPTION_COLUMNS}
        self._encoded = image_name if encoded else ""
        kinds: dict[str, Any] = {}  # pyarrow's types
        suffix = path.suffix.lower()
        if suffix in _DELIMITED:
            self._rows = self._delimited
            names = self._header("\t" if suffix != ".csv" else ",\t;|", asked)
        elif suffix in _JSON_LINES:
            self._rows = self._json_lines
            with path.open("rb") as file:
                objects = map(_json_object, islice(_lines(file), 100))
                names = list(dict.fromkeys(key for one in objects if isinstance(one, dict) for key in one))
            if not names:
                raise DataError(f"{path} has no JSON object in its first 100 lines")
        elif suffix in _PARQUET:
            self._rows = self._parquet
            schema = _parquet_file(path).schema_arrow
            names = list(schema.names)
            kinds = {name: schema.field(names.index(name)).type for name in names}
        else:
            raise DataError(
                f"{path}: expected a .csv, .tsv, .jsonl or .parquet file, not {suffix or 'a file without a suffix'}"
            )
        self.image_column, self.caption_column = (
            self._column(what, asked[what], names, kinds, required=needed in need)
            for what, needed in ((image_name, "image"), ("caption", "caption"))
        )
        self._read = [name for name in (self.image_column, self.caption_column) if name]
        self._image, self._caption = (
            names.index(name) if name else None for name in (self.image_column, self.caption_column)
        )
        self._fewest = 1 + max(names.index(name) for name in self._read)
        for name in others or ():
            if name not in names:
                raise DataError(f"{path} has no column {name!r} ({nearest(name, names[:30])})")
        self._every_key = others is None  # any line of JSONL may have additional keys
        wanted = [
            name for name in dict.fromkeys(names if others is None else others) if name not in self._read
        ]
        self.left_out = {name: "it has no name" for name in wanted if not name.strip()}
        for name in wanted:
            if name in kinds and not _is_plain(kinds[name]):
                self.left_out[name] = f"it contains {str(kinds[name])[:60]}"
        self.others = {name: names.index(name) for name in wanted if name not in self.left_out}
        counts = Counter(names)
        for name in (*self._read, *self.others):
            if counts[name] > 1:
                self.left_out[name] = f"{counts[name]} columns have this name: only the first is used"

    def __iter__(self) -> Iterator[Row]:
        return self._rows()

    def _column(
        self, what: str, asked: str | None, names: Sequence[str], kinds: Mapping[str, Any], *, required: bool
    ) -> str:
        """Return the requested column, or the one with the most specific common name; "" if none is required."""
        if asked is not None and asked not in names:
            raise DataError(f"{self.path} has no column {asked!r} ({nearest(asked, names[:30])})")
        plain = {_plain(name): name for name in reversed(names)}
        name = asked or next((plain[usual] for usual in self._usual[what] if usual in plain), "")
        if not name and required:
            shown = ", ".join(name[:40] for name in names[:30]) or "none"
            raise DataError(
                f"{self.path}: which column is the {what}? Set --{what}-column; the columns are {shown}"
            )
        kind = str(kinds.get(name, "string"))
        if "string" in kind and not kind.startswith(("struct", "list", "large_list", "map")):
            return name
        if what == self._encoded and kind.startswith(("binary", "large_binary", "struct<bytes: binary")):
            self._batch = _ENCODED_BATCH
            return name
        if asked is None and not required:
            return ""
        # for example a column of encoded images, whose rows might not fit in memory
        raise DataError(
            f"{self.path}: column {name!r} contains {kind[:60]}, not text; choose a column of text"
        )

    def _header(self, delimiters: str, asked: Mapping[str, str | None]) -> list[str]:
        """Read the column names of a delimited file, and determine its encoding and delimiter."""
        with self.path.open("rb") as file:
            start = file.read(HEADER)
        self._encoding = "utf-16" if start[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
        text = start.decode(self._encoding, errors="replace")
        best: tuple[int, int] = (-1, -1)
        names: list[str] = []
        for delimiter in delimiters:
            try:
                first = next(csv.reader(io.StringIO(text), delimiter=delimiter), [])
            except csv.Error:
                continue
            fields = [name.strip() for name in first]
            found = sum(
                name in fields
                if name is not None
                else any(_plain(one) in self._usual[what] for one in fields)
                for what, name in asked.items()
            )
            if (found, len(fields)) > best:
                best, names, self._delimiter = (found, len(fields)), fields, delimiter
        return names

    def _delimited(self) -> Iterator[Row]:
        size = max(1, self.path.stat().st_size)
        with self.path.open("rb") as file:
            # newline="": line ends inside quotes are part of the caption
            text = io.TextIOWrapper(file, encoding=self._encoding, errors="replace", newline="")
            reader = csv.reader(text, delimiter=self._delimiter)
            number, names = -1, list[str]()
            while True:
                fields, cause = [""], ""
                try:
                    fields = next(reader)
                except StopIteration:
                    return
                except csv.Error:
                    cause = "a field longer than 131,072 characters (a missing closing quote?)"
                if not fields:
                    continue
                number += 1
                if number == 0:
                    names = fields
                    continue
                progress = min(1.0, file.tell() / size)
                if not cause and len(fields) < self._fewest:
                    cause = "too few columns"
                elif (
                    not cause
                    and self._delimiter == "\t"
                    and any("\n" in one and "\t" in one for one in fields)
                ):
                    cause = "a missing closing quote"  # the field contains the following rows
                if cause:
                    yield Row(number=number, cause=cause, progress=progress)
                    continue
                if names[:3] in _CLASSIFIED:  # undo safe_cell
                    fields = [one[1:] if one[:1] == "'" and _FORMULA.match(one) else one for one in fields]
                yield Row(
                    number=number,
                    path=None if self._image is None else fields[self._image].strip(),
                    caption=None if self._caption is None else fields[self._caption],
                    progress=progress,
                    others={
                        name: (fields[at] or None) if at < len(fields) else None
                        for name, at in self.others.items()
                    },
                )

    def _json_lines(self) -> Iterator[Row]:
        size = max(1, self.path.stat().st_size)
        with self.path.open("rb") as file:
            for number, line in enumerate(_lines(file), 1):
                progress = min(1.0, file.tell() / size)
                value = _json_object(line)
                if isinstance(value, str):
                    yield Row(number=number, cause=value, progress=progress)
                    continue
                others = {
                    name: one
                    for name, one in value.items()
                    if name in self.others or (self._every_key and name.strip() and name not in self._read)
                }
                path, caption = (
                    value.get(name) if name else None for name in (self.image_column, self.caption_column)
                )
                yield Row(number=number, path=path, caption=caption, progress=progress, others=others)

    def _parquet(self) -> Iterator[Row]:
        import pyarrow

        file = _parquet_file(self.path)
        total = max(1, file.metadata.num_rows)
        number = 0
        try:
            for batch in file.iter_batches(batch_size=self._batch, columns=[*self._read, *self.others]):
                # by position, because batch.column(name) fails for duplicate names
                columns = {name: batch.column(at) for at, name in reversed([*enumerate(batch.schema.names)])}
                values = {name: columns[name].to_pylist() for name in self._read}
                for i in range(batch.num_rows):
                    number += 1
                    path, caption = (
                        values[name][i] if name else None for name in (self.image_column, self.caption_column)
                    )
                    others = {name: _python(columns[name][i]) for name in self.others}
                    yield Row(
                        number=number, path=path, caption=caption, progress=number / total, others=others
                    )
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{self.path} is damaged after row {number}: {error}") from error


def _is_plain(kind: Any) -> bool:
    """Check whether a pyarrow type holds numbers, text, times, or lists and objects of these."""
    if kind.num_fields:
        return all(_is_plain(kind.field(number).type) for number in range(kind.num_fields))
    return "binary" not in str(kind) and not str(kind).startswith("extension")


def _python(scalar: Any) -> Any:
    """Convert a pyarrow value: times in microseconds (None if out of Python's range), maps as a dict.

    Maps with keys other than strings become lists of pairs.
    """
    from pyarrow import duration, time64, timestamp, types

    kind = scalar.type
    if not scalar.is_valid:
        return None
    if types.is_map(kind):
        pairs = [(_python(one["key"]), _python(one["value"])) for one in scalar.values]
        return dict(pairs) if str(kind.key_type) in ("string", "large_string", "string_view") else pairs
    if "map<" not in str(kind) and "[ns" not in str(kind):  # with pandas, nanoseconds would be its types
        with suppress(ValueError, OverflowError):  # years beyond 9999
            return scalar.as_py()
    if types.is_struct(kind):
        return {name: _python(value) for name, value in scalar.items()}
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return list(map(_python, scalar.values))
    coarser = (
        timestamp("us", kind.tz) if types.is_timestamp(kind)
        else time64("us") if types.is_time(kind)
        else duration("us") if types.is_duration(kind)
        else kind
    )  # fmt: skip
    try:
        return scalar.cast(coarser, safe=False).as_py()
    except (ValueError, OverflowError):
        return None


def _plain(name: str) -> str:
    return name.strip().lower().replace(" ", "_").replace("-", "_")


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield nonblank lines; lines that are too long are cut."""
    first = True
    while line := file.readline(LONGEST_LINE + 1):
        if len(line) > LONGEST_LINE:
            while not (rest := file.readline(LONGEST_LINE)).endswith(b"\n") and rest:
                pass
        if first:
            line, first = line.removeprefix(b"\xef\xbb\xbf"), False
        if line.strip():
            yield line


def _json_object(line: bytes) -> dict[str, object] | str:
    """Parse a JSON object from a line, or return why that fails."""
    if len(line) > LONGEST_LINE:
        return f"a line longer than {LONGEST_LINE:,} bytes"
    try:
        value = json.loads(line.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return "not JSON"
    return value if isinstance(value, dict) else "not a JSON object"


def _parquet_file(path: Path) -> Any:
    """Open a Parquet file; pyarrow is installed by the extra ``pack``."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError("Parquet tables need pyarrow: pip install 'pyarrow>=18'") from error
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}") from error
