"""One shard, opened: its index, which of its samples count, and their members' bytes."""

import json
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipkit.errors import DataError
from clipkit.files.tar import tar_files, tar_files_of
from data.captions import Chosen, Selection
from data.remote.store import ShardFile
from data.shards.index import (
    CAPTION,
    META,
    ShardIndex,
    index_of_members,
    index_place,
    index_shard,
    keep_index,
    read_arrays,
    stored_index,
    with_content,
    write_arrays,
)

if TYPE_CHECKING:
    from data.remote.cache import ShardCache

__all__ = ["MAX_MEMBER_BYTES", "OpenShard"]

MAX_MEMBER_BYTES = 256 << 20  # a single picture beyond this is an attack or an accident
# of each column; captions and the like become objects many times as large: a json of 4 MiB may take 100 MiB
_MAX_BYTES = (MAX_MEMBER_BYTES, 1 << 20, 1 << 20, 4 << 20)
_TRIES = 5
_CHANGED = "the shard has changed since it was counted: is it being written?"
_NEAR = 16 << 10  # bytes between members that are read along rather than asked for apart


class OpenShard:
    """Reads the samples of one shard; safe from several threads.

    Args:
        file: the shard.
        selection: which of its samples count.
        cache: where a remote shard's copy is kept. Without one its members are read over the network, one by one.

    Raises:
        TruncatedError: it is not whole, and its intact part is not wanted.
        DataError: it is missing, not a tar, or cannot be fetched.

    Attributes:
        shown: its name as messages may show it.
        index: of all its samples.
        chosen: those that count.
    """

    def __init__(self, file: ShardFile, selection: Selection, cache: "ShardCache | None") -> None:
        self.file = file
        self.shown = file.shown
        self._descriptor = -1
        if not file.is_remote or cache is not None:
            self._descriptor = _opened(file, cache)
        self._truncated = selection.truncated
        self.index = _index(file, self._descriptor, self._truncated)
        # size and time with which its bytes are those that were counted, and with which they are others
        self._sound = None if file.is_remote else _state(self._descriptor)
        self._changed: tuple[int, int] | None = None
        self._has_large = bool((self.index.sizes > _MAX_BYTES).any())
        self.chosen = self._choose(selection)
        self._rows = self.chosen.rows.data

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            os.close(self._descriptor)

    def __len__(self) -> int:
        return len(self.chosen)

    def key(self, number: int) -> str:
        """The key of the ``number``-th sample that counts."""
        return self.index.key(self.row(number))

    def row(self, number: int) -> int:
        """Its row in the index.

        Raises:
            DataError: there are not so many, though it was stated.
        """
        if number >= len(self._rows):
            raise DataError(f"its shard has only {len(self._rows)} samples, though more were stated")
        row: int = self._rows[number]
        return row

    def caption_number(self, number: int) -> int:
        """Which of its captions the ``number``-th sample that counts is trained with."""
        return 0 if self.chosen.captions is None else int(self.chosen.captions[number])

    def read(self, row: int, columns: tuple[int, ...]) -> list[bytes | None]:
        """The members of a row, None for one that it lacks.

        Raises:
            DataError: they cannot be read, the file has shrunk since it was indexed, or one is over the size
            limit.
        """
        if self._has_large:
            self._check_sizes(row, columns)
        span, descriptor = self.index.span, self._descriptor
        if descriptor < 0:
            return self._read_together([span(row, column) for column in columns])
        found: list[bytes | None] = []
        try:
            for column in columns:
                offset, size = span(row, column)
                data = os.pread(descriptor, size, offset) if offset else None
                if data is not None and len(data) != size:
                    raise DataError("the shard has become shorter since it was indexed")
                found.append(data)
        except OSError as error:
            raise DataError(f"the shard cannot be read: {error.strerror}") from error
        # looked at after its bytes were read, as it may be written at any time
        if self._sound is not None and (now := _state(self._descriptor)) != self._sound:
            self._check_content(now)
        return found

    def _check_sizes(self, row: int, columns: tuple[int, ...]) -> None:
        for column in columns:
            _, size = self.index.span(row, column)
            if size > (most := _MAX_BYTES[column]):
                raise DataError(f"a member of {size} bytes is over the limit of {most}")

    def _check_content(self, now: tuple[int, int]) -> None:
        """That a file of this machine still is what was counted; a later time alone does no harm."""
        if now != self._changed:
            self._changed = now
            with suppress(DataError):
                if _scanned(self.file, self._descriptor, self._truncated).is_same(self.index):
                    self._sound, self._changed = now, None
                    return
        raise DataError(_CHANGED)

    def _read_together(self, wanted: list[tuple[int, int]]) -> list[bytes | None]:
        """The same over the network, by one request where they lie near one another, as those of a sample do."""
        there = [span for span in wanted if span[0]]
        first = min((offset for offset, _ in there), default=0)
        last = max((offset + size for offset, size in there), default=0)
        if last - first > sum(size for _, size in there) + _NEAR * len(there):
            return [self._range(at, at + size) if at else None for at, size in wanted]
        together = self._range(first, last) if there else b""
        return [together[at - first : at - first + size] if at else None for at, size in wanted]

    def _range(self, start: int, end: int) -> bytes:
        from data.remote import store

        return store.read_range(self.file, start, end)

    def _choose(self, selection: Selection) -> Chosen:
        if not selection.reads_json:
            return selection.choose(self.index, self._content)
        place = index_place(self.file).with_suffix(f".{self.index.digest}.{selection.identity}")
        with suppress(KeyError, TypeError):
            if (stored := read_arrays(place)) is not None:
                about, arrays = stored
                return Chosen(rows=arrays["rows"], captions=arrays.get("captions"), dropped=about["dropped"])
        chosen = selection.choose(self.index, self._content)
        arrays = {"rows": chosen.rows} | ({} if chosen.captions is None else {"captions": chosen.captions})
        with suppress(OSError):
            write_arrays(place, {"dropped": chosen.dropped}, arrays)
        return chosen

    def _content(self, row: int) -> tuple[str | None, dict[str, Any]]:
        text, meta = self.read(row, (CAPTION, META))
        return text_of(text), meta_of(meta)


def text_of(data: bytes | None) -> str | None:
    """A caption file's text; bytes that are not UTF-8 become lone surrogates, see ``data.captions.is_utf8``."""
    return None if data is None else data.decode("utf-8", "surrogateescape")


def meta_of(data: bytes | None) -> dict[str, Any]:
    """A sample's json, its texts as of ``text_of``; empty where it has none, or it is no object.

    Raises:
        DataError: it does not parse.
    """
    if data is None:
        return {}
    try:
        value = json.loads(data.decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"its json does not parse: {error}") from error
    return value if isinstance(value, dict) else {}


def label_of(data: bytes | None) -> int | None:
    """A label file's number.

    Raises:
        DataError: it holds something else.
    """
    text = text_of(data)
    if text is None:
        return None
    if not (text.strip().isdecimal() and len(text.strip()) < 19):  # of int64
        raise DataError(f"label {text.strip()[:40]!r} is not a whole number")
    return int(text)


def _opened(file: ShardFile, cache: "ShardCache | None") -> int:
    """A descriptor of a shard's bytes on this machine, fetched if they must be."""
    for tried in range(_TRIES):
        try:
            path = cache.fetch(file) if cache is not None else file.url
            return os.open(
                path, os.O_RDONLY | os.O_NONBLOCK
            )  # a pipe that came into its place has no one to wait for
        except OSError as error:
            # between fetching and opening it may have had to make room
            if cache is None or not isinstance(error, FileNotFoundError) or tried + 1 == _TRIES:
                raise DataError(f"shard {file.shown}: {error.strerror}") from error
    raise AssertionError("the last try returns or raises")


def _state(descriptor: int) -> tuple[int, int]:
    """Size and time of the last change in nanoseconds."""
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


def _scanned(file: ShardFile, descriptor: int, truncated: str) -> ShardIndex:
    """The index of what the file holds now."""
    path = Path(f"/dev/fd/{descriptor}")
    try:
        members = tar_files(path, called=file.shown)
        return with_content(index_of_members(file.shown, members, truncated=truncated), path)
    except OSError as error:
        raise DataError(f"shard {file.shown}: {error.strerror}") from error


def _index(file: ShardFile, descriptor: int, truncated: str) -> ShardIndex:
    if descriptor >= 0:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"shard {file.shown} is not a regular file")
        here = file if file.is_remote else ShardFile.of_status(file.url, status)
        if here.may_be_copy_of(file):  # another host may have a copy of its own
            return index_shard(here, Path(f"/dev/fd/{descriptor}"), truncated=truncated)
        counted = stored_index(
            file, truncated=truncated
        )  # a copy of the same, or a later time alone, do no harm
        if counted is None or not _scanned(file, descriptor, truncated).is_same(counted):
            raise DataError(f"shard {file.shown}: {_CHANGED}")
        return counted
    if file.size < 0:
        raise DataError(f"shard {file.shown} can be read only once: it needs data.cache_gb above 0")
    index = stored_index(file, truncated=truncated)
    if index is None:
        from data.remote import store

        members = tar_files_of(file.shown, store.RangedBytes(file))
        index = index_of_members(file.shown, members, truncated=truncated)
        keep_index(file, index)
    return index
