"""Where a source's shards are.

A source is a dataset folder (with ``train/`` and ``test/``), a folder of tars, a brace pattern such as
``pairs/{00000..00041}.tar``, a single tar, the name of a built-in corpus; or such a folder, pattern or tar at
``s3://``, ``gs://``, ``https://`` or ``hf://``, or ``pipe:`` and a command that writes a tar. On a disk
wildcards are patterns too, as in ``pairs-*/*.tar``.
"""

import glob
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from clipkit.errors import DataError
from clipkit.files.patterns import IMAGE_SUFFIXES, expand_braces, match_wildcards, path_order
from clipkit.files.terminal import counted
from data.corpora.builtin import BUILTIN, built_in
from data.remote.store import ShardFile, Unreachable, is_remote, shown

__all__ = [
    "find_shards",
    "hint_of_file",
    "hint_of_folder",
    "hint_of_remote",
    "hint_of_several",
    "hint_of_splits",
]


# --------------------------------------------------------------------------------------------------------------
# What is said of sources that are none: lists in one text, wildcards in a store, folders without tars.

_UNPACKED_BY = {
    ".gz": "gunzip -k",
    ".tgz": "gunzip -k",
    ".bz2": "bunzip2 -k",
    ".xz": "unxz -k",
    ".zst": "unzstd",
}
_TABLES = (".parquet", ".pq", ".csv", ".tsv", ".tab", ".jsonl", ".ndjson")
_LOOKED_AT = 1000  # names of a folder, and folders in it
_SHOWN = 8  # splits in a message
_COLONS, _COMMA = re.compile("::"), re.compile(r"[,;\s]\s*")  # webdataset's separator, and what others try
_ANOTHER = re.compile(r"(?:::|[,;\s])\s*(?=[a-z][a-z0-9]*://|pipe:)")


def hint_of_several(source: str) -> str | None:
    """What to do with several sources in one text, None if it is no such text."""
    parts = list(_parts(source))
    if len(parts) < 2 or not all(map(_is_source, parts)):
        return None
    listed = ",".join(f'"{shown(part)}"' for part in parts[:2])
    more = ",…" if len(parts) > 2 else ""
    return (
        f"{len(parts)} sources in one text: give them as a list, data.train='[{listed}{more}]', or to a command as "
        "arguments of their own"
    )


def hint_of_remote(source: str) -> str | None:
    """What is wrong with a source in a store that can be seen without asking for it, None if nothing is."""
    if source.startswith("pipe:"):  # spaces and wildcards are the shell's
        return hint_of_several(source) if "::pipe:" in source else None
    if _ANOTHER.search(source) or all(part.endswith(".tar") for part in _parts(source)):
        hint = hint_of_several(source)
        if hint is not None:
            return hint
    if "*" not in source.partition("?")[0]:
        return None
    return (
        f"{shown(source)}: a store knows no wildcards; name the folder, of which every .tar is taken, or the "
        "shards by braces, as {00000..00010}.tar"
    )


def hint_of_file(path: Path) -> str | None:
    """What to do with a file that is no shard by its name, None if it may be one; raises OSError."""
    kind = _kind(path.name)
    if kind is None or not path.is_file() or _is_tar(path):
        return None
    quoted = shlex.quote(str(path))
    if kind == "compressed":
        return f"{path} is compressed: unpack it with {_UNPACKED_BY[path.suffix.lower()]} {quoted}"
    if kind == "table":
        return f"{path} is a table, not a tar: make shards of it with python -m data pack {quoted} OUT"
    return f"{path} is a picture, not a tar: {_TO_PACK}"


def _is_tar(path: Path) -> bool:
    """Whether it is one all the same, as where a browser has unpacked what it fetched."""
    with path.open("rb") as file:
        return file.read(262)[257:] == b"ustar"


def hint_of_folder(folder: Path) -> str | None:
    """What to do with a folder without tars, None if it holds nothing that is known."""
    inside = sorted(_names(folder))
    found = {kind: name for name in reversed(inside) if (kind := _kind(name)) is not None}
    if name := found.get("compressed"):
        suffix = name[-7:] if name.lower().endswith(".tar.gz") else Path(name).suffix
        command = f"{_UNPACKED_BY[Path(name).suffix.lower()]} {shlex.quote(str(folder))}/*{suffix}"
        return f"the tars in {folder} are compressed: unpack them with {command}"
    if name := found.get("table"):
        table = shlex.quote(str(folder / name))
        return f"{folder} holds a table, not tars: make shards of it with python -m data pack {table} OUT"
    below = (one for name in inside if (folder / name).is_dir() for one in _names(folder / name))
    if "picture" in found or any(_kind(name) == "picture" for name in islice(below, _LOOKED_AT)):
        return f"{folder} holds pictures, not tars: {_TO_PACK}"
    return None


def hint_of_splits(folder: Path, split: str) -> str | None:
    """That a folder has other splits than the one without tars, None if it has none."""
    splits = [
        name for name in sorted(_names(folder)) if any(one.endswith(".tar") for one in _names(folder / name))
    ]
    if not splits:
        return None
    more = ", …" if len(splits) > _SHOWN else ""
    return f"{folder} has no split {split!r} (known: {', '.join(splits[:_SHOWN])}{more})"


_TO_PACK = (
    "write a table of paths and captions (columns image and caption), and make shards of it with "
    "python -m data pack TABLE.csv OUT"
)


def _kind(name: str) -> str | None:
    if name.endswith(".tar"):  # there may be a million
        return None
    name = name.lower()
    suffix = Path(name).suffix
    if suffix == ".tgz" or (suffix in _UNPACKED_BY and name.endswith(".tar" + suffix)):
        return "compressed"
    return "table" if suffix in _TABLES else "picture" if suffix in IMAGE_SUFFIXES else None


def _names(folder: Path) -> list[str]:
    with suppress(OSError), os.scandir(folder) as entries:  # it may be another user's
        return [entry.name for entry in islice(entries, _LOOKED_AT)]
    return []


def _parts(source: str) -> Iterator[str]:
    """What stands between the separators of a list, those within braces not counted."""
    separator = _COLONS if "::" in source else _COMMA
    begin = depth = position = 0
    while position < len(source):
        depth += (source[position] == "{") - (source[position] == "}")
        found = separator.match(source, position) if depth == 0 else None
        if found is None:
            position += 1
            continue
        if source[begin:position]:
            yield source[begin:position]
        begin = position = found.end()
    if source[begin:]:
        yield source[begin:]


def _is_source(text: str) -> bool:
    from data.corpora.builtin import BUILTIN

    if is_remote(text) or text in BUILTIN or text.partition("?")[0].endswith(".tar"):
        return True
    try:
        return Path(text).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # longer than a name may be; ~ of nobody
        return False


# --------------------------------------------------------------------------------------------------------------


def find_shards(source: str, *, split: str = "train") -> list[ShardFile]:
    """The tars of a source, in order; a built-in corpus is made on first use.

    Raises:
        DataError: nothing is there, or shards are missing.
    """
    if not source:
        raise DataError("no data: the source is empty")
    if is_remote(source):
        return _remote_shards(source, split)
    if source in BUILTIN and not Path(source).exists():
        return [ShardFile.at(path) for path in _shards_of_folder(built_in(source), split)]
    shown = source if len(source) <= 200 else source[:200] + "…"
    try:
        return [ShardFile.at(path) for path in _shards_at(source, split)]
    except OSError as error:  # a name too long, a folder that may not be read
        raise DataError(f"cannot look for data at {shown!r}: {error.strerror}") from error
    except (ValueError, RuntimeError) as error:  # a null character; ~ of a user that there is not
        raise DataError(f"cannot look for data at {shown!r}: {error}") from error


def _remote_shards(source: str, split: str) -> list[ShardFile]:
    from data.remote import store

    if (hint := hint_of_remote(source)) is not None:
        raise DataError(hint)
    if source.startswith("pipe:") or "{" in source or source.partition("?")[0].endswith(".tar"):
        return store.describe(list(expand_braces(source)))
    form = f"; name the shards as {store.HUB_FORM}" if source.startswith("hf://") else ""
    fault = nothing = DataError(f"no tar at {store.shown(source)} or in its folder {split!r}{form}")
    for folder in (f"{source.rstrip('/')}/{split}", source.rstrip("/")):
        try:
            found = store.list_folder(folder)
        except Unreachable:
            raise
        except DataError as error:
            fault = error
            continue
        if found:
            _check_count(store.shown(folder), len(found), store.read_text(f"{folder}/nshards.txt", limit=100))
            return found
        fault = nothing
    raise _with_form(fault, source)


def _with_form(fault: DataError, source: str) -> DataError:
    """The fault of a folder; many web servers list none, so for theirs with what can be typed instead."""
    from data.remote import store

    if not source.startswith(("http://", "https://")):
        return fault
    form = f"'{store.shown(source).rstrip('/')}/{{00000..00331}}.tar'"
    return DataError(f"{str(fault).removesuffix('; name the shards')}; name the shards as {form}")


def _shards_at(source: str, split: str) -> list[Path]:
    if "{" not in source and (path := Path(source).expanduser()).is_dir():
        return _shards_of_folder(path, split)
    paths = [path for name in expand_braces(source) for path in _matching(name)]
    if missing := [one for one in paths if not one.is_file()]:
        raise DataError(_about_missing(source, missing, len(paths)))
    if (hint := next(filter(None, map(hint_of_file, paths)), None)) is not None:
        raise DataError(hint)
    return paths


def _about_missing(source: str, missing: list[Path], count: int) -> str:
    if (hint := hint_of_several(source)) is not None:
        return hint
    if glob.has_magic(str(missing[0])):
        found = match_wildcards(missing[0])[:100]
        if any(one.is_dir() for one in found):
            return f"{str(missing[0])[:200]!r} names folders: end it with /*.tar"
        fault = f"no tar on this disk has a name as {str(missing[0])[:200]!r}"
        return next(filter(None, map(hint_of_file, found)), fault)
    if count == 1:
        built_ins = ", ".join(sorted(BUILTIN))
        return f"no data at {source!r}: not a folder, a tar, or a built-in corpus ({built_ins})"
    return (
        f"{len(missing)} of {count} shards are missing, the first is {missing[0]}; to go without them name the "
        "folder, or the others as {{00000..00001},{00003..00004}}.tar"
    )


def _matching(name: str) -> list[Path]:
    """The tars that wildcards match; the path itself if there are none."""
    path = Path(name).expanduser()
    return [one for one in match_wildcards(path) if one.suffix == ".tar" and one.is_file()] or [path]


def _shards_of_folder(folder: Path, split: str) -> list[Path]:
    inside = folder / split
    here = inside if inside.is_dir() else folder
    paths = sorted(here.glob("*.tar"), key=path_order)
    if not paths:
        hint = hint_of_folder(inside) or hint_of_splits(folder, split) or hint_of_folder(folder)
        raise DataError(hint or _about_nothing(folder, split))
    stated = here / "nshards.txt"
    if stated.is_file():
        with stated.open(errors="replace") as file:
            _check_count(str(here), len(paths), file.read(100))
    return paths


def _about_nothing(folder: Path, split: str) -> str:
    inside = sorted(path.name for path in folder.iterdir() if path.is_dir())
    more = ", …" if len(inside) > 8 else ""
    found = f"; it has the folders {', '.join(inside[:8])}{more}" if inside else ""
    return f"no tar of split {split!r} in {folder}{found}"


def _check_count(folder: str, found: int, stated: str | None) -> None:
    """That ``nshards.txt`` says as many."""
    if stated is not None and (not stated.strip().isdecimal() or int(stated) != found):
        raise DataError(
            f"{folder} has {counted(found, 'shard')}, but nshards.txt says {stated.strip()[:20]!r}"
        )
