"""What a format of tables provides, and how it knows which columns are of interest."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clipkit.errors import DataError

# common names, most specific first; compared in the form of ``plain_name``
IMAGE_COLUMNS = (
    "filepath", "file_path", "image_path", "img_path", "path", "filename", "file_name", "image_file",
    "image_filename", "image_name", "image", "img", "images", "picture", "jpg", "png", "webp", "photo", "file",
)  # fmt: skip
CAPTION_COLUMNS = (
    "caption", "text", "title", "description", "sentence", "alt_text", "alt", "prompt", "comment", "captions",
    "sentences", "texts", "txt", "raw", "conversations", "label",
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
    """

    cells: Mapping[str, object]
    cause: str = ""
    progress: float


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
