"""Brace patterns, wildcards, and the order of file names."""

import glob
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from clipkit.errors import ConfigError, DataError

_MAX_NAMES = 1_000_000  # per pattern
_RANGE = re.compile(r"(-?[0-9]+)\.\.(-?[0-9]+)(?:\.\.-?([0-9]+))?")


def name_order(name: str) -> tuple[int, str]:
    """Sort key of file names in a folder: shorter ones first, so that 2.tar precedes 10.tar."""
    return len(name), name


def path_order(path: Path) -> tuple[str, int, str]:
    """Sort key of paths: folder by folder, within a folder by ``name_order``."""
    return str(path.parent), *name_order(path.name)


def user_path(text: str) -> Path:
    """Expand ``~``; if there is no home folder, keep it as part of the name."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def resolve_output(path: Path) -> Path:
    """Resolve a folder to write to."""
    try:
        return path.expanduser().resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"cannot create the folder {str(path)[:200]!r}: {error}") from error


def match_wildcards(path: Path) -> list[Path]:
    """Return the files and folders that match, sorted by ``path_order``, without hidden ones.

    A path that exists, or has no wildcards, is returned unchanged.
    """
    if not glob.has_magic(str(path)) or path.exists():
        return [path]
    every = glob.iglob(str(path), recursive=True)  # noqa: PTH207 - Path.glob includes hidden files
    names = list(islice(every, _MAX_NAMES + 1))
    if len(names) > _MAX_NAMES:
        raise DataError(
            f"{str(path)[:200]!r} matches more than {_MAX_NAMES:,} names: use their folder instead"
        )
    return sorted(map(Path, names), key=path_order)


def expand_braces(source: str) -> Iterator[str]:
    """Expand a brace pattern such as ``{00000..00041}.tar``; names are counted before they are generated."""
    from braceexpand import braceexpand

    if _count_names(source) > _MAX_NAMES:
        raise DataError(
            f"the braces of {source[:200]!r} expand to more than {_MAX_NAMES:,} names: check their ranges"
        )
    try:
        names: Iterator[str] = braceexpand(source)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the braces of {source[:200]!r} do not balance") from error
    return names


def _count_names(pattern: str) -> int:
    """Count the names of a brace pattern; above the limit, return any number greater than the limit."""
    opened: list[tuple[int, int, int]] = []  # position of each open brace, and the counts before it
    before, here = 0, 1  # number of names of the previous items of this list, and of the current item
    position = 0
    while position < len(pattern):
        character = pattern[position]
        if character == "\\":
            position += 1  # the next character is escaped
        elif character == "{":
            opened.append((position, before, here))
            before, here = 0, 1
        elif character == "," and opened:
            before, here = before + here, 1
        elif character == "}" and opened:
            start, outer_before, outer = opened.pop()
            count = before + here
            if (numbers := _RANGE.fullmatch(pattern, start + 1, position)) is not None:
                if max(map(len, numbers.groups("1"))) > 18:
                    return _MAX_NAMES + 1
                first, last, step = map(int, numbers.groups("1"))
                count = abs(last - first) // (step or 1) + 1
            before, here = outer_before, outer * count
        if here > _MAX_NAMES:
            return here
        position += 1
    return here
