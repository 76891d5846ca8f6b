"""Read tables of images, captions or both row by row: CSV, TSV, JSONL, JSON, Parquet or HDF5.

Text is UTF-8, with or without a byte order mark, or UTF-16 with one, and may be compressed with gzip. A row that
cannot be read has a cause; it is not an error. Each format is one class, see ``Format``.

Captions: a caption may be a list of strings, also one written as text by JSON, Python or NumPy
(``["a cat", "a pet"]``). Of a conversation
(LLaVA's list of objects with ``from`` and ``value``), the first answer is the caption. Of a list of objects with
``raw`` or ``caption`` (Karpathy's ``sentences``), these are the captions.

Other columns are read on request. Values from JSON and Parquet keep their types; cells of CSV and TSV are strings,
unchanged (``007`` is not converted), or None if empty.
"""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from clipkit.errors import DataError, nearest
from clipkit.samples.folders import is_hidden, select_split
from clipkit.samples.table.base import (
    CAPTION_COLUMNS,
    IMAGE_COLUMNS,
    ColumnRequest,
    OpenFormat,
    find_column,
    find_texts,
    plain_name,
)
from clipkit.samples.table.delimited import Delimited, safe_cell
from clipkit.samples.table.hdf5 import Hdf5
from clipkit.samples.table.json_rows import JsonLines, open_json
from clipkit.samples.table.parquet import Parquet, has_bytes

__all__ = [
    "CAPTION_COLUMNS",
    "HDF5_SUFFIXES",
    "IMAGE_COLUMNS",
    "NAMED_SUFFIXES",
    "SUFFIXES",
    "Row",
    "Table",
    "find_column",
    "is_table",
    "listed_path",
    "plain_name",
    "read_split",
    "safe_cell",
]

_TEXT_FORMATS: Mapping[str, OpenFormat] = {
    ".csv": Delimited,
    ".tsv": Delimited,
    ".tab": Delimited,
    ".jsonl": JsonLines,
    ".ndjson": JsonLines,
}
# other files have these suffixes too: they are tables only where a table is expected
_NAMED_FORMATS: Mapping[str, OpenFormat] = {
    ".json": open_json,
    ".txt": Delimited,
    ".token": Delimited,
}
# only where a table is packed
HDF5_SUFFIXES = (".h5", ".hdf5")
_FORMATS: Mapping[str, OpenFormat] = {
    **_TEXT_FORMATS,
    **_NAMED_FORMATS,
    ".parquet": Parquet,
    ".pq": Parquet,
    **dict.fromkeys(HDF5_SUFFIXES, Hdf5),
}
_GZIP = ".gz"
SUFFIXES = (*_TEXT_FORMATS, *(suffix + _GZIP for suffix in _TEXT_FORMATS), ".parquet", ".pq")
NAMED_SUFFIXES = (*_NAMED_FORMATS, *(suffix + _GZIP for suffix in _NAMED_FORMATS))
_EXPECTED = "a .csv, .tsv, .jsonl, .json or .parquet table, or a .txt list"
_EXAMINED = 1000  # rows in which an image in the table is looked for
# folders in which images are looked for
_MOST_FOLDERS = 100
# Folders of tables, in lower case, whose images are in the folders beside them: of COCO and Flickr8k
_ANNOTATIONS = ("annotations", "flickr8k_text", "flickr_textdata")
_NOT_TEXT = re.compile("[\udc80-\udcff]")  # bytes that are not UTF-8, see ``open_text``


@dataclass(frozen=True, kw_only=True)  # with slots, pickling would take three times as long
class Row:
    """One row: its path and caption (None without such a column), or why it cannot be read."""

    number: int  # from 1, not counting the header
    path: object = None  # if there is a cause, only to name the row
    caption: object = None
    cause: str = ""
    progress: float  # fraction of the table read so far, in [0, 1]
    others: Mapping[str, object] = field(default_factory=dict)  # other columns that were requested
    caption_number: int | None = None  # 2 of 1000268201_693b08cb0e.jpg#2

    @property
    def content(self) -> object:
        """The path of the image, or the encoded image, also of an image as the Hugging Face hub stores it."""
        if isinstance(self.path, dict):
            return self.path.get("bytes") or self.path.get("path")
        return self.path


class Table:
    """The rows of a table; iteration reads them from the file in order, with bounded memory (except .json).

    Args:
        path: a file with one of ``SUFFIXES`` or ``NAMED_SUFFIXES``.
        image_column: column with the paths; found by common names if not given.
        caption_column: column with the captions; found by common names if not given.
        image_columns: common names of the column with the paths.
        image_name: content of that column, "image" or "url".
        need: columns that the table must have: "image", "caption" or both.
        encoded: whether a Parquet table's image column may hold encoded images, as bytes or as a struct with
            ``bytes`` (the hub's image datasets); paths of such rows are bytes or dicts.
        others: names of other columns to read; None for all of them.
        captions: for an HDF5 file, a table whose columns are read too; its rows are those of the images.

    Attributes:
        image_column: name of the column with the paths; "" if there is none.
        caption_column: name of the column with the captions; "" if there is none.
        others: positions of the other columns to read, by name; later rows of JSON may have more columns.
        left_out: columns that are not read, or only in part, by name, with the reason.
        needs_caption: whether a row without a caption cannot be used.
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
        captions: Path | None = None,
    ) -> None:
        open_format = _select_format(path)
        self.path = path
        image = ColumnRequest(content=image_name, name=image_column, common=image_columns)
        caption = ColumnRequest(content="caption", name=caption_column, common=CAPTION_COLUMNS)
        if captions is None:
            self._format = open_format(path, (image, caption))
        else:
            self._format = Hdf5(path, (image, caption), _select_format(captions)(captions, (image, caption)))
        names = self._format.names
        self.image_column = self._find_column(image, required="image" in need, encoded=encoded)
        self.caption_column = self._find_column(caption, required="caption" in need)
        self.needs_caption = "caption" in need
        self._required = [name for name in (self.image_column, self.caption_column) if name]
        for name in others or ():
            if name not in names:
                raise DataError(f"{path} has no column {name!r} ({nearest(name, names[:30])})")
        self._every_column = others is None and self._format.any_column
        requested = [
            name for name in dict.fromkeys(names if others is None else others) if name not in self._required
        ]
        self.left_out = {name: "it has no name" for name in requested if not name.strip()}
        for name in requested:
            kind = self._format.types.get(name)
            if kind is not None and not _is_plain(kind):
                self.left_out[name] = f"it contains {str(kind)[:60]}"
        self.others = {name: names.index(name) for name in requested if name not in self.left_out}
        counts = Counter(names)
        for name in (*self._required, *self.others):
            if counts[name] > 1:
                self.left_out[name] = f"{counts[name]} columns have this name: only the first is used"
        if self.caption_column == "conversations":
            self.left_out[self.caption_column] = "except the first answer of each, which is the caption"

    @property
    def content_id(self) -> str:
        """16 hexadecimal digits that depend on the content and the columns of images and captions."""
        return hashlib.sha256(repr((self._format.content_id, self._required)).encode()).hexdigest()[:16]

    def find_image(self, text: str) -> Path:
        """Return the file that a row lists as ``text``, see ``listed_path``; it may not exist.

        Paths are relative to the folder of the table, or else to one of the folders in it, such as ``Images`` of
        Flickr8k, or beside a folder of annotations, such as COCO's ``val2017``. Every row is looked up by itself,
        so the order of rows does not matter.
        """
        return listed_path(self.find_folder(text) or self.path.parent, text)

    def find_folder(self, text: str) -> Path | None:
        """Return the folder that the path ``text`` of a row is relative to; None if there is no such file."""
        folders = [self.path.parent]
        parent = self.path.absolute().parent
        if text.startswith(f"{parent.name}/"):  # paths with the table's own folder, as CheXpert's
            folders.append(parent.parent)
        for folder in chain(folders, self._folders):
            with suppress(DataError, OSError, ValueError):  # a web address, or not a path
                if listed_path(folder, text).is_file():
                    return folder
        return None

    @cached_property
    def _folders(self) -> list[Path]:
        folder = self.path.absolute().parent
        folders = _subfolders(self.path.parent)
        if folder.name.lower() in _ANNOTATIONS:
            folders += _subfolders(folder.parent)
        return folders

    @property
    def contains_images(self) -> bool:
        """Whether the images are in the table, by the type of the column and the first image that is not null."""
        if not _is_image_type(self._format.types.get(self.image_column)):
            return False
        for row in islice(self, _EXAMINED):
            if row.content and not row.cause:
                return isinstance(row.content, bytes)
        return True

    def read_image(self, row: int) -> bytes:
        """Return the encoded image of a row, counted from 0, of a table whose images are in it."""
        return self._format.read_image(row, self.image_column)

    def __iter__(self) -> Iterator[Row]:
        records = self._format.records(self._required, list(self.others))
        for row_number, record in enumerate(records, 1):
            path = None
            if self.image_column:
                path = record.cells.get(self.image_column)
            path = path.strip() if isinstance(path, str) else path
            if record.cause:
                yield Row(number=row_number, path=path, cause=record.cause, progress=record.progress)
                continue
            caption = None
            if self.caption_column:
                caption = record.cells.get(self.caption_column)
            others = self._other_cells(record.cells)
            cause = self._check_encoding(others)
            captions: object = None
            try:
                captions = find_texts(caption)
            except DataError as error:
                if self.needs_caption:
                    cause = cause or str(error)
            if cause:
                yield Row(number=row_number, path=path, cause=cause, progress=record.progress)
                continue
            yield Row(
                number=row_number,
                path=path,
                caption=captions,
                progress=record.progress,
                others=others,
                caption_number=record.caption_number,
            )

    def _check_encoding(self, others: Mapping[str, object]) -> str:
        for name, value in others.items():
            if name in self._format.types:  # of Parquet, whose text is not decoded here
                continue
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            if _NOT_TEXT.search(name + text):
                return f"not UTF-8: column {name!r}"
        return ""

    def _other_cells(self, cells: Mapping[str, object]) -> dict[str, object]:
        if self._every_column:
            return {
                name: value for name, value in cells.items() if name.strip() and name not in self._required
            }
        if self._format.any_column:  # an object without the column
            return {name: value for name, value in cells.items() if name in self.others}
        return {name: cells.get(name) for name in self.others}

    def _find_column(self, request: ColumnRequest, *, required: bool, encoded: bool = False) -> str:
        names = self._format.names
        content = request.content
        if request.name is not None and request.name not in names:
            raise DataError(
                f"{self.path} has no column {request.name!r} ({nearest(request.name, names[:30])})"
            )
        with_images = [name for name in names if encoded and _is_image_type(self._format.types.get(name))]
        name = request.name or self._format.guesses.get(content, "")
        name = name or request.find_column(with_images)  # before a column of the names of files
        name = name or request.find_column(names)
        if not name and len(with_images) == 1:
            name = with_images[0]
        if not names and required:
            raise DataError(f"{self.path} is empty")
        if not name and required:
            listed = ", ".join(" ".join(name.split())[:40] for name in names[:30]) or "none"
            raise DataError(
                f"{self.path}: which column is the {content}? Set --{content}-column; the columns are {listed}"
            )
        kind = str(self._format.types.get(name, "string"))
        if "string" in kind and not kind.startswith(
            ("struct", "list", "large_list", "fixed_size_list", "map")
        ):
            return name
        if content == "caption" and _is_list_of_text(kind):
            return name
        if encoded and _is_image_type(self._format.types.get(name)):
            return name
        if request.name is None and not required:
            return ""
        # for example a column of encoded images, whose rows might not fit in memory
        raise DataError(
            f"{self.path}: column {name!r} contains {kind[:60]}, not text; choose a column of text"
        )


def _select_format(path: Path) -> OpenFormat:
    if not path.is_file():
        raise DataError(f"{path} is not a file: expected {_EXPECTED}")
    suffix = Path(path.name.lower().removesuffix(_GZIP)).suffix
    if suffix not in _FORMATS:
        actual = suffix or "a file without a suffix"
        raise DataError(f"{path}: expected {_EXPECTED}, not {actual}")
    return _FORMATS[suffix]


def _is_image_type(kind: Any) -> bool:
    """Whether values of a type of pyarrow, None for other formats, may be encoded images."""
    is_list = str(kind).startswith(("list", "large_list", "fixed_size_list"))
    return kind is not None and not is_list and has_bytes(kind)


def read_split(fields: Mapping[str, Any], *, file_split: str = "") -> str:
    """Return the split that the column ``split`` of a row states, such as "val" for "dev".

    Without this column, the row is in the split of the file, which may be "".
    """
    value = next((value for column, value in fields.items() if plain_name(column) == "split"), None)
    if isinstance(value, list):
        raise DataError("its rows are in several splits")
    word = str(value or "").strip().lower()
    split = select_split(word) or word or file_split
    if file_split and split != file_split:
        raise DataError(f"its split is {split!r}, and that of its file {file_split!r}")
    return split


def is_table(path: Path) -> bool:
    """Return whether a file that a user names is a table, rather than a list of texts or another file.

    A .txt file is a table if it has columns of images and captions, as Flickr8k's ``captions.txt``.
    """
    if path.name.lower().endswith((*SUFFIXES, ".json", ".json.gz")):
        return path.is_file()
    if not path.name.lower().endswith(NAMED_SUFFIXES):
        return False
    try:
        Table(path, image_column=None, caption_column=None)
    except (DataError, OSError):
        return False
    return True


def listed_path(folder: Path, text: str) -> Path:
    """Return the file that a table in ``folder`` lists as ``text``: a path relative to it, or a file:// URL.

    Percent escapes of URLs are decoded. Backslashes separate folders, as on Windows, unless there is a file whose
    name contains them.
    """
    if text.startswith("file://"):
        text = unquote(text.removeprefix("file://"), errors="surrogateescape")
        if text.startswith("localhost/"):
            text = text.removeprefix("localhost")
    elif "://" in text:
        raise DataError("a web address, not a file: download it first")
    path = folder / text
    if "\\" in text and not os.path.lexists(path):
        return folder / text.replace("\\", "/")
    return path


def _subfolders(folder: Path) -> list[Path]:
    with suppress(OSError), os.scandir(folder) as entries:
        folders = sorted(
            Path(entry.path) for entry in entries if entry.is_dir() and not is_hidden(entry.name)
        )
        return folders[:_MOST_FOLDERS]
    return []


def _is_list_of_text(kind: str) -> bool:
    return (
        kind.startswith(("list", "large_list", "fixed_size_list"))
        and "string" in kind
        and "binary" not in kind
    )


def _is_plain(kind: Any) -> bool:
    if kind.num_fields:
        return all(_is_plain(kind.field(i).type) for i in range(kind.num_fields))
    return "binary" not in str(kind) and not str(kind).startswith("extension")
