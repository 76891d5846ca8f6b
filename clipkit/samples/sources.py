"""Find out what a source is: its format, and the files of a split.

    pairs/                        a dataset: a folder per split, such as pairs/train, or files named after splits
    pairs/{00000..00041}.tar      WebDataset shards, by a brace pattern or, on this machine, by wildcards
    captions.csv                  a table of paths and captions, see ``clipkit.samples.table``
    train-*.parquet               tables, or Parquet files with encoded images
    photos/                       a folder of images
    s3://bucket/pairs             the same in a store: s3://, gs://, https://, hf://
    pipe:COMMAND                  a command that writes a tar

The files of a split are in a folder with the name of the split, or have names that begin with it; see
``clipkit.samples.folders.SPLIT_NAMES`` for other names. If no name states a split, files belong to every split. The
files may also be in a folder ``data`` of the dataset, as in downloads from the Hugging Face hub.
"""

import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TypeVar

from clipkit.errors import DataError, Unavailable
from clipkit.files.terminal import counted, redact_url
from clipkit.files.writing import name_order, user_path
from clipkit.samples.base import Samples
from clipkit.samples.folders import (
    PARQUET_PART,
    SPLIT_NAMES,
    SPLIT_WORDS,
    check_parts,
    images_below,
    is_hidden,
)
from clipkit.samples.image_folder import FolderSamples, find_captions, find_metadata_table
from clipkit.samples.remote import (
    HUB_FORM,
    ShardCache,
    ShardFile,
    Unreachable,
    describe_files,
    is_remote,
    list_entries,
    read_text,
)
from clipkit.samples.shards import ShardSamples
from clipkit.samples.table import HDF5_SUFFIXES, IMAGE_COLUMNS, SUFFIXES, Table, is_table
from clipkit.samples.table.parquet import ParquetSamples
from clipkit.samples.tables import TableSamples

PARQUET_SUFFIXES = (".parquet", ".pq")
_SUFFIXES = (".tar", *SUFFIXES)
_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst", ".zip")
# folders with the files of a dataset; "TEST" is the hub's name for nlphuji's retrieval datasets
_INSIDE = ("", "data", "default", "TEST")
_CONVERTED = "@refs/convert/parquet"  # the branch of the hub with the Parquet files that the hub has made
_HUB_DATASET = re.compile(r"hf://datasets/[\w.-]+/[\w.-]+", flags=re.ASCII)
_SPLIT_WORD = re.compile(rf"({'|'.join(SPLIT_WORDS)})(?![a-z])", flags=re.IGNORECASE)
_EXAMINED = 1000  # images of a folder
_COUNT = "nshards.txt"  # states the number of tars in a folder
_SHOWN = 8  # names in a message
_MAX_COUNT = 100  # bytes of nshards.txt
_MAX_DIGITS = 6  # of a number of shards
_MAX_NAMES = 1_000_000  # per pattern
_RANGE = re.compile(r"(-?[0-9]+)\.\.(-?[0-9]+)(?:\.\.-?([0-9]+))?")
CACHE_GB = 100.0  # default size of the cache of remote files


class MissingSplit(Unavailable):
    """A source has no files of a split."""


class NoFiles(MissingSplit):
    """A folder has no files of any split."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Files of one format.

    Attributes:
        format: a key of ``FORMATS``.
        files: tars, tables or images in order; none for a folder of images.
        folder: a folder of images, otherwise None.
        split: the split that the names of the files or their folders state, "" if they state none.
    """

    format: str
    files: tuple[ShardFile, ...] = ()
    folder: Path | None = None
    split: str = ""


@dataclass(frozen=True, kw_only=True)
class OpenOptions:
    """How sources are opened; each format uses some of the options.

    Attributes:
        cache: cache of remote files.
        image_column: column of tables with images or their paths; found by common names by default.
        caption_column: column of tables with captions, likewise.
        need: columns that tables must have, "image", "caption" or both; without "image", images are not looked for.
        others: other columns of tables that become fields; None for all.
        group: whether the rows of an image are one sample.
        truncated: "error", or "use" to use the intact part of truncated shards.
    """

    cache: ShardCache | None = None
    image_column: str | None = None
    caption_column: str | None = None
    need: Sequence[str] = ("image",)
    others: Sequence[str] | None = None
    group: bool = True
    truncated: str = "error"


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format of sources, an entry of ``FORMATS``.

    Attributes:
        name: of its files, for messages.
        recognize: returns which of some files have this format.
        open: opens the files.
        many_files: whether a dataset usually has many files; reading then goes on after a damaged file.
    """

    name: str
    recognize: Callable[[Sequence[ShardFile]], Sequence[ShardFile]]
    open: Callable[[Source, OpenOptions], Samples]
    many_files: bool = False


def _recognize_shards(files: Sequence[ShardFile]) -> Sequence[ShardFile]:
    tars = [file for file in files if file.name.endswith(".tar") or file.url.startswith("pipe:")]
    if not tars and not files[0].is_remote:
        with Path(files[0].url).open("rb") as content:
            if content.read(262)[257:] == b"ustar":
                return files
    return tars


def _recognize_parquet(files: Sequence[ShardFile]) -> Sequence[ShardFile]:
    tables = [file for file in files if file.name.endswith(PARQUET_SUFFIXES)]
    # the rows of a remote file cannot be read before it is downloaded
    if tables and not tables[0].is_remote:
        path = Path(tables[0].url)
        try:
            rows = Table(path, image_column=None, caption_column=None, need=("image",), encoded=True)
            return tables if rows.contains_images else []
        except DataError:
            return []
    return tables


def _recognize_tables(files: Sequence[ShardFile]) -> Sequence[ShardFile]:
    tables = [file for file in files if file.name.lower().endswith(SUFFIXES)]
    return tables or [file for file in files if not file.is_remote and is_table(Path(file.url))]


def refuse_remote_table(file: ShardFile) -> None:
    """Raise DataError if a file is a table of paths in a store, because the images are not read from there."""
    if file.is_remote and not file.name.endswith(PARQUET_SUFFIXES):
        raise DataError(
            f"{file.shown} is a table in a store: download it, and the images that it lists; if these are URLs, "
            f"`python -m data download {file.shown} OUT` downloads both"
        )


def _open_tables(source: Source, options: OpenOptions) -> Samples:
    refuse_remote_table(source.files[0])
    tables = []
    for file in source.files:
        table = Table(
            Path(file.url),
            image_column=options.image_column,
            caption_column=options.caption_column,
            image_columns=IMAGE_COLUMNS if "image" in options.need else (),
            need=options.need,
            encoded=True,
            others=options.others,
        )
        tables.append(table)
    return TableSamples(tables, group=options.group)


def _open_folder(source: Source, options: OpenOptions) -> Samples:
    if source.folder is None:
        raise DataError(f"{source.files[0].shown} is an image: name its folder")
    return FolderSamples(source.folder)


# a file has the first format that recognizes it; files that no other format recognizes are taken for images
FORMATS: Mapping[str, Format] = {
    "shards": Format(
        name="tars",
        recognize=_recognize_shards,
        open=lambda source, options: ShardSamples(source.files, options.cache, truncated=options.truncated),
        many_files=True,
    ),
    "parquet": Format(
        name="Parquet files",
        recognize=_recognize_parquet,
        open=lambda source, options: ParquetSamples(
            source.files,
            options.cache,
            image_column=options.image_column,
            caption_column=options.caption_column,
        ),
        many_files=True,
    ),
    "table": Format(name="tables", recognize=_recognize_tables, open=_open_tables),
    "images": Format(name="images", recognize=lambda files: files, open=_open_folder),
}


def open_samples(source: str, *, split: str = "train", options: OpenOptions = OpenOptions()) -> Samples:
    """Open one split of a source as a random-access list of samples."""
    files = find_source(source, split=split)
    return FORMATS[files.format].open(files, options)


def find_source(source: str, *, split: str = "train") -> Source:
    """Return the format of a source and the files of one of its splits.

    Raises:
        MissingSplit: a folder has no files of the split.
        DataError: there is no such source, files are missing, or they have different formats.
    """
    sources: list[Source] = []
    with _folder_errors(source):
        for files in _list_source(source):
            if isinstance(files, str):
                name, files = find_split(files, split)
                return replace(_group_by_format(files)[0], split=name)
            if not isinstance(files, Path):
                sources.append(_group_by_format(files)[0])
            elif files == user_path(source):
                return _find_in_folder(files, split)
    if not sources:
        raise DataError(f"{source[:200]!r} matches folders: append /*.tar")
    first = sources[0]
    for other in sources:
        if other.format != first.format:
            names = f"{FORMATS[first.format].name} and {FORMATS[other.format].name}"
            raise DataError(f"{source[:200]!r} has {names}: name them as separate sources")
    return _merge(sources, source)


def find_splits(folder: Path) -> dict[str, Source]:
    """Return the tables or images of each split; {} if names of files or folders do not state the splits.

    Folders without captions are splits only if no other folder has images: they may be classes called train.
    """
    splits: dict[str, Source] = {}
    for split in SPLIT_NAMES:
        with suppress(MissingSplit):
            source = find_source(str(folder), split=split)
            if not source.split or source.format == "shards":
                return {}
            splits[split] = source
    folders = [source.folder for source in splits.values() if source.folder is not None]
    if not all(map(has_captions, folders)):
        for other in _folders_in(folder):
            if other not in folders and next(images_below(other), None) is not None:
                return {}
    return splits


def find_sources(source: str) -> list[Source]:
    """Return all files of a source, whatever their split and format.

    A folder on this machine has the shards directly in it, or else those in the folders of splits, and all images
    below it; without either, it has the tables of all splits.
    """
    sources: list[Source] = []
    with _folder_errors(source):
        for files in _list_source(source):
            if isinstance(files, Path):
                sources += _find_all_in_folder(files)
            elif isinstance(files, str):
                sources += _find_all_splits(files)
            else:
                sources += _group_by_format(files)
    merged: list[Source] = []
    for format in FORMATS:
        same = [each for each in sources if each.format == format and each.files]
        if same:
            merged.append(_merge(same, source))
    return merged + [each for each in sources if each.folder is not None]


def _merge(sources: Sequence[Source], pattern: str) -> Source:
    files = tuple(file for source in sources for file in source.files)
    if not pattern.endswith(files[0].name):  # the user may name one part of a dataset
        check_parts(file.shown for file in files)
    return replace(sources[0], files=files)


def _group_by_format(files: Sequence[ShardFile]) -> list[Source]:
    sources = []
    rest = list(files)
    for name, format in FORMATS.items():
        chosen = dict.fromkeys(format.recognize(rest) if rest else ())
        if chosen:
            sources.append(Source(format=name, files=tuple(chosen)))
            rest = [file for file in rest if file not in chosen]
    compressed = [file for file in sources[0].files if file.name.lower().endswith(_COMPRESSED)]
    if compressed and sources[0].format == "images":
        raise DataError(f"{compressed[0].shown} is compressed: unpack it first")
    hdf5 = [file for file in sources[0].files if file.name.lower().endswith(HDF5_SUFFIXES)]
    if hdf5 and sources[0].format == "images":
        raise DataError(
            f"{hdf5[0].shown} is an HDF5 file: write its images and captions into shards with "
            f"`python -m data pack {hdf5[0].shown} OUT`"
        )
    return sources


# --------------------------------------------------------------------------------------------------------------
# What a source names: a folder, or files.


@contextmanager
def _folder_errors(source: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:  # a folder cannot be read
        raise DataError(f"cannot look for data at {source[:200]!r}: {error.strerror}") from error


def _list_source(source: str) -> Iterator[Path | str | list[ShardFile]]:
    if not source:
        raise DataError("no data: the source is empty")
    if not is_remote(source):
        yield from _list_paths(source)
        return
    path = source.partition("?")[0]
    is_pipe = source.startswith("pipe:")  # the shell interprets wildcards
    if not is_pipe and "*" in path:
        raise DataError(
            f"{redact_url(source)}: stores do not support wildcards; name the folder, or the shards with braces, "
            "as {00000..00010}.tar"
        )
    if is_pipe or "{" in source or path.lower().endswith(_SUFFIXES):
        yield describe_files(list(_expand_braces(source)))
    else:
        yield (path if source.startswith("http") else source).rstrip("/")


def _list_paths(source: str) -> Iterator[Path | list[ShardFile]]:
    names = [source]
    if "{" in source and not os.path.lexists(user_path(source)):
        names = list(_expand_braces(source))
    missing = []
    for name in names:
        paths = [path for path in _match_wildcards(user_path(name)) if os.path.lexists(path)]
        if not paths:
            missing.append(name)
            continue
        yield from (path for path in paths if path.is_dir())
        files = [ShardFile.at(path) for path in paths if not path.is_dir()]
        if files:
            yield files
    if not missing:
        return
    if len(names) > 1:
        raise DataError(f"{len(missing)} of {len(names)} files are missing, the first is {missing[0][:200]}")
    if glob.has_magic(source):
        raise DataError(f"no local file or folder matches {source[:200]!r}")
    raise DataError(f"no data at {source[:200]!r}: there is no such file or folder")


# --------------------------------------------------------------------------------------------------------------
# The files of a split in a folder, local or in a store.


def join_place(folder: str | Path, *names: str) -> str | Path:
    """Join names to a local folder or to the URL of one."""
    if isinstance(folder, Path) or not is_remote(folder):
        return Path(folder, *names)
    return "/".join([folder.rstrip("/"), *names])


def find_split(
    folder: Path | str, split: str, suffixes: tuple[str, ...] = _SUFFIXES
) -> tuple[str, list[ShardFile]]:
    """Return the tars of a split of a dataset, otherwise its Parquet files, otherwise its only table.

    Returns:
        The split, or "" if no name of a file or folder states a split; and the files, at least one.
    """
    if isinstance(folder, str):  # other tables in a store have no images there
        suffixes = tuple(suffix for suffix in suffixes if suffix in (".tar", *PARQUET_SUFFIXES))
    files, folders = _list(folder, suffixes)
    if not files and not folders:
        split_of_numbered, files = _find_numbered(folder, split)
        if files:
            return split_of_numbered, files
    splits = set[str]()
    location = folder
    folders_of_dataset = folders
    for inside in _INSIDE:
        if inside and inside not in folders_of_dataset:
            continue
        if inside:
            location = join_place(folder, inside)
            files, folders = _list(location, suffixes)
        inner = find_split_folder([join_place(location, name) for name in folders], split)
        by_split = {} if inner is None else _group_by_split(inner, _list(inner, suffixes)[0])
        matches = next(iter(by_split.values()), [])
        if not matches:
            by_split = _group_by_split(location, files)
            matches = next((by_split[name] for name in _names_of(split) if name in by_split), [])
        if matches:
            return split, _describe_parts(matches)
        splits |= by_split.keys()
        unnamed = by_split.get("", [])
        if unnamed and unnamed[0].name.endswith(".tar"):
            return "", _describe_parts(unnamed)
        for name in folders:
            is_split = isinstance(location, Path) or name.lower() in SPLIT_WORDS
            with suppress(OSError):  # it may be unreadable
                if is_split and list_files(join_place(location, name), (".tar",)):
                    splits.add(name)
        # tables beside the folders of splits list other things, such as bad rows
        if splits == {""}:
            return "", _describe_parts(unnamed)
        if by_split:
            break
    if isinstance(folder, str) and _HUB_DATASET.fullmatch(folder):
        try:
            return find_split(f"{folder}{_CONVERTED}", split, suffixes)
        except Unreachable:
            raise
        except DataError:  # there is no such branch, or no such split in it
            pass
    names = sorted(filter(None, splits))
    if names:
        raise MissingSplit(
            f"{redact_url(str(folder))} has no split {split!r}, only {', '.join(names[:_SHOWN])}"
        )
    message = f"no tar, table or Parquet file of split {split!r} in {redact_url(str(folder))}"
    if isinstance(folder, str):
        form = HUB_FORM if folder.startswith("hf://") else f"{redact_url(folder)}/{{00000..00331}}.tar"
        message = f"{message}; name the shards as {form}"
    raise NoFiles(message)


def list_files(folder: Path | str, suffixes: tuple[str, ...]) -> list[ShardFile]:
    """Return the files with these suffixes directly in a folder, 2.tar before 10.tar; [] if there is no folder."""
    return [file for file in _list(folder, suffixes)[0] if file.name != _COUNT]


def _list(folder: Path | str, suffixes: tuple[str, ...]) -> tuple[list[ShardFile], list[str]]:
    suffixes = (*suffixes, _COUNT)
    if isinstance(folder, str):
        files, folders = list_entries(folder)
        return [file for file in files if file.name.lower().endswith(suffixes)], folders
    names: list[str] = []
    folders = []
    if folder.is_dir():
        with os.scandir(folder) as entries:
            for entry in entries:
                if is_hidden(entry.name):
                    continue
                if entry.name.lower().endswith(suffixes):
                    names.append(entry.name)
                    continue
                with suppress(OSError):  # a link that leads nowhere
                    if entry.is_dir():
                        folders.append(entry.name)
    return [ShardFile.at(folder / name) for name in sorted(names, key=name_order)], sorted(folders)


def _find_numbered(folder: Path | str, split: str) -> tuple[str, list[ShardFile]]:
    """Return the tars 0.tar to N-1.tar on a web server that does not list folders, if ``nshards.txt`` states N."""
    if isinstance(folder, str) and folder.startswith(("http://", "https://")):
        for location in (*(f"{folder}/{name}" for name in _names_of(split)), folder):
            count = _stated_count(location)
            if count:
                files = describe_files([f"{location}/{i}.tar" for i in range(count)])
                return "" if location == folder else split, files
    return "", []


def _describe_parts(files: list[ShardFile]) -> list[ShardFile]:
    """Return files with their sizes, which a web server's listing does not state; check that no part is missing."""
    check_parts(file.shown for file in files)
    if files[0].size < 0:
        return describe_files([file.url for file in files])
    return files


def _group_by_split(folder: Path | str, files: Sequence[ShardFile]) -> dict[str, list[ShardFile]]:
    tars = [file for file in files if file.name.endswith(".tar")]
    if tars:
        count = None
        if any(file.name == _COUNT for file in files):
            count = _stated_count(folder)
        if count not in (None, len(tars)):
            raise DataError(
                f"{redact_url(str(folder))} has {counted(len(tars), 'shard')}, but {_COUNT} says '{count}'"
            )
        return {"": tars}
    by_split: dict[str, list[ShardFile]] = {}
    tables = [file for file in files if file.name != _COUNT]
    parquet = [file for file in tables if file.name.lower().endswith(PARQUET_SUFFIXES)]
    for file in parquet or tables:
        stem = file.name.partition(".")[0]
        part = PARQUET_PART.fullmatch(stem)
        word = _SPLIT_WORD.match(stem)
        name = ""
        if part is not None:
            name = part[1] or ""
        elif word is not None:
            name = word[1].lower()
        if name in by_split and not parquet:
            first = by_split[name][0].name
            raise MissingSplit(f"{folder} has several tables, {first} and {file.name}: name one of them")
        by_split.setdefault(name, []).append(file)
    return by_split


def _stated_count(folder: Path | str) -> int | None:
    if isinstance(folder, str):
        text = read_text(f"{folder}/{_COUNT}", limit=_MAX_COUNT)
    else:
        text = (folder / _COUNT).read_text(errors="replace")[: _MAX_COUNT + 1]
    if text is None:
        return None
    count = text.strip()
    if not count.isdecimal() or len(count) > _MAX_DIGITS:
        raise DataError(
            f"{redact_url(str(folder))}: {_COUNT} says {count[:20]!r}, expected a number of shards"
        )
    return int(count)


def _names_of(split: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((split, *SPLIT_NAMES.get(split, ()))))


P = TypeVar("P", Path, Path | str)


def find_split_folder(
    folders: Iterable[P], split: str, holds: Callable[[P], object] = lambda _: True
) -> P | None:
    """Return the folder that is named like a split and satisfies ``holds``, if there is one."""
    matches: list[P] = []
    for folder in folders:
        name = str(folder).rpartition("/")[2]
        if (name == split or name.lower() in _names_of(split)) and holds(folder):
            matches.append(folder)
    if len(matches) > 1:
        raise DataError(
            f"{matches[0]} and {matches[1]} would both be the split {split!r}: rename or move one"
        )
    return matches[0] if matches else None


def _folders_in(folder: Path) -> list[Path]:
    return [folder / name for name in _list(folder, ())[1]]


def _find_in_folder(folder: Path, split: str) -> Source:
    folders = _folders_in(folder)
    images = find_split_folder(folders, split)
    if images is None and not any(path.name.lower() in SPLIT_WORDS for path in folders):
        images = folder
    image_split = "" if images == folder else split
    try:
        name, files = find_split(folder, split)
    except MissingSplit as error:
        if images is None or next(images_below(images), None) is None:
            raise
        if images == folder and not isinstance(error, NoFiles) and not has_captions(images):
            raise  # the images are those that the tables of other splits list
        return Source(format="images", folder=images, split=image_split)
    source = replace(_group_by_format(files)[0], split=name)
    if source.format == "table" and images is not None and has_captions(images):
        return Source(format="images", folder=images, split=image_split)
    return source


def has_captions(folder: Path) -> bool:
    """Whether a folder has images with captions in files beside them, or a table of them named metadata."""
    images = (path for path, _ in islice(images_below(folder), _EXAMINED))
    return find_metadata_table(folder) is not None or find_captions(images) is not None


def _find_all_in_folder(folder: Path) -> list[Source]:
    files = _list(folder, (".tar",))[0]
    if not any(file.name.endswith(".tar") for file in files):
        for inner in _folders_in(folder):
            with suppress(OSError):  # it may be unreadable, which is an error when its images are read
                listed = _list(inner, (".tar",))[0]
                if inner.name.lower() in SPLIT_WORDS or any(file.name == _COUNT for file in listed):
                    files += listed
    tars = [file for file in files if file.name.endswith(".tar")]
    sources = [Source(format="shards", files=tuple(tars))] if tars else []
    if next(images_below(folder), None) is not None:
        sources.append(Source(format="images", folder=folder))
    return sources or _find_all_splits(folder)


def _find_all_splits(folder: Path | str) -> list[Source]:
    sources: list[Source] = []
    missing = None
    for split in sorted(SPLIT_NAMES):
        try:
            name, files = find_split(folder, split)
        except MissingSplit as error:
            missing = error
            continue
        sources += _group_by_format(files)
        if not name:
            break
    if isinstance(missing, NoFiles) and isinstance(folder, Path) and not sources:
        hint = ""
        if list_files(folder, (".npy",)):
            hint = "; .npy files are images only if a table lists them"
        raise MissingSplit(f"{folder} has no images, tars, tables or Parquet files{hint}")
    if missing is not None and not sources:
        raise missing
    return sources


def _path_order(path: Path) -> tuple[str, int, str]:
    """Sort key of paths: folder by folder, within a folder by ``name_order``."""
    return str(path.parent), *name_order(path.name)


def _match_wildcards(path: Path) -> list[Path]:
    """Return the files and folders that match, sorted by ``_path_order``, without hidden ones.

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
    return sorted(map(Path, names), key=_path_order)


def _expand_braces(source: str) -> Iterator[str]:
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
