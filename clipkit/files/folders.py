"""Walks over the files of a folder and its subfolders, in the order of their paths and with little memory."""

import heapq
import json
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

__all__ = ["files_below", "is_hidden"]

_MAX_SORTED = 2**17  # maximum number of names sorted in memory
_SYSTEM_FOLDERS = ("__MACOSX", "@eaDir", "lost+found", "$RECYCLE.BIN", "System Volume Information")


def is_hidden(name: str) -> bool:
    """Whether a file or folder has a name with a leading dot, or one that only systems use, such as ``@eaDir``."""
    return name.startswith(".") or name in _SYSTEM_FOLDERS


def files_below(folder: Path, suffixes: Collection[str] | None = None) -> Iterator[tuple[Path, str]]:
    """Yield the files below a folder, sorted by path, and subfolders that cannot be read with the cause.

    Hidden files and folders are skipped. Links to folders are followed, but not to a folder that contains the link,
    nor, in a linked folder, to one that another link has led to: folders that link to each other would have
    many times as many paths as files.

    Args:
        folder: where to start; its files come with paths that begin with it.
        suffixes: of files, in lower case and with the dot; None for all files.

    Yields:
        The path, and "" or why the folder at that path was not read.
    """
    waiting = [(folder, folder.resolve(), _sorted(_names(folder, suffixes)))]
    linked = set[Path]()  # where links have led to
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
                    yield inner, "link to a folder that another link leads to"
                    continue
                linked.add(target)
            waiting.append((inner, target, _sorted(_names(inner, suffixes))))
        else:
            yield here / name, ""


def _names(folder: Path, suffixes: Collection[str] | None) -> Iterator[str]:
    """Yield the names of files and folders; folders end with "/", so that sorting names sorts paths."""
    with os.scandir(folder) as entries:
        for entry in entries:
            name = entry.name
            if is_hidden(name):
                continue
            try:
                is_folder = entry.is_dir()
            except OSError:  # a link that leads nowhere; reading it as a file tells why
                is_folder = False
            if is_folder:
                yield name + "/"
            elif suffixes is None or name[name.rfind(".") :].lower() in suffixes:
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
