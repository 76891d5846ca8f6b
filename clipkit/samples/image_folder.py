"""Folders of images as samples: with captions in files beside them, in a table, or by class; names of classes.

The captions of ``cat.jpg`` are in ``cat.txt`` or ``cat.jpg.txt``, or files with one of ``CAPTION_SUFFIXES``.
"""

import hashlib
import json
import os
import re
import tempfile
import weakref
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import IO, Any

from clipkit.errors import DataError
from clipkit.samples.base import Samples
from clipkit.samples.folders import SPLIT_WORDS, files_below, images_below, is_hidden, read_file
from clipkit.samples.formats import check_image
from clipkit.samples.table import NAMED_SUFFIXES, SUFFIXES, Row, Table, plain_name

CLASS_NAMES = "classnames.txt"
_NUMBER = re.compile(r"[0-9]+")
# WordNet ids, numbers, numbered classes, and hexadecimal ids such as UUIDs
_ID = re.compile(
    r"n[0-9]{8}|[0-9]+|(?:class|category|label|id)[ _-]*[0-9]+|(?=.*[0-9])[0-9a-f-]{8,}", re.IGNORECASE
)

# In any case; if an image has several files, the first of these with captions is used.
CAPTION_SUFFIXES = (".txt", ".caption", ".captions", ".cap", ".text", ".tags", ".json")
_CHECKED_ROWS = 1000  # first rows of a table
_MAX_BYTES = 4 << 20  # per file; the rest is not read
# str.splitlines would also split at characters that may be within a caption, such as U+2028
_LINE_END = re.compile(r"\r\n|\n|\r")


class FolderSamples(Samples):
    """The images below a folder in the order of their paths, see ``clipkit.samples.Samples``.

    Paths are kept on disk. The only member of a sample is the image, named by the extension of the file. An image,
    or a folder, that cannot be read is a bad sample. If there are no files that may contain captions, and images in
    two subfolders or more, these are classes: the field ``class`` of a sample is the name of its subfolder, or the
    name in ``classnames.txt``; an image outside the subfolders has no fields, which is an error.
    Otherwise the field ``captions`` lists the captions in the file beside the image.
    """

    # as of ``TableSamples``
    image_column = "files"
    others: Sequence[str] = ()
    left_out: Mapping[str, str] = {}
    damage = ""
    other_images = 0

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the samples)
        weakref.finalize(self, self._file.close)
        self._ends = array("q")  # where the name of each image ends in the file
        self._causes: dict[int, str] = {}
        end = 0
        for path, cause in images_below(folder):
            if cause:
                self._causes[len(self._ends)] = cause
            end += self._file.write(os.fsencode(path.relative_to(folder)))
            self._ends.append(end)
        self._file.flush()
        self._list_texts = lru_cache(maxsize=8)(list_texts)

    def __reduce__(self) -> tuple[Any, ...]:
        return FolderSamples, (self.folder,)

    def __len__(self) -> int:
        return len(self._ends)

    def _name(self, i: int) -> str:
        start = self._ends[i - 1] if i else 0
        return os.fsdecode(os.pread(self._file.fileno(), self._ends[i] - start, start))

    def rows(self, i: int) -> list[Row]:
        """Return a sample as the row of a table, with the path in the folder."""
        return [Row(number=i + 1, path=self._name(i), cause=self.cause(i), progress=(i + 1) / len(self))]

    def path(self, i: int) -> Path:
        return self.folder / self._name(i)

    def cause(self, i: int) -> str:
        return self._causes.get(i, "")

    def subfolder(self, i: int) -> str:
        """Return the name of the subfolder that an image is in or below; "" if it is directly in the folder."""
        return self._name(i).rpartition("/")[0].partition("/")[0]

    def key(self, i: int) -> str:
        return str(self.path(i))

    def locate(self, i: int) -> tuple[str, str]:
        return str(self.folder), self._name(i)

    def members(self, i: int) -> Sequence[str]:
        return [self.path(i).suffix.lower().removeprefix(".")]

    def fields(self, i: int) -> dict[str, Any]:
        """Return the class, or the captions that are not blank; raise DataError if the image cannot be read."""
        cause = self.cause(i)
        if cause:
            raise DataError(cause)
        if self.class_names:
            subfolder = self.subfolder(i)
            if not subfolder:
                raise DataError("outside the class folders")
            return {"class": self.class_names[subfolder]}
        file = find_caption_file(self.path(i), self._list_texts)
        texts = read_captions(file) if file is not None else []
        return {"captions": [text.strip() for text in texts if text.strip()]}

    def read(self, i: int, member: str) -> bytes:
        if i in self._causes:
            raise DataError(self._causes[i])
        return read_file(self.path(i))

    @property
    def content_id(self) -> str:
        """16 hexadecimal digits that depend on the paths and sizes of the images, relative to the folder."""
        digest = hashlib.sha256()
        for i in range(len(self)):
            try:
                size = self.path(i).stat().st_size
            except OSError:
                size = -1
            digest.update(f"{self._name(i)}\0{size}\n".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()[:16]

    @property
    def caption_column(self) -> str:  # type: ignore[override]
        """The field with the captions."""
        return "class" if self.class_names else "captions"

    @property
    def captions_from(self) -> str:
        """What the captions are read from."""
        if self.class_names:
            if self._class_names_folder is None:
                return "names of folders"
            return CLASS_NAMES
        suffix = ".txt"
        if self.caption_file:
            suffix = self.caption_file.suffix.lower()
        return f"{suffix} files"

    @cached_property
    def classes(self) -> tuple[list[str], dict[str, int]]:
        """Names of classes by label, and labels by subfolder; none if subfolders are not classes."""
        if not self._has_classes:
            return [], {}
        if self._class_names_folder is not None:
            listed = read_class_names(self._class_names_folder, self._subfolders)
            if listed is not None:
                return listed
        self.check_no_caption_tables()
        return self._subfolders, {name: label for label, name in enumerate(self._subfolders)}

    @cached_property
    def class_names(self) -> dict[str, str]:
        """Names of classes by subfolder; {} if subfolders are not classes."""
        names, labels = self.classes
        return {subfolder: " ".join(names[label].split()) for subfolder, label in labels.items()}

    def label(self, i: int) -> int | None:
        return self.classes[1].get(self.subfolder(i))

    @cached_property
    def caption_file(self) -> Path | None:
        """The first file beside an image that may contain captions; None if there is none."""
        return find_captions(self._images())

    def check_no_caption_tables(self) -> None:
        """Check that names of subfolders do not replace the captions of a table."""
        tables = open_caption_tables(sorted(self.folder.iterdir()), NAMED_SUFFIXES)
        tables += open_caption_tables((path for path, _ in files_below(self.folder)), SUFFIXES)
        if tables:
            raise DataError(
                f"{tables[0].path} is a table of images and captions, so the names of folders are not read as "
                f"classes: name the table instead of the folder, or write the names of classes into "
                f"{self.folder / CLASS_NAMES}"
            )

    def _images(self) -> Iterator[Path]:
        return (self.path(i) for i in range(len(self)) if i not in self._causes)

    @property
    def _class_names_folder(self) -> Path | None:
        folders = [self.folder]
        if self.folder.name.lower() in SPLIT_WORDS:
            folders.append(self.folder.parent)
        for folder in folders:
            if (folder / CLASS_NAMES).is_file():
                return folder
        return None

    @cached_property
    def _subfolders(self) -> list[str]:
        names = {self.subfolder(i) for i in range(len(self)) if i not in self._causes}
        if self.folder.name.lower() in SPLIT_WORDS:  # a split may lack classes that others have
            for split in self.folder.parent.iterdir():
                if split.name.lower() in SPLIT_WORDS:
                    names |= {path.name for path in split.glob("*/") if not is_hidden(path.name)}
        return sorted(names - {""})

    @property
    def _has_classes(self) -> bool:
        if len(self._subfolders) < 2 or any(name.lower() in SPLIT_WORDS for name in self._subfolders):
            return False
        return self._class_names_folder is not None or self.caption_file is None


def are_ids(names: Collection[str]) -> bool:
    """Whether all names of classes are ids or numbers, which mean nothing to a text encoder."""
    return bool(names) and all(map(_ID.fullmatch, names))


def read_class_names(folder: Path, subfolders: Sequence[str]) -> tuple[list[str], dict[str, int]] | None:
    """Read the names of classes from ``classnames.txt``, whose line numbers, counted from 0, are the labels.

    The subfolders have the names in the file; or they are numbers from 0, which are the labels; or ids or other
    numbers, as many as lines, in ascending order.

    Returns:
        The names by label, and the labels by subfolder; None if there is no file.
    """
    file = folder / CLASS_NAMES
    if not file.is_file():
        return None
    try:
        names = [line.strip() for line in file.read_text(encoding="utf-8-sig").rstrip().split("\n")]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read as UTF-8 text: {error}") from error
    lines = {_normalize_name(name): line for line, name in reversed([*enumerate(names)])}
    if all(_normalize_name(name) in lines for name in subfolders):
        return names, {name: lines[_normalize_name(name)] for name in subfolders}
    if not are_ids(subfolders):
        unknown = next(name for name in subfolders if _normalize_name(name) not in lines)
        raise DataError(f"{file} does not contain {unknown!r}, which is a folder: add it, or remove the file")
    numbered = all(map(_NUMBER.fullmatch, subfolders))
    if numbered and "0" in {name.lstrip("0") or "0" for name in subfolders}:
        labels = {name: int(name) for name in subfolders}
        if max(labels.values()) < len(names):
            return names, labels
    if len(names) != len(subfolders):
        raise DataError(
            f"{file} has {len(names)} lines, but there are {len(subfolders)} folders of classes: write one name "
            "for each, in their order"
        )
    ordered = sorted(subfolders, key=int) if numbered else sorted(subfolders)
    return names, {name: label for label, name in enumerate(ordered)}


def _normalize_name(name: str) -> str:
    return " ".join(name.replace("_", " ").split()).casefold()


# --------------------------------------------------------------------------------------------------------------
# Files with the captions of images beside the images, and tables of captions in a folder of images.


def find_caption_file(image: Path, texts_in: Callable[[Path], Mapping[str, Sequence[str]]]) -> Path | None:
    """Return the file that may contain the captions of an image, None if there is none.

    Of several files, the first with captions is used, else the first.
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
        file = find_caption_file(image, texts_in)
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

    One of the first 1,000 rows must name an image that exists, see ``Table.find_image``. Hidden files do not
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


def find_metadata_table(folder: Path) -> Path | None:
    """Return the table of a folder of images in the layout of the Hugging Face hub, None if there is none."""
    tables = [folder / f"metadata{suffix}" for suffix in SUFFIXES]
    tables = [table for table in tables if table.is_file()]
    if len(tables) > 1:
        raise DataError(f"{folder} contains {tables[0].name} and {tables[1].name}: remove one of them")
    return tables[0] if tables else None


def find_caption_table(folder: Path, *, image_column: str | None, caption_column: str | None) -> Path | None:
    """Return the table in a folder that lists captions of images in it, None if there is none.

    A table named metadata is preferred. Files with captions beside the images precede other tables, unless a column
    is named.
    """
    metadata = find_metadata_table(folder)
    if metadata is not None:
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
    for row in islice(table, _CHECKED_ROWS):
        if not isinstance(row.path, str):
            continue
        with suppress(DataError, OSError, ValueError):  # a web address, or not a path
            path = table.find_image(row.path)
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
    encoding = "utf-8-sig"
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        encoding = "utf-16"
    text = data.decode(encoding, errors="replace")
    if file.suffix.lower() != ".json":
        if text:
            return _LINE_END.split(text.removesuffix("\n").removesuffix("\r"))
        return []
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return []
    if not isinstance(fields, dict):
        return []
    captions = fields.get("captions") or fields.get("caption")
    if isinstance(captions, str):
        return [captions]
    if isinstance(captions, list):
        return [text for text in captions if isinstance(text, str)]
    return []


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
