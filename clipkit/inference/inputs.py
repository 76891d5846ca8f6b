"""Streams of pictures and texts from what a user has: folders, files, shards, tables, lists of texts.

    photos/                        the shards that lie directly in it, and every picture below it by its path
    pairs/                         a data set of shards: those of all its splits, as pairs/train and pairs/test
    cat.jpg                        one picture
    pairs.tar                      a WebDataset shard, a plain tar
    shards/{00000..00331}.tar      all of a pattern
    shards/*.tar                   all that have such a name, 9.tar before 10.tar
    table.csv                      a table of paths, captions or both, see ``clipkit.files.table``
    lines.txt, -                   texts, one a line; "-" is standard input

Nothing here grows with the number of pictures: a stream names one item after the other and can be run through
again, always in the same order; the folder, shard or table must stay as it is. Reading an item's bytes is another
step, which any thread may take.
"""

import glob
import heapq
import json
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Literal
from urllib.parse import unquote

from clipkit.errors import DataError
from clipkit.files.patterns import IMAGE_SUFFIXES, expand_braces, match_wildcards, path_order, user_path
from clipkit.files.table import SUFFIXES, Row, Table
from clipkit.files.tar import sample_name, tar_files

__all__ = [
    "Item",
    "Kind",
    "Member",
    "Stream",
    "members",
    "paths_of",
    "pictures_below",
    "read_caption",
    "read_image",
    "readable",
    "shards_in",
    "shards_of_dataset",
]


# --------------------------------------------------------------------------------------------------------------
# What lies in a folder: its shards, or every picture below it in a fixed order, in bounded memory.

_RUN = 2**17  # names of one folder that are sorted in memory


def shards_in(folder: Path) -> list[Path]:
    """The tars that lie directly in a folder, 2.tar before 10.tar.

    Raises:
        DataError: the folder cannot be read.
    """
    try:
        with os.scandir(folder) as entries:  # not glob, which would list every picture of the folder
            shards = [Path(entry) for entry in entries if entry.name.endswith(".tar") and entry.is_file()]
    except OSError as error:
        raise DataError(f"{folder}: {error.strerror}") from error
    return sorted(shards, key=path_order)


def shards_of_dataset(folder: Path) -> list[Path]:
    """The tars that lie directly in a folder; if there are none, those of its splits, by their names.

    A split is a folder with tars and ``nshards.txt``, as data sets of shards have them.

    Raises:
        DataError: a folder cannot be read.
    """
    if shards := shards_in(folder):
        return shards
    try:
        splits = sorted(inner for inner in folder.iterdir() if (inner / "nshards.txt").is_file())
    except OSError as error:
        raise DataError(f"{folder}: {error.strerror}") from error
    return [shard for split in splits for shard in shards_in(split)]


def pictures_below(folder: Path) -> Iterator[tuple[Path, str]]:
    """Every picture below a folder, in the order of the paths; a folder that cannot be read comes with the cause.

    What counts is the file name's suffix. Hidden files and folders are left out, links to folders are not followed.
    """
    waiting = [(folder, _sorted(_names(folder)))]
    while waiting:
        here, names = waiting[-1]
        try:
            name = next(names, None)
        except OSError as error:
            waiting.pop()
            yield here, f"folder cannot be read: {error.strerror}"
            continue
        if name is None:
            waiting.pop()
        elif name.endswith("/"):
            inner = here / name
            waiting.append((inner, _sorted(_names(inner))))
        else:
            yield here / name, ""


def readable(text: str) -> str:
    """Text, or a path, as every file format can hold it: bytes that are no UTF-8 become escapes (``\\xe9``)."""
    try:
        content = text.encode("utf-8", "surrogateescape")  # as the system's paths hold such bytes
    except UnicodeEncodeError:  # half a pair, from JSON
        content = text.encode("utf-8", "surrogatepass")
    return content.decode("utf-8", "backslashreplace")


def _names(folder: Path) -> Iterator[str]:
    """The names of pictures, and of folders with "/" at the end, so that sorting them sorts paths."""
    with os.scandir(folder) as entries:
        for entry in entries:
            name = entry.name
            if name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield name + "/"
            elif name[name.rfind(".") :].lower() in IMAGE_SUFFIXES:
                yield name


def _sorted(names: Iterable[str]) -> Iterator[str]:
    """Like ``sorted``, with no more than ``_RUN`` names in memory: longer lists are merged from files."""
    rest = iter(names)
    with ExitStack() as files:
        runs: list[Iterator[str]] = []
        while run := sorted(islice(rest, _RUN)):
            if not runs and len(run) < _RUN:
                yield from run
                return
            file = files.enter_context(tempfile.TemporaryFile("w+", encoding="ascii"))
            file.writelines(json.dumps(name) + "\n" for name in run)
            file.seek(0)
            runs.append(map(json.loads, file))
        yield from heapq.merge(*runs)


# --------------------------------------------------------------------------------------------------------------
# Which paths a user means by braces, as in ``{00000..00331}.tar``, and by wildcards, as in ``*.tar``.


def paths_of(source: str) -> list[str]:
    """The paths of one source, those of a pattern in order; what is no pattern, or is there, is itself.

    Raises:
        DataError: a pattern stands for nothing, or for more than a million paths, or braces name what is missing.
    """
    return [path for pattern in _expanded(source) for path in _matching(pattern)]


def _matching(pattern: str) -> list[str]:
    """The paths that wildcards match; anything else is itself."""
    if not glob.has_magic(pattern) or "://" in pattern or os.path.lexists(user_path(pattern)):
        return [pattern]
    paths = list(map(str, match_wildcards(user_path(pattern))))
    if not paths:
        raise DataError(f"no file or folder on this disk matches {pattern!r}")
    return paths


def _expanded(source: str) -> list[str]:
    """The paths of a brace pattern; anything else is itself."""
    if "{" not in source or os.path.lexists(source):
        return [source]
    paths = list(expand_braces(source))
    missing = [path for path in paths if not user_path(path).exists() and not glob.has_magic(path)]
    if missing:
        raise DataError(
            f"of the {len(paths)} paths of {source!r} {len(missing)} do not exist: {missing[0]}, …"
        )
    return paths


# --------------------------------------------------------------------------------------------------------------
# The members of a WebDataset shard, as ``clipkit encode`` reads them.
#
# Members belong to one sample while their key (the path up to the first dot of the file name) stays the same.


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """Where one member of a sample lies."""

    shard: Path
    offset: int
    size: int
    extension: str  # in lower case, without the dot

    def read(self, limit: int) -> bytes:
        """The bytes, by one read; any thread may.

        Raises:
            DataError: there are more than ``limit``, or the file cannot be read or has become shorter.
        """
        if self.size > limit:
            raise DataError(f"a member of more than {limit >> 20} MiB")
        try:
            descriptor = os.open(self.shard, os.O_RDONLY)
            try:
                data = os.pread(descriptor, self.size, self.offset)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise DataError(f"the shard cannot be read: {error.strerror}") from error
        if len(data) != self.size:
            raise DataError("the shard has become shorter since it was looked through")
        return data


def members(shard: Path) -> Iterator[tuple[str, Member]]:
    """The key and place of each file that belongs to a sample, in the order of the tar.

    Raises:
        DataError: as for ``tar_files``, and where the file cannot be read.
    """
    try:
        for name, offset, size in tar_files(shard):
            if (found := sample_name(name)) is not None:
                key, extension = found
                yield key, Member(shard=shard, offset=offset, size=size, extension=extension)
    except OSError as error:
        raise DataError(f"shard {shard}: {error.strerror}") from error


# --------------------------------------------------------------------------------------------------------------

MAX_BYTES = 256 << 20  # of one picture or caption; beyond it is an attack or an accident
MAX_LINE = 2**20  # characters of a line of texts
_SHOWN = 8  # folders in a message
_CAPTIONS = ("txt", "json")  # the members that hold one, the first that is there counts
_EMPTY = "empty caption"
_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst", ".zip")

Kind = Literal["image", "caption"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One picture or text of a stream, nothing of it read.

    Attributes:
        source: the folder, file, shard or table that it comes from.
        key: the picture's path; of a shard the sample's key; of a list of texts the number of the line or row.
        image: where its bytes are.
        caption: the text, or where it is.
        cause: why it cannot be used; "" where nothing speaks against it so far.
    """

    source: str
    key: str
    image: Path | Member | None = None
    caption: str | Member | None = None
    cause: str = ""


class Stream:
    """All items of some sources, in order; iterate as often as needed.

    Args:
        sources: see the module.
        kind: whether pictures or captions are wanted.
        image_column: of tables; guessed from the usual names if not given.
        caption_column: likewise.

    Raises:
        DataError: a source is missing or holds nothing of the kind (the latter when iterating).
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
        self._columns = image_column, caption_column
        self._parts: list[tuple[str, Callable[[], Iterator[Item]]]] = []
        for source in sources:
            for path in paths_of(source):
                self._parts.append((path, self._opened(path)))

    def __iter__(self) -> Iterator[Item]:
        for source, items in self._parts:
            nothing = True
            for item in items():
                nothing = False
                yield item
            if nothing:
                raise DataError(
                    f"{source} holds no {'picture' if self.kind == 'image' else 'text'}{_hint(source)}"
                )

    def _opened(self, source: str) -> Callable[[], Iterator[Item]]:
        """What iterates over one source; it is looked at as far as needed to say what it is."""
        kind, lower = self.kind, source.lower()
        if source == "-":
            if kind == "image":
                raise DataError("standard input holds texts: add --text")
            spool = _spooled(sys.stdin.buffer)
            return lambda: _lines(spool, "-")
        if "://" in source:
            raise DataError(f"{source} is a web address: only files on this machine can be read")
        path = user_path(source)
        if path.is_dir():
            return self._folder(path)
        if not path.is_file():
            if path.exists():
                raise DataError(f"{source} is a pipe or a device: save what it gives to a file")
            raise DataError(f"{source}: no such file or folder")
        if lower.endswith(_COMPRESSED):
            raise DataError(f"{source} is compressed: unpack it first")
        if lower.endswith(".tar"):
            return lambda: _samples(path, kind)
        if path.suffix.lower() in SUFFIXES:
            image, caption = self._columns
            table = Table(path, image_column=image, caption_column=caption, need=(kind,))
            return lambda: _rows(table, kind)
        if kind == "caption":
            if path.suffix.lower() != ".txt":
                raise DataError(
                    f"{source}: texts come from a .txt file, a table, shards or - (standard input)"
                )
            return lambda: _lines(path, readable(source))
        if path.suffix.lower() == ".txt":
            raise DataError(f"{source} holds texts: add --text")
        return lambda: iter((Item(source=readable(source), key=readable(source), image=path),))

    def _folder(self, folder: Path) -> Callable[[], Iterator[Item]]:
        shards, kind = shards_of_dataset(folder), self.kind
        if kind == "caption" and not shards:
            raise DataError(f"{folder} holds no shard to take captions from{_hint(str(folder))}")

        def items() -> Iterator[Item]:
            for shard in shards:
                yield from _samples(shard, kind)
            if kind == "image":
                yield from _pictures(folder)

        return items


def read_image(item: Item) -> bytes:
    """The encoded picture of an item.

    Raises:
        DataError: the cause for which it cannot be read, in a few words without the item's name.
    """
    if item.cause:
        raise DataError(item.cause)
    assert item.image is not None
    data = _file_bytes(item.image) if isinstance(item.image, Path) else item.image.read(MAX_BYTES)
    if not data:
        raise DataError("empty file")
    return data


def read_caption(item: Item) -> str:
    """The caption of an item.

    Raises:
        DataError: the cause for which there is none. A blank line of a list of texts is a text, so that the rows
            keep its numbers; a sample's blank caption is none.
    """
    if item.cause:
        raise DataError(item.cause)
    caption = item.caption
    if isinstance(caption, Member):
        try:
            text = caption.read(MAX_BYTES).decode()
        except UnicodeDecodeError as error:
            raise DataError("caption is not UTF-8") from error
        caption = _json_caption(text) if caption.extension == "json" else text
        if caption is not None and not caption.strip():
            raise DataError(_EMPTY)
    if caption is None:
        raise DataError("no caption")
    return readable(caption)


def _json_caption(text: str) -> str | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError("its json does not parse") from error
    caption = value.get("caption") if isinstance(value, dict) else None
    return caption if isinstance(caption, str) else None


def _file_bytes(path: Path) -> bytes:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe or a device might never end
            raise DataError("not a file")
        if status.st_size > MAX_BYTES:
            raise DataError(f"file of more than {MAX_BYTES >> 20} MiB")
        with path.open("rb") as file:
            return file.read(MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise DataError("missing file") from None
    except OSError as error:
        raise DataError(f"file cannot be read: {error.strerror}") from error
    except ValueError:  # a path with a null byte, or letters that the system lacks
        raise DataError("file cannot be read") from None


def _hint(source: str) -> str:
    """Where the shards may be that a user meant by a folder."""
    path = user_path(source)
    if not path.is_dir():
        return ""
    found = [inner for inner in sorted(path.iterdir()) if inner.is_dir() and shards_in(inner)]
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f"; there are shards in {', '.join(map(str, found[:_SHOWN]))}{more}" if found else ""


def _pictures(folder: Path) -> Iterator[Item]:
    source = readable(str(folder))
    for path, cause in pictures_below(folder):
        yield Item(source=source, key=readable(str(path)), image=path, cause=cause)


def _samples(shard: Path, kind: Kind) -> Iterator[Item]:
    """The samples of a shard; consecutive members with one key are one sample."""
    source = readable(str(shard))
    key, found, twice = "", dict[str, Member](), list[str]()
    cause = ""
    try:
        for name, member in members(shard):
            if name != key:
                yield from _sample(source, key, found, twice, kind)
                found, twice = {}, []
            key = name
            if member.extension in found:
                twice.append(member.extension)
            else:
                found[member.extension] = member
    except DataError as error:
        cause = str(error)
    yield from _sample(source, key, found, twice, kind)
    if cause:
        yield Item(source=source, key="", cause=cause)


def _sample(
    source: str, key: str, found: dict[str, Member], twice: Sequence[str], kind: Kind
) -> Iterator[Item]:
    """One sample, if anything was found; then an item for each further picture, or caption, under its name."""
    if not found:
        return
    image = next((one for extension, one in found.items() if f".{extension}" in IMAGE_SUFFIXES), None)
    caption = next((found[extension] for extension in _CAPTIONS if extension in found), None)
    cause = ""
    if kind == "image" and image is None:
        cause = f"no picture, only {', '.join(sorted(found))[:100]}"
    elif kind == "caption" and caption is None:
        cause = "no caption"
    yield Item(source=source, key=key, image=image, caption=caption, cause=cause)
    for extension in twice:
        if f".{extension}" in IMAGE_SUFFIXES if kind == "image" else extension in _CAPTIONS:
            yield Item(
                source=source, key=key, cause=f"{key}.{extension} is there twice in a row: one was taken"
            )


def _rows(table: Table, kind: Kind) -> Iterator[Item]:
    """The rows of a table; one that cannot be used carries its cause."""
    source, number = readable(str(table.path)), 0
    try:
        for row in table:
            number = row.number
            yield _row(source, table.path.parent, row) if kind == "image" else _caption_row(source, row)
    except DataError as error:
        yield Item(source=source, key=str(number + 1), cause=str(error))


def _row(source: str, folder: Path, row: Row) -> Item:
    given, cause = row.path, row.cause
    if not cause and (given is None or given == ""):
        cause = "no path"
    elif not cause and not isinstance(given, str):
        cause = "path is not text"
    elif isinstance(given, str) and "://" in given and not given.startswith("file://"):
        cause = "a web address, not a file: download it first"
    if cause:
        key = given[:4096] if isinstance(given, str) and given else str(row.number)
        return Item(source=source, key=readable(key), cause=cause)
    assert isinstance(given, str)
    path = folder / _file_of_url(given)
    caption = row.caption if isinstance(row.caption, str) else None
    return Item(source=source, key=readable(str(path)), image=path, caption=caption)


def _file_of_url(given: str) -> str:
    """The path that a ``file://`` address stands for; anything else is itself."""
    if not given.startswith("file://"):
        return given
    path = unquote(given.removeprefix("file://"), errors="surrogateescape")
    return path.removeprefix("localhost") if path.startswith("localhost/") else path


def _caption_row(source: str, row: Row) -> Item:
    cause = row.cause
    if not cause and row.caption is None:
        cause = "no caption"
    elif not cause and not isinstance(row.caption, str):
        cause = "caption is not text"
    elif not cause and isinstance(row.caption, str) and not row.caption.strip():
        cause = _EMPTY
    caption = row.caption if isinstance(row.caption, str) and not cause else None
    return Item(source=source, key=str(row.number), caption=caption, cause=cause)


def _spooled(stream: BinaryIO) -> BinaryIO:
    """What can be read only once, in a file without a name that can be read again."""
    spool: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the stream)
    shutil.copyfileobj(stream, spool)
    spool.flush()
    return spool


def _lines(origin: Path | BinaryIO, source: str) -> Iterator[Item]:
    """Every line, blank ones too: row and line stay the same number where nothing fails."""
    with origin.open("rb") if isinstance(origin, Path) else os.fdopen(os.dup(origin.fileno()), "rb") as file:
        file.seek(0)  # a duplicate shares its place with the original
        encoding = "utf-16" if file.read(2) in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
        file.seek(0)
        text = TextIOWrapper(file, encoding=encoding, errors="replace", newline="\n")
        number = 0
        while line := text.readline(MAX_LINE + 1):
            number += 1
            cause = "" if len(line) <= MAX_LINE else f"a line of more than {MAX_LINE:,} characters"
            while cause and not line.endswith("\n") and (line := text.readline(MAX_LINE)):
                pass
            caption = None if cause else line.removesuffix("\n").removesuffix("\r")
            yield Item(source=source, key=str(number), caption=caption, cause=cause)
