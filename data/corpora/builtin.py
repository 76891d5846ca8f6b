"""The built-in data sets: nothing to download, made on first use and kept in the user's cache."""

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import parent_process
from pathlib import Path
from threading import Thread

from clipkit.errors import DataError, nearest
from clipkit.files.atomic import FileLock
from data.remote.cache import cache_folder

__all__ = ["BUILTIN", "BuiltIn", "built_in", "end_with_parent"]


# --------------------------------------------------------------------------------------------------------------
# Processes that work for another one: they end with it, however it ends.


def end_with_parent() -> None:
    """From here on this process, a child of ``multiprocessing``, is gone as soon as its parent is."""
    Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


# --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BuiltIn:
    """How one built-in set is made; a new revision is made anew beside the old one."""

    make: Callable[[Path, bool], None]  # (the folder to make, whether to show progress)
    revision: str


# The makers are imported when they are needed: they bring fonts, pictures and scikit-learn with them.
def _make_glyphs(out: Path, progress: bool) -> None:
    from data.corpora import glyphs

    glyphs.make(out, progress=progress)


def _make_digits(out: Path, progress: bool) -> None:
    from data.corpora import digits

    digits.make(out)


def _make_icons(out: Path, progress: bool) -> None:
    from data.corpora import icons

    icons.make(out, progress=progress)


BUILTIN: dict[str, BuiltIn] = {
    "glyphs": BuiltIn(make=_make_glyphs, revision="3"),
    "digits": BuiltIn(make=_make_digits, revision="1"),
    "icons": BuiltIn(make=_make_icons, revision="1"),
}


def built_in(name: str, *, progress: bool = True) -> Path:
    """The folder of a built-in set, which is made now if it is not there yet.

    Several processes may ask at once: one makes the set, the others wait for it.

    Raises:
        DataError: there is no such set, or it cannot be made here.
    """
    if name not in BUILTIN:
        raise DataError(f"there is no built-in data set {name!r}: {nearest(name, BUILTIN)}")
    chosen = BUILTIN[name]
    folder = cache_folder() / f"{name}-{chosen.revision}"
    if folder.is_dir():  # a folder appears by renaming, so it is whole
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.with_name(f".{folder.name}.lock"))
        while not lock.try_acquire():
            time.sleep(0.05)
        try:
            if not folder.is_dir():
                for left in folder.parent.glob(f".{folder.name}.partial-*"):  # by a killed process
                    shutil.rmtree(left, ignore_errors=True)
                chosen.make(folder, progress)
        finally:
            lock.release()
    except OSError as error:
        raise DataError(f"cannot make {name} in {folder.parent} ({error}): set CLIPKIT_CACHE") from error
    return folder
