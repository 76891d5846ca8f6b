"""Which paths a user means by braces, as in ``{00000..00331}.tar``, and by wildcards, as in ``*.tar``."""

import glob
import math
import os
import re
from itertools import islice

from clipkit.errors import DataError
from clipkit.picture_folder import user_path

__all__ = ["paths_of"]

_MAX_PATTERN = 1_000_000  # paths of a pattern
_RANGE = re.compile(r"\{(-?\d{1,18})\.\.(-?\d{1,18})")
_NUMBER = re.compile(r"([0-9]+)")


def paths_of(source: str) -> list[str]:
    """The paths of one source, those of a pattern in order; what is no pattern, or is there, is itself.

    Raises:
        DataError: a pattern stands for nothing, or for more than a million paths, or braces name what is missing.
    """
    return [path for pattern in _expanded(source) for path in _matching(pattern)]


def _matching(pattern: str) -> list[str]:
    """The paths that wildcards stand for, by their names with numbers as numbers; anything else is itself."""
    if not glob.has_magic(pattern) or "://" in pattern or os.path.lexists(user_path(pattern)):
        return [pattern]
    every = glob.iglob(str(user_path(pattern)), recursive=True)  # noqa: PTH207 - leaves hidden files out
    paths = list(islice(every, _MAX_PATTERN + 1))
    if not paths:
        raise DataError(f"no file or folder on this disk has a name as {pattern!r}")
    if len(paths) > _MAX_PATTERN:
        raise DataError(f"{pattern!r} stands for more than {_MAX_PATTERN:,} paths")
    return sorted(paths, key=_natural)


def _natural(path: str) -> tuple[list[tuple[int, str]], str]:
    """To sort 9 before 10; names that differ in zeros alone by these."""
    parts = _NUMBER.split(path)  # texts and numbers in turn
    return [(int(part), "") if i % 2 else (0, part) for i, part in enumerate(parts)], path


def _expanded(source: str) -> list[str]:
    """The paths of a brace pattern; anything else is itself."""
    if "{" not in source or os.path.lexists(source):
        return [source]
    from braceexpand import braceexpand

    # braceexpand writes ranges out before it gives the first path
    ranges = [abs(int(first) - int(last)) + 1 for first, last in _RANGE.findall(source)]
    try:
        many = math.prod(ranges) > _MAX_PATTERN
        paths = [] if many else list(islice(braceexpand(source), _MAX_PATTERN + 1))
    except ValueError as error:
        raise DataError(f"the braces of {source!r} do not balance") from error
    if many or len(paths) > _MAX_PATTERN:
        raise DataError(f"{source!r} stands for more than {_MAX_PATTERN:,} paths")
    missing = [path for path in paths if not user_path(path).exists() and not glob.has_magic(path)]
    if missing:
        raise DataError(
            f"of the {len(paths)} paths of {source!r} {len(missing)} do not exist: {missing[0]}, …"
        )
    return paths
