"""Shards that lie in a store: what is there, ranges of them, and whole files.

s3, gs, http(s) and hf are read through fsspec; ``pipe:COMMAND`` and other streams that only begin at their start
through webdataset's programs. Failures that pass by themselves are tried again (see ``data.remote.patience``), from
the byte that was reached. Credentials come from the environment or the store's standard configuration alone, and no
message holds more of a URL than ``shown`` leaves.
"""

import hashlib
import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urljoin, urlsplit

from clipkit.errors import DataError
from clipkit.urls import shown
from data.remote.hub import HUB_FORM
from data.remote.patience import Attempts, TransferError
from data.remote.pipes import STREAMS
from data.remote.transfers import Transfer, facts, listing, open_transfer, protocol_of
from data.shard_file import ShardFile, is_remote

__all__ = [
    "HUB_FORM",
    "RangedBytes",
    "describe",
    "download",
    "list_folder",
    "read_range",
    "read_text",
    "shown",
]

_MANY = 32  # questions to a store at a time
_MAX_PAGE_BYTES = 64 << 20  # of a listing: some 500,000 links
_SMALLEST_BLOCK = 64 << 10
_LARGEST_BLOCK = 8 << 20
_FAR = (
    1 << 20
)  # bytes; where headers lie further apart, the data between them take longer than another request


def list_folder(url: str) -> list[ShardFile]:
    """The ``*.tar`` directly in a folder, by (length of the name, name); none where there are none.

    A folder of http(s) is its page of links; of these only those into the same folder count.

    Raises:
        DataError: the folder cannot be listed.
    """
    if protocol_of(url) in STREAMS:
        raise DataError(f"{shown(url)}: this is no folder that can be listed; name the shards")
    if protocol_of(url) in ("http", "https"):
        shards = describe(_links(url))
    else:
        found = _patiently(url, lambda: listing(url))
        shards = [
            ShardFile(url=name, size=size, version=version)
            for name, size, version in found
            if name.endswith(".tar")
        ]
    return sorted(shards, key=lambda shard: (len(shard.name), shard.name))


def _links(url: str) -> list[str]:
    folder = url.partition("#")[0].partition("?")[0].rstrip("/") + "/"
    text = read_text(folder, limit=_MAX_PAGE_BYTES)
    if text is None:
        raise DataError(f"{shown(folder)}: there is no such folder, or it may not be listed; name the shards")
    parser = _Links()
    parser.feed(text)
    found = dict.fromkeys(_joined(folder, link) for link in parser.links)
    return [
        link
        for link in found
        if link.startswith(folder) and link.endswith(".tar") and "/" not in link[len(folder) :]
    ]


def _joined(folder: str, link: str) -> str:
    try:
        whole = urljoin(folder, link)
        # a link of the whole address leaves out the user that we came with
        if (parts := urlsplit(whole)).netloc == urlsplit(folder).netloc.rpartition("@")[2]:
            whole = parts._replace(netloc=urlsplit(folder).netloc).geturl()
    except ValueError:  # not everything in a page is a URL
        return ""
    return whole


class _Links(HTMLParser):
    """What the links of a page point to."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.links += [value for name, value in attrs if name == "href" and value]


def describe(urls: Sequence[str]) -> list[ShardFile]:
    """Size and version of each of these, in their order; many are asked at a time.

    Paths of this machine are described too; of a stream (``pipe:``) nothing is known.

    Raises:
        DataError: some are missing (they are counted, the first is named), or the store does not answer.
    """
    failed = threading.Event()  # none but the first of a million shards is tried again and again

    def look(url: str) -> ShardFile | None:
        try:
            return None if failed.is_set() else _described(url)
        except DataError:
            failed.set()
            raise

    pool = ThreadPoolExecutor(min(_MANY, max(1, len(urls))))
    try:
        found = list(pool.map(look, urls))
    finally:
        pool.shutdown(cancel_futures=True)
    missing = [url for url, shard in zip(urls, found, strict=True) if shard is None]
    if missing:
        form = f"; the form is {HUB_FORM}" if protocol_of(missing[0]) == "hf" else ""
        if len(urls) == 1:
            raise DataError(f"{shown(missing[0])}: there is no such file{form}")
        raise DataError(
            f"{len(missing)} of {len(urls)} shards are missing, the first is {shown(missing[0])}{form}"
        )
    return [shard for shard in found if shard is not None]


def _described(url: str) -> ShardFile | None:
    if not is_remote(url):
        return ShardFile.at(Path(url)) if Path(url).exists() else None
    if protocol_of(url) in STREAMS:
        return ShardFile(url=url, size=-1, version="")
    found = _patiently(url, lambda: facts(url), (404, 410))
    return None if found is None else ShardFile(url=url, size=found[0], version=found[1])


def _patiently(url: str, work: Callable[[], Any], none_for: Sequence[int] = ()) -> Any:
    """The result of a short request, None for these statuses."""
    attempts = Attempts(url)
    while True:
        try:
            result = work()
            attempts.answered()
            return result
        except TransferError as error:
            if error.status in none_for:
                attempts.answered()
                return None
            attempts.failed(error)


def read_text(url: str, *, limit: int) -> str | None:
    """A small file beside shards; None where there is none, or where only the shards may be read.

    Raises:
        DataError: it is longer than ``limit`` bytes, or the store does not answer.
    """

    def read() -> bytes:
        with closing(open_transfer(url)) as transfer:
            data = b""
            while len(data) <= limit and (part := transfer.read()):
                data += part
            if len(data) < min(transfer.total, limit):
                raise TransferError("it ended early", temporary=True)
            return data

    # a store may say "forbidden" of what is not there to those who may not list, and a signed URL is of one file
    data = _patiently(url, read, (401, 403, 404, 410))
    if data is None:
        return None
    if len(data) > limit:
        raise DataError(f"{shown(url)} is longer than {limit} bytes")
    return str(data, "utf-8", "replace")


def read_range(shard: ShardFile, start: int, stop: int) -> bytes:
    """Exactly the bytes ``start`` to ``stop`` of a shard.

    Raises:
        DataError: the file has changed since it was indexed, its server has no ranges, or it does not answer.
    """
    if stop <= start:
        return b""
    attempts = _attempts(shard)
    data = bytearray()
    while len(data) < stop - start:
        try:
            _read_on(shard, start, stop, data, attempts)
        except TransferError as error:
            if error.status == 416:
                raise _changed(shard) from None
            attempts.failed(error)
    return bytes(data)


def _attempts(shard: ShardFile) -> Attempts:
    attempts = Attempts(shard.url)
    if shard.size >= 0 or shard.version:  # somebody has been told of it, if not this process
        attempts.answered()
    return attempts


def _read_on(shard: ShardFile, start: int, stop: int, data: bytearray, attempts: Attempts) -> None:
    here = start + len(data)
    with closing(open_transfer(shard.url, here, stop)) as transfer:
        _check_same(shard, transfer)
        if not transfer.ranged or transfer.start != here:
            attempts.give_up(
                "this server gives no ranges, only whole files: set data.cache_gb (--cache-gb) to more than 0"
            )
        while len(data) < stop - start and (part := transfer.read()):
            data += part[: stop - start - len(data)]
            attempts.received(len(part))
        if len(data) < stop - start:
            raise TransferError("it ended early", temporary=True)


def _check_same(shard: ShardFile, transfer: Transfer) -> None:
    other_size = min(shard.size, transfer.total) >= 0 and shard.size != transfer.total
    if other_size or (shard.version and transfer.version and shard.version != transfer.version):
        raise _changed(shard)


def _changed(shard: ShardFile) -> DataError:
    return DataError(f"{shown(shard.url)} has changed since it was indexed: start again, to index it anew")


def download(shard: ShardFile, path: Path, *, room: Callable[[int], None] | None = None) -> int:
    """Fetch a whole file into ``path``, going on after a failure at the byte that was reached.

    A stream (``pipe:``) begins again. The size is checked, and the checksum where the store states one: an S3
    etag that is an MD5, the SHA-256 of a large file of Hugging Face.

    Args:
        shard: what to fetch.
        path: the file to make; what it holds is overwritten. It is not synced, and stays behind after a failure.
        room: called before each write with the size that the file is going to have; what it raises ends all.

    Returns:
        The CRC-32 of the bytes.

    Raises:
        DataError: the store does not give the file, gives another one, or it cannot be written.
    """
    attempts = _attempts(shard)
    try:
        with path.open("wb") if not path.exists() else path.open("r+b") as file:
            sink = _Sink(file, room)
            while not _fetched(shard, sink, attempts):
                pass
            file.truncate(sink.size)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}") from error
    return sink.crc


class _Sink:
    """A file that is written from its start, and what is known of its bytes.

    ``version`` is that of the file whose first bytes it has; ``furthest`` the largest size that it has had.
    """

    def __init__(self, file: BinaryIO, room: Callable[[int], None] | None) -> None:
        self._file = file
        self._room = room
        self.furthest = 0
        self.restart()

    def restart(self) -> None:
        self._file.seek(0)
        self.version = ""
        self.size = 0
        self.crc = 0
        self._digests: dict[str, Any] = {}

    def write(self, data: bytes, checksum: tuple[str, str] | None) -> None:
        if self._room is not None:
            self._room(self.size + len(data))
        if checksum is not None and not self.size:
            self._digests = {checksum[0]: hashlib.new(checksum[0], usedforsecurity=False)}
        self._file.write(data)
        self.size += len(data)
        self.furthest = max(self.furthest, self.size)
        self.crc = zlib.crc32(data, self.crc)
        for digest in self._digests.values():
            digest.update(data)

    def agrees(self, checksum: tuple[str, str] | None) -> bool:
        digest = self._digests.get(checksum[0]) if checksum else None
        return digest is None or checksum is None or digest.hexdigest() == checksum[1]


def _fetched(shard: ShardFile, sink: _Sink, attempts: Attempts) -> bool:
    """Whether all has come now; False when there is more to try."""
    try:
        if protocol_of(shard.url) in STREAMS:
            sink.restart()
        with closing(open_transfer(shard.url, sink.size)) as transfer:
            if protocol_of(shard.url) not in STREAMS:  # a command that runs may still fail
                attempts.answered()
            _check_same(replace(shard, version=sink.version) if sink.version else shard, transfer)
            sink.version = transfer.version
            if not 0 <= transfer.start <= sink.size:
                attempts.give_up("its server answers with other bytes than those asked for")
            known = sink.size - transfer.start  # of a server that always begins at the start
            expected = max(transfer.total, shard.size)
            while part := transfer.read():
                new = part[known:]
                # what is begun again must come further than before, or it would begin again for ever
                attempts.received(len(part), new=sink.size + len(new) > sink.furthest)
                if new:
                    if 0 <= expected < sink.size + len(new):
                        attempts.give_up(f"more comes than its {expected} bytes")
                    sink.write(new, transfer.checksum)
                known = max(0, known - len(part))
            if sink.size < expected:
                raise TransferError(f"it ended at byte {sink.size} of {expected}", temporary=True)
            if not sink.agrees(transfer.checksum):
                sink.restart()
                raise TransferError(
                    "its bytes do not have the checksum that the store states", temporary=True
                )
    except TransferError as error:
        if error.status == 416 and sink.size:
            raise _changed(shard) from None
        attempts.failed(error)
        return False
    attempts.answered()
    return True


class RangedBytes:
    """The bytes of a shard in a store, for a scan of its headers (a ``Content`` of ``clipkit.tar``).

    Reads ahead. Where headers lie close together blocks double up to 8 MiB, so that a scan takes one request for
    each of these; where members are so large that their data take longer than a request, only the surroundings of
    headers are read. Not for several threads at once.

    Attributes:
        requests: how many there were.
        bytes_read: by all of these.
    """

    def __init__(self, shard: ShardFile) -> None:
        if shard.size < 0:
            raise DataError(f"{shown(shard.url)}: nobody knows its size, so it cannot be read in parts")
        self._shard = shard
        self._start = 0
        self._block = b""
        self._block_size = _SMALLEST_BLOCK
        self._served = 0  # reads of places that lie one after the other
        self.requests = 0
        self.bytes_read = 0

    def __len__(self) -> int:
        return self._shard.size

    def __getitem__(self, part: slice, /) -> bytes:
        start, stop, step = part.indices(len(self))
        assert step == 1, "bytes are read in their order"
        if stop <= start:
            return b""
        if not self._start <= start <= stop <= self._start + len(self._block):
            self._read(start, stop)
        self._served += 1
        return self._block[start - self._start : stop - self._start]

    def _read(self, start: int, stop: int) -> None:
        if self._block:
            stride = (start - self._start) / max(self._served, 1)
            close = 0 <= stride <= _FAR
            self._block_size = min(self._block_size * 2, _LARGEST_BLOCK) if close else _SMALLEST_BLOCK
        stop = min(max(stop, start + self._block_size), len(self))
        self._block = read_range(self._shard, start, stop)
        self._start, self._served = start, 0
        self.requests += 1
        self.bytes_read += len(self._block)
