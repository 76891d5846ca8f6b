"""Find the shards of a source.

A source is a dataset folder (with ``train/`` and ``test/``), a folder of tars, a brace pattern such as
``pairs/{00000..00041}.tar``, a tar, or the name of a built-in dataset. The first four may also be in a store
(``s3://``, ``gs://``, ``https://``, ``hf://``); ``pipe:COMMAND`` is a command that writes a tar. Local paths
may contain wildcards, as in ``pairs-*/*.tar``. Local tables of images and captions, folders of images with
captions, and Parquet files with encoded images, also in a store, are packed into shards in the cache first.
"""

import glob
import os
import re
import shlex
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TypeVar

from clipkit.errors import DataError
from clipkit.files import counted, expand_braces, match_wildcards, path_order, shown
from clipkit.samples import (
    IMAGE_SUFFIXES,
    SUFFIXES,
    Table,
    check_parts,
    find_captions,
    images_below,
    is_table,
    remote,
)
from clipkit.samples.remote import HUB_FORM, ShardFile, Unreachable, is_remote
from data.corpora.builtin import BUILTIN, built_in

__all__ = ["SPLITS", "find_shards", "remote_hint"]

_UNPACK = {".gz": "gunzip -k", ".tgz": "gunzip -k", ".bz2": "bunzip2 -k", ".xz": "unxz -k", ".zst": "unzstd"}
_PARQUET = (".parquet", ".pq")
_File = TypeVar("_File", Path, ShardFile)
SPLITS = ("train", "test", "val", "valid", "validation", "dev")
_LOOKED_AT = 1000  # examined names in a folder, and folders in it
_SHOWN = 8  # names in a message
_TO_PACK = (
    "write the captions into .txt files of the same names, or paths and captions into a table (columns image and "
    "caption), and name that; `python -m data pack` packs images in one folder per class"
)
_COLONS, _COMMA = re.compile("::"), re.compile(r"[,;\s]\s*")  # webdataset's separator, and common others
_ANOTHER = re.compile(r"(?:::|[,;\s])\s*(?=[a-z][a-z0-9]*://|pipe:)")


def find_shards(source: str, *, split: str = "train") -> list[ShardFile]:
    """Return the tars of a source in order; a built-in dataset is created on first use.

    Raises:
        DataError: the source does not exist, or shards are missing.
    """
    if not source:
        raise DataError("no data: the source is empty")
    if is_remote(source):
        return _remote_shards(source, split)
    if source in BUILTIN and not Path(source).exists():
        return [ShardFile.at(path) for path in _folder_shards(built_in(source), split)]
    short = source if len(source) <= 200 else source[:200] + "…"
    try:
        return [ShardFile.at(path) for path in _local_shards(source, split)]
    except OSError as error:  # the name is too long, or the folder cannot be read
        raise DataError(f"cannot look for data at {short!r}: {error.strerror}") from error
    except (ValueError, RuntimeError) as error:  # a null character; ~ of an unknown user
        raise DataError(f"cannot look for data at {short!r}: {error}") from error


def _remote_shards(source: str, split: str) -> list[ShardFile]:
    if (hint := remote_hint(source)) is not None:
        raise DataError(hint)
    name = source.partition("?")[0].lower()
    if source.startswith("pipe:") or "{" in source or name.endswith((".tar", *SUFFIXES)):
        files = remote.describe(list(expand_braces(source)))
        return _packed_remote(files) if name.endswith(SUFFIXES) else files
    form = f"; name the shards as {HUB_FORM}" if source.startswith("hf://") else ""
    fault = nothing = DataError(f"no tar at {shown(source)} or in its folder {split!r}{form}")
    base = source.rstrip("/")
    places = (f"{base}/{split}", base, f"{base}/data")  # data: in datasets of the hub
    for folder in places:
        try:
            found = remote.list_folder(folder, (".tar", *_PARQUET))
        except Unreachable:
            raise
        except DataError as error:
            fault = fault if folder == places[-1] else error
            continue
        if tars := [one for one in found if one.name.endswith(".tar")]:
            stated = remote.read_text(f"{folder}/nshards.txt", limit=100)
            _check_count(shown(folder), len(tars), stated)
            return tars
        if tables := _of_split(found, split):
            check_parts(table.shown for table in tables)
            return _packed_remote(tables)
        fault = nothing
    if source.startswith(("http://", "https://")):  # many web servers list no folders
        form = f"'{shown(source).rstrip('/')}/{{00000..00331}}.tar'"
        raise DataError(f"{str(fault).removesuffix('; name the shards')}; name the shards as {form}")
    raise fault


def _local_shards(source: str, split: str) -> list[Path]:
    if "{" not in source and (path := Path(source).expanduser()).is_dir():
        return _folder_shards(path, split)
    paths: list[Path] = []
    for name in expand_braces(source):
        path = Path(name).expanduser()
        found = [one for one in match_wildcards(path) if one.is_file()]
        tars = [one for one in found if one.suffix == ".tar"]
        paths += tars or [one for one in found if one.name.lower().endswith(SUFFIXES)] or [path]
    missing = [one for one in paths if not one.is_file()]
    if not missing:
        if all(is_table(path) and not _is_tar(path) for path in paths):
            if [str(path) for path in paths] != [source]:  # the user may name one part
                check_parts(map(str, paths))
            return _packed(paths)
        if (hint := next(filter(None, map(_file_hint, paths)), None)) is not None:
            raise DataError(hint)
        return paths
    if (hint := _list_hint(source)) is not None:
        raise DataError(hint)
    first = str(missing[0])
    if glob.has_magic(first):
        found = match_wildcards(missing[0])[:100]
        if any(one.is_dir() for one in found):
            raise DataError(f"{first[:200]!r} matches folders: append /*.tar")
        fault = f"no local tar matches {first[:200]!r}"
        raise DataError(next(filter(None, map(_file_hint, found)), fault))
    if len(paths) == 1:
        built_ins = ", ".join(sorted(BUILTIN))
        raise DataError(f"no data at {source!r}: not a folder, a tar, or a built-in dataset ({built_ins})")
    raise DataError(
        f"{len(missing)} of {len(paths)} shards are missing, the first is {first}; to skip them, name the "
        "folder, or the others as {{00000..00001},{00003..00004}}.tar"
    )


def _folder_shards(folder: Path, split: str) -> list[Path]:
    inside = folder / split
    here = inside if inside.is_dir() else folder
    paths = sorted(here.glob("*.tar"), key=path_order)
    if not paths:
        known = _splits_hint(folder, split)  # a dataset folder lists bad rows in a table
        by_split = any((folder / name).is_dir() for name in (split, *SPLITS))
        for place in () if known else (inside, folder, folder / "data"):  # data: in downloads from the hub
            if not place.is_dir():
                continue
            tables = _tables_in(place, split)
            # below the folder are other splits too; pack chooses between pairs and a table of paths beside them
            if (
                (place == inside or not by_split)
                and _has_pairs(place)
                and not any(map(_holds_images, tables))
            ):
                return _packed([place])
            if tables:
                check_parts(map(str, tables))
                return _packed(tables)
        raise DataError(_folder_hint(inside) or known or _folder_hint(folder) or _empty(folder, split))
    stated = here / "nshards.txt"
    if stated.is_file():
        with stated.open(errors="replace") as file:
            _check_count(str(here), len(paths), file.read(100))
    return paths


def _packed_remote(files: list[ShardFile]) -> list[ShardFile]:
    """Return the shards of remote tables, after downloading and packing them into the cache."""
    from data.pack import packed

    return [ShardFile.at(path) for path in _folder_shards(packed(files), "train")]


def _packed(paths: list[Path]) -> list[Path]:
    """Return the shards of tables, or of a folder of images, after packing them into the cache."""
    from data.pack import packed

    return _folder_shards(packed(paths), "train")


def _tables_in(folder: Path, split: str) -> list[Path]:
    """Return the only table of a folder, or its Parquet files, of the split if their names begin with splits."""
    tables = [one for one in folder.iterdir() if _kind(one.name) == "table" and one.is_file()]
    parquet = sorted((one for one in tables if one.suffix in _PARQUET), key=path_order)
    return _of_split(parquet, split) if parquet or len(tables) != 1 else tables


def _of_split(tables: list[_File], split: str) -> list[_File]:
    """Return the tables of a split if names begin with one, such as ``train-00000-of-00002.parquet``; else all."""

    def is_of(table: _File, split: str) -> bool:
        return re.match(rf"{re.escape(split)}(?![a-z])", table.name) is not None

    named = any(is_of(one, name) for one in tables for name in (split, *SPLITS))
    return [one for one in tables if is_of(one, split)] if named else tables


def _holds_images(table: Path) -> bool:
    """Whether a table is a Parquet file of encoded images with captions."""
    if table.suffix not in _PARQUET:
        return False
    try:
        rows = Table(table, image_column=None, caption_column=None, encoded=True)
        row = next(iter(rows), None)
    except DataError:
        return False
    return row is not None and isinstance(row.path, bytes | dict)


def _has_pairs(folder: Path) -> bool:
    """Whether a folder has images with captions in files beside them, or a table of them named metadata."""
    from data.pack import metadata_of

    images = (path for path, _ in islice(images_below(folder), _LOOKED_AT))
    return metadata_of(folder) is not None or find_captions(images) is not None


def _check_count(folder: str, found: int, stated: str | None) -> None:
    """Compare the number of shards with ``nshards.txt``."""
    if stated is not None and (not stated.strip().isdecimal() or int(stated) != found):
        raise DataError(
            f"{folder} has {counted(found, 'shard')}, but nshards.txt says {stated.strip()[:20]!r}"
        )


# --------------------------------------------------------------------------------------------------------------
# Hints for invalid sources: several sources in one string, wildcards in a store, folders without tars.


def remote_hint(source: str) -> str | None:
    """Return the error message for a remote source with invalid syntax, None if it may be valid."""
    if source.startswith("pipe:"):  # the shell interprets spaces and wildcards
        return _list_hint(source) if "::pipe:" in source else None
    if _ANOTHER.search(source) or all(part.endswith(".tar") for part in _split(source)):
        hint = _list_hint(source)
        if hint is not None:
            return hint
    if "*" not in source.partition("?")[0]:
        return None
    return (
        f"{shown(source)}: stores do not support wildcards; name the folder to use every .tar in it, or the "
        "shards with braces, as {00000..00010}.tar"
    )


def _list_hint(source: str) -> str | None:
    """Return a hint for several sources in one string, None for a single source."""
    parts = _split(source)
    if len(parts) < 2:
        return None
    for part in parts:
        if not (is_remote(part) or part in BUILTIN or part.partition("?")[0].endswith(".tar")):
            try:
                if not Path(part).expanduser().exists():
                    return None
            except (OSError, ValueError, RuntimeError):  # the name is too long; ~ of an unknown user
                return None
    listed = ",".join(f'"{shown(part)}"' for part in parts[:2])
    more = ",…" if len(parts) > 2 else ""
    return (
        f"{len(parts)} sources in one string: give them as a list, data.train='[{listed}{more}]', or to a command "
        "as separate arguments"
    )


def _split(source: str) -> list[str]:
    """Split at the separators of a list, except within braces."""
    separator = _COLONS if "::" in source else _COMMA
    parts = []
    begin = depth = position = 0
    while position < len(source):
        depth += (source[position] == "{") - (source[position] == "}")
        found = separator.match(source, position) if depth == 0 else None
        if found is None:
            position += 1
            continue
        parts.append(source[begin:position])
        begin = position = found.end()
    return [part for part in [*parts, source[begin:]] if part]


def _file_hint(path: Path) -> str | None:
    """Return a hint for a file whose name is not that of a tar, None if it may be a tar; may raise OSError."""
    kind = _kind(path.name)
    if kind is None or not path.is_file():
        return None
    if _is_tar(path):
        return None
    if kind == "compressed":
        return f"{path} is compressed: unpack it with {_UNPACK[path.suffix.lower()]} {shlex.quote(str(path))}"
    if kind == "table":
        return f"{path} is a table, not a tar: name tables and tars as separate sources"
    return f"{path} is an image, not a tar: {_TO_PACK}"


def _is_tar(path: Path) -> bool:
    """Whether a file is a tar whatever its name, such as one that a browser unpacked."""
    with path.open("rb") as file:
        return file.read(262)[257:] == b"ustar"


def _folder_hint(folder: Path) -> str | None:
    """Return a hint for a folder without tars, None if its files are unknown."""
    inside = sorted(_names(folder))
    found = {kind: name for name in reversed(inside) if (kind := _kind(name)) is not None}
    if name := found.get("compressed"):
        suffix = name[-7:] if name.lower().endswith(".tar.gz") else Path(name).suffix
        command = f"{_UNPACK[Path(name).suffix.lower()]} {shlex.quote(str(folder))}/*{suffix}"
        return f"the tars in {folder} are compressed: unpack them with {command}"
    if name := found.get("table"):
        return f"{folder} has tables such as {name}, but none or several of this split: name one"
    below = (one for name in inside if (folder / name).is_dir() for one in _names(folder / name))
    if "image" in found or any(_kind(name) == "image" for name in islice(below, _LOOKED_AT)):
        return f"{folder} has images, not tars: {_TO_PACK}"
    return None


def _splits_hint(folder: Path, split: str) -> str | None:
    """Return the other splits of a folder, None if there are none."""
    splits = [
        name for name in sorted(_names(folder)) if any(one.endswith(".tar") for one in _names(folder / name))
    ]
    if not splits:
        return None
    more = ", …" if len(splits) > _SHOWN else ""
    return f"{folder} has no split {split!r} (known: {', '.join(splits[:_SHOWN])}{more})"


def _empty(folder: Path, split: str) -> str:
    inside = sorted(path.name for path in folder.iterdir() if path.is_dir())
    more = ", …" if len(inside) > _SHOWN else ""
    found = f"; it has the folders {', '.join(inside[:_SHOWN])}{more}" if inside else ""
    return f"no tar of split {split!r} in {folder}{found}"


def _kind(name: str) -> str | None:
    if name.endswith(".tar"):  # fast for a million names
        return None
    name = name.lower()
    suffix = Path(name).suffix
    if suffix == ".tgz" or (suffix in _UNPACK and name.endswith(".tar" + suffix)):
        return "compressed"
    return "table" if name.endswith(SUFFIXES) else "image" if suffix in IMAGE_SUFFIXES else None


def _names(folder: Path) -> list[str]:
    with suppress(OSError), os.scandir(folder) as entries:  # it may be inaccessible
        return [entry.name for entry in islice(entries, _LOOKED_AT)]
    return []
