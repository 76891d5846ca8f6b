"""Transfers from object stores and web servers: clients, failures and retries.

s3, gs, http(s) and hf are read through fsspec's clients; ``pipe:COMMAND`` is the output of a program. Credentials
come from the environment or the store's standard configuration only, and messages contain only the parts of a URL
that ``shown`` keeps. Libraries are imported at first use.
"""

import errno
import importlib
import logging
import os
import random
import re
import select
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn
from urllib.parse import quote

from clipkit.errors import DataError
from clipkit.files import printable, redact_url

if TYPE_CHECKING:
    import aiohttp
    import yarl

HUB_FORM = "hf://datasets/OWNER/NAME/PATH-{00000..00010}.tar"


# --------------------------------------------------------------------------------------------------------------
# Failures and retries.
#
# A temporary failure (broken connection, timeout, overloaded server) is retried after a wait that doubles;
# others fail at once. If a store has never answered, the name is probably wrong, and requests fail within seconds;
# if it has answered before, it is assumed to be temporarily down.

_log = logging.getLogger(__name__)
_random = random.SystemRandom()  # differs between forked processes and is independent of any seed
_QUIET_FAILURES = 2  # in a row, before failures are logged
_PROGRESS = 1 << 20  # bytes that reset the count of failures
_TEMPORARY = (408, 425, 429, 500, 502, 503, 504)
_MEANING = {
    400: "the server refused the request as invalid",
    401: "access is denied",
    403: "access is denied",
    404: "there is no such file",
    410: "there is no such file",
    416: "the file is shorter than the requested range",
    429: "too many requests",
    503: "the server is overloaded or under maintenance",
}
_answered: set[str] = set()  # stores that have answered this process or its parent


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How often and how long to retry.

    Attributes:
        tries: consecutive failures, with less than 1 MiB read between them.
        first_wait: seconds before the first retry; each further wait is twice as long.
        longest_wait: seconds.
        total_seconds: limit for consecutive failures.
        contact_waits: seconds between attempts to reach a store that has never answered.
        contact_seconds: limit for these attempts.
        connect_seconds: timeout for connecting.
        stall_seconds: timeout for a transfer without progress.
    """

    tries: int = 8
    first_wait: float = 0.5
    longest_wait: float = 30.0
    total_seconds: float = 600.0
    contact_waits: tuple[float, ...] = (1.5, 3.0)  # enough for a server that is being started
    contact_seconds: float = 5.0
    connect_seconds: float = 20.0
    stall_seconds: float = 60.0


PATIENCE = Patience()  # read at each use; a program may replace it


class Unreachable(DataError):
    """The store did not answer, or failed, despite all retries."""


class TransferError(Exception):
    """One failure of a store.

    Args:
        message: description without the URL and without text from the store or a library.
        temporary: whether a retry may succeed.
        status: the HTTP status, if there is one.
        wait: seconds to wait, requested by the server.
        unreached: whether nothing answered (unknown host, closed port, failed command).
    """

    def __init__(
        self,
        message: str,
        *,
        temporary: bool,
        status: int | None = None,
        wait: float = 0.0,
        unreached: bool = False,
    ) -> None:
        super().__init__(message)
        self.temporary = temporary
        self.status = status
        self.wait = wait
        self.unreached = unreached


def http_error(status: int, *, wait: float = 0.0) -> TransferError:
    """Return the error for an HTTP status."""
    meaning = _MEANING.get(status, "the server failed" if status >= 500 else "the server refused the request")
    message = f"{meaning} (status {status})"
    if status in (401, 403):
        message += "; credentials come from the environment or the standard configuration of the store"
    return TransferError(message, temporary=status in _TEMPORARY or status > 504, status=status, wait=wait)


def answered(url: str) -> None:
    """Record that the store of a URL has answered: later failures to reach it are treated as outages."""
    _answered.add(_identify_store(url))


def _identify_store(url: str) -> str:
    protocol, _, rest = url.partition(":")
    if protocol == "pipe":
        return f"pipe:{next((word for word in rest.split() if '=' not in word), '')}"
    host = rest.lstrip("/").partition("/")[0].rpartition("@")[2]
    return "hf" if protocol == "hf" else f"{protocol}:{host.lower()}"


class Attempts:
    """Count the failures of one request and wait between retries.

    Args:
        url: the file.
        was_counted: whether this or another process has read the file before.
    """

    def __init__(self, url: str, *, was_counted: bool = False) -> None:
        self._url = url
        self._failures = 0
        self._bytes = 0
        self._since = time.monotonic()
        self._unreached: list[float] = []  # times of the failures to reach the store
        if was_counted:
            self.answered()

    def received(self, count: int, *, new: bool = True) -> None:
        """Count bytes; enough of them reset the retries if they are ``new``."""
        self._bytes += count
        enough = self._bytes >= _PROGRESS
        if enough:
            self.answered()
            if new:
                self._failures = 0
        if enough or not self._failures:
            self._since = time.monotonic()

    def answered(self) -> None:
        """Record that the store has answered."""
        answered(self._url)
        self._unreached.clear()

    def failed(self, error: TransferError) -> None:
        """Wait before the next attempt.

        Raises:
            DataError: retrying is useless; ``Unreachable`` if retries did not help.
        """
        self._failures += 1
        self._bytes = 0
        if error.status is not None:
            self.answered()
        if not error.temporary:
            self.give_up(str(error))
        now = time.monotonic()
        if error.unreached and _identify_store(self._url) not in _answered:
            self._unreached.append(now)
            tries = len(self._unreached)
            since = self._unreached[0]
            limit = PATIENCE.contact_seconds
            last = tries > len(PATIENCE.contact_waits)
            wait = 0.0
            if not last:
                wait = PATIENCE.contact_waits[tries - 1] * _random.uniform(0.8, 1.0)
        else:
            self._unreached.clear()
            tries = self._failures
            since = self._since
            limit = PATIENCE.total_seconds
            last = tries >= PATIENCE.tries
            # random, so that readers that failed together do not retry together
            wait = min(PATIENCE.longest_wait, PATIENCE.first_wait * 2 ** (tries - 1))
            wait = min(max(wait * _random.uniform(0.5, 1.0), error.wait), PATIENCE.longest_wait)
        if last or now - since + wait > limit:
            message = f"{error}; gave up after {tries} tries in {now - since:.0f} s"
            raise Unreachable(f"{redact_url(self._url)}: {message}") from None
        if self._failures > _QUIET_FAILURES:
            _log.warning("%s: %s; trying again in %.1f s", redact_url(self._url), error, wait)
        time.sleep(wait)

    def give_up(self, message: str) -> NoReturn:
        """Raise a one-line error."""
        raise DataError(
            f"{redact_url(self._url)}: {message}"
        ) from None  # a library's error may contain the signed URL


# --------------------------------------------------------------------------------------------------------------
# URLs are sent as they are written: a signed URL is valid only character by character.

# a percent sign that begins no escape, and characters that RFC 3986 does not allow in a URL
_INVALID = re.compile(r"%(?![0-9A-Fa-f]{2})|[^A-Za-z0-9\-._~:/?#\[\]@!$&'()*+,;=%]")


def encode_url(text: str) -> "yarl.URL":
    """Parse a URL; only characters that are invalid in a URL are percent-encoded, and the host by IDNA.

    The fragment, which is not sent, is dropped.
    """
    import yarl

    # Location headers that are not UTF-8 contain surrogates for their bytes
    escaped = _INVALID.sub(lambda match: quote(match[0].encode("utf-8", "surrogateescape")), text)
    written = yarl.URL(escaped, encoded=True)
    return yarl.URL.build(
        scheme=written.scheme,
        authority=yarl.URL(text).raw_authority,
        path=written.raw_path,
        query_string=written.raw_query_string,
        encoded=True,
    )


async def _encode_redirect(
    request: "aiohttp.ClientRequest", send: "aiohttp.ClientHandlerType"
) -> "aiohttp.ClientResponse":
    """Encode the URL of a request, which after a redirect is the text of a ``Location`` header."""
    url = encode_url(str(request.url))
    if url.raw_host != request.url.raw_host:  # encoded by IDNA
        request.headers["Host"] = url.host_port_subcomponent
    request.url = url
    return await send(request)


# of aiohttp.ClientSession
CLIENT_OPTIONS = {"requote_redirect_url": False, "middlewares": (_encode_redirect,)}


# --------------------------------------------------------------------------------------------------------------
# Clients of fsspec and the meaning of their errors.

_MARGIN = 5.0  # seconds beyond a library's own timeout
_LIBRARIES = (
    "aiobotocore",
    "aiohttp",
    "botocore",
    "fsspec",
    "gcsfs",
    "google",
    "httpx",
    "httpx2",
    "huggingface_hub",
)
_TRANSIENT = ("Timeout", "Connect", "Payload", "Disconnected", "Incomplete", "Network", "Protocol", "Stream")
_NO_ANSWER = (
    errno.ECONNREFUSED, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL,
)  # fmt: skip

_clients: dict[tuple[int, str, Patience], Any] = {}  # never emptied, see _client_of
_clients_lock = threading.Lock()
os.register_at_fork(
    before=lambda: _clients_lock.acquire(),
    after_in_parent=lambda: _clients_lock.release(),
    after_in_child=lambda: _clients_lock.release(),
)


def _client_of(protocol: str) -> Any:
    """Return this process's client for a protocol, or for file downloads from Hugging Face ("hub").

    A forked process needs its own client, because threads do not survive a fork. It keeps the parent's client,
    too: deleting it would close the parent's connection.
    """
    key = (os.getpid(), protocol, PATIENCE)
    with _clients_lock:
        if key in _clients:
            return _clients[key]
        settings: dict[str, Any] = {}
        if protocol in ("http", "https"):
            settings["client_kwargs"] = {"trust_env": True, "auto_decompress": False, **CLIENT_OPTIONS}
        elif protocol == "hub":  # has its own token; an entry of ~/.netrc would contradict it
            from urllib.request import getproxies

            proxy = getproxies().get("https")
            settings["client_kwargs"] = {"proxy": proxy, "auto_decompress": False, **CLIENT_OPTIONS}
        elif protocol in ("s3", "s3a"):
            times = {"connect_timeout": PATIENCE.connect_seconds, "read_timeout": PATIENCE.stall_seconds}
            settings["config_kwargs"] = {**times, "retries": {"max_attempts": 0}, "max_pool_connections": 64}
        try:
            fsspec = importlib.import_module("fsspec")
            importlib.import_module("fsspec.asyn")
            cls = fsspec.get_filesystem_class("https" if protocol == "hub" else protocol)
            if protocol == "hf":
                importlib.import_module("aiohttp")
            with _library_errors():
                client = cls(skip_instance_cache=True, use_listings_cache=False, **settings)
        except ImportError as error:
            extra = "gs" if protocol in ("gs", "gcs") else "remote"
            raise DataError(f"{protocol}:// needs: pip install -e '.[{extra}]'") from error
        except (ValueError, TypeError):  # unknown to fsspec, or needs more than a URL, such as ftp
            raise DataError(f"{protocol}:// is not supported; known: s3, gs, hf, http, https, pipe") from None
        if protocol in ("s3", "s3a"):
            client.retries = 1  # Attempts counts them
        _clients[key] = client
        return client


@contextmanager
def _library_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError) and type(error).__module__.partition(".")[0] not in _LIBRARIES:
            raise
        raise _classified(error) from None  # the library's text may contain the signed URL


def _classified(error: Exception) -> TransferError:
    name = type(error).__name__
    for cause in (error, error.__cause__):  # s3fs keeps the cause
        response = getattr(cause, "response", None)
        if isinstance(response, dict):  # botocore
            response = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        status = getattr(response, "status_code", response)
        if isinstance(status, int):
            return http_error(status)
    status = getattr(error, "status" if hasattr(error, "status") else "code", None)
    if isinstance(status, int) and status >= 300:
        return http_error(status)
    if isinstance(error, FileNotFoundError):
        return http_error(404)
    if name == "NoCredentialsError":  # botocore
        message = "no credentials in the environment or in ~/.aws; a public bucket needs FSSPEC_S3_ANON=true"
        return TransferError(message, temporary=False, status=401)
    if isinstance(error, PermissionError) or "Credential" in name or name == "ProfileNotFound":
        return http_error(401)
    if "Certificate" in name or "SSL" in name:
        return TransferError(f"no secure connection ({name})", temporary=False)
    if isinstance(error, TimeoutError) or "Timeout" in name:
        return TransferError(f"no data for {PATIENCE.stall_seconds:g} s", temporary=True)
    if name in ("InvalidURL", "InvalidUrlClientError", "NonHttpUrlClientError"):
        return TransferError("invalid URL", temporary=False)
    if name == "OfflineModeIsEnabled":  # huggingface_hub
        return TransferError("HF_HUB_OFFLINE forbids downloads: unset it", temporary=False)
    unreached = _unreached(error)
    if unreached is not None:
        return unreached
    reason = getattr(getattr(error, "os_error", error), "strerror", None) or name
    names = " ".join(base.__name__ for base in type(error).__mro__)
    if isinstance(error, OSError) or any(part in names for part in _TRANSIENT):
        return TransferError(f"the connection failed ({reason})", temporary=True)
    return TransferError(f"cannot be read ({name})", temporary=False)


def _unreached(error: Exception) -> TransferError | None:
    """Return the error if no server answered: an unknown host, a refused connection, no route."""
    cause: BaseException | None = error
    for _ in range(8):
        if isinstance(cause, socket.gaierror):
            message = f"the host is unknown ({cause.strerror}): a wrong name, or no network"
            return TransferError(message, temporary=True, unreached=True)
        if isinstance(cause, OSError) and cause.errno in _NO_ANSWER:
            message = (
                f"the connection failed ({os.strerror(cause.errno or 0)}): no server at this host and port"
            )
            return TransferError(message, temporary=True, unreached=True)
        details = getattr(cause, "kwargs", None)  # of botocore
        below = [getattr(cause, name, None) for name in ("os_error", "__cause__", "__context__")]
        if isinstance(details, dict):
            below.insert(1, details.get("error"))
        cause = next((each for each in below if isinstance(each, BaseException)), None)
    return None


def _call(client: Any, function: Callable[..., Awaitable[Any]], *args: Any, **named: Any) -> Any:
    from fsspec.asyn import sync

    seconds = PATIENCE.connect_seconds + PATIENCE.stall_seconds + _MARGIN
    with _library_errors():
        return sync(client.loop, function, *args, timeout=seconds, **named)


def _ask(client: Any, method: str, *args: Any, **named: Any) -> Any:
    if getattr(client, "async_impl", False):
        return _call(client, getattr(client, f"_{method}"), *args, **named)
    with _library_errors():
        return getattr(client, method)(*args, **named)


def _hub_path(client: Any, url: str) -> Any:
    with _library_errors():
        try:
            return client.resolve_path(url)
        except FileNotFoundError as error:
            message = (
                "there is no such repository at Hugging Face, or it is private and HF_TOKEN gives no access"
            )
            if "Revision" in type(error.__cause__).__name__:
                message = "the repository has no such revision"
            raise TransferError(f"{message}; the form is {HUB_FORM}", temporary=False) from None
        except (ValueError, NotImplementedError):
            raise _not_a_hub_file() from None


def _not_a_hub_file() -> TransferError:
    return TransferError(f"not a file of a repository; the form is {HUB_FORM}", temporary=False)


# --------------------------------------------------------------------------------------------------------------
# Transfers: http(s), s3 and hf are streamed, which keeps the bytes received before a connection broke; fsspec's
# other protocols are read in pieces. Every failure is a ``TransferError``.

_CHUNK = 1 << 20
# of a command's standard error: bytes read at the end, and characters of a line in a message
_ERROR_BYTES = 4096
_ERROR_SHOWN = 200
_URL = re.compile(r"[a-z][a-z0-9+.-]*://\S+", re.IGNORECASE)
_CHUNK_SECONDS = 0.5  # a smaller chunk is returned after this time
_PIECE = 4 << 20  # bytes per request of a protocol without streams


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """A transfer that has started.

    Attributes:
        chunks: yields the bytes.
        total: size of the whole file, -1 if unknown.
        version: of the file, as in ``ShardFile``.
        start: position of the first byte, which may precede the requested one.
        checksum: a hashlib algorithm and the digest of the whole file, if the store states one.
        ranged: whether a transfer can start anywhere in the file.
    """

    chunks: Iterator[bytes]
    total: int = -1
    version: str = ""
    start: int = 0
    checksum: tuple[str, str] | None = None
    ranged: bool = False


def get_protocol(url: str) -> str:
    """Return the protocol of a URL in lower case."""
    return url.partition(":")[0].lower()


@contextmanager
def open_transfer(url: str, start: int = 0, stop: int | None = None) -> Iterator[Transfer]:
    """Start reading a file from ``start`` to ``stop`` (default: its end).

    Raises:
        TransferError: the request failed.
        DataError: a library is missing, or the protocol is unknown.
    """
    protocol = get_protocol(url)
    if protocol == "pipe":
        with _command_output(url) as chunks:
            yield Transfer(chunks=chunks)
        return
    client = _client_of(protocol)
    byte_range = None
    if start or stop is not None:
        last = "" if stop is None else stop - 1
        byte_range = f"bytes={start}-{last}"
    if protocol in ("http", "https", "hf"):
        with _http_transfer(client, url, byte_range) as transfer:
            yield transfer
    elif protocol in ("s3", "s3a"):
        with _s3_transfer(client, url, byte_range) as transfer:
            yield transfer
    else:
        total, version = file_facts(url)
        end = total if stop is None else stop
        if total >= 0:
            end = min(end, total)
        chunks = (
            _ask(client, "cat_file", url, start=here, end=min(here + _PIECE, end))
            for here in range(start, end, _PIECE)
        )
        yield Transfer(chunks=chunks, total=total, version=version, start=start, ranged=True)


def file_facts(url: str) -> tuple[int, str]:
    """Return size and version of a file with one short request; raises as ``open_transfer``."""
    protocol = get_protocol(url)
    client = _client_of(protocol)
    if protocol in ("http", "https", "hf"):
        with _http_transfer(client, url, "bytes=0-0") as transfer:  # signed URLs are not valid for HEAD
            return transfer.total, transfer.version
    if protocol in ("s3", "s3a"):
        head = _call(client, client._call_s3, "head_object", **_s3_name(client, url))
        return int(head["ContentLength"]), head.get("ETag", "").strip('"')
    return _facts_of(_ask(client, "info", url))


def listing(url: str) -> list[tuple[str, int, str]]:
    """List a folder: full URLs, which end with "/" for folders, sizes and versions; raises as ``open_transfer``."""
    protocol = get_protocol(url)
    client = _client_of(protocol)
    if protocol == "hf":
        _hub_path(client, url)
    entries: list[tuple[str, int, str]] = []
    for entry in _ask(client, "ls", url.rstrip("/"), detail=True, refresh=True):
        name = entry["name"] if "://" in entry["name"] else f"{protocol}://{entry['name']}"
        if entry["type"] == "directory":
            entries.append((f"{name.rstrip('/')}/", -1, ""))
        elif entry["type"] == "file":
            entries.append((name, *_facts_of(entry)))
    return entries


def _facts_of(entry: Mapping[str, Any]) -> tuple[int, str]:
    versions = [entry.get(name) for name in ("blob_id", "generation", "ETag", "etag", "mtime")]
    lfs = entry.get("lfs")
    if lfs:
        versions.insert(0, lfs.get("sha256"))
    size = entry.get("size")
    version = next((str(version) for version in versions if version), "")
    return -1 if size is None else int(size), version.strip('"')


def _range_start(content_range: str | None, default: int) -> tuple[int, int]:
    if not content_range:
        return 0, default
    span, _, total = content_range.removeprefix("bytes").strip().partition("/")
    return _parse_integer(span.partition("-")[0], 0), _parse_integer(total, -1)


def _parse_integer(text: str, default: int) -> int:
    return int(text) if text.isdecimal() else default


@contextmanager
def _http_transfer(client: Any, url: str, byte_range: str | None) -> Iterator[Transfer]:
    import aiohttp

    headers = {"Accept-Encoding": "identity"}
    if byte_range:
        headers["Range"] = byte_range
    if get_protocol(url) == "hf":
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers

        path = _hub_path(client, url)
        try:
            with _library_errors():
                if hasattr(path, "repo_id"):
                    url = hf_hub_url(
                        path.repo_id,
                        path.path_in_repo,
                        repo_type=path.repo_type,
                        revision=path.revision,
                        endpoint=client.endpoint,
                    )
                else:  # a bucket
                    url = client.url(url)
                headers |= build_hf_headers()
        except (ValueError, NotImplementedError):
            raise _not_a_hub_file() from None
        client = _client_of("hub")
    try:
        target = encode_url(url)
    except ValueError:
        raise TransferError("invalid URL", temporary=False) from None

    async def get() -> Any:
        session = await client.set_session()
        times = aiohttp.ClientTimeout(
            total=None, sock_connect=PATIENCE.connect_seconds, sock_read=PATIENCE.stall_seconds
        )
        try:
            response = await session.get(target, headers=headers, timeout=times, read_bufsize=_CHUNK)
        except ValueError:  # a redirect to something else than a URL
            raise TransferError("invalid URL", temporary=False) from None
        if response.status not in (200, 206, 416):
            after = response.headers.get("Retry-After", "")
            response.close()
            raise http_error(response.status, wait=_parse_integer(after, 0))
        return response

    response = _call(client, get)
    try:
        etags = [redirect.headers.get("X-Linked-ETag") for redirect in response.history]  # Hugging Face
        version = next(filter(None, etags), None) or response.headers.get("ETag")
        version = (version or response.headers.get("Last-Modified", "")).removeprefix("W/").strip('"')
        length = _parse_integer(response.headers.get("Content-Length", ""), -1)
        start, total = _range_start(response.headers.get("Content-Range"), length)
        chunks = _read_chunks(client, partial(_any_bytes, response.content))
        if response.status == 416:  # for an empty file even the first byte is out of range
            if total != 0 or byte_range is None or not byte_range.startswith("bytes=0-"):
                raise http_error(416)
            chunks = iter(())
        accepts = response.headers.get("Accept-Ranges", "").lower() == "bytes"
        yield Transfer(
            chunks=chunks,
            total=total,
            version=version,
            start=start,
            checksum=("sha256", version) if any(etags) and len(version) == 64 else None,
            ranged=response.status != 200
            or accepts,  # a server with ranges may answer 200 for the whole file
        )
    finally:
        with suppress(RuntimeError):  # the loop has ended
            client.loop.call_soon_threadsafe(response.close)


def _s3_name(client: Any, url: str) -> dict[str, str]:
    bucket, key, version = client.split_path(url)
    return {"Bucket": bucket, "Key": key, **({"VersionId": version} if version else {})}


@contextmanager
def _s3_transfer(client: Any, url: str, byte_range: str | None) -> Iterator[Transfer]:
    request = _s3_name(client, url)
    if byte_range:
        request["Range"] = byte_range
    answer = _call(client, client._call_s3, "get_object", **request)
    body = answer["Body"]
    try:
        version = answer.get("ETag", "").strip('"')
        # the etag is not the MD5 of a file uploaded in parts or encrypted with a key of its own
        plain = (
            answer.get("ServerSideEncryption") in (None, "AES256") and "SSECustomerAlgorithm" not in answer
        )
        start, total = _range_start(answer.get("ContentRange"), int(answer["ContentLength"]))
        content = getattr(getattr(body, "raw_stream", None), "content", None)
        read = partial(body.read, _CHUNK) if content is None else partial(_any_bytes, content)
        yield Transfer(
            chunks=_read_chunks(client, read),
            total=total,
            version=version,
            start=start,
            checksum=("md5", version) if plain and len(version) == 32 and version.isalnum() else None,
            ranged="ContentRange" in answer or answer.get("AcceptRanges", "").lower() == "bytes",
        )
    finally:
        with suppress(RuntimeError):
            client.loop.call_soon_threadsafe(body.close)


async def _any_bytes(content: Any) -> bytes:
    """Return the buffered bytes of an aiohttp stream, or wait for more.

    aiohttp discards the bytes that arrived before a connection broke. They are fetched here; otherwise a server
    that breaks every connection would allow no progress.
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


def _read_chunks(client: Any, read: Callable[[], Awaitable[bytes]]) -> Iterator[bytes]:
    failures: list[Exception] = []

    async def collect() -> bytes:
        until = time.monotonic() + _CHUNK_SECONDS
        parts = list[bytes]()
        size = 0
        try:
            while size < _CHUNK and time.monotonic() < until and (part := await read()):
                parts.append(part)
                size += len(part)
        except Exception as error:
            failures.append(error)
        return b"".join(parts)

    while not failures and (data := _call(client, collect)):
        yield data
    with _library_errors():
        for error in failures:
            raise error


@contextmanager
def _command_output(url: str) -> Iterator[Iterator[bytes]]:
    command = url.removeprefix("pipe:")
    with tempfile.TemporaryFile() as errors:
        try:  # a session of its own, so that everything the shell starts can be killed
            process = subprocess.Popen(
                command, shell=True, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
            )
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or type(error).__name__
            raise TransferError(f"the command cannot be run ({reason})", temporary=False) from None
        assert process.stdout is not None
        try:
            yield _process_chunks(process, process.stdout.fileno(), errors)
        finally:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            process.stdout.close()


def _process_chunks(process: "subprocess.Popen[bytes]", descriptor: int, errors: BinaryIO) -> Iterator[bytes]:
    seconds = PATIENCE.stall_seconds
    readable = select.poll()  # select() is limited to 1,024 descriptors
    readable.register(descriptor, select.POLLIN)
    while True:
        if not readable.poll(seconds * 1000):
            raise TransferError(f"the command has written nothing for {seconds:g} s", temporary=True)
        data = os.read(descriptor, _CHUNK)
        if not data:
            break
        yield data
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        raise TransferError("the command does not end", temporary=True) from None
    if status in (126, 127):  # of a shell
        what = "cannot be run" if status == 126 else "was not found"
        raise TransferError(f"the command failed with status {status}: a program {what}", temporary=False)
    if status:
        how = f"with status {status}" if status > 0 else f"by signal {-status}"
        error_line = _read_last_line(errors)
        if error_line:
            how = f"{how} ({error_line})"
        raise TransferError(f"the command failed {how}", temporary=True, unreached=True)


def _read_last_line(errors: BinaryIO) -> str:
    """Return the last line that a command has written to standard error; of URLs only what ``shown`` keeps."""
    size = errors.seek(0, os.SEEK_END)
    errors.seek(max(0, size - _ERROR_BYTES))
    lines = errors.read().decode(errors="replace").split("\n")
    line = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return printable(_URL.sub(lambda match: redact_url(match[0]), line), _ERROR_SHOWN)
