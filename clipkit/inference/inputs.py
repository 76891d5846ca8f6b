"""Streams of images and texts from folders, files, shards, tables and lists of texts.

    photos/                        the shards directly in it, and all images below it, sorted by path
    pairs/                         a dataset: the shards of all splits, such as pairs/train and pairs/test
    cat.jpg                        one image
    pairs.tar                      a WebDataset shard, an uncompressed tar
    shards/{00000..00331}.tar      all paths of a brace pattern
    shards/*.tar                   all matching paths, 9.tar before 10.tar
    table.csv                      a table of paths, captions or both (``clipkit.samples.table``); each image once
    lines.txt, -                   texts, one per line; "-" is standard input

Memory does not grow with the number of images: a stream yields one item at a time. It can be iterated again in the
same order as long as its sources do not change. Reading an item's bytes is a separate step, which may run in any
thread.
"""

import glob
import hashlib
import json
import os
import shutil
import sqlite3
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO, Literal

from clipkit.errors import DataError
from clipkit.files.patterns import expand_braces, match_wildcards, path_order, user_path
from clipkit.samples.folders import images_below
from clipkit.samples.image_types import IMAGE_EXTENSIONS
from clipkit.samples.table import Table, is_table, listed_path
from clipkit.samples.tar import sample_name, tar_files

__all__ = [
    "Item",
    "Kind",
    "Member",
    "Stream",
    "members",
    "read_caption",
    "read_image",
    "readable",
    "shards_in",
]

MAX_BYTES = 256 << 20  # limit for one image or caption
MAX_LINE = 2**20  # limit for a line of a list of texts, in characters
_SHOWN = 8  # folders listed in a message
_CAPTIONS = ("txt", "json")  # extensions of captions; the first one present is used
_EMPTY = "empty caption"
_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst", ".zip")

Kind = Literal["image", "caption"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """Location of one member of a sample in a WebDataset shard."""

    shard: Path
    offset: int
    size: int
    extension: str  # in lower case, without the dot

    def read(self, limit: int) -> bytes:
        """Read the bytes; safe to call from any thread.

        Raises:
            DataError: there are more than ``limit`` bytes, or the file cannot be read or has been truncated.
        """
        if self.size > limit:
            raise DataError(f"member of more than {limit >> 20} MiB")
        try:
            descriptor = os.open(self.shard, os.O_RDONLY)
            try:
                data = os.pread(descriptor, self.size, self.offset)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise DataError(f"cannot read the shard: {error.strerror}") from error
        if len(data) != self.size:
            raise DataError("the shard was truncated after it was listed")
        return data


def members(shard: Path) -> Iterator[tuple[str, Member]]:
    """Yield the key and location of each member of a sample, in the order of the tar.

    Consecutive members with the same key (the path up to the first dot of the file name) form a sample.

    Raises:
        DataError: as for ``tar_files``, or the file cannot be read.
    """
    try:
        for name, offset, size in tar_files(shard):
            if (found := sample_name(name)) is not None:
                key, extension = found
                yield key, Member(shard=shard, offset=offset, size=size, extension=extension)
    except OSError as error:
        raise DataError(f"shard {shard}: {error.strerror}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One image or text of a stream, not read yet.

    Attributes:
        source: the folder, file, shard or table that contains it.
        key: the image's path; in a shard the sample's key; in a list of texts the number of the line or row.
        image: location of the image.
        caption: the text, or its location.
        cause: why the item cannot be used; "" if no problem is known.
    """

    source: str
    key: str
    image: Path | Member | None = None
    caption: str | Member | None = None
    cause: str = ""


class Stream:
    """All items of some sources, in order; can be iterated any number of times.

    Args:
        sources: paths and patterns, see the module's documentation.
        kind: whether to stream images or captions.
        image_column: column of tables with image paths; found by common names if not given.
        caption_column: column of tables with captions; found by common names if not given.

    Raises:
        DataError: a source is missing or, when iterating, contains no items of this kind.

    Attributes:
        repeated: number of rows of tables, in the last iteration, whose image is that of an earlier row.
    """

    def __init__(
        self,
        sources: Sequence[str],
        *,
        kind: Kind = "image",
        image_column: str | None = None,
        caption_column: str | None = None,
    ) -> None:
        self.kind: Kind = kind
        self.repeated = 0
        self._columns = image_column, caption_column
        self._parts: list[tuple[str, Callable[[], Iterator[Item]]]] = []
        for source in sources:
            for path in _paths_of(source):
                self._parts.append((path, self._opened(path)))

    @property
    def note(self) -> str:
        """What to print about rows with the same image; "" if there are none."""
        if not self.repeated:
            return ""
        rows = "row has" if self.repeated == 1 else "rows have"
        return f"{self.repeated:,} {rows} the image of an earlier row: each image is read once"

    def __iter__(self) -> Iterator[Item]:
        self.repeated = 0
        for source, items in self._parts:
            nothing = True
            for item in items():
                nothing = False
                yield item
            if nothing:
                raise DataError(
                    f"{source} contains no {'image' if self.kind == 'image' else 'text'}{_hint(source)}"
                )

    def _opened(self, source: str) -> Callable[[], Iterator[Item]]:
        """Determine the type of one source; return a function that iterates over it."""
        kind, suffix = self.kind, Path(source).suffix.lower()
        if source == "-":
            if kind == "image":
                raise DataError("standard input contains texts: add --text")
            # standard input can be read only once: copy it to a file that can be read again
            spool: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the stream)
            shutil.copyfileobj(sys.stdin.buffer, spool)
            spool.flush()
            return lambda: _lines(spool, "-")
        if "://" in source:
            raise DataError(f"{source} is a web address: only local files can be read")
        path = user_path(source)
        if path.is_dir():
            return self._folder(path)
        if not path.is_file():
            if path.exists():
                raise DataError(f"{source} is a pipe or a device: save its content to a file")
            raise DataError(f"{source}: no such file or folder")
        if source.lower().endswith(_COMPRESSED):
            raise DataError(f"{source} is compressed: unpack it first")
        if suffix == ".tar":
            return lambda: _samples(path, kind)
        if is_table(path):
            image, caption = self._columns
            table = Table(path, image_column=image, caption_column=caption, need=(kind,))
            return lambda: self._images_in(table) if kind == "image" else _captions_in(table)
        if kind == "caption":
            if suffix != ".txt":
                raise DataError(
                    f"{source}: texts are read from a .txt file, a table, shards or - (standard input)"
                )
            return lambda: _lines(path, readable(source))
        if suffix == ".txt":
            raise DataError(f"{source} contains texts: add --text")
        return lambda: iter((Item(source=readable(source), key=readable(source), image=path),))

    def _images_in(self, table: Table) -> Iterator[Item]:
        """Yield each image of a table once, with the caption of its first row; unusable rows have a cause."""
        source, number = readable(str(table.path)), 0
        with closing(sqlite3.connect("", check_same_thread=False)) as paths:  # a temporary file
            paths.execute("CREATE TABLE paths (digest BLOB PRIMARY KEY) WITHOUT ROWID")
            try:
                for row in table:
                    number = row.number
                    text = row.path if isinstance(row.path, str) else ""
                    path, cause = Path(), row.cause
                    if not cause and row.path in (None, ""):
                        cause = "no path"
                    elif not cause and not isinstance(row.path, str):
                        cause = "path is not text"
                    try:
                        path = listed_path(table.path.parent, text)
                    except DataError as error:
                        cause = cause or str(error)
                    if cause:
                        yield Item(source=source, key=readable(text[:4096] or str(number)), cause=cause)
                        continue
                    normalized = os.path.normpath(path).encode("utf-8", "surrogatepass")
                    digest = hashlib.blake2b(normalized, digest_size=16).digest()
                    if not paths.execute("INSERT OR IGNORE INTO paths VALUES (?)", (digest,)).rowcount:
                        self.repeated += 1
                        continue
                    caption = row.caption if isinstance(row.caption, str) else None
                    yield Item(source=source, key=readable(str(path)), image=path, caption=caption)
            except DataError as error:
                yield Item(source=source, key=str(number + 1), cause=str(error))

    def _folder(self, folder: Path) -> Callable[[], Iterator[Item]]:
        kind = self.kind
        shards = shards_in(folder)
        if not shards:  # a dataset with a folder per split
            try:
                splits = sorted(filter(_is_split, folder.iterdir()))
            except OSError as error:
                raise DataError(f"{folder}: {error.strerror}") from error
            shards = [shard for split in splits for shard in shards_in(split)]
        if kind == "caption" and not shards:
            raise DataError(f"{folder} contains no shards with captions{_hint(str(folder))}")

        def items() -> Iterator[Item]:
            for shard in shards:
                yield from _samples(shard, kind)
            if kind == "image":
                source = readable(str(folder))
                for path, cause in images_below(folder):
                    yield Item(source=source, key=readable(str(path)), image=path, cause=cause)

        return items


def read_image(item: Item) -> bytes:
    """Read the encoded image of an item.

    Raises:
        DataError: it cannot be read; the message is a short cause without the item's name.
    """
    if item.cause:
        raise DataError(item.cause)
    assert item.image is not None
    if isinstance(item.image, Member):
        data = item.image.read(MAX_BYTES)
    else:
        try:
            status = item.image.stat()
            if not stat.S_ISREG(status.st_mode):  # reading a pipe or device might block
                raise DataError("not a file")
            if status.st_size > MAX_BYTES:
                raise DataError(f"file of more than {MAX_BYTES >> 20} MiB")
            with item.image.open("rb") as file:
                data = file.read(MAX_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            raise DataError("missing file") from None
        except OSError as error:
            raise DataError(f"cannot read file: {error.strerror}") from error
        except ValueError:  # a path with a null byte or with characters that cannot be encoded
            raise DataError("cannot read file") from None
    if not data:
        raise DataError("empty file")
    return data


def read_caption(item: Item) -> str:
    """Read the caption of an item.

    A blank line in a list of texts is a valid text, so that row numbers equal line numbers; a blank caption of a
    sample is an error.

    Raises:
        DataError: there is no caption; the message is a short cause without the item's name.
    """
    if item.cause:
        raise DataError(item.cause)
    caption = item.caption
    if isinstance(caption, Member):
        try:
            text: object = caption.read(MAX_BYTES).decode()
            if caption.extension == "json":
                value = json.loads(str(text))
                text = value.get("caption") if isinstance(value, dict) else None
        except UnicodeDecodeError as error:
            raise DataError("caption is not UTF-8") from error
        except (ValueError, RecursionError) as error:
            raise DataError("invalid JSON") from error
        caption = text if isinstance(text, str) else None
        if caption is not None and not caption.strip():
            raise DataError(_EMPTY)
    if caption is None:
        raise DataError("no caption")
    return readable(caption)


def readable(text: str) -> str:
    """Convert text or a path to valid Unicode: bytes that are not UTF-8 become escapes (``\\xe9``)."""
    try:
        content = text.encode("utf-8", "surrogateescape")  # how paths represent such bytes
    except UnicodeEncodeError:  # an unpaired surrogate, from JSON
        content = text.encode("utf-8", "surrogatepass")
    return content.decode("utf-8", "backslashreplace")


def _paths_of(source: str) -> list[str]:
    """Expand the braces and wildcards of a source, in order; return other sources and existing paths unchanged.

    Raises:
        DataError: a pattern matches nothing or more than a million paths, or a path named by braces is missing.
    """
    patterns = [source]
    if "{" in source and not os.path.lexists(source):
        patterns = list(expand_braces(source))
        missing = [path for path in patterns if not user_path(path).exists() and not glob.has_magic(path)]
        if missing:
            raise DataError(
                f"{len(missing)} of the {len(patterns)} paths of {source!r} do not exist: {missing[0]}, …"
            )
    paths: list[str] = []
    for pattern in patterns:
        if not glob.has_magic(pattern) or "://" in pattern or os.path.lexists(user_path(pattern)):
            paths.append(pattern)
        elif matches := list(map(str, match_wildcards(user_path(pattern)))):
            paths += matches
        else:
            raise DataError(f"no file or folder on this disk matches {pattern!r}")
    return paths


def shards_in(folder: Path) -> list[Path]:
    """List the tars directly in a folder, 2.tar before 10.tar.

    Raises:
        DataError: the folder cannot be read.
    """
    try:
        with os.scandir(folder) as entries:  # glob would build a list of all files in the folder
            shards = [Path(entry) for entry in entries if entry.name.endswith(".tar") and entry.is_file()]
    except OSError as error:
        raise DataError(f"{folder}: {error.strerror}") from error
    return sorted(shards, key=path_order)


def _is_split(folder: Path) -> bool:
    try:
        return (folder / "nshards.txt").is_file()
    except OSError:  # reported when its images are read
        return False


def _hint(source: str) -> str:
    """Suggest subfolders that contain shards."""
    path = user_path(source)
    if not path.is_dir():
        return ""
    found = [inner for inner in sorted(path.iterdir()) if inner.is_dir() and shards_in(inner)]
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f"; found shards in {', '.join(map(str, found[:_SHOWN]))}{more}" if found else ""


def _samples(shard: Path, kind: Kind) -> Iterator[Item]:
    """Yield the samples of a shard, followed by an item with the cause if it cannot be read to the end.

    A duplicate image or caption in a sample is yielded as a failed item.
    """
    source, causes = readable(str(shard)), list[str]()

    def located() -> Iterator[tuple[str, Member]]:
        try:
            yield from members(shard)
        except DataError as error:
            causes.append(str(error))

    for key, group in groupby(located(), itemgetter(0)):
        found: dict[str, Member] = {}
        twice: list[str] = []
        for _, member in group:
            if member.extension in found:
                twice.append(member.extension)
            else:
                found[member.extension] = member
        image = next((one for extension, one in found.items() if extension in IMAGE_EXTENSIONS), None)
        caption = next((found[extension] for extension in _CAPTIONS if extension in found), None)
        cause = ""
        if kind == "image" and image is None:
            cause = f"no image, only {', '.join(sorted(found))[:100]}"
        elif kind == "caption" and caption is None:
            cause = "no caption"
        yield Item(source=source, key=key, image=image, caption=caption, cause=cause)
        for extension in twice:
            if extension in (IMAGE_EXTENSIONS if kind == "image" else _CAPTIONS):
                cause = f"{key}.{extension} occurs twice in a row: used only the first"
                yield Item(source=source, key=key, cause=cause)
    for cause in causes:
        yield Item(source=source, key="", cause=cause)


def _captions_in(table: Table) -> Iterator[Item]:
    """Yield the caption of each row of a table; unusable rows have a cause."""
    source, number = readable(str(table.path)), 0
    try:
        for row in table:
            number = row.number
            cause = row.cause
            if not cause and row.caption is None:
                cause = "no caption"
            elif not cause and not isinstance(row.caption, str):
                cause = "caption is not text"
            text = row.caption if isinstance(row.caption, str) else ""
            if not cause and not text.strip():
                cause = _EMPTY
            yield Item(source=source, key=str(number), caption=None if cause else text, cause=cause)
    except DataError as error:
        yield Item(source=source, key=str(number + 1), cause=str(error))


def _lines(origin: Path | BinaryIO, source: str) -> Iterator[Item]:
    """Yield every line, including blank ones, so that row numbers equal line numbers if nothing fails."""
    with origin.open("rb") if isinstance(origin, Path) else os.fdopen(os.dup(origin.fileno()), "rb") as file:
        file.seek(0)  # a duplicated descriptor shares its position with the original
        encoding = "utf-16" if file.read(2) in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
        file.seek(0)
        text = TextIOWrapper(file, encoding=encoding, errors="replace", newline="\n")
        number = 0
        while line := text.readline(MAX_LINE + 1):
            number += 1
            cause = "" if len(line) <= MAX_LINE else f"line of more than {MAX_LINE:,} characters"
            while cause and not line.endswith("\n") and (line := text.readline(MAX_LINE)):
                pass
            caption = None if cause else line.removesuffix("\n").removesuffix("\r")
            yield Item(source=source, key=str(number), caption=caption, cause=cause)
