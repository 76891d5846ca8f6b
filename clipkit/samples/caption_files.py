"""Find files with the captions of images beside the images: ``cat.txt`` or ``cat.jpg.txt`` for ``cat.jpg``."""

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path

from clipkit.errors import DataError
from clipkit.samples.folders import images_below, is_hidden
from clipkit.samples.image_types import check_image
from clipkit.samples.table import SUFFIXES, Table, listed_path, plain_name

# In any case; if an image has several files, the first of these with captions is used.
CAPTION_SUFFIXES = (".txt", ".caption", ".captions", ".cap", ".text", ".tags", ".json")
_CHECKED_ROWS = 1000  # first rows of a table
_MAX_BYTES = 4 << 20  # per file; the rest is not read
# str.splitlines would also split at characters that may be within a caption, such as U+2028
_LINE_END = re.compile(r"\r\n|\n|\r")


def caption_file_of(image: Path, texts_in: Callable[[Path], Mapping[str, Sequence[str]]]) -> Path | None:
    """Return the file that may contain the captions of an image, None if there is none.

    Of several files, the first with captions is used, else the first.

    Args:
        image: the image.
        texts_in: ``list_texts``, or a function that caches its results.
    """
    texts = texts_in(image.parent)
    names = [*texts.get(image.stem, []), *texts.get(image.name, [])]
    files = [image.with_name(name) for name in names]
    if len(files) > 1:
        files = [file for file in files if any(map(str.strip, read_captions(file)))] or files
    return files[0] if files else None


def find_captions(images: Iterable[Path]) -> Path | None:
    """Return the first file beside the images that may contain captions, None if there is none.

    A .json file is one only if it has captions; other .json files have metadata or annotations.
    """
    texts_in = lru_cache(maxsize=8)(list_texts)
    for image in images:
        file = caption_file_of(image, texts_in)
        if file is not None and (file.suffix.lower() != ".json" or read_captions(file)):
            return file
    return None


def open_caption_tables(
    files: Iterable[Path],
    suffixes: tuple[str, ...],
    *,
    image_column: str | None = None,
    caption_column: str | None = None,
) -> list[Table]:
    """Open the files with these suffixes, in any case, that are tables of captions of images in their folders.

    One of the first 1,000 rows must name an image that exists, see ``Table.image_folder``. Hidden files do not
    count. Tables whose caption column is ``label`` do not count either, unless ``caption_column`` names it.
    """
    tables = []
    for file in files:
        if is_hidden(file.name) or not file.name.lower().endswith(suffixes):
            continue
        try:
            table = Table(file, image_column=image_column, caption_column=caption_column, encoded=True)
            has_labels = caption_column is None and plain_name(table.caption_column) in ("label", "labels")
            if not has_labels and _lists_an_image(table):
                tables.append(table)
        except (DataError, OSError):
            continue
    return tables


def metadata_of(folder: Path) -> Path | None:
    """Return the table of a folder of images in the layout of the Hugging Face hub, None if there is none.

    Raises:
        DataError: there are several, such as ``metadata.csv`` and ``metadata.jsonl``.
    """
    tables = [folder / f"metadata{suffix}" for suffix in SUFFIXES]
    tables = [table for table in tables if table.is_file()]
    if len(tables) > 1:
        raise DataError(f"{folder} contains {tables[0].name} and {tables[1].name}: remove one of them")
    return tables[0] if tables else None


def caption_table_of(folder: Path, *, image_column: str | None, caption_column: str | None) -> Path | None:
    """Return the table in a folder that lists captions of images in it, None if there is none.

    A table named metadata is preferred. Files with captions beside the images precede other tables, unless a column
    is named.

    Raises:
        DataError: there are several.
    """
    if (metadata := metadata_of(folder)) is not None:
        return metadata
    opened = open_caption_tables(
        sorted(folder.iterdir()), SUFFIXES, image_column=image_column, caption_column=caption_column
    )
    tables = [table.path for table in opened]
    if tables and image_column is None and caption_column is None:
        images = (path for path, cause in images_below(folder) if not cause)
        if find_captions(images) is not None:
            return None
    if len(tables) > 1:
        raise DataError(
            f"{folder} contains several tables of images and captions, {tables[0].name} and {tables[1].name}: name "
            "one of them instead of the folder"
        )
    return tables[0] if tables else None


def _lists_an_image(table: Table) -> bool:
    """Whether one of the first rows names an image that exists."""
    for row in islice(table, _CHECKED_ROWS):
        if not isinstance(row.path, str):
            continue
        with suppress(DataError, OSError, ValueError):  # a web address, or not a path
            path = listed_path(table.image_folder, row.path)
            if path.is_file() and check_image(path) is not None:
                return True
    return False


def read_captions(file: Path) -> list[str]:
    """Read the captions of an image: the lines of a text, or the field ``captions`` or ``caption`` of a .json file.

    Returns [] if the file cannot be read or has no captions.
    """
    try:
        with file.open("rb") as opened:
            data = opened.read(_MAX_BYTES)
    except OSError:
        return []
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    text = data.decode(encoding, errors="replace")
    if file.suffix.lower() != ".json":
        return _LINE_END.split(text.removesuffix("\n").removesuffix("\r")) if text else []
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return []
    if not isinstance(fields, dict):
        return []
    captions = fields.get("captions") or fields.get("caption")
    if isinstance(captions, str):
        return [captions]
    return [text for text in captions if isinstance(text, str)] if isinstance(captions, list) else []


def list_texts(folder: Path) -> dict[str, list[str]]:
    """Return the names of files with a suffix of captions, by their names without the suffix, in order of use."""
    names: list[tuple[int, bool, str, str]] = []
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            stem, suffix = os.path.splitext(entry.name)  # noqa: PTH122 - fast for many names
            if suffix.lower() in CAPTION_SUFFIXES:
                names.append((CAPTION_SUFFIXES.index(suffix.lower()), not suffix.islower(), stem, entry.name))
    texts: dict[str, list[str]] = {}
    for _, _, stem, name in sorted(names):
        texts.setdefault(stem, []).append(name)
    return texts
