"""Text of tables: compression, encoding, and the size of one value."""

import codecs
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
