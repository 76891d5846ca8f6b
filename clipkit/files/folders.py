"""Walks over the files below a folder, in the order of their paths and with little memory; names of splits."""

import heapq
import json
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

__all__ = ["SPLIT_NAMES", "SPLIT_WORDS", "files_below", "is_hidden"]

# Common names of the folders and files of splits, case-insensitive.
SPLIT_NAMES = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}
SPLIT_WORDS = frozenset(word for words in SPLIT_NAMES.values() for word in words)

_MAX_SORTED = 2**17  # maximum number of names sorted in memory
_SYSTEM_FOLDERS = ("__MACOSX", "@eaDir", "lost+found", "$RECYCLE.BIN", "System Volume Information")


def is_hidden(name: str) -> bool:
    """Whether a name begins with a dot or is that of a system folder, such as ``@eaDir``."""
    return name.startswith(".") or name in _SYSTEM_FOLDERS


def files_below(folder: Path, suffixes: Collection[str] | None = None) -> Iterator[tuple[Path, str]]:
    """Yield the files below a folder, sorted by path, and the subfolders that are not read, with the cause.

    Hidden files and folders are skipped. Links to folders are followed, except to a folder that contains the link.
    Within a linked folder, links to a folder that was already reached through a link are not followed either:
    folders that link to each other have exponentially many paths.

    Args:
        folder: where to start; the paths begin with it.
        suffixes: suffixes of the files to yield, in lower case and with the dot; None for all files.

    Yields:
        The path of a file and "", or the path of a folder and why it is not read.
    """
    endings = ("",) if suffixes is None else tuple(suffixes)
    waiting = [(folder, folder.resolve(), _sorted(_names(folder, endings)))]
    linked = set[Path]()  # targets of the links followed so far
    while waiting:
        here, real, names = waiting[-1]
        try:
            name = next(names, None)
        except OSError as error:
            waiting.pop()
            yield here, f"cannot read folder: {error.strerror}"
            continue
        if name is None:
            waiting.pop()
        elif name.endswith("/"):
            inner, target = here / name, real / name
            if inner.is_symlink():
                target = inner.resolve()
                if any(above.is_relative_to(target) for _, above, _ in waiting):
                    yield inner, "link to a folder that contains it"
                    continue
                if target in linked and any(one.is_symlink() for one, _, _ in waiting[1:]):
                    yield inner, "link to a folder that is read through another link"
                    continue
                linked.add(target)
            waiting.append((inner, target, _sorted(_names(inner, endings))))
        else:
            yield here / name, ""


def _names(folder: Path, endings: tuple[str, ...]) -> Iterator[str]:
    """Yield the names of files and folders; folders end with "/", so that sorting names sorts paths."""
    with os.scandir(folder) as entries:
        for entry in entries:
            name = entry.name
            if is_hidden(name):
                continue
            try:
                is_folder = entry.is_dir()
            except OSError:  # an invalid link; opening it as a file will raise the error
                is_folder = False
            if is_folder:
                yield name + "/"
            elif name.lower().endswith(endings):
                yield name


def _sorted(names: Iterable[str]) -> Iterator[str]:
    """Sort with at most ``_MAX_SORTED`` names in memory; longer lists are merged from temporary files."""
    rest = iter(names)
    with ExitStack() as files:
        runs: list[Iterator[str]] = []
        while run := sorted(islice(rest, _MAX_SORTED)):
            if not runs and len(run) < _MAX_SORTED:
                yield from run
                return
            file = files.enter_context(tempfile.TemporaryFile("w+", encoding="ascii"))
            file.writelines(json.dumps(name) + "\n" for name in run)
            file.seek(0)
            runs.append(map(json.loads, file))
        yield from heapq.merge(*runs)
