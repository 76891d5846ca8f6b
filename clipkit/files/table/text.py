"""Text of tables: compression, encoding, and the size of one value."""

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from clipkit.errors import DataError

LONGEST = 2**20  # characters of a line of a delimited table, or of a JSON object
_BYTE_ORDER_MARKS = (b"\xff\xfe", b"\xfe\xff")  # of UTF-16


@contextmanager
def open_text(path: Path, newline: str = "") -> Iterator[tuple[TextIO, Callable[[], float]]]:
    """Open a text file, and a function that returns the fraction of the file that has been read.

    Text is UTF-8, with or without a byte order mark, or UTF-16 with one; invalid bytes become U+FFFD. Content
    compressed with gzip is decompressed while it is read, whatever the name of the file.

    Args:
        newline: as for ``open``: by default, lines keep their ends.

    Raises:
        DataError: while reading, if the compressed content is damaged.
    """
    size = max(1, path.stat().st_size)
    with path.open("rb") as raw:
        file: io.BufferedReader | gzip.GzipFile = raw
        if raw.peek(2)[:2] == b"\x1f\x8b":
            file = gzip.GzipFile(fileobj=raw)
        try:
            encoding = "utf-16" if file.peek(2)[:2] in _BYTE_ORDER_MARKS else "utf-8-sig"
            text = io.TextIOWrapper(file, encoding=encoding, errors="replace", newline=newline)
            yield text, lambda: min(1.0, raw.tell() / size)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{path} is damaged: {str(error) or 'it is cut off'}") from error
