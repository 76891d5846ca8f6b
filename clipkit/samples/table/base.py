"""What formats of tables have in common: columns of interest, rows, text, values as JSON, and captions in cells."""

import ast
import codecs
import gzip
import hashlib
import io
import json
import math
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, TextIO

from clipkit.errors import DataError

# common names, most specific first; compared in the form of ``plain_name``
IMAGE_COLUMNS = (
    "filepath", "file_path", "image_path", "img_path", "path", "filename", "file_name", "image_file",
    "image_filename", "image_name", "image", "img", "images", "picture", "jpg", "png", "webp", "photo", "file",
)  # fmt: skip
CAPTION_COLUMNS = (
    "caption", "text", "title", "description", "sentence", "alt_text", "alt", "prompt", "comment", "captions",
    "sentences", "texts", "txt", "raw", "conversations", "label",
    "impression", "report",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnRequest:
    """A column that a table is read for.

    Attributes:
        content: "image", "url" or "caption".
        name: name of the column; None to find it by common names.
        common: common names, most specific first, in the form of ``plain_name``.
    """

    content: str
    name: str | None
    common: Sequence[str]

    def find_column(self, names: Sequence[str]) -> str:
        """Return the requested column, or the first one with the most specific common name; "" if there is none."""
        if self.name is not None:
            return self.name if self.name in names else ""
        return find_column(self.common, names)


def find_column(common: Sequence[str], names: Sequence[str]) -> str:
    """Return the first column with the most specific common name, in the form of ``plain_name``; "" without one."""
    by_plain_name = {plain_name(name): name for name in reversed(names)}
    for name in common:
        if name in by_plain_name:
            return by_plain_name[name]
    return ""


def plain_name(name: str) -> str:
    """Return the form in which names of columns are compared with common names."""
    return name.strip().lower().replace(" ", "_").replace("-", "_")


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """A row as its format reads it.

    Attributes:
        cells: values by column; columns that do not exist in this row are missing or None. If there is a cause, at
            most the path of an image.
        cause: why the row cannot be used, otherwise "".
        progress: fraction of the table read so far, in [0, 1].
        caption_number: the number of the caption, if the path has one, as in Flickr8k's.
    """

    cells: Mapping[str, object]
    cause: str = ""
    progress: float
    caption_number: int | None = None


class Format(ABC):
    """A table that is open for reading.

    Attributes:
        path: its file.
        names: names of the columns in order; a name may occur several times.
        types: pyarrow's types by column; {} if cells are text or JSON values.
        guesses: columns by their content, "image", "url" or "caption", where names do not tell it: the probable
            columns of a table without a header, and the joined captions of COCO.
        any_column: whether rows may have columns that are not in ``names``.
    """

    names: list[str]
    types: Mapping[str, Any] = {}
    guesses: Mapping[str, str] = {}
    any_column = False

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def content_id(self) -> str:
        """16 hexadecimal digits that depend on the content of the table."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]

    def read_image(self, row: int, column: str) -> bytes:
        """Return an encoded image in the table; rows are counted from 0."""
        raise DataError("it holds text, not an encoded image")

    @abstractmethod
    def records(self, required: Sequence[str], others: Sequence[str]) -> Iterator[Record]:
        """Read all rows in order, with the cells of these columns.

        A row without a cell for one of the required columns has a cause.
        """


# opens a file for the columns of images and captions
OpenFormat = Callable[[Path, Sequence[ColumnRequest]], Format]


# --------------------------------------------------------------------------------------------------------------
# Text: compression, encoding, and the size of one value.

LONGEST = 2**20  # characters of a line of a delimited table, or of a JSON object
_BYTE_ORDER_MARKS = (b"\xff\xfe", b"\xfe\xff")  # of UTF-16
_START = 64  # bytes from which the encoding is detected


@contextmanager
def open_text(path: Path, newline: str = "") -> Iterator[tuple[TextIO, Callable[[], float]]]:
    """Open a text file, and a function that returns the fraction of the file that has been read.

    Text is UTF-8, with or without a byte order mark, or UTF-16 with one; bytes that are not UTF-8 become lone
    surrogates. Content compressed with gzip is decompressed while it is read, whatever the name of the file.
    """
    size = max(1, path.stat().st_size)
    with path.open("rb") as raw:
        file: io.BufferedReader | gzip.GzipFile = raw
        if raw.peek(2)[:2] == b"\x1f\x8b":
            file = gzip.GzipFile(fileobj=raw)
        try:
            start = file.peek(_START)[:_START]
            encoding = "utf-8-sig"
            if start[:2] in _BYTE_ORDER_MARKS:
                encoding = "utf-16"
            if start.startswith(codecs.BOM_UTF32_LE) or (encoding != "utf-16" and b"\0" in start):
                raise DataError(
                    f"{path} is neither UTF-8 nor UTF-16 with a byte order mark: save it as UTF-8"
                )
            errors = "replace" if encoding == "utf-16" else "surrogateescape"
            text = io.TextIOWrapper(file, encoding=encoding, errors=errors, newline=newline)
            yield text, lambda: min(1.0, raw.tell() / size)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{path} is damaged: {str(error) or 'it is cut off'}") from error


# --------------------------------------------------------------------------------------------------------------
# Values and captions of cells.


def json_value(value: object) -> Any:
    """Convert a value to standard JSON.

    Non-finite numbers become None, dates and times ISO 8601 strings, durations seconds, and decimals floats.
    Characters that UTF-8 cannot encode become question marks. Other types become ``str(value)``.
    """
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {json_value(str(name)): json_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal):
        return json_value(float(value))
    return str(value).encode("utf-8", "replace").decode()


LONGEST_CAPTION = 10_000  # characters
MOST_CAPTIONS = 100  # per image
# elements of lists that are written as text: strings with the escapes of ``repr``, and None or numbers
_ELEMENT = re.compile(
    r"""'(?:[^'\\]|\\[\\'"nrtxuU])*'|"(?:[^"\\]|\\[\\'"nrtxuU])*"|None|null|nan|-?[0-9]+(?:\.[0-9]+)?"""
)
_LIST = re.compile(rf"\[\s*(?:{_ELEMENT.pattern})(?:[\s,]+(?:{_ELEMENT.pattern}))*[\s,]*\]")
_QUOTED_LIST = re.compile(r"""\[\s*(['"]).*\1\s*\]""", re.DOTALL)
_INVALID = re.compile("[\ufffd\ud800-\udfff]")  # where text is not UTF-8
_ANSWERING = ("gpt", "assistant", "model")  # who answers in conversations


def find_texts(value: object) -> object:
    """Return the captions in a list that is written as text, or that contains objects; other values unchanged."""
    if isinstance(value, str):
        return _read_list(value) if value.lstrip()[:1] == "[" else value
    if not isinstance(value, list) or not all(isinstance(element, dict) for element in value):
        return value
    for element in value:
        if element.get("from") in _ANSWERING:
            return element.get("value")
    return [element.get("raw", element.get("caption")) for element in value]


def _read_list(text: str) -> object:
    """Return the list that a text is, as JSON, Python or NumPy write it; the text itself if it is another one.

    Elements are strings or None, or also numbers if there are strings.
    """
    stripped = text.strip()
    elements: object = None
    try:
        elements = json.loads(stripped)
    except (ValueError, RecursionError):
        if _LIST.fullmatch(stripped):
            words = [match[0] for match in _ELEMENT.finditer(stripped, 1)]
            with suppress(ValueError, SyntaxError):
                # each by itself, because Python joins strings without a comma between them
                elements = [None if word in ("null", "nan") else ast.literal_eval(word) for word in words]
    if isinstance(elements, list):
        has_text = any(isinstance(element, str) for element in elements)
        if has_text or all(element is None for element in elements):
            return elements
        return text
    if _QUOTED_LIST.fullmatch(stripped):
        raise DataError('a list that cannot be read: write it as JSON, ["a cat", "a pet"]')
    return text


def parse_captions(value: object) -> list[str]:
    """Return the captions in a cell as its format reads it, see ``find_texts`` and ``usable_texts``."""
    return usable_texts(find_texts(value))


def usable_texts(value: object) -> list[str]:
    """Return the texts in a cell that are not blank, without spaces around them."""
    values = value if isinstance(value, list) else [value]
    return [text.strip() for text in values if isinstance(text, str) and text.strip()]


def check_captions(value: object, *, most: int = MOST_CAPTIONS) -> list[str]:
    """Return the captions in a cell without blank ones, at least one; equal captions are kept."""
    values = value if isinstance(value, list) else [value]
    texts = [text for text in values if isinstance(text, str)]
    if len(texts) + values.count(None) < len(values):
        raise DataError("caption is neither a string nor a list of strings")
    captions = usable_texts(value)
    if not captions:
        raise DataError("empty caption" if texts else "no caption")
    if len(set(captions)) > most:
        raise DataError(f"more than {most} captions")
    for caption in captions:
        if len(caption) > LONGEST_CAPTION:
            raise DataError(f"caption of more than {LONGEST_CAPTION:,} characters")
        if _INVALID.search(caption):
            raise DataError("caption is not UTF-8")
    return captions
