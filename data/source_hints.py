"""What is said of sources that are none: lists in one text, wildcards in a store, folders without tars."""

import os
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from data.remote.patience import shown
from data.shard_file import is_remote

__all__ = ["hint_of_file", "hint_of_folder", "hint_of_remote", "hint_of_several", "hint_of_splits"]

_UNPACKED_BY = {
    ".gz": "gunzip -k",
    ".tgz": "gunzip -k",
    ".bz2": "bunzip2 -k",
    ".xz": "unxz -k",
    ".zst": "unzstd",
}
_TABLES = (".parquet", ".pq", ".csv", ".tsv", ".tab", ".jsonl", ".ndjson")
_PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif")
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
    return "table" if suffix in _TABLES else "picture" if suffix in _PICTURES else None


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
