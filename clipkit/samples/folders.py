"""Walks over the files and images below a folder, in the order of their paths; names of splits and of parts."""

import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from clipkit.errors import DataError
from clipkit.samples.formats import check_image

# Common names of the folders and files of splits, case-insensitive.
SPLIT_NAMES = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}
SPLIT_WORDS = frozenset(word for words in SPLIT_NAMES.values() for word in words)


def select_split(word: str) -> str:
    """Return the split that a word names, such as "val" for "dev"; "" for other words."""
    word = word.strip().lower()
    return next((split for split, names in SPLIT_NAMES.items() if word in names), "")


# name without its suffix of a part of a dataset in Parquet files, such as train-00000-of-00002
PARQUET_PART = re.compile(r"(?:(.*?)[-_.])?(\d{4,5})-of-(\d{4,5})(?:[-_.][0-9a-f]+)?", flags=re.ASCII)

MAX_BYTES = 256 << 20  # of an image file
_SYSTEM_FOLDERS = ("__MACOSX", "@eaDir", "lost+found", "$RECYCLE.BIN", "System Volume Information")


def is_hidden(name: str) -> bool:
    """Whether a name begins with a dot or is that of a system folder, such as ``@eaDir``."""
    return name.startswith(".") or name in _SYSTEM_FOLDERS


def images_below(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the images below a folder, sorted by path, and what cannot be read, with the cause.

    See ``check_image`` for the formats of images, and ``files_below`` for the subfolders that are not read.
    """
    for path, cause in files_below(folder):
        problem = cause or check_image(path)
        if problem is not None:
            yield path, problem


def read_file(path: Path) -> bytes:
    """Read an image file.

    Raises:
        DataError: it cannot be read; the message is a short cause without the path.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # reading a pipe or device might block
            raise DataError("not a file")
        if status.st_size > MAX_BYTES:
            raise DataError(f"file of more than {MAX_BYTES >> 20} MiB")
        with path.open("rb") as file:
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


def files_below(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the files below a folder, sorted by path, and the subfolders that are not read, with the cause.

    Hidden files and folders are skipped. Links to folders are followed, except to a folder that contains the link.
    Within a linked folder, links to a folder that was already reached through a link are not followed either:
    folders that link to each other have exponentially many paths.

    Yields:
        The path of a file and "", or the path of a folder and why it is not read.
    """
    waiting = [(folder, folder.resolve(), _names(folder))]
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
            inner = here / name
            target = real / name
            try:
                is_link = inner.is_symlink()
                if is_link:
                    target = inner.resolve()
            except OSError as error:  # the path is too long
                yield inner, f"cannot read folder: {error.strerror}"
                continue
            if is_link:
                if any(above.is_relative_to(target) for _, above, _ in waiting):
                    yield inner, "link to a folder that contains it"
                    continue
                if target in linked and any(path.is_symlink() for path, _, _ in waiting[1:]):
                    yield inner, "link to a folder that is read through another link"
                    continue
                linked.add(target)
            waiting.append((inner, target, _names(inner)))
        else:
            yield here / name, ""


def _names(folder: Path) -> Iterator[str]:
    names: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if is_hidden(entry.name):
                continue
            is_folder = False
            with suppress(OSError):  # an invalid link; opening it as a file will raise the error
                is_folder = entry.is_dir()
            names.append(f"{entry.name}/" if is_folder else entry.name)
    yield from sorted(names)


def check_parts(files: Iterable[str]) -> None:
    """Check that each part of datasets in numbered Parquet files is there once, see ``PARQUET_PART``."""
    numbers: dict[tuple[str, str], set[int]] = {}
    firsts: dict[tuple[str, str], tuple[str, int]] = {}
    for path in files:
        folder, _, name = path.rpartition("/")
        part = PARQUET_PART.fullmatch(name.removesuffix(".parquet"))
        if part is None:
            continue
        dataset = (folder, part[1] or "")
        first, total = firsts.setdefault(dataset, (path, int(part[3])))
        seen = numbers.setdefault(dataset, set())
        if int(part[3]) != total or int(part[2]) in seen:
            raise DataError(f"{first} and {path} are parts of different datasets: remove one of them")
        seen.add(int(part[2]))
    for dataset, (first, total) in firsts.items():
        missing = sorted(set(range(total)) - numbers[dataset])
        if missing:
            raise DataError(f"part {missing[0]} of {total} is missing next to {first}; download it again")
