"""Which shards there are, and which lack: as training lists them, but where it would refuse this goes on."""

import os
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import braceexpand

from clipkit.errors import DataError
from data.shard_file import ShardFile, is_remote
from data.sources import find_shards

__all__ = ["ShardList", "check_ends", "list_shards", "missing_numbers"]

_NUMBER = re.compile(r"[0-9]+(?=[^0-9]*$)")  # the last one of a name
_MAX_DIGITS = 18
_FAR_APART = 10  # missing shards for each that is there: beyond, numbers are not meant to be without gaps
_MANY = 32  # requests at a time
_BLOCK = 512
_COMPRESSED = (b"\x1f\x8b", b"BZ", b"\xfd7", b"(\xb5", b"<", b"PK")  # the last ones: an HTML page, a zip


@dataclass(frozen=True, kw_only=True)
class ShardList:
    """Shards in order.

    Attributes:
        files: those that are there.
        refused: for what a training would refuse the list.
        missing: numbers that lack, as ranges such as ``00003–00007``.
        missing_count: how many.
    """

    files: list[ShardFile]
    refused: tuple[str, ...]
    missing: tuple[str, ...]
    missing_count: int


def list_shards(sources: Sequence[str], *, split: str) -> ShardList:
    """The shards of all sources.

    Raises:
        DataError: one of them has none, or cannot be listed.
    """
    files: list[ShardFile] = []
    refused = []
    absent: list[str] = []
    for source in sources:
        try:
            files += find_shards(source, split=split)
        except DataError as error:
            there, lacking = _those_there(source, split, str(error))
            if not there:
                raise
            files += there
            absent += lacking
            refused.append(str(error))
    ranges, count = missing_numbers([file.url for file in files], absent)
    return ShardList(files=files, refused=tuple(refused), missing=tuple(ranges), missing_count=count)


def _those_there(source: str, split: str, refusal: str) -> tuple[list[ShardFile], list[str]]:
    """The shards of a source that training refuses, and the names of those that should be there."""
    if "shards are missing" in refusal:  # so its braces stand for no more than are allowed
        names = list(braceexpand.braceexpand(source))
        if is_remote(source):
            with ThreadPoolExecutor(_MANY) as pool:
                found = list(pool.map(_remote, names))
        else:
            found = [_local(name) for name in names]
        there = [one for one in found if one is not None]
        return there, [name for name, one in zip(names, found, strict=True) if one is None]
    if "nshards.txt says" in refusal:
        return _of_folder(source, split), []
    return [], []


def _remote(url: str) -> ShardFile | None:
    from data.remote import store

    try:
        return store.describe([url])[0]
    except DataError:
        return None


def _local(name: str) -> ShardFile | None:
    path = Path(name).expanduser()
    return ShardFile.at(path) if path.is_file() else None


def _of_folder(source: str, split: str) -> list[ShardFile]:
    if is_remote(source):
        from data.remote import store

        base = source.rstrip("/")
        return store.list_folder(f"{base}/{split}") or store.list_folder(base)
    folder = Path(source).expanduser()
    here = folder / split if (folder / split).is_dir() else folder
    return [
        ShardFile.at(path)
        for path in sorted(here.glob("*.tar"), key=lambda path: (len(path.name), path.name))
    ]


def missing_numbers(urls: Iterable[str], absent: Iterable[str] = ()) -> tuple[list[str], int]:
    """The numbers that lack in names that differ by a number, as ranges, and how many they are.

    Args:
        urls: of what is there.
        absent: of what is known to lack; it counts too where it lies before the first or behind the last one.
    """
    series: defaultdict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    lacking: defaultdict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    for into, names in ((series, urls), (lacking, absent)):
        for url in names:
            folder, _, name = url.partition("?")[0].rpartition("/")
            match = _NUMBER.search(name)
            if match is not None and len(match[0]) <= _MAX_DIGITS:
                where = os.path.abspath(folder) if not is_remote(folder) else folder  # noqa: PTH100
                into[f"{where}/{name[: match.start()]}", name[match.end() :]][int(match[0])] = match[0]
    ranges: list[str] = []
    count = 0
    for key, there in series.items():
        known = {**lacking.get(key, {}), **there}
        gaps = _gaps(sorted(there), sorted(lacking.get(key, {})))
        missing = sum(last - first + 1 for first, last in gaps)
        if missing > _FAR_APART * len(there) and not lacking.get(key):
            continue
        width = len(next(iter(known.values()))) if any(one[0] == "0" for one in known.values()) else 0
        count += missing
        for first, last in gaps:
            begin = f"{first:0{width}d}"
            ranges.append(begin if first == last else f"{begin}–{last:0{width}d}")
    return ranges, count


def _gaps(there: list[int], lacking: list[int]) -> list[tuple[int, int]]:
    """Stretches of numbers between the first and the last one that are not there."""
    begin, end = min([there[0], *lacking[:1]]), max([there[-1], *lacking[-1:]])
    fence = [begin - 1, *there, end + 1]
    return [(low + 1, high - 1) for low, high in pairwise(fence) if high - low > 1]


def check_ends(files: Sequence[ShardFile], *, seconds: float) -> tuple[int, list[int]]:
    """How many local shards were looked at in that time, and which do not begin or end as a tar does.

    A tar that was cut short lacks the zeros at its end: this tells it without a walk through its headers.
    """
    deadline = time.monotonic() + seconds
    checked, suspicious = 0, []
    for number, file in enumerate(files):
        if file.is_remote:
            continue
        if time.monotonic() > deadline:
            break
        checked += 1
        if not _ends_well(file):
            suspicious.append(number)
    return checked, suspicious


def _ends_well(file: ShardFile) -> bool:
    if file.size < 2 * _BLOCK or file.size % _BLOCK:
        return False
    try:
        descriptor = os.open(file.url, os.O_RDONLY)
    except OSError:
        return False
    try:
        begin = os.pread(descriptor, 2, 0)
        return not (begin.startswith(_COMPRESSED) or any(os.pread(descriptor, _BLOCK, file.size - _BLOCK)))
    except OSError:
        return False
    finally:
        os.close(descriptor)
