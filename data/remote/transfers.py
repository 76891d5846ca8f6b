"""One transfer from a store: bytes that come one after the other, by whichever library speaks its protocol.

http(s), s3 and hf arrive as streams, so that what came before a connection broke is kept; other protocols of fsspec
are read in pieces; ``pipe:`` and the like are streams that only begin at their start. Whatever goes wrong is a
``TransferError``.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from data.remote import patience
from data.remote.clients import ask, call, client_of, failure_of, library_errors
from data.remote.hub import check_place, of_hub
from data.remote.patience import TransferError, of_status
from data.remote.pipes import STREAMS, PipeTransfer

__all__ = ["Transfer", "facts", "listing", "open_transfer", "protocol_of"]

_CHUNK = 1 << 20  # bytes given on at a time
_CHUNK_SECONDS = 0.5  # after which fewer are
_PIECE = 4 << 20  # bytes of one request where a protocol has no streams


class Transfer(Protocol):
    """Bytes on their way.

    Attributes:
        total: the size of the whole file, -1 where nobody says.
        version: of the file, as in ``ShardFile``.
        start: the place in the file of the first byte that comes, which may lie before the one asked for.
        checksum: an algorithm of hashlib and the digest that the whole file must have, where the store says so.
        ranged: whether it can begin anywhere in the file.
    """

    total: int
    version: str
    start: int
    ranged: bool
    checksum: tuple[str, str] | None

    def read(self) -> bytes:
        """The next bytes, none at the end; raises TransferError."""

    def close(self) -> None:
        """End the transfer, wherever it stands."""


def protocol_of(url: str) -> str:
    """What stands before the colon."""
    return url.partition(":")[0].lower()


def open_transfer(url: str, start: int = 0, stop: int | None = None) -> Transfer:
    """Begin to read a file, from ``start`` up to ``stop``, its end if None.

    Raises:
        TransferError: the store does not give it.
        DataError: the library is missing, or nobody knows the protocol.
    """
    protocol = protocol_of(url)
    if protocol in STREAMS:
        return PipeTransfer(url)
    client = client_of(protocol)
    if protocol in ("http", "https", "hf"):
        return _of_http(client, url, _range(start, stop))
    if protocol in ("s3", "s3a"):
        return _of_s3(client, url, _range(start, stop))
    size, version = facts(url)
    return _InPieces(client, url, start, size if stop is None else stop, size, version)


def facts(url: str) -> tuple[int, str]:
    """Size and version of a file that is no stream, with one short request; raises as ``open_transfer``."""
    protocol = protocol_of(url)
    client = client_of(protocol)
    if protocol in ("http", "https", "hf"):
        # not HEAD, for which signed URLs are not valid
        transfer = _of_http(client, url, "bytes=0-0")
        transfer.close()
        return transfer.total, transfer.version
    if protocol in ("s3", "s3a"):
        about = call(client, client._call_s3, "head_object", **_s3_name(client, url))
        return int(about["ContentLength"]), about.get("ETag", "").strip('"')
    return _facts_of(ask(client, "info", url))


def listing(url: str) -> list[tuple[str, int, str]]:
    """Full URL, size and version of the files directly in a folder, by the store's own listing; raises as above."""
    protocol = protocol_of(url)
    client = client_of(protocol)
    if protocol == "hf":
        check_place(client, url)
    entries = ask(client, "ls", url.rstrip("/"), detail=True, refresh=True)
    return [
        (name if "://" in (name := entry["name"]) else f"{protocol}://{name}", *_facts_of(entry))
        for entry in entries
        if entry["type"] == "file"
    ]


def _facts_of(about: Mapping[str, Any]) -> tuple[int, str]:
    size = about.get("size")
    lfs = about.get("lfs")
    candidates = [lfs.get("sha256") if lfs else None]
    candidates += [about.get(name) for name in ("blob_id", "generation", "ETag", "etag", "mtime")]
    version = next((str(one) for one in candidates if one), "")
    return -1 if size is None else int(size), version.strip('"')


def _range(start: int, stop: int | None) -> str | None:
    if start == 0 and stop is None:
        return None
    return f"bytes={start}-" if stop is None else f"bytes={start}-{stop - 1}"


def _total(content_range: str | None, default: int) -> tuple[int, int]:
    """First byte and size of the whole file, from ``bytes 0-9/100``."""
    if not content_range:
        return 0, default
    span, _, total = content_range.removeprefix("bytes").strip().partition("/")
    first = span.partition("-")[0]
    return (int(first) if first.isdecimal() else 0), (int(total) if total.isdecimal() else -1)


class _Stream:
    """A transfer of an asynchronous client."""

    def __init__(
        self, client: Any, read: Callable[[], Awaitable[bytes]], close: Callable[[], Any],
        *, total: int, version: str, start: int, ranged: bool, checksum: tuple[str, str] | None,
    ) -> None:  # fmt: skip
        self.total = total
        self.version = version
        self.start = start
        self.ranged = ranged
        self.checksum = checksum
        self._client = client
        self._read = read
        self._close = close
        self._broke: TransferError | None = None

    def read(self) -> bytes:
        if self._broke is not None:
            raise self._broke
        data: bytes = call(self._client, self._some)
        return data

    async def _some(self) -> bytes:
        loop = asyncio.get_running_loop()
        until = loop.time() + _CHUNK_SECONDS
        parts: list[bytes] = []
        size = 0
        try:
            while size < _CHUNK and loop.time() < until:
                part = await self._read()
                if not part:
                    break
                parts.append(part)
                size += len(part)
        except library_errors() as error:
            if not parts:
                raise
            self._broke = failure_of(error)  # what has come is good
        return b"".join(parts)

    def close(self) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._client.loop.call_soon_threadsafe(self._close)


def _of_http(client: Any, url: str, byte_range: str | None) -> Transfer:
    headers = {"Accept-Encoding": "identity"}
    if byte_range:
        headers["Range"] = byte_range
    if protocol_of(url) == "hf":
        url, own = of_hub(client, url)
        headers |= own
        client = client_of("hub")
    response = call(client, _get, client, _as_written(url), headers)
    checksum = None
    etags = [one.headers.get("X-Linked-ETag") for one in response.history]  # of Hugging Face
    version = next(filter(None, etags), None) or response.headers.get("ETag")
    version = (version or response.headers.get("Last-Modified", "")).removeprefix("W/").strip('"')
    if any(etags) and len(version) == 64:
        checksum = ("sha256", version)
    length = response.headers.get("Content-Length", "")
    start, total = _total(response.headers.get("Content-Range"), int(length) if length.isdecimal() else -1)
    read: Callable[[], Awaitable[bytes]] = partial(_any_of, response.content)
    if response.status == 416:
        response.close()
        if total != 0 or byte_range is None or not byte_range.startswith("bytes=0-"):
            raise of_status(416)
        read = _nothing  # of an empty file even the first byte is too much
    # where all is asked for a server that knows ranges may well answer with 200
    ranged = response.status != 200 or response.headers.get("Accept-Ranges", "").lower() == "bytes"
    return _Stream(
        client, read, response.close,
        total=total, version=version, start=start, ranged=ranged, checksum=checksum,
    )  # fmt: skip


async def _nothing() -> bytes:
    return b""


def _as_written(url: str) -> Any:
    import yarl

    try:  # where it can be left as it is it must be, as its signature may be of that
        return yarl.URL(url, encoded=url.isascii() and url.isprintable() and " " not in url)
    except ValueError:
        raise TransferError("this is no URL", temporary=False) from None


async def _get(client: Any, url: Any, headers: dict[str, str]) -> Any:
    import aiohttp

    limits = patience.PATIENCE
    session = await client.set_session()
    times = aiohttp.ClientTimeout(
        total=None, sock_connect=limits.connect_seconds, sock_read=limits.stall_seconds
    )
    response = await session.get(url, headers=headers, timeout=times, read_bufsize=_CHUNK)
    if response.status not in (200, 206, 416):
        after = response.headers.get("Retry-After", "")
        response.close()
        raise of_status(response.status, wait=float(after) if after.isdecimal() else None)
    return response


async def _any_of(content: Any) -> bytes:
    """What a stream of aiohttp holds, or else what comes next.

    When a connection breaks aiohttp withholds the bytes that came before; they are fetched all the same, as a
    server that breaks off again and again would else never bring us on.
    """
    from aiohttp import ClientError

    try:
        data: bytes = await content.readany()
    except (ClientError, OSError) as error:
        content.set_exception(None)
        data = content.read_nowait()
        content.set_exception(error)
        if not data:
            raise
    return data


def _s3_name(client: Any, url: str) -> dict[str, str]:
    bucket, key, version = client.split_path(url)
    return {"Bucket": bucket, "Key": key, **({"VersionId": version} if version else {})}


def _of_s3(client: Any, url: str, byte_range: str | None) -> Transfer:
    named = _s3_name(client, url)
    if byte_range:
        named["Range"] = byte_range
    answer = call(client, client._call_s3, "get_object", **named)
    body = answer["Body"]
    version = answer.get("ETag", "").strip('"')
    # the etag is no MD5 of a file that came in parts or that is encrypted with a key of its own
    plain = answer.get("ServerSideEncryption") in (None, "AES256") and "SSECustomerAlgorithm" not in answer
    checksum = ("md5", version) if plain and len(version) == 32 and version.isalnum() else None
    start, total = _total(answer.get("ContentRange"), int(answer["ContentLength"]))

    content = getattr(getattr(body, "raw_stream", None), "content", None)
    read = partial(body.read, _CHUNK) if content is None else partial(_any_of, content)
    ranged = "ContentRange" in answer or answer.get("AcceptRanges", "").lower() == "bytes"
    return _Stream(
        client, read, body.close,
        total=total, version=version, start=start, ranged=ranged, checksum=checksum,
    )  # fmt: skip


class _InPieces:
    """A transfer by one request after the other."""

    ranged = True
    checksum: tuple[str, str] | None = None

    def __init__(self, client: Any, url: str, start: int, stop: int, total: int, version: str) -> None:
        self.total = total
        self.version = version
        self.start = start
        self._client = client
        self._url = url
        self._stop = min(stop, total) if total >= 0 else stop

    def read(self) -> bytes:
        if self.start >= self._stop:
            return b""
        stop = min(self._stop, self.start + _PIECE)
        data: bytes = ask(self._client, "cat_file", self._url, start=self.start, end=stop)
        self.start = stop
        return data

    def close(self) -> None:
        pass
