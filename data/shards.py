"""Shards as one random-access list of samples, and where to find them.

A source is a dataset folder (with ``train/`` and ``test/``), a folder of tars, a brace pattern such as
``pairs/{00000..00041}.tar``, a single tar, or the name of a built-in corpus.
"""

import hashlib
import json
import os
import re
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import braceexpand
import numpy as np
import numpy.typing as npt

from clipkit.errors import DataError
from data.builtin import BUILTIN, built_in
from data.index import CAPTION, IMAGE, LABEL, META, ShardIndex, index_shard

__all__ = ["Sample", "Shards", "find_shards"]

_MAX_MEMBER_BYTES = 256 << 20  # a single picture or caption file beyond this is an attack or an accident
_MAX_OPEN_FILES = 64
_MAX_SHARDS = 1_000_000  # that a brace pattern may stand for
_RANGE = re.compile(r"(-?[0-9]+)\.\.(-?[0-9]+)(?:\.\.-?([0-9]+))?")
_FIELD = {"image": IMAGE, "caption": CAPTION, "label": LABEL}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One sample as it lies in its shard, nothing decoded.

    ``id`` is its number in the list of shards it was read from. A caption, label or json that nobody asked for
    (see ``Shards``) is left out.
    """

    id: int
    shard: str
    key: str
    image: bytes
    caption: str | None = None
    label: int | None = None
    meta: dict[str, Any] = field(default_factory=dict)


class Shards:
    """Random access to the samples of a list of tars that have everything in ``need``.

    Reading is safe from several threads; a copy in another process opens files of its own.

    Args:
        paths: the tars. Their order numbers the samples.
        need: which of "image", "caption" and "label" a sample must have to count. A caption is a ``txt``
            member, or the "caption" field of a ``json`` member. Nothing else is read, so what is wrong with it
            does no harm; but where only the picture is needed, all that a sample has is read along.

    Raises:
        DataError: a shard is missing, truncated or not a tar, or holds no sample with what is needed.

    Attributes:
        counts: (S,) int64, usable samples by shard.
        skipped: how many samples lacked something.
    """

    def __init__(self, paths: Sequence[Path], *, need: Sequence[str] = ("image", "caption")) -> None:
        if not paths:
            raise DataError("no shards were given")
        self.paths = list(paths)
        self._keys: list[npt.NDArray[np.str_]] = []
        self._spans: list[npt.NDArray[np.int64]] = []
        self.skipped = 0
        self._read_all = set(need) <= {"image"}
        self._needed = {"image", "caption", "label"} if self._read_all else set(need)
        for path in self.paths:
            index = index_shard(path)
            usable = _usable(index, need)
            if not usable.any():
                raise DataError(_nothing_usable(path, index, need))
            self.skipped += int((~usable).sum())
            self._keys.append(index.keys[usable])
            self._spans.append(index.spans[usable])
        self.counts = np.array([len(keys) for keys in self._keys], dtype=np.int64)
        self._starts = np.concatenate([[0], np.cumsum(self.counts)])
        self._forget_files()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getstate__(self) -> dict[str, Any]:
        own = ("_files", "_files_lock", "_files_of_process")  # file descriptors stay in their process
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget_files()

    def _forget_files(self) -> None:
        self._files: OrderedDict[int, _OpenFile] = OrderedDict()
        self._files_lock = Lock()
        self._files_of_process = os.getpid()

    def fingerprint(self) -> str:
        """16 hexadecimal digits that change when the set of samples or its order does.

        Shard names, keys and sizes count; the folder that holds them does not, so data may be moved.
        """
        digest = hashlib.sha256()
        for path, keys, spans in zip(self.paths, self._keys, self._spans, strict=True):
            digest.update(os.fsencode(f"{path.name}\n{len(keys)}\n"))
            digest.update("\0".join(keys.tolist()).encode())
            digest.update(spans.tobytes())
        return digest.hexdigest()[:16]

    def locate(self, number: int) -> tuple[str, str]:
        """The shard and key of a sample, without reading it."""
        shard, row = self._position(number)
        return str(self.paths[shard]), str(self._keys[shard][row])

    def read(self, number: int) -> Sample:
        """Read sample ``number`` (0 ≤ number < len).

        Raises:
            DataError: the file cannot be read or has shrunk since it was indexed, a member is over the size
                limit, or a label is not a whole number.
        """
        shard, row = self._position(number)
        span = self._spans[shard][row]
        caption = self._text(shard, span[CAPTION]) if "caption" in self._needed else None
        meta: dict[str, Any] = {}
        if self._read_all or ("caption" in self._needed and caption is None):
            meta = self._json(shard, span[META])
        if caption is None and isinstance(meta.get("caption"), str):
            caption = meta["caption"]
        return Sample(
            id=number,
            shard=str(self.paths[shard]),
            key=str(self._keys[shard][row]),
            image=self._bytes(shard, span[IMAGE]),
            caption=caption,
            label=self._label(shard, span[LABEL]) if "label" in self._needed else None,
            meta=meta,
        )

    def _position(self, number: int) -> tuple[int, int]:
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        shard = int(np.searchsorted(self._starts, number, side="right")) - 1
        return shard, number - int(self._starts[shard])

    def _text(self, shard: int, span: npt.NDArray[np.int64]) -> str | None:
        return None if span[0] < 0 else self._bytes(shard, span).decode("utf-8", "replace")

    def _label(self, shard: int, span: npt.NDArray[np.int64]) -> int | None:
        text = self._text(shard, span)
        if text is None:
            return None
        if not (text.strip().isdecimal() and len(text.strip()) < 19):  # of int64
            raise DataError(f"label {text.strip()[:40]!r} is not a whole number")
        return int(text)

    def _json(self, shard: int, span: npt.NDArray[np.int64]) -> dict[str, Any]:
        text = self._text(shard, span)
        if text is None:
            return {}
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"its json does not parse: {error}") from error
        return value if isinstance(value, dict) else {}

    def _bytes(self, shard: int, span: npt.NDArray[np.int64]) -> bytes:
        offset, size = int(span[0]), int(span[1])
        if size > _MAX_MEMBER_BYTES:
            raise DataError(f"a member of {size} bytes is over the limit of {_MAX_MEMBER_BYTES}")
        file = self._file(shard)
        try:
            data = os.pread(file.descriptor, size, offset)
        except OSError as error:
            raise DataError(f"the shard cannot be read: {error.strerror}") from error
        if len(data) != size:
            raise DataError("the shard has become shorter since it was indexed")
        return data

    def _file(self, shard: int) -> "_OpenFile":
        if self._files_of_process != os.getpid():  # a forked worker opens its own
            self._forget_files()
        with self._files_lock:
            file = self._files.get(shard)
            if file is None:
                if len(self._files) >= _MAX_OPEN_FILES:
                    self._files.popitem(last=False)
                try:
                    file = self._files[shard] = _OpenFile(os.open(self.paths[shard], os.O_RDONLY))
                except OSError as error:
                    raise DataError(f"shard {self.paths[shard]}: {error.strerror}") from error
            self._files.move_to_end(shard)
            return file


class _OpenFile:
    """A file descriptor, closed when nobody holds this object: not under a thread that still reads."""

    __slots__ = ("descriptor",)

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


def _usable(index: ShardIndex, need: Sequence[str]) -> npt.NDArray[np.bool_]:
    has = index.spans[:, :, 0] >= 0  # (N, 4)
    usable = np.ones(len(index), dtype=np.bool_)
    for what in need:
        usable &= has[:, _FIELD[what]] | (has[:, META] if what == "caption" else False)
    return usable


def _nothing_usable(path: Path, index: ShardIndex, need: Sequence[str]) -> str:
    counts = Counter(dict(zip(index.extensions.tolist(), index.extension_counts.tolist(), strict=True)))
    seen = ", ".join(f"{name} ({count})" for name, count in counts.most_common(8)) or "none"
    return f"shard {path} holds no sample with {' and '.join(need)}; extensions seen: {seen}"


def find_shards(source: str, *, split: str = "train") -> list[Path]:
    """The tars of a source, in order; a built-in corpus is made on first use.

    Raises:
        DataError: nothing is there, or shards are missing.
    """
    if not source:
        raise DataError("no data: the source is empty")
    if source in BUILTIN and not Path(source).exists():
        return _shards_of_folder(built_in(source), split)
    shown = source if len(source) <= 200 else source[:200] + "…"
    try:
        return _shards_at(source, split)
    except OSError as error:  # a name too long, a folder that may not be read
        raise DataError(f"cannot look for data at {shown!r}: {error.strerror}") from error
    except (ValueError, RuntimeError) as error:  # a null character; ~ of a user that there is not
        raise DataError(f"cannot look for data at {shown!r}: {error}") from error


def _shards_at(source: str, split: str) -> list[Path]:
    if "{" not in source and (path := Path(source).expanduser()).is_dir():
        return _shards_of_folder(path, split)
    paths = [Path(name).expanduser() for name in _expanded(source)]
    missing = [one for one in paths if not one.is_file()]
    if len(paths) == 1 and missing:
        built_ins = ", ".join(sorted(BUILTIN))
        raise DataError(f"no data at {source!r}: not a folder, a tar, or a built-in corpus ({built_ins})")
    if missing:
        raise DataError(f"{len(missing)} of {len(paths)} shards are missing, the first is {missing[0]}")
    return paths


def _expanded(source: str) -> Iterator[str]:
    """The names that a brace pattern stands for, counted before any is made."""
    if _count_names(source) > _MAX_SHARDS:
        raise DataError(
            f"the braces of {source[:200]!r} stand for more than {_MAX_SHARDS} shards: see their numbers"
        )
    try:
        return braceexpand.braceexpand(source)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the braces of {source[:200]!r} do not balance") from error


def _count_names(pattern: str) -> int:
    """How many names a brace pattern stands for; where that is over the limit, some number over it."""
    opened: list[tuple[int, int, int]] = []  # where, and the two counts as they stood there
    before, here, position = (
        0,
        1,
        0,
    )  # names of the items of this list that a comma ended, and of the item here
    while position < len(pattern):
        character = pattern[position]
        if character == "\\":
            position += 1  # what follows is no brace
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
                    return _MAX_SHARDS + 1
                first, last, step = map(int, numbers.groups("1"))
                count = abs(last - first) // (step or 1) + 1
            before, here = outer_before, outer * count
        if here > _MAX_SHARDS:
            return here
        position += 1
    return here


def _shards_of_folder(folder: Path, split: str) -> list[Path]:
    inside = folder / split
    here = inside if inside.is_dir() else folder
    paths = sorted(here.glob("*.tar"), key=lambda path: (len(path.name), path.name))
    if not paths:
        splits = sorted(path.name for path in folder.iterdir() if path.is_dir())
        more = ", …" if len(splits) > 8 else ""
        found = f"; it has the folders {', '.join(splits[:8])}{more}" if splits else ""
        raise DataError(f"no tar of split {split!r} in {folder}{found}")
    stated = here / "nshards.txt"
    if stated.is_file():
        with stated.open(errors="replace") as file:
            text = file.read(100).strip()
        if not text.isdecimal() or int(text) != len(paths):
            raise DataError(f"{here} has {len(paths)} shards, but nshards.txt says {text[:20]!r}")
    return paths
