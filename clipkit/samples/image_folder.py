"""Folders of images as samples: with captions in files beside them, or by class; names of classes."""

import hashlib
import os
import re
import tempfile
import weakref
from array import array
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import IO, Any

from clipkit.errors import DataError
from clipkit.samples.base import Samples
from clipkit.samples.caption_files import (
    caption_file_of,
    find_captions,
    list_texts,
    open_caption_tables,
    read_captions,
)
from clipkit.samples.folders import SPLIT_WORDS, files_below, images_below, read_file
from clipkit.samples.table import NAMED_SUFFIXES, SUFFIXES, Row

CLASS_NAMES = "classnames.txt"
_NUMBER = re.compile(r"[0-9]+")
# WordNet ids, numbers, numbered classes, and hexadecimal ids such as UUIDs
_ID = re.compile(
    r"n[0-9]{8}|[0-9]+|(?:class|category|label|id)[ _-]*[0-9]+|(?=.*[0-9])[0-9a-f-]{8,}", re.IGNORECASE
)


class FolderSamples(Samples):
    """The images below a folder in the order of their paths, see ``clipkit.samples.Samples``.

    Paths are kept on disk. The only member of a sample is the image, named by the extension of the file. An image,
    or a folder, that cannot be read is a bad sample. If there are no files that may contain captions and all images
    are in subfolders, these are classes: the field ``class`` of a sample is the name of its subfolder, or the name
    in ``classnames.txt``.
    Otherwise the field ``captions`` lists the captions in the file beside the image.

    Attributes:
        folder: the folder.
    """

    # as of ``TableSamples``
    image_column = "files"
    others: Sequence[str] = ()
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
        """Return the path of an image."""
        return self.folder / self._name(i)

    def cause(self, i: int) -> str:
        """Return why an image cannot be used, "" if no reason is known before it is read."""
        return self._causes.get(i, "")

    def key(self, i: int) -> str:
        """Return the path of an image."""
        return str(self.path(i))

    def locate(self, i: int) -> tuple[str, str]:
        """Return the folder, and the path of an image in it."""
        return str(self.folder), self._name(i)

    def members(self, i: int) -> Sequence[str]:
        """Return the extension of the image."""
        return [self.path(i).suffix.lower().removeprefix(".")]

    def fields(self, i: int) -> dict[str, Any]:
        """Return the class, or the captions that are not blank; raise DataError if the image cannot be read."""
        if cause := self.cause(i):
            raise DataError(cause)
        if self.class_names:
            return {"class": self.class_names.get(self._name(i).partition("/")[0], "")}
        file = caption_file_of(self.path(i), self._list_texts)
        texts = read_captions(file) if file is not None else []
        return {"captions": [text.strip() for text in texts if text.strip()]}

    def read(self, i: int, member: str) -> bytes:
        """Return an encoded image, whatever the member; raise DataError with the cause if it cannot be read."""
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
    def caption_column(self) -> str:
        """The field with the captions."""
        return "class" if self.class_names else "captions"

    @property
    def captions_from(self) -> str:
        """What the captions are read from."""
        if self.class_names:
            return CLASS_NAMES if self._has_class_names else "names of folders"
        suffix = self._captioned.suffix.lower() if self._captioned else ".txt"
        return f"{suffix} files"

    @cached_property
    def class_names(self) -> dict[str, str]:
        """Names of classes by subfolder; {} if subfolders are not classes.

        Raises:
            DataError: the folder contains tables that may list the captions, or ``classnames.txt`` does not match
                the subfolders.
        """
        if len(self._subfolders) < 2 or self._why_not:
            return {}
        names = {subfolder: " ".join(subfolder.split()) for subfolder in self._subfolders}
        if (listed := read_class_names(self.folder, self._subfolders)) is not None:
            lines, labels = listed
            names = {subfolder: " ".join(lines[label].split()) for subfolder, label in labels.items()}
        if not self._has_class_names:
            self._check_no_caption_tables()
        return names

    @property
    def hint(self) -> str:
        """Why several subfolders are not read as classes, otherwise ""."""
        if len(self._subfolders) < 2 or not self._why_not:
            return ""
        return f"; subfolders are not read as classes because {self._why_not}"

    def _images(self) -> Iterator[Path]:
        return (self.path(i) for i in range(len(self)) if i not in self._causes)

    @property
    def _has_class_names(self) -> bool:
        return (self.folder / CLASS_NAMES).is_file()

    @cached_property
    def _subfolders(self) -> list[str]:
        names = (path.relative_to(self.folder).parts for path in self._images())
        return sorted({parts[0] for parts in names if len(parts) > 1})

    @cached_property
    def _captioned(self) -> Path | None:
        return find_captions(self._images())

    @cached_property
    def _why_not(self) -> str:
        """Why subfolders are not classes, "" if they may be."""
        outside = next((path for path in self._images() if path.parent == self.folder), None)
        if outside is not None:
            return f"{outside.name} is outside them"
        if self._captioned and not self._has_class_names:
            return f"{self._captioned.relative_to(self.folder)} may contain captions"
        if splits := sorted(SPLIT_WORDS.intersection(self._subfolders)):
            return f"{splits[0]!r} is the name of a split: pack the splits one by one, or rename it"
        return ""

    def _check_no_caption_tables(self) -> None:
        """Check that names of subfolders do not replace the captions of a table."""
        opened = open_caption_tables(sorted(self.folder.iterdir()), NAMED_SUFFIXES)
        opened += open_caption_tables((path for path, _ in files_below(self.folder)), SUFFIXES)
        if opened:
            raise DataError(
                f"{self.folder}: the names of its subfolders are not read as captions, because {opened[0].path} is "
                f"a table of images and captions: pack a table instead of the folder, or write the names of "
                f"classes into {self.folder / CLASS_NAMES}"
            )


def are_ids(names: Collection[str]) -> bool:
    """Whether all names of classes are ids or numbers, which mean nothing to a text encoder."""
    return bool(names) and all(map(_ID.fullmatch, names))


def read_class_names(folder: Path, subfolders: Sequence[str]) -> tuple[list[str], dict[str, int]] | None:
    """Read the names of classes from ``classnames.txt``, whose line numbers, counted from 0, are the labels.

    The subfolders have the names in the file; or they are numbers from 0, which are the labels; or ids or other
    numbers, as many as lines, in ascending order.

    Args:
        folder: the folder with the file.
        subfolders: names of the folders with the images of a class.

    Returns:
        The names by label, and the labels by subfolder; None if there is no file.

    Raises:
        DataError: the file cannot be read, or the subfolders do not match the lines.
    """
    file = folder / CLASS_NAMES
    if not file.is_file():
        return None
    try:
        names = [line.strip() for line in file.read_text(encoding="utf-8-sig").rstrip().split("\n")]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read as UTF-8 text: {error}") from error
    lines = {_plain(name): line for line, name in reversed([*enumerate(names)])}
    if all(_plain(name) in lines for name in subfolders):
        return names, {name: lines[_plain(name)] for name in subfolders}
    if not are_ids(subfolders):
        unknown = next(name for name in subfolders if _plain(name) not in lines)
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


def _plain(name: str) -> str:
    return " ".join(name.replace("_", " ").split()).casefold()
