"""Local and remote shards: size and version, listings, byte ranges, downloads, and scans of tar headers."""

import hashlib
import json
import os
import re
import stat
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import TypeVar
from urllib.parse import urljoin, urlsplit

from clipkit.errors import DataError
from clipkit.files import name_order, redact_url, replacing, write_atomic
from clipkit.samples.remote.transfer import (
    HUB_FORM,
    Attempts,
    Transfer,
    TransferError,
    file_facts,
    get_protocol,
    listing,
    open_transfer,
)

T = TypeVar("T")
_THREADS = 32  # concurrent requests for size and version
_MAX_PAGE_BYTES = 64 << 20  # of a listing: about 500,000 links
# bytes of a request of RangedBytes
_SMALLEST_BLOCK = 64 << 10
_LARGEST_BLOCK = 8 << 20
_FAR = 1 << 20  # bytes between headers beyond which reading the data takes longer than another request


# parameters of signed URLs of S3 and Google, which state who may read a file until when
_SIGNATURE = re.compile(
    "x-(amz|goog)-(algorithm|credential|date|expires|signedheaders|signature|security-token)=", re.IGNORECASE
)


def is_remote(source: str) -> bool:
    """Return whether a source is a URL or ``pipe:COMMAND`` rather than a path."""
    return "://" in source or source.startswith("pipe:")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardFile:
    """A tar on this machine or in a store.

    Attributes:
        url: absolute path or full URL.
        size: in bytes, -1 if unknown.
        version: changes with the content: the store's etag; for a local file modification time and change time in
            nanoseconds and inode; empty if unknown.
    """

    url: str
    size: int
    version: str

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self.url.partition("?")[0].rstrip("/").rpartition("/")[2]

    @property
    def shown(self) -> str:
        """The URL for messages, without secrets."""
        return redact_url(self.url)

    @property
    def identity(self) -> str:
        """A text that differs between files, and between versions of a file.

        URLs that differ only in their signature name the same file if its version is known.
        """
        url = self.url
        if self.version and "?" in url and is_remote(url):
            address, _, query = url.partition("?")
            parameters = [part for part in query.split("&") if not _SIGNATURE.match(part)]
            url = "?".join([address, *filter(None, ["&".join(parameters)])])
        return f"{url}\n{self.size}\n{self.version}"

    @property
    def is_remote(self) -> bool:
        """Whether the file must be fetched."""
        return is_remote(self.url)

    @classmethod
    def at(cls, path: Path) -> "ShardFile":
        """Describe a local file."""
        try:
            status = path.stat()
        except OSError as error:
            raise DataError(f"shard {path}: {error.strerror}") from error
        if not stat.S_ISREG(status.st_mode):  # opening a named pipe would block
            raise DataError(f"shard {path} is not a regular file")
        return cls.from_status(str(path.absolute()), status)

    @classmethod
    def from_status(cls, url: str, status: os.stat_result) -> "ShardFile":
        """Describe a local file by its status."""
        # copying and unpacking may set any modification time
        version = f"{status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"
        return cls(url=url, size=status.st_size, version=version)

    def may_be_copy_of(self, other: "ShardFile") -> bool:
        """Whether size and modification time, which a copy keeps, are equal."""
        return (self.size, self.version.partition(" ")[0]) == (other.size, other.version.partition(" ")[0])


def list_folder(url: str, suffixes: tuple[str, ...] = (".tar",)) -> list[ShardFile]:
    """Return the files with these suffixes directly in a folder, see ``list_entries``, with their sizes."""
    files = [file for file in list_entries(url)[0] if file.name.endswith(suffixes)]
    if files and files[0].size < 0:
        return describe_files([file.url for file in files])
    return files


def list_entries(url: str) -> tuple[list[ShardFile], list[str]]:
    """List a folder: the files directly in it, sorted by ``name_order``, and the names of folders.

    Both are empty if there is no folder. On a web server, the folder's page of links is read, which states no
    sizes; only links into the same folder are used.
    """
    if get_protocol(url) == "pipe":
        raise DataError(f"{redact_url(url)}: a stream is not a folder that can be listed; name the shards")
    if get_protocol(url) in ("http", "https"):
        links = _links(url.partition("#")[0].partition("?")[0].rstrip("/") + "/")
        entries = [(link, -1, "") for link in links]
    else:
        entries = _request_retrying(url, lambda: listing(url), none_for=(404, 410)) or []
    files: list[ShardFile] = []
    folders: list[str] = []
    for name, size, version in entries:
        if name.endswith("/"):
            folders.append(name.rstrip("/").rpartition("/")[2])
        else:
            files.append(ShardFile(url=name, size=size, version=version))
    return sorted(files, key=lambda file: name_order(file.name)), sorted(folders)


def _links(folder: str) -> list[str]:
    text = read_text(folder, limit=_MAX_PAGE_BYTES)
    if text is None:
        return []
    links: list[str] = []

    class Links(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            if tag == "a":
                links.extend(value for name, value in attrs if name == "href" and value)

    Links().feed(text)
    host = urlsplit(folder).netloc
    targets: dict[str, None] = {}
    for link in links:
        try:
            target = urljoin(folder, link)
            # absolute links omit the user name and password of the folder's URL
            parts = urlsplit(target)
            if parts.netloc == host.rpartition("@")[2]:
                target = parts._replace(netloc=host).geturl()
        except ValueError:  # not a URL
            continue
        name = target.removeprefix(folder)
        if name and name != target and "/" not in name[:-1] and not set(name).intersection("?#"):
            targets[target] = None
    return list(targets)


def describe_files(urls: Sequence[str]) -> list[ShardFile]:
    """Return size and version of local and remote files; both are unknown for a stream (``pipe:``)."""
    failed = threading.Event()  # only the first of many shards is retried

    def look(url: str) -> ShardFile | None:
        if failed.is_set():
            return None
        if not is_remote(url):
            return ShardFile.at(Path(url)) if Path(url).exists() else None
        if get_protocol(url) == "pipe":
            return ShardFile(url=url, size=-1, version="")
        try:
            facts = _request_retrying(url, lambda: file_facts(url), none_for=(404, 410))
        except DataError:
            failed.set()
            raise
        if facts is None:
            return None
        return ShardFile(url=url, size=facts[0], version=facts[1])

    pool = ThreadPoolExecutor(min(_THREADS, max(1, len(urls))))
    try:
        files = list(pool.map(look, urls))
    finally:
        pool.shutdown(cancel_futures=True)
    missing = [url for url, shard in zip(urls, files, strict=True) if shard is None]
    if missing:
        form = ""
        if get_protocol(missing[0]) == "hf":
            form = f"; the form is {HUB_FORM}"
        if len(urls) == 1:
            raise DataError(f"{redact_url(missing[0])}: there is no such file{form}")
        raise DataError(
            f"{len(missing)} of {len(urls)} shards are missing, the first is {redact_url(missing[0])}{form}"
        )
    return [file for file in files if file is not None]


def _request_retrying(url: str, request: Callable[[], T], *, none_for: Sequence[int] = ()) -> T | None:
    attempts = Attempts(url)
    while True:
        try:
            result = request()
            attempts.answered()
            return result
        except TransferError as error:
            if error.status in none_for:
                attempts.answered()
                return None
            attempts.failed(error)


def read_text(url: str, *, limit: int) -> str | None:
    """Read a small file next to shards; None if it does not exist or access is denied."""

    def read() -> bytes:
        with open_transfer(url) as transfer:
            data = b""
            for chunk in transfer.chunks:
                data += chunk
                if len(data) > limit:
                    break
            if len(data) < min(transfer.total, limit):
                raise TransferError("the transfer ended early", temporary=True)
            return data

    # a store may answer "forbidden" for a missing file, and a signed URL is valid for one file only
    data = _request_retrying(url, read, none_for=(401, 403, 404, 410))
    if data is None:
        return None
    if len(data) > limit:
        raise DataError(f"{redact_url(url)} is longer than {limit} bytes")
    return str(data, "utf-8", "replace")


def read_range(shard: ShardFile, start: int, stop: int) -> bytes:
    """Read the bytes ``start`` to ``stop`` of a shard."""
    data = bytearray()
    attempts = Attempts(shard.url, was_counted=shard.size >= 0 or bool(shard.version))
    while len(data) < stop - start:
        here = start + len(data)
        try:
            with open_transfer(shard.url, here, stop) as transfer:
                _check_same(shard, transfer)
                if not transfer.ranged or transfer.start != here:
                    attempts.give_up(
                        "the server does not support byte ranges, only whole files: set data.cache_gb (--cache-gb) "
                        "above 0"
                    )
                for chunk in transfer.chunks:
                    data += chunk[: stop - start - len(data)]
                    attempts.received(len(chunk))
                    if len(data) == stop - start:
                        break
                else:
                    raise TransferError("the transfer ended early", temporary=True)
        except TransferError as error:
            if error.status == 416:
                raise _changed(shard) from None
            attempts.failed(error)
    return bytes(data)


def _check_same(shard: ShardFile, transfer: Transfer) -> None:
    other_size = min(shard.size, transfer.total) >= 0 and shard.size != transfer.total
    if other_size or (shard.version and transfer.version and shard.version != transfer.version):
        raise _changed(shard)


def _changed(shard: ShardFile) -> DataError:
    return DataError(f"{redact_url(shard.url)} has changed since it was indexed: restart to index it again")


def download(shard: ShardFile, path: Path, *, reserve: Callable[[int], None] | None = None) -> int:
    """Download a whole file into ``path``; after a failure, resume at the last byte received.

    A stream (``pipe:``) is restarted. The size is checked, and the checksum if the store states one: an S3 etag
    that is an MD5, or the SHA-256 of a large file of Hugging Face.

    Args:
        shard: the file.
        path: output file, overwritten. It is not synced, and remains after a failure.
        reserve: called with the new size before each write; an exception raised by it aborts the download.

    Returns:
        The CRC-32 of the bytes.
    """
    attempts = Attempts(shard.url, was_counted=shard.size >= 0 or bool(shard.version))
    is_stream = get_protocol(shard.url) == "pipe"
    size = furthest = crc = 0
    version = ""
    digest = None
    try:
        with path.open("r+b" if path.exists() else "wb") as file:
            while True:
                if is_stream:
                    size = 0
                if size == 0:
                    file.seek(0)
                    version = ""
                    digest = None
                    crc = 0
                try:
                    with open_transfer(shard.url, size) as transfer:
                        if not is_stream:  # a running command may still fail
                            attempts.answered()
                        _check_same(replace(shard, version=version) if version else shard, transfer)
                        version = transfer.version
                        if not 0 <= transfer.start <= size:
                            attempts.give_up("the server returned a different byte range than requested")
                        skip = size - transfer.start  # for a server that always starts at the beginning
                        expected = max(transfer.total, shard.size)
                        for chunk in transfer.chunks:
                            new = chunk[skip:]
                            skip = max(0, skip - len(chunk))
                            # only new bytes reset the retries; otherwise a download could restart forever
                            attempts.received(len(chunk), new=size + len(new) > furthest)
                            if not new:
                                continue
                            if 0 <= expected < size + len(new):
                                attempts.give_up(f"the file is longer than its {expected} bytes")
                            if reserve is not None:
                                reserve(size + len(new))
                            if transfer.checksum and not size:
                                digest = hashlib.new(transfer.checksum[0], usedforsecurity=False)
                            file.write(new)
                            size += len(new)
                            furthest = max(furthest, size)
                            crc = zlib.crc32(new, crc)
                            if digest is not None:
                                digest.update(new)
                        if size < expected:
                            raise TransferError(
                                f"the transfer ended at byte {size} of {expected}", temporary=True
                            )
                        if digest and transfer.checksum not in (None, (digest.name, digest.hexdigest())):
                            size = 0
                            raise TransferError(
                                "the checksum differs from the one stated by the store", temporary=True
                            )
                    break
                except TransferError as error:
                    if error.status == 416 and size:
                        raise _changed(shard) from None
                    attempts.failed(error)
            attempts.answered()
            file.truncate(size)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}") from error
    return crc


def download_all(files: Sequence[ShardFile], folder: Path) -> list[Path]:
    """Download files into a folder under their own names, except those that it has; return their paths.

    A file is downloaded again if its size or version differs from that of the copy.
    """
    paths = [folder / file.name for file in files]
    names = Counter(file.name for file in files)
    repeated = next((name for name, count in names.items() if count > 1), None)
    if repeated:
        raise DataError(f"several files are called {repeated}: use one at a time")
    folder.mkdir(parents=True, exist_ok=True)
    for file, path in zip(files, paths, strict=True):
        source_path = path.with_name(f".{file.name}.source")
        # a hash, because the URL may contain secrets
        url_hash = hashlib.sha256(os.fsencode(file.url)).hexdigest()
        source = json.dumps({"url": url_hash, "size": file.size, "version": file.version})
        if path.exists() and source_path.exists() and source_path.read_text() == source:
            continue
        with replacing(path, durable=True) as temporary:
            download(file, temporary)
        write_atomic(source_path, source, durable=True)
    return paths


class RangedBytes:
    """The bytes of a remote shard for a scan of its headers (a ``Content`` of ``clipkit.samples.tar``).

    Reads ahead: blocks double up to 8 MiB if headers are close together; with members so large that reading them
    takes longer than a request, only the surroundings of headers are read. Not thread-safe.

    Attributes:
        bytes_read: bytes read by all requests.
    """

    def __init__(self, shard: ShardFile) -> None:
        if shard.size < 0:
            raise DataError(f"{redact_url(shard.url)}: its size is unknown, so it cannot be read in parts")
        self._shard = shard
        self._start = 0
        self._block = b""
        self._block_size = _SMALLEST_BLOCK
        self._served = 0  # reads from the current block
        self.requests = 0
        self.bytes_read = 0

    def __len__(self) -> int:
        return self._shard.size

    def __getitem__(self, part: slice, /) -> bytes:
        start, stop, step = part.indices(len(self))
        assert step == 1
        if stop <= start:
            return b""
        if not self._start <= start <= stop <= self._start + len(self._block):
            if self._block:
                close = 0 <= (start - self._start) / max(self._served, 1) <= _FAR
                self._block_size = min(self._block_size * 2, _LARGEST_BLOCK) if close else _SMALLEST_BLOCK
            self._block = read_range(self._shard, start, min(max(stop, start + self._block_size), len(self)))
            self._start = start
            self._served = 0
            self.requests += 1
            self.bytes_read += len(self._block)
        self._served += 1
        return self._block[start - self._start : stop - self._start]
