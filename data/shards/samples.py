"""Shards as one random-access list of samples."""

import json
import os
import stat
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from clipkit.errors import DataError
from clipkit.samples import (
    CAPTION,
    IMAGE,
    LABEL,
    META,
    ShardIndex,
    index_of_members,
    index_place,
    index_shard,
    keep_index,
    read_arrays,
    stored_index,
    tar_files,
    tar_files_of,
    with_content,
    write_arrays,
)
from clipkit.samples.remote import RangedBytes, ShardCache, ShardFile, read_range
from data.captions import CaptionRule, Chosen, Selection

if TYPE_CHECKING:
    from data.shards.manifest import Manifest

__all__ = ["OpenShard", "Sample", "Shards", "label_of", "meta_of", "text_of"]

# Limits in bytes of image, caption, label and json. An image beyond this is an attack or an accident; texts become
# objects many times as large: a json of 4 MiB may take 100 MiB.
_MAX_BYTES = (256 << 20, 1 << 20, 1 << 20, 4 << 20)
_CHANGED = "the shard has changed since it was counted: is it being written?"
_NEAR = 16 << 10  # bytes; a smaller gap between members is read along rather than split into requests
_MAX_OPEN = 256  # shards
_FETCHING = 4  # shards that one process downloads at a time


def text_of(data: bytes | None) -> str | None:
    """Decode a caption file; invalid UTF-8 becomes lone surrogates, see ``data.captions.is_utf8``."""
    return None if data is None else data.decode("utf-8", "surrogateescape")


def meta_of(data: bytes | None) -> dict[str, Any]:
    """Parse a sample's json; empty if it is missing or not an object.

    Raises:
        DataError: invalid JSON.
    """
    if data is None:
        return {}
    try:
        value = json.loads(data.decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"its json does not parse: {error}") from error
    return value if isinstance(value, dict) else {}


def label_of(data: bytes | None) -> int | None:
    """Parse a label file.

    Raises:
        DataError: the label is not a non-negative int64.
    """
    text = text_of(data)
    if text is None:
        return None
    if not (text.strip().isdecimal() and len(text.strip()) < 19):
        raise DataError(f"label {text.strip()[:40]!r} is not a whole number")
    return int(text)


class OpenShard:
    """An open shard: its index, the used samples, and the content of their members. Thread-safe.

    Args:
        file: the shard.
        selection: which samples are used.
        cache: cache of remote shards; None reads their members over the network.

    Raises:
        TruncatedError: the shard is truncated, and the selection does not accept that.
        DataError: the shard is missing or not a tar, or cannot be downloaded.

    Attributes:
        file: the shard.
        shown: its name in messages.
        index: index of all its samples.
        chosen: the used samples.
    """

    def __init__(self, file: ShardFile, selection: Selection, cache: ShardCache | None) -> None:
        self.file = file
        self.shown = file.shown
        self._truncated = selection.truncated
        self._descriptor = -1
        retries = 4  # the cache may remove a file between fetching and opening it
        while self._descriptor < 0 and (not file.is_remote or cache is not None):
            try:
                path = cache.fetch(file) if cache is not None else file.url
                # nonblocking: a named pipe may have replaced the file
                self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            except OSError as error:
                if cache is None or not isinstance(error, FileNotFoundError) or not retries:
                    raise DataError(f"shard {file.shown}: {error.strerror}") from error
                retries -= 1
        self.index = self._find_index()
        # (size, modification time) for which the content is known to equal the index, and known to differ
        self._sound = None if file.is_remote else self._state()
        self._changed: tuple[int, int] | None = None
        self._has_large = bool((self.index.sizes > _MAX_BYTES).any())
        self.chosen = self._choose(selection)
        self._rows = self.chosen.rows.data

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            os.close(self._descriptor)

    def __len__(self) -> int:
        return len(self.chosen)

    @property
    def path(self) -> Path:
        """Path of the open local file, which the cache may have removed."""
        return Path(f"/dev/fd/{self._descriptor}")

    def key(self, number: int) -> str:
        """Return the key of the ``number``-th used sample."""
        return self.index.key(self.row(number))

    def row(self, number: int) -> int:
        """Return the index row of the ``number``-th used sample.

        Raises:
            DataError: the shard has fewer samples than stated.
        """
        if number >= len(self._rows):
            raise DataError(f"its shard has only {len(self._rows)} samples, fewer than stated")
        row: int = self._rows[number]
        return row

    def caption_number(self, number: int) -> int:
        """Return the index of the caption of the ``number``-th used sample."""
        return 0 if self.chosen.captions is None else int(self.chosen.captions[number])

    def read(self, row: int, columns: tuple[int, ...]) -> list[bytes | None]:
        """Read members of a row, None for missing ones.

        Raises:
            DataError: they cannot be read, the shard has changed since it was indexed, or a member is too large.
        """
        span, descriptor = self.index.span, self._descriptor
        if self._has_large:
            for column in columns:
                _, size = span(row, column)
                if size > (limit := _MAX_BYTES[column]):
                    raise DataError(f"a member of {size} bytes is over the limit of {limit}")
        if descriptor < 0:
            return self._read_remote([span(row, column) for column in columns])
        found: list[bytes | None] = []
        try:
            for column in columns:
                offset, size = span(row, column)
                data = os.pread(descriptor, size, offset) if offset else None
                if data is not None and len(data) != size:
                    raise DataError("the shard is shorter than when it was indexed")
                found.append(data)
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
            self._sound, self._changed = now, None
        return found

    def _read_remote(self, spans: list[tuple[int, int]]) -> list[bytes | None]:
        """Read members over the network, with one request if they are close together."""
        there = [span for span in spans if span[0]]
        first = min((offset for offset, _ in there), default=0)
        last = max((offset + size for offset, size in there), default=0)
        if last - first > sum(size for _, size in there) + _NEAR * len(there):
            return [read_range(self.file, at, at + size) if at else None for at, size in spans]
        together = read_range(self.file, first, last) if there else b""
        return [together[at - first : at - first + size] if at else None for at, size in spans]

    def _state(self) -> tuple[int, int]:
        """Return size and modification time in nanoseconds."""
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns

    def _scan(self) -> ShardIndex:
        """Index what the local file contains now."""
        path = Path(f"/dev/fd/{self._descriptor}")
        try:
            members = tar_files(path, called=self.shown)
            return with_content(index_of_members(self.shown, members, truncated=self._truncated), path)
        except OSError as error:
            raise DataError(f"shard {self.shown}: {error.strerror}") from error

    def _find_index(self) -> ShardIndex:
        file, truncated = self.file, self._truncated
        if self._descriptor >= 0:
            status = os.fstat(self._descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise DataError(f"shard {self.shown} is not a regular file")
            here = file if file.is_remote else ShardFile.of_status(file.url, status)
            if here.may_be_copy_of(file):  # another host may have its own copy
                return index_shard(here, Path(f"/dev/fd/{self._descriptor}"), truncated=truncated)
            counted = stored_index(file, truncated=truncated)  # only the modification time may differ
            if counted is None or not self._scan().is_same(counted):
                raise DataError(f"shard {self.shown}: {_CHANGED}")
            return counted
        if file.size < 0:
            raise DataError(f"shard {self.shown} can be read only once: it needs data.cache_gb above 0")
        index = stored_index(file, truncated=truncated)
        if index is None:
            members = tar_files_of(self.shown, RangedBytes(file))
            index = index_of_members(self.shown, members, truncated=truncated)
            keep_index(file, index)
        return index

    def _choose(self, selection: Selection) -> Chosen:
        if not selection.reads_json:
            return selection.choose(self.index, self._content, shard=self.file.name)
        place = index_place(self.file).with_suffix(f".{self.index.digest}.{selection.identity}")
        with suppress(KeyError, TypeError):
            if (stored := read_arrays(place)) is not None:
                about, arrays = stored
                return Chosen(rows=arrays["rows"], captions=arrays.get("captions"), dropped=about["dropped"])
        content = self._content
        if selection.scores is not None:
            scores, from_json = selection.scores.rows(self.index, self.shown, selection.filters), content

            def content(row: int) -> tuple[str | None, dict[str, Any]]:
                text, meta = from_json(row) if selection.needs_content else (None, {})
                return text, {**meta, "score": scores[row]}

        chosen = selection.choose(self.index, content, shard=self.file.name)
        arrays = {"rows": chosen.rows} | ({} if chosen.captions is None else {"captions": chosen.captions})
        with suppress(OSError):
            write_arrays(place, {"dropped": chosen.dropped}, arrays)
        return chosen

    def _content(self, row: int) -> tuple[str | None, dict[str, Any]]:
        text, meta = self.read(row, (CAPTION, META))
        return text_of(text), meta_of(meta)


class Sample(NamedTuple):
    """One sample, not decoded.

    ``id`` is its number in the list of shards. A caption, label or json that is not needed (see ``Shards``) is
    omitted. ``caption`` is the content of the caption file or, without one, the json's "caption";
    ``caption_number`` is its index if each caption is a sample.
    """

    id: int
    shard: str
    key: str
    image: bytes
    caption: str | None
    label: int | None
    meta: dict[str, Any]
    caption_number: int


class Shards:
    """Random access to the used samples of a list of tars.

    Thread-safe; a copy in another process opens its own files. Members that are not needed are not read and
    may be damaged; if only the image is needed, all members are read.

    Args:
        manifest: the shards and their numbers of samples.
        selection: which samples are used; must be the manifest's.
        cache: cache of remote shards; None reads their samples over the network.

    Attributes:
        counts: (S,) int64, used samples per shard.
    """

    def __init__(
        self, manifest: "Manifest", selection: Selection, *, cache: ShardCache | None = None
    ) -> None:
        assert manifest.selection == selection.identity
        self.manifest, self.selection, self.cache = manifest, selection, cache
        self.counts = manifest.counts
        self._starts: array[int] = array("q", [0, *np.cumsum(self.counts).tolist()])
        need = set(selection.need)
        read_all = need <= {"image"}
        self._caption = read_all or "caption" in need
        self._meta = read_all or (
            "caption" in need and (selection.captions.reads_json or bool(selection.captions.negatives))
        )
        label = read_all or "label" in need
        self._columns = (IMAGE, *([CAPTION] * self._caption), *([LABEL] * label), *([META] * self._meta))
        self._forget_open()

    @classmethod
    def of(
        cls,
        shards: Sequence[ShardFile],
        *,
        need: Sequence[str] = ("image", "caption"),
        captions: CaptionRule | None = None,
        cache: ShardCache | None = None,
    ) -> "Shards":
        """Open the samples of tars that have every member in ``need``: "image", "caption" and "label".

        Raises:
            DataError: a shard is missing, truncated or not a tar, or no sample has what is needed.
        """
        from data.shards.manifest import make_manifest

        selection = Selection(need=tuple(need), captions=captions or CaptionRule())
        return cls(make_manifest([shards], selection, cache=cache), selection, cache=cache)

    def __len__(self) -> int:
        return self._starts[-1]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_open", "_open_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget_open()

    def _forget_open(self) -> None:
        self._open: OrderedDict[int, OpenShard] = OrderedDict()
        self._open_lock = Lock()
        self._open_in = os.getpid()

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that change with the set of samples or its order."""
        return self.manifest.fingerprint

    @property
    def skipped(self) -> int:
        """Number of samples that are not used."""
        return sum(self.manifest.dropped.values())

    def locate(self, number: int) -> tuple[str, str]:
        """Return shard and key of a sample without reading it; the key is empty if it is unknown."""
        shard, within = self._position(number)
        file = self.manifest.shard(shard)
        try:
            return file.shown, self._opened(shard).key(within)
        except DataError:  # the shard is gone; its index may still exist
            index = stored_index(file, truncated=self.selection.truncated)
            if index is None or self.selection.reads_json:
                return file.shown, ""
            rows = self.selection.choose(index, lambda row: (None, {}), shard=file.name).rows
            return file.shown, index.key(int(rows[within])) if within < len(rows) else ""

    def read(self, number: int) -> Sample:
        """Read sample ``number`` (0 ≤ number < len).

        Raises:
            DataError: the shard cannot be read or has changed, a member is too large, or a label is not a number.
        """
        shard, within = self._position(number)
        opened = self._opened(shard)
        row = opened.row(within)
        found = dict(zip(self._columns, opened.read(row, self._columns), strict=True))
        caption, meta = text_of(found.get(CAPTION)), meta_of(found.get(META))
        if self._caption and caption is None:
            if not self._meta:
                meta = meta_of(opened.read(row, (META,))[0])
            if isinstance(meta.get("caption"), str):
                caption = meta["caption"]
        return Sample(
            id=number,
            shard=opened.shown,
            key=opened.index.key(row),
            image=found[IMAGE] or b"",
            caption=caption,
            label=label_of(found.get(LABEL)),
            meta=meta,
            caption_number=opened.caption_number(within),
        )

    def fetch_ahead(self, shards: Sequence[int]) -> None:
        """Download these shards in the background, in this order, instead of those of an earlier call."""
        if self.cache is not None:
            remote = [file for file in map(self.manifest.shard, shards) if file.is_remote]
            if remote:
                self.cache.prefetch(remote, threads=_FETCHING)

    def _position(self, number: int) -> tuple[int, int]:
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        shard = bisect_right(self._starts, number) - 1
        return shard, number - self._starts[shard]

    def _opened(self, shard: int) -> OpenShard:
        if self._open_in != os.getpid():  # forked
            self._forget_open()
        with self._open_lock:
            if (opened := self._open.get(shard)) is not None:
                self._open.move_to_end(shard)
                return opened
        opened = OpenShard(self.manifest.shard(shard), self.selection, self.cache)
        with self._open_lock:
            self._open[shard] = opened
            while len(self._open) > _MAX_OPEN:  # readers of a removed shard still refer to it
                self._open.popitem(last=False)
        return opened
