"""What lies in a folder: its shards, or every picture below it in a fixed order, in bounded memory."""

import heapq
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

from clipkit.errors import DataError

__all__ = ["IMAGE_SUFFIXES", "pictures_below", "readable", "shards_in", "shards_of_dataset", "user_path"]

IMAGE_SUFFIXES = frozenset(
    (
        ".jpg",
        ".jpeg",
        ".jpe",
        ".png",
        ".webp",
        ".gif",
        ".bmp",
        ".tif",
        ".tiff",
        ".ppm",
        ".pgm",
        ".jp2",
        ".avif",
    )
)
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
    return sorted(shards, key=lambda path: (len(path.name), path.name))


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


def user_path(given: str) -> Path:
    """A path as a user types it; a ``~`` that stands for nobody's home is part of a name."""
    try:
        return Path(given).expanduser()
    except RuntimeError:
        return Path(given)


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
