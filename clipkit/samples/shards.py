"""WebDataset shards: one open tar, and several tars as one random-access list of samples."""

import hashlib
import json
import os
import stat
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import Any, Generic, TypeVar

from clipkit.errors import DataError
from clipkit.samples.base import Samples, is_json, parse_fields
from clipkit.samples.index import (
    Layout,
    ShardIndex,
    add_content_digest,
    index_members,
    index_shard,
    keep_index,
    stored_index,
)
from clipkit.samples.remote.cache import ShardCache
from clipkit.samples.remote.store import RangedBytes, ShardFile, read_range
from clipkit.samples.tar import list_tar_content, list_tar_files

# Limits in bytes by the last extension of a member, and for all others. An image beyond this is an attack or an
# accident; texts become objects many times as large: a json of 4 MiB may take 100 MiB.
_LIMITS = {"txt": 1 << 20, "cls": 1 << 20, "json": 4 << 20}
_LIMIT = 256 << 20
_CHANGED = "the shard has changed since it was counted: is it being written?"
_NEAR = 16 << 10  # bytes; a smaller gap between members is read along rather than split into requests
_MAX_OPEN = 256  # shards


class Shard:
    """An open shard: its index, and the content of its members. Thread-safe.

    Args:
        cache: cache of remote shards; None reads their members over the network.
        truncated: "error", or "use" to use the intact part of a truncated shard.
        index: the index of a remote shard that is read over the network, if it is known.

    Attributes:
        shown: its name in messages.
        index: index of all its samples.
    """

    def __init__(
        self,
        file: ShardFile,
        cache: ShardCache | None = None,
        *,
        truncated: str = "error",
        index: ShardIndex | None = None,
    ) -> None:
        self.file = file
        self.shown = file.shown
        self._truncated = truncated
        self._descriptor = -1
        retries = 4  # the cache may remove a file between fetching and opening it
        while self._descriptor < 0 and index is None and (not file.is_remote or cache is not None):
            try:
                path = cache.fetch(file) if cache is not None else file.url
                # nonblocking: a named pipe may have replaced the file
                self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            except OSError as error:
                if cache is None or not isinstance(error, FileNotFoundError) or not retries:
                    raise DataError(f"shard {file.shown}: {error.strerror}") from error
                retries -= 1
        self.index = index or self._find_index()
        # (size, modification time) for which the content is known to equal the index, and known to differ
        self._sound = None if file.is_remote else self._state()
        self._changed: tuple[int, int] | None = None
        sizes = self.index.member_sizes
        self._has_large = bool(len(sizes) and sizes.max() > min(_LIMITS.values()))

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            os.close(self._descriptor)

    @property
    def path(self) -> Path:
        """Path of the open local file, which the cache may have removed."""
        return Path(f"/dev/fd/{self._descriptor}")

    def read(self, row: int, names: Sequence[str], *, layout: Layout | None = None) -> list[bytes | None]:
        """Read members of a sample by name, None for missing ones; "" is the image, see ``find_image``.

        ``layout`` is that of the row in the index, if it is known.
        """
        spans = self.index.spans(layout or self.index.find_layout(row), names)
        if self._has_large:
            for name, (_, size) in zip(names, spans, strict=True):
                if size > (limit := _LIMITS.get(name.rpartition(".")[2], _LIMIT)):
                    raise DataError(f"a member of {size} bytes is over the limit of {limit}")
        if self._descriptor < 0:
            return self._read_remote(spans)
        contents: list[bytes | None] = []
        try:
            for offset, size in spans:
                data = None
                if offset:
                    data = os.pread(self._descriptor, size, offset)
                if data is not None and len(data) != size:
                    raise DataError("the shard is shorter than when it was indexed")
                contents.append(data)
        except OSError as error:
            raise DataError(f"the shard cannot be read: {error.strerror}") from error
        # checked after reading, because the file may be written at any time; a new modification time alone is fine
        if self._sound is not None and (now := self._state()) != self._sound:
            if now == self._changed:
                raise DataError(_CHANGED)
            self._changed = now
            try:
                same = self._scan().is_same(self.index)
            except DataError:
                same = False
            if not same:
                raise DataError(_CHANGED)
            self._sound = now
            self._changed = None
        return contents

    def read_present(self, row: int, names: Iterable[str]) -> dict[str, bytes]:
        """Read those of the members that a sample has, by name; errors are as for ``read``."""
        members = self.index.members(row)
        present = [name for name in names if name in members]
        contents = zip(present, self.read(row, present), strict=True)
        return {name: data for name, data in contents if data is not None}

    def _read_remote(self, spans: list[tuple[int, int]]) -> list[bytes | None]:
        there = [span for span in spans if span[0]]
        first = min((offset for offset, _ in there), default=0)
        last = max((offset + size for offset, size in there), default=0)
        if last - first > sum(size for _, size in there) + _NEAR * len(there):
            return [read_range(self.file, at, at + size) if at else None for at, size in spans]
        together = read_range(self.file, first, last) if there else b""
        return [together[at - first : at - first + size] if at else None for at, size in spans]

    def _state(self) -> tuple[int, int]:
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns

    def _scan(self) -> ShardIndex:
        try:
            members = list_tar_files(self.path, called=self.shown)
            return add_content_digest(
                index_members(self.shown, members, truncated=self._truncated), self.path
            )
        except OSError as error:
            raise DataError(f"shard {self.shown}: {error.strerror}") from error

    def _find_index(self) -> ShardIndex:
        file = self.file
        truncated = self._truncated
        if self._descriptor >= 0:
            status = os.fstat(self._descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise DataError(f"shard {self.shown} is not a regular file")
            here = file if file.is_remote else ShardFile.from_status(file.url, status)
            if here.may_be_copy_of(file):  # another host may have its own copy
                return index_shard(here, self.path, truncated=truncated)
            counted = stored_index(file, truncated=truncated)  # only the modification time may differ
            if counted is None or not self._scan().is_same(counted):
                raise DataError(f"shard {self.shown}: {_CHANGED}")
            return counted
        if file.size < 0:
            raise DataError(f"shard {self.shown} can be read only once: it needs data.cache_gb above 0")
        index = stored_index(file, truncated=truncated)
        if index is None:
            members = list_tar_content(self.shown, RangedBytes(file))
            index = index_members(self.shown, members, truncated=truncated)
            keep_index(file, index)
        return index


S = TypeVar("S", bound=Shard)


class OpenShards(ABC, Generic[S]):
    """Random access to samples of many shards, which are opened when first used; the last ones stay open.

    Thread-safe; a copy in another process opens its own files.
    """

    def __init__(self, counts: Iterable[int]) -> None:
        self._starts: array[int] = array("q", accumulate(counts, initial=0))
        self._forget_open()

    @abstractmethod
    def _new_shard(self, index: int) -> S:
        """Open a shard."""

    def __len__(self) -> int:
        return self._starts[-1]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_open", "_open_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget_open()

    def _forget_open(self) -> None:
        self._open: OrderedDict[int, S] = OrderedDict()
        self._open_lock = Lock()
        self._open_in = os.getpid()

    def _position(self, i: int) -> tuple[int, int]:
        starts = self._starts
        if not 0 <= i < starts[-1]:
            raise IndexError(f"sample {i} of {len(self)}")
        shard = bisect_right(starts, i) - 1
        return shard, i - starts[shard]

    def open_shard(self, index: int) -> S:
        """Return a shard, which may already be open."""
        if self._open_in != os.getpid():  # forked
            self._forget_open()
        with self._open_lock:
            opened = self._open.get(index)
            if opened is not None:
                self._open.move_to_end(index)
                return opened
        opened = self._new_shard(index)
        with self._open_lock:
            self._open[index] = opened
            while len(self._open) > _MAX_OPEN:  # readers of a removed shard still refer to it
                self._open.popitem(last=False)
        return opened


class ShardSamples(OpenShards[Shard], Samples):
    """All samples of some shards, see ``Samples``; their indexes are read or made now."""

    def __init__(
        self, files: Sequence[ShardFile], cache: ShardCache | None = None, *, truncated: str = "error"
    ) -> None:
        self.files = tuple(files)
        self._cache = cache
        self._truncated = truncated
        digest = hashlib.sha256()
        counts = []
        self._faults: list[str] = []
        for shard_index, file in enumerate(self.files):
            index = self._new_shard(shard_index).index
            counts.append(len(index))
            if index.truncated:
                self._faults.append(index.truncated)
            extra = index.repeated.items()
            members = [f"{count} more {name} in samples that have one already" for name, count in extra]
            if members:
                self._faults.append(f"{file.shown}: {', '.join(members)}")
            digest.update(json.dumps([file.name, file.size, index.digest]).encode())
        self._content_id = digest.hexdigest()[:16]
        super().__init__(counts)

    def _new_shard(self, index: int) -> Shard:
        return Shard(self.files[index], self._cache, truncated=self._truncated)

    @property
    def faults(self) -> list[str]:
        return self._faults

    def find(self, i: int) -> tuple[Shard, int]:
        """Return the open shard of a sample, and its row in the shard's index."""
        shard_index, row = self._position(i)
        shard = self.open_shard(shard_index)
        if row >= len(shard.index):
            raise DataError(f"its shard has only {len(shard.index)} samples, fewer than before")
        return shard, row

    def key(self, i: int) -> str:
        return self.locate(i)[1]

    def locate(self, i: int) -> tuple[str, str]:
        shard_index, row = self._position(i)
        file = self.files[shard_index]
        try:
            index = self.open_shard(shard_index).index
        except DataError:  # the shard is gone; its index may still exist
            stored = stored_index(file, truncated=self._truncated)
            return file.shown, stored.key(row) if stored is not None else ""
        return file.shown, index.key(row)

    def members(self, i: int) -> tuple[str, ...]:
        shard, row = self.find(i)
        return shard.index.members(row)

    def fields(self, i: int) -> dict[str, Any]:
        shard, row = self.find(i)
        return parse_fields(shard.read_present(row, filter(is_json, shard.index.members(row))))

    def read(self, i: int, member: str) -> bytes:
        shard, row = self.find(i)
        (data,) = shard.read(row, (member,))
        if data is None:
            there = ", ".join(shard.index.members(row))[:100]
            raise DataError(f"no {member or 'image'}, only {there}")
        return data

    @property
    def content_id(self) -> str:
        return self._content_id
