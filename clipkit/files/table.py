"""Reads the rows of a table of pictures, captions or both, one at a time: CSV, TSV, JSONL or Parquet.

Text is UTF-8, with or without a byte order mark, or UTF-16 with one. A .csv file may be separated by commas,
tabs, semicolons or bars, as its header shows. A line that cannot be read is a row with a cause, not an error.

Other columns are read where they are asked for. JSONL and Parquet keep their types. CSV and TSV have none: their
cells are texts, as they stand in the file (``007`` stays so), and None where they are empty.
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

# the usual names, the most telling first; compared in lower case with "_" for blanks and hyphens
IMAGE_COLUMNS = (
    "filepath", "file_path", "image_path", "img_path", "path", "filename", "file_name", "image_file",
    "image_filename", "image_name", "image", "img", "picture", "photo", "file",
)  # fmt: skip
CAPTION_COLUMNS = (
    "caption", "text", "title", "description", "sentence", "alt_text", "alt", "prompt", "comment", "label",
)  # fmt: skip
_DELIMITED, _JSON_LINES, _PARQUET = (".csv", ".tsv", ".tab"), (".jsonl", ".ndjson"), (".parquet", ".pq")
SUFFIXES = (*_DELIMITED, *_JSON_LINES, *_PARQUET)
LONGEST_LINE = 2**20  # bytes, of JSONL
HEADER = 2**16  # bytes in which a header must end
_CLASSIFIED = ["picture", "source", "label_1"]  # the first columns of what ``clipkit classify`` writes
_FORMULA = re.compile(r"'*[=+\-@\t\r\n＝＋－＠]")


def safe_cell(text: str) -> str:
    """A text for a CSV file, with an apostrophe before what a spreadsheet program would run as a formula.

    That is what OWASP recommends against CSV injection. Texts that look like the result get another apostrophe, so
    that taking one off a cell that begins with apostrophes and such a character gives the text back.
    """
    return f"'{text}" if _FORMULA.match(text) else text


def _plain_cell(cell: str) -> str:
    """The inverse of ``safe_cell``."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row: what its path and caption columns hold, or the cause for which it cannot be read.

    A column that the table does not have is None.
    """

    number: int  # from 1, the header not counted
    path: object = None
    caption: object = None
    cause: str = ""
    progress: float  # how much of the table is read, in [0, 1]
    others: Mapping[str, object] = field(default_factory=dict)  # the other columns that were asked for


class Table:
    """The rows of a table; iterating reads them from the file, in order, in bounded memory.

    Args:
        path: a .csv, .tsv, .tab, .jsonl, .ndjson, .parquet or .pq file.
        image_column: the column with the paths; guessed from the usual names if not given.
        caption_column: the column with the captions; guessed likewise.
        image_columns: the usual names of the former.
        image_name: what they hold, "image" or "url".
        need: which of "image" and "caption" the table must have.
        others: names of other columns to read; None for all of them.

    Raises:
        DataError: there is no such file, it is no table of a known kind, or its columns cannot be told.

    Attributes:
        image_column: its name, "" where there is none.
        caption_column: likewise.
        others: the other columns that are read, each with its position; later lines of JSONL may have more.
        left_out: why columns are not read, by name. Of several columns with the same name only the first is read.
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
        others: Sequence[str] | None = (),
    ) -> None:
        if not path.is_file():
            raise DataError(f"{path} is not a file: name a .csv, .tsv, .jsonl or .parquet table")
        self.path = path
        self._asked = image_column, caption_column
        self._usual = image_columns, CAPTION_COLUMNS
        self._delimiter = ","
        suffix = path.suffix.lower()
        if suffix in _DELIMITED:
            self._rows = self._delimited
            names = self._header("\t" if suffix != ".csv" else ",\t;|")
        elif suffix in _JSON_LINES:
            self._rows = self._json_lines
            names = self._first_keys()
        elif suffix in _PARQUET:
            self._rows = self._parquet
            schema = _parquet_file(path).schema_arrow
            names = list(schema.names)
        else:
            raise DataError(
                f"{path}: a table is a .csv, .tsv, .jsonl or .parquet file, not {suffix or 'that'}"
            )
        self.image_column = self._column(names, image_column, image_columns, image_name, "image" in need)
        self.caption_column = self._column(
            names, caption_column, CAPTION_COLUMNS, "caption", "caption" in need
        )
        if suffix in _PARQUET:
            self._check_text(schema, need)
        self._read = [name for name in (self.image_column, self.caption_column) if name]
        self._image, self._caption = (
            names.index(name) if name else None for name in (self.image_column, self.caption_column)
        )
        self._fewest = 1 + max(names.index(name) for name in self._read)
        for name in others or ():
            if name not in names:
                raise DataError(f"{path} has no column {name!r} ({nearest(name, names[:30])})")
        self._every_key = others is None  # of JSONL, where any line may have others
        wanted = dict.fromkeys(
            name for name in (names if others is None else others) if name not in self._read
        )
        self.left_out = {name: "it has no name" for name in wanted if not name.strip()}
        if suffix in _PARQUET:
            kinds = {name: schema.field(names.index(name)).type for name in wanted}
            self.left_out |= {
                name: f"it holds {str(kind)[:60]}" for name, kind in kinds.items() if not _is_plain(kind)
            }
        self.others = {name: names.index(name) for name in wanted if name not in self.left_out}
        counts = Counter(names)
        self.left_out |= {
            name: f"{counts[name]} columns have this name: only the first is used"
            for name in (*self._read, *self.others)
            if counts[name] > 1
        }

    def __iter__(self) -> Iterator[Row]:
        return self._rows()

    def _column(
        self, names: Sequence[str], asked: str | None, usual: Sequence[str], what: str, needed: bool
    ) -> str:
        """The column that was asked for, or the one with the most telling usual name; "" if there need be none."""
        shown = ", ".join(name[:40] for name in names[:30]) or "none"
        if asked is not None:
            if asked not in names:
                raise DataError(f"{self.path} has no column {asked!r} ({nearest(asked, names[:30])})")
            return asked
        plain = {_plain(name): name for name in reversed(names)}
        for name in usual:
            if name in plain:
                return plain[name]
        if not needed:
            return ""
        raise DataError(
            f"{self.path}: which column is the {what}? Say --{what}-column; its columns are {shown}"
        )

    def _check_text(self, schema: Any, need: Sequence[str]) -> None:
        """Refuse columns of pictures, of which a batch of rows would fill the memory; do without where we can."""
        for what, asked in zip(("image", "caption"), self._asked, strict=True):
            name = self.image_column if what == "image" else self.caption_column
            kind = str(schema.field(schema.names.index(name)).type) if name else "string"
            if "string" in kind and not kind.startswith(("struct", "list", "large_list", "map")):
                continue
            if asked is not None or what in need:
                raise DataError(
                    f"{self.path}: column {name!r} holds {kind[:60]}, not text; name a column of text"
                )
            if what == "image":
                self.image_column = ""
            else:
                self.caption_column = ""

    def _encoding(self) -> str:
        with self.path.open("rb") as file:
            start = file.read(2)
        return "utf-16" if start in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"

    def _header(self, delimiters: str) -> list[str]:
        """The names in the first line of a delimited file; settles the delimiter on the way."""
        with self.path.open("rb") as file:
            text = file.read(HEADER).decode(self._encoding(), errors="replace")
        best: tuple[int, int] = (-1, -1)
        names: list[str] = []
        for delimiter in delimiters:
            try:
                fields = [
                    name.strip() for name in next(csv.reader(io.StringIO(text), delimiter=delimiter), [])
                ]
            except csv.Error:
                continue
            found = sum(
                asked in fields if asked is not None else any(_plain(name) in usual for name in fields)
                for asked, usual in zip(self._asked, self._usual, strict=True)
            )
            if (found, len(fields)) > best:
                best, names, self._delimiter = (found, len(fields)), fields, delimiter
        return names

    def _delimited(self) -> Iterator[Row]:
        size = max(1, self.path.stat().st_size)
        with self.path.open("rb") as file:
            # a line end inside quotes belongs to the caption, so the csv module must see it: newline=""
            text = io.TextIOWrapper(file, encoding=self._encoding(), errors="replace", newline="")
            reader = csv.reader(text, delimiter=self._delimiter)
            number, names = -1, list[str]()
            while True:
                try:
                    fields, cause = next(reader), ""
                except StopIteration:
                    return
                except csv.Error:
                    fields, cause = (
                        [""],
                        "a field longer than 131,072 characters (a quote that does not end?)",
                    )
                if not fields:
                    continue
                number += 1
                if number == 0:
                    names = fields
                    continue
                progress = min(1.0, file.tell() / size)
                if not cause:
                    cause = self._fault(fields)
                if cause:
                    yield Row(number=number, cause=cause, progress=progress)
                else:
                    if names[: len(_CLASSIFIED)] == _CLASSIFIED:
                        fields = [_plain_cell(cell) for cell in fields]
                    path = None if self._image is None else fields[self._image].strip()
                    caption = None if self._caption is None else fields[self._caption]
                    others = {
                        name: (fields[at] or None) if at < len(fields) else None
                        for name, at in self.others.items()
                    }
                    yield Row(number=number, path=path, caption=caption, progress=progress, others=others)

    def _fault(self, fields: Sequence[str]) -> str:
        """Why a delimited row cannot be used, or ""."""
        if len(fields) < self._fewest:
            return "too few columns"
        if self._delimiter == "\t" and any("\n" in field and "\t" in field for field in fields):
            return "a quote that does not end"  # it has swallowed the rows behind it
        return ""

    def _first_keys(self) -> list[str]:
        """The keys of the first hundred lines, in the order in which they appear."""
        names: dict[str, None] = {}
        with self.path.open("rb") as file:
            for line in islice(_lines(file), 100):
                keys = _json_object(line)
                if isinstance(keys, dict):
                    names |= dict.fromkeys(keys)
        if not names:
            raise DataError(f"{self.path} has no JSON object in its first hundred lines")
        return list(names)

    def _json_lines(self) -> Iterator[Row]:
        size = max(1, self.path.stat().st_size)
        with self.path.open("rb") as file:
            for number, line in enumerate(_lines(file), 1):
                progress = min(1.0, file.tell() / size)
                value = _json_object(line)
                if isinstance(value, str):
                    yield Row(number=number, cause=value, progress=progress)
                else:
                    path, caption = (
                        value.get(name) if name else None for name in (self.image_column, self.caption_column)
                    )
                    others = {
                        name: one
                        for name, one in value.items()
                        if name in self.others
                        or (self._every_key and name.strip() and name not in self._read)
                    }
                    yield Row(number=number, path=path, caption=caption, progress=progress, others=others)

    def _parquet(self) -> Iterator[Row]:
        import pyarrow

        file = _parquet_file(self.path)
        total = max(1, file.metadata.num_rows)
        number = 0
        try:
            for batch in file.iter_batches(batch_size=1024, columns=[*self._read, *self.others]):
                # by position, as batch.column(name) fails where two columns have this name
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
            raise DataError(f"{self.path} is broken behind row {number}: {error}") from error


def _is_plain(kind: Any) -> bool:
    """Whether values of a pyarrow type are numbers, texts, times, or lists and objects of these."""
    if kind.num_fields:
        return all(_is_plain(kind.field(number).type) for number in range(kind.num_fields))
    return "binary" not in str(kind) and not str(kind).startswith("extension")


def _has_map(kind: Any) -> bool:
    """Whether a pyarrow type is or contains a map."""
    from pyarrow import types

    return types.is_map(kind) or any(_has_map(kind.field(i).type) for i in range(kind.num_fields))


def _python(scalar: Any) -> Any:
    """A value of pyarrow as Python has it, times to the microsecond; None for a time that Python cannot hold.

    A map is a dict where its keys are strings, else a list of pairs.
    """
    from pyarrow import duration, time64, timestamp, types

    kind = scalar.type
    if not scalar.is_valid:
        return None
    if types.is_map(kind):
        pairs = [(_python(one["key"]), _python(one["value"])) for one in scalar.values]
        return dict(pairs) if str(kind.key_type) in ("string", "large_string", "string_view") else pairs
    if not _has_map(kind):
        with suppress(ValueError, OverflowError):  # nanoseconds, years beyond 9999
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
    """The lines that are not blank; of one that is too long only the start."""
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
    """The object in a line of JSON, or the cause for which there is none."""
    if len(line) > LONGEST_LINE:
        return f"a line longer than {LONGEST_LINE:,} bytes"
    try:
        value = json.loads(line.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return "not JSON"
    return value if isinstance(value, dict) else "not a JSON object"


def _parquet_file(path: Path) -> Any:
    """An open Parquet file; pyarrow comes with the extra ``pack``."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError("Parquet tables need pyarrow: pip install 'pyarrow>=18'") from error
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a Parquet file that can be read: {error}") from error
