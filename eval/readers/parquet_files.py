"""The parquet files of a dataset, as Hugging Face keeps them: which belong to a split, and their columns.

Files are ``data/SPLIT-00000-of-00002.parquet``, ``SPLIT/0000.parquet``, ``SPLIT.parquet`` or the like; those that
name no split are taken for the one that is scored, if no other file names one. Of a dataset at Hugging Face that
has none, such as one made by a script, those are read to which the hub has converted it.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipkit.errors import DataError
from clipkit.urls import shown
from data.cache import shard_cache
from data.remote.patience import Unreachable
from data.shard_file import ShardFile
from eval.dataset import TEST, NoSplit, some
from eval.readers.places import files_in
from eval.readers.text_files import beside

if TYPE_CHECKING:
    import pyarrow as pa

    from data.remote.shard_cache import ShardCache

__all__ = ["ParquetFiles", "has_parquet", "open_parquet_files", "reading"]

_PART = re.compile(r"(?:(.*?)[-_.])?(\d{4,5})-of-(\d{4,5})(?:[-_.][0-9a-f]+)?", flags=re.ASCII)
_NAMES = {"val": ("val", "validation", "valid", "dev"), "train": ("train",), TEST: (TEST,)}
# folders of a dataset that hold its files; the last is what the hub names those of nlphuji's retrieval sets
_INSIDE = ("", "data", "default", "TEST")
_CONVERTED = "@refs/convert/parquet"  # the branch where the hub puts what it converts
_HUB_DATASET = re.compile(r"hf://datasets/[\w.-]+/[\w.-]+", flags=re.ASCII)
_FETCHING = 2  # files at a time


@dataclass(frozen=True, kw_only=True, eq=False)
class ParquetFiles:
    """The files of one split, in order.

    Attributes:
        files: where they lie.
        groups: by file, the number of rows of each of its row groups.
        marks: by file, a hash of its footer, which changes with the sizes and places of all that is in it.
        schema: of all of them.
        cache: where copies of remote ones are kept.
    """

    files: tuple[ShardFile, ...]
    groups: tuple[tuple[int, ...], ...]
    marks: tuple[str, ...]
    schema: "pa.Schema"
    cache: "ShardCache | None"

    def __len__(self) -> int:
        return sum(map(sum, self.groups))

    def path(self, number: int) -> Path:
        """A file of this machine; whoever asks opens it at once."""
        file = self.files[number]
        return self.cache.fetch(file) if self.cache is not None else Path(file.url)

    def columns(self, *names: str) -> list[list[Any]]:
        """The values of these columns, which should be small ones, of all rows."""
        from pyarrow import parquet as pq

        found: list[list[Any]] = [[] for _ in names]
        for number, file in enumerate(self.files):
            with reading(file.shown), pq.ParquetFile(self.path(number)) as opened:
                for group in range(opened.num_row_groups):
                    table = opened.read_row_group(group, columns=list(names), use_threads=False)
                    if len(table) != self.groups[number][group]:
                        raise DataError(
                            f"{file.shown} has {len(table)} rows where its footer states another number"
                        )
                    for values, name in zip(found, names, strict=True):
                        values += table.column(name).to_pylist()
        return found


@contextmanager
def reading(shown: str) -> Iterator[None]:
    """Tell what pyarrow raises for a damaged file; some damage to a footer ends the process even so."""
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, OSError, ValueError, LookupError, MemoryError, OverflowError) as error:
        raise DataError(f"{shown} cannot be read: {' '.join(str(error).split())[:200]}") from error


def has_parquet(place: str | Path, split: str) -> bool:
    """Whether there are parquet files of a split; on this machine also where there are such of other splits."""
    if _candidates(place, split):
        return True
    return isinstance(place, Path) and any(_candidates(place, other) for other in _NAMES)


def open_parquet_files(name: str, place: Path | str, split: str, cache_gb: float) -> ParquetFiles:
    """The files of a split; remote ones are fetched now.

    Raises:
        NoSplit: there are none of this split.
        DataError: one is missing, cannot be read, or has other columns than the first; pyarrow is not there.
    """
    try:
        from pyarrow import parquet as pq
    except ImportError as error:
        raise DataError("parquet files need: pip install -e '.[eval]'") from error
    files = _of_split(name, place, split)
    cache = shard_cache([file.url for file in files], cache_gb or 1e-9)
    if cache is not None:
        cache.prefetch(files, threads=_FETCHING)
    groups, marks, schema = [], [], None
    for file in files:
        path = cache.fetch(file) if cache is not None else Path(file.url)
        with reading(f"dataset {name}: {file.shown}"):
            about = pq.read_metadata(path)
            own = about.schema.to_arrow_schema()
            groups.append(tuple(about.row_group(number).num_rows for number in range(about.num_row_groups)))
        if schema is not None and own.remove_metadata() != schema.remove_metadata():
            raise DataError(f"dataset {name}: {file.shown} has other columns than {files[0].shown}")
        schema = schema or own
        marks.append(_mark(path))
    if cache is not None:
        cache.close()  # all are here
    return ParquetFiles(files=files, groups=tuple(groups), marks=tuple(marks), schema=schema, cache=cache)


def _mark(path: Path) -> str:
    import hashlib

    with path.open("rb") as file:
        size = file.seek(-8, 2)
        length = int.from_bytes(file.read(4), "little")
        file.seek(max(0, size - length))
        return hashlib.sha256(file.read(length)).hexdigest()[:16]


def _of_split(name: str, place: Path | str, split: str) -> tuple[ShardFile, ...]:
    found = _candidates(place, split)
    by_split: dict[str, list[ShardFile]] = {}
    for own, file in found:
        by_split.setdefault(own, []).append(file)
    for wanted in (*_NAMES.get(split, (split,)), *([""] if split == TEST and set(by_split) <= {""} else [])):
        if wanted in by_split:
            files = sorted(by_split[wanted], key=lambda file: (len(file.name), file.name))
            _check_parts(name, files)
            return tuple(files)
    there = some(sorted(filter(None, by_split))) or "files that name none"
    where = shown(str(place))
    raise NoSplit(
        f"dataset {name} has no split {split!r}: {where} has {there}"
        if found
        else f"dataset {name}: no parquet file in {where}, nor in its folder data"
    )


def _check_parts(name: str, files: Sequence[ShardFile]) -> None:
    """That all parts are there which the names of the others speak of."""
    parts = [match for file in files if (match := _PART.fullmatch(_stem(file)))]
    if not parts:
        return
    stated, there = int(parts[0][3]), {int(part[2]) for part in parts}
    if len(parts) != len(files) or {int(part[3]) for part in parts} != {stated} or len(there) != len(parts):
        raise DataError(f"dataset {name}: {files[0].shown} and its neighbours are of more than one set")
    if missing := sorted(set(range(stated)) - there):
        raise DataError(
            f"dataset {name}: part {missing[0]} of {stated} is missing beside {files[0].shown}; fetch it again"
        )


def _stem(file: ShardFile) -> str:
    return file.name.removesuffix(".parquet")


def _candidates(place: str | Path, split: str) -> list[tuple[str, ShardFile]]:
    """All parquet files with the name of their split, empty where none is named."""
    found = _in_folders(place, split)
    if not found and isinstance(place, str) and _HUB_DATASET.fullmatch(place):
        try:
            return _in_folders(f"{place}{_CONVERTED}", split)
        except Unreachable:
            raise
        except DataError:  # there is no such branch
            return []
    return found


def _in_folders(place: str | Path, split: str) -> list[tuple[str, ShardFile]]:
    names = _NAMES.get(split, (split,))
    found = []
    for inside in _INSIDE:
        folder = beside(place, inside) if inside else place
        found += [(_split_of(file), file) for file in _parquet_in(folder)]
        for name in names:
            found += [(name, file) for file in _parquet_in(beside(folder, name))]
        if found:
            break  # each look is a question to the store
    return found


def _split_of(file: ShardFile) -> str:
    stem = _stem(file)
    if (part := _PART.fullmatch(stem)) is not None:
        return part[1] or ""
    known = {name for names in _NAMES.values() for name in names}
    first = re.split(r"[-_.]", stem)[0]
    return first if first in known else ""


def _parquet_in(folder: str | Path) -> list[ShardFile]:
    if isinstance(folder, Path):
        return [ShardFile.at(path) for path in sorted(folder.glob("*.parquet"))] if folder.is_dir() else []
    return sorted(
        (file for file in files_in(folder) if file.name.endswith(".parquet")), key=lambda file: file.url
    )
